"""Bits that a round of VertCoHiRF sends, and the bound of proposition 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RoundBits(NamedTuple):
    """Bits and bytes that one round sends, over all agents.

    Attributes:
      labels: Bits of the labels, A.1.1: (A - 1) n_active ceil(log2 C_a), summed over agents.
      rankings: Bits of the lists of ids, A.1.2, with every list at its true length.
      bound: The bound of proposition 3.1.
      int32_bytes: Bytes of the same messages as int32, padding not sent.
    """

    labels: int
    rankings: int
    bound: int
    int32_bytes: int


def communication(
    n_samples: int,
    n_labels: Sequence[int],
    n_active: int,
    n_clusters: int,
    n_listed: int,
    n_longest: int,
) -> RoundBits:
    """Computes the bits of one round, and the bound of proposition 3.1.

    Args:
      n_samples: n, all samples.
      n_labels: C_a of each agent.
      n_active: Active samples before the round.
      n_clusters: Consensus clusters.
      n_listed: Candidates of all clusters.
      n_longest: Candidates of the cluster that has most: N_s of the proposition.
    """
    agents = len(n_labels)
    links = agents * (agents - 1)
    id_bits = _ceil_log2(n_samples)
    return RoundBits(
        labels=(agents - 1) * n_active * sum(_ceil_log2(c) for c in n_labels),
        rankings=links * n_listed * id_bits,
        bound=links * (n_active * _ceil_log2(max(n_labels)) + n_clusters * n_longest * id_bits),
        int32_bytes=4 * links * (n_active + n_listed),
    )


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()
