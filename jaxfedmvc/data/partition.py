"""Division of samples and views over the clients of a hybrid federation.

Some clients hold every view of their samples and the others only some of the views. No sample is
held by two clients.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfedmvc import checks


class Part(NamedTuple):
    """A cohort: the clients that hold the same views.

    Attributes:
      view_ids: the views every client of the cohort holds, ascending.
      sample_ids: [clients, rows] int32, the samples of each client; -1 fills the end of a row.
      client_ids: [clients] int32, unique over the federation and within 0..n_clients-1.
    """

    view_ids: tuple[int, ...]
    sample_ids: np.ndarray
    client_ids: np.ndarray


def parse_ratio(text: str) -> tuple[int, int]:
    """Reads the ratio of multi-view to partial clients, as in ``"2:1"``.

    Raises:
      ValueError: the text is not two whole numbers with a colon between them.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*", str(text))
    if match is None:
        raise ValueError(f"ratio must be two whole numbers such as '2:1'; got {text!r}")
    return int(match[1]), int(match[2])


def hybrid_partition(
    seed: int,
    n_samples: int,
    n_views: int,
    n_clients: int,
    *,
    ratio: tuple[int, int] = (1, 1),
    partial_views: int = 1,
    samples_per_client: int | None = None,
    dirichlet: float | None = None,
    labels: Any = None,
) -> tuple[Part, ...]:
    """Deals samples and views out to multi-view and partial clients.

    Clients 0..M-1 hold all views and form the first part. The others each hold `partial_views` of
    them; the possible subsets, in the order of `itertools.combinations`, are dealt to these clients
    in turn. With one view, every client holds it and there is a single part.

    The seed decides only which samples a client gets. Parts, clients and the shapes of all arrays
    follow from the other arguments, so that a program compiled for one seed serves them all.

    Args:
      seed: seeds all randomness.
      n_samples: number of samples to deal out.
      n_views: number of views.
      n_clients: number of clients.
      ratio: a to b, multi-view to partial clients: M is n_clients * a / (a + b), halves rounded up.
      partial_views: views of a partial client, 1 to n_views - 1.
      samples_per_client: the same size for every client, leaving the other samples unused; by
        default all are dealt out and sizes differ by at most one.
      dirichlet: None for clients of like class mix. A concentration b > 0 skews them: each client
        draws class shares from Dir(b p), p the shares in `labels` (Hsu, Qi and Brown, 2019), and
        its samples accordingly for as long as the classes last. Sizes stay as without it. Clients
        are served in a random order; when all samples are dealt out, the last takes the rest.
      labels: [n_samples] classes, for `dirichlet` only.

    Returns:
      The parts that have clients, all padded to the same number of rows per client.

    Raises:
      ValueError: an argument is out of range, or two do not fit together; the text names it.
    """
    checks.whole("seed", seed, 0)
    checks.whole("n_samples", n_samples, 1)
    checks.whole("n_views", n_views, 1)
    checks.whole("n_clients", n_clients, 1, n_samples)
    checks.whole("partial_views", partial_views, 1, n_views - 1 if n_views > 1 else None)
    sizes = _client_sizes(n_samples, n_clients, samples_per_client)
    n_full = n_clients if n_views == 1 else _n_multi_view(n_clients, ratio)

    rng = np.random.default_rng(seed)
    if dirichlet is None:
        order = rng.permutation(n_samples)
        rows = np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])
    else:
        rows = _skewed_rows(rng, n_samples, sizes, dirichlet, labels)
    samples = np.full((n_clients, sizes.max()), -1, np.int32)
    for client, row in enumerate(rows):
        samples[client, : len(row)] = row

    clients = np.arange(n_clients, dtype=np.int32)
    parts = [Part(tuple(range(n_views)), samples[:n_full], clients[:n_full])]
    subsets = list(itertools.combinations(range(n_views), partial_views))
    for index, subset in enumerate(subsets[: n_clients - n_full]):
        cohort = clients[n_full + index :: len(subsets)]
        parts.append(Part(subset, samples[cohort], cohort))
    return tuple(parts)


