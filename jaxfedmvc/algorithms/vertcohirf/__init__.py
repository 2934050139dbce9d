"""VertCoHiRF: vertical clustering by consensus on labels and rankings, without a server."""

from jaxfedmvc.algorithms.vertcohirf.method import LocalStep, vertcohirf

__all__ = ["LocalStep", "vertcohirf"]
