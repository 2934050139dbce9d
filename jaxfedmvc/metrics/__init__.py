"""Scores of clusterings: from contingency tables (`contingency`), and of federations."""

from jaxfedmvc.metrics.contingency import (
    accuracy,
    ari,
    contingency,
    nmi,
    purity,
    scores,
    scores_from_contingency,
    simplified_silhouette,
)

__all__ = [
    "accuracy",
    "ari",
    "contingency",
    "nmi",
    "purity",
    "scores",
    "scores_from_contingency",
    "simplified_silhouette",
]