def partition_as_held(
    seed: int, held: np.ndarray, n_clients: int | None = None, clients: Any = None
) -> tuple[Part, ...]:
    """Divides samples that do not all have all views over clients, each of which holds the same.

    Args:
      seed: seeds which client of its kind a sample lies with.
      held: [n_samples, n_views] bool, which sample has which views; one at least.
      n_clients: number of clients; kinds of samples get clients in proportion to their number, and
        one at least. Not with `clients`.
      clients: [n_samples] the client of each sample, where that is known. One whose samples are of
        several kinds becomes a client for each kind.

    Returns:
      A part for each kind of samples, those with the most views first.

    Raises:
      ValueError: no samples, or one without a view; fewer clients than kinds, or more than samples;
        arrays of other shapes, a client that is NaN, or both `n_clients` and `clients`.
    """
    checks.whole("seed", seed, 0)
    # Numbers other than 0 and 1 would make rows that hold the same views differ, and one kind of
    # them would take the place of the other.
    held = np.asarray(held, bool)
    if held.ndim != 2 or 0 in held.shape:
        raise checks.wrong("held", held.shape, "a shape [n_samples, n_views], none of them 0")
    kinds: dict[tuple[int, ...], np.ndarray] = {}
    for row in np.unique(held, axis=0):
        if not row.any():
            raise ValueError("held: a sample has no view; allowed is one or more")
        kinds[tuple(np.flatnonzero(row).tolist())] = np.flatnonzero((held == row).all(axis=1))
    order = sorted(kinds, key=lambda ids: (-len(ids), ids))
    groups: list[list[np.ndarray]]
    if clients is not None:
        owner = np.asarray(clients)
        if owner.shape != held.shape[:1]:
            raise checks.wrong("clients", owner.shape, f"shape {held.shape[:1]}, one per sample")
        if (owner != owner).any():
            raise ValueError("clients: got NaN; allowed is the client of each sample")
        if n_clients is not None:
            raise checks.wrong("n_clients", n_clients, "None where clients are given")
        groups = [
            [rows[owner[rows] == c] for c in np.unique(owner[rows])]
            for rows in (kinds[ids] for ids in order)
        ]
        # Numbered as the clients are, one after another where a client has several kinds.
        first = [owner[rows[0]] for group in groups for rows in group]
        numbers = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    else:
        checks.whole("n_clients", n_clients, len(order), len(held))
        rng = np.random.default_rng(seed)
        sizes = np.array([len(kinds[ids]) for ids in order])
        counts = _shares(sizes, n_clients or 0)
        groups = [
            np.array_split(rng.permutation(kinds[ids]), count)
            for ids, count in zip(order, counts, strict=True)
        ]
        numbers = np.arange(counts.sum())
    parts, at = [], 0
    for ids, group in zip(order, groups, strict=True):
        samples = np.full((len(group), max(map(len, group))), -1, np.int32)
        for place, rows in enumerate(group):
            samples[place, : len(rows)] = rows
        parts.append(Part(ids, samples, numbers[at : at + len(group)].astype(np.int32)))
        at += len(group)
    return tuple(parts)


def _shares(sizes: np.ndarray, total: int) -> np.ndarray:
    """Splits `total` so that sizes a client differ least: one each, then where they are largest."""
    counts = np.ones(len(sizes), int)
    while counts.sum() < total:
        room = np.where(counts < sizes, sizes / counts, -np.inf)  # samples a client, so far
        counts[np.argmax(room)] += 1
    return counts


def _n_multi_view(n_clients: int, ratio: tuple[int, int]) -> int:
    """Number of clients with all views, in whole numbers so that halves round up exactly."""
    if not isinstance(ratio, Sequence | np.ndarray) or len(ratio) != 2:
        raise ValueError(f"ratio must be two whole numbers; got {ratio!r}")
    for side in ratio:
        checks.whole("each side of ratio", side, 0)
    a, b = ratio
    n_full = (2 * n_clients * a + a + b) // (2 * (a + b)) if a else 0
    if n_full == 0:
        raise ValueError(f"ratio {a}:{b} leaves no multi-view client among n_clients={n_clients}")
    return n_full


def _client_sizes(n_samples: int, n_clients: int, samples_per_client: int | None) -> np.ndarray:
    """Samples of each client, [n_clients]; the first ones take what does not divide evenly."""
    if samples_per_client is not None:
        checks.whole("samples_per_client", samples_per_client, 1, n_samples // n_clients)
        return np.full(n_clients, samples_per_client)
    share, extra = divmod(n_samples, n_clients)
    return share + (np.arange(n_clients) < extra)


def _skewed_rows(
    rng: np.random.Generator, n_samples: int, sizes: np.ndarray, beta: float, labels: Any
) -> list[np.ndarray]:
    """Samples of each client, drawn by class shares that the client has from a Dirichlet."""
    checks.number("dirichlet", beta, checks.POSITIVE)
    if np.shape(labels) != (n_samples,):
        got = "none" if labels is None else f"shape {np.shape(labels)}"
        raise ValueError(f"dirichlet needs labels of shape ({n_samples},); got {got}")
    _, classes, left = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    pools = [rng.permutation(np.flatnonzero(classes == c)) for c in range(len(left))]
    prior = left / n_samples

    rows = [np.empty(0, int)] * len(sizes)
    # Clients served last take what is left, whatever their shares. A random order keeps that from
    # falling on the partial clients, which have the highest numbers.
    for client in rng.permutation(len(sizes)):
        counts = _class_counts(rng, rng.dirichlet(beta * prior), sizes[client], left)
        taken = [pool[n - c : n] for pool, n, c in zip(pools, left, counts, strict=True)]
        rows[client] = rng.permutation(np.concatenate(taken))
        left = left - counts
    return rows


def _class_counts(
    rng: np.random.Generator, shares: np.ndarray, size: int, left: np.ndarray
) -> np.ndarray:
    """How many of `size` samples to draw from each class, at most `left` [K]; by `shares` [K].

    Draws that hit an exhausted class are repeated among the others, which is the same as drawing
    one by one and renormalising the shares whenever a class runs out.
    """
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        weights = np.where(counts < left, shares, 0.0)
        if weights.sum() <= 0:  # a small concentration rounds shares to zero
            weights = (left - counts).astype(float)
        drawn = rng.multinomial(missing, weights / weights.sum())
        counts = np.minimum(counts + drawn, left)
    return counts
