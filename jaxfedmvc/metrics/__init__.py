"""Scores of clusterings: from contingency tables (`contingency`), and of federations."""

from jaxfedmvc.metrics.contingency import (
    accuracy,
    ari,
    ari_from_contingency,
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
    "ari_from_contingency",
    "contingency",
    "nmi",
    "purity",
    "scores",
    "scores_from_contingency",
    "simplified_silhouette",
]
