"""Spreads the features of known samples over a graph, which needs no training.

Each sample's features are taken to be the weighted mean of its neighbours', as a harmonic function
has it: Zhu, Ghahramani & Lafferty, "Semi-supervised learning using Gaussian fields and harmonic
functions", 2003. A message of few edges has more to say this way than through singular vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import linalg

# Every sample is tied to the mean of the known ones by so much of an average degree: those that no
# path leads to from a known one are guessed to be there.
_TIE = 1e-6


class Spread(NamedTuple):
    """What a graph makes of known samples.

    Attributes:
      features: Guessed, [n, D]; of known samples those that are known.
      validation: R^2 on the known samples, each guessed from the others.
    """

    features: np.ndarray
    validation: float


def spread(message: np.ndarray, known: np.ndarray, features: np.ndarray, k: int) -> Spread:
    """Guesses everybody's features, over the graph as it was sent or one made of its rows.

    Noise and lies make edges that join nobody alike; whose rows are alike, it is harder to hide.
    The known samples decide between the two, each of them left out in turn.

    Args:
      message: The graph, [n, n]; what is not above zero is no edge.
      known: Rows of known samples, [m].
      features: Theirs, [m, D].
      k: Neighbours of a sample in the graph that is made.
    """
    sent = message + message.T
    graphs = (np.maximum(sent, 0), alike(sent, k))
    return max((harmonic(g, known, features) for g in graphs), key=lambda found: found.validation)


def harmonic(graph: np.ndarray, known: np.ndarray, features: np.ndarray) -> Spread:
    """Solves for the harmonic function on a symmetric graph [n, n] that is given at `known`.

    With Q the Laplacian and the ties to the mean, and C its inverse, it is C_uk C_kk^-1 f_k: what
    is expected of a Gaussian field of precision Q. One known sample left out of that misses its
    own features by (C_kk^-1 f)_i / (C_kk^-1)_ii.
    """
    degrees, mean = graph.sum(axis=1, dtype=float), features.mean(axis=0)
    tied = np.diag(degrees + _TIE * (degrees.mean() or 1.0)) - graph
    # Columns of C: its others are not needed.
    covariance = linalg.solve(tied, np.eye(len(graph))[:, known], assume_a="pos")
    precision = np.linalg.inv(covariance[known])
    pull = precision @ (features - mean)
    missed = pull / np.diag(precision)[:, None]
    validation = 1 - np.sum(missed**2) / np.sum((features - mean) ** 2)
    return Spread(mean + covariance @ pull, float(validation))


def alike(rows: np.ndarray, k: int) -> np.ndarray:
    """Joins each row to the `k` others of largest cosine; symmetric [n, n], two where both do."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.where(norms > 0, norms, 1.0)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    edges = np.zeros(cosines.shape)
    np.put_along_axis(edges, nearest, 1.0, axis=1)
    return edges + edges.T
