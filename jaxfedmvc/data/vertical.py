"""Vertical federations: every agent holds all samples, and some of the features.

Here are the preparation of a table, the split of its features over simulated agents, and the
alignment by sample id of the tables that real agents bring. All of it runs on the host, in NumPy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.data.dataset import check_arrays, check_order
from jaxfedmvc.data.partition import Part

# A category of this many levels or more is dropped, not one-hot coded.
_MANY_LEVELS = 10
# How many ids, of those that are missing or too many, an error names.
_IDS_NAMED = 3


def prepare(
    x: Any, labels: Any, *, categorical: Sequence[int] | None = None, seed: int | None = None
) -> tuple[np.ndarray, Any]:
    """Brings a table to the form in which VertCoHiRF's experiments cluster it.

    In this order: rows whose features repeat an earlier row's are dropped (whatever their labels,
    which a clustering does not know); categorical columns of fewer than 10 levels become one
    column of 0 and 1 for each level but the first, in the same place, and the others are dropped;
    constant columns are dropped; every column, coded ones too, gets zero mean and unit (population)
    variance; the rows are shuffled.

    Args:
      x: [n, p] real numbers; categories are coded as any distinct numbers.
      labels: [n] labels that follow the rows, or None.
      categorical: the columns that hold categories, 0..p-1; none of them if None.
      seed: of the shuffling; the rows keep their order if None.

    Returns:
      The features [m, q] float32 and the labels [m] (None if they were), m <= n.

    Raises:
      ValueError: `x` or `labels` is unusable (as `check_arrays` says), `categorical` or `seed` is
        out of range, or no column is left.
    """
    check_arrays([x], labels, names=["x"])
    x = np.asarray(x, np.float64)
    n_columns = x.shape[1]
    if categorical is not None and np.ndim(categorical) != 1:
        raise checks.wrong("categorical", categorical, "a sequence of columns, or None")
    for column in () if categorical is None else categorical:
        checks.whole("each column of categorical", column, 0, n_columns - 1)
    rows = np.sort(np.unique(x, axis=0, return_index=True)[1])
    x = x[rows]

    coded = set(() if categorical is None else categorical)
    columns = [_one_hot(x[:, c]) if c in coded else x[:, c : c + 1] for c in range(n_columns)]
    x = np.concatenate(columns, axis=1)
    x = x[:, np.ptp(x, axis=0) > 0]
    if x.shape[1] == 0:
        raise ValueError(
            f"x: none of its {n_columns} columns is left; each is constant or a category of"
            f" {_MANY_LEVELS} levels or more"
        )
    x = (x - x.mean(axis=0)) / x.std(axis=0)

    if seed is not None:
        checks.whole("seed", seed, 0)
        order = np.random.default_rng(seed).permutation(len(x))
        x, rows = x[order], rows[order]
    return x.astype(np.float32), None if labels is None else np.asarray(labels)[rows]


def _one_hot(column: np.ndarray) -> np.ndarray:
    """A category [n] as [n, levels - 1] of 0 and 1, or [n, 0] where it has too many levels."""
    levels = np.unique(column)
    kept = levels[1:] if len(levels) < _MANY_LEVELS else levels[:0]
    return (column[:, None] == kept).astype(np.float64)


def split_features(
    seed: int,
    n_features: int,
    n_agents: int,
    *,
    order: str = "random",
    overlap: float = 0.0,
    max_overlap: float = 0.3,
    overlap_order: str = "random",
) -> tuple[np.ndarray, ...]:
    """Deals features out to the agents of a simulated vertical federation.

    The features are cut into groups whose sizes differ by at most one, larger ones first. Then
    each agent is offered the features of all other groups, takes each with probability `overlap`,
    and stops when it has taken int(max_overlap * its own number). The cap is on all that an agent
    receives, not on what any two agents share.

    Args:
      seed: seeds all randomness.
      n_features: number of features.
      n_agents: number of agents, at most `n_features`.
      order: ``"random"`` cuts a random order of the features, ``"sequential"`` their own order.
      overlap: probability with which an agent takes a feature of another group.
      max_overlap: most features taken, as a share of the agent's own ones.
      overlap_order: ``"random"`` offers the features in random order. ``"ascending"`` goes through
        the groups in order, and through each by ascending feature: the cap is reached early, so
        that the last groups (with ``order="sequential"``, high features) are hardly ever shared.

    Returns:
      For each agent its features, int64: its own ones first, then those taken.

    Raises:
      ValueError: an argument is out of range; the text names it.
    """
    checks.whole("seed", seed, 0)
    checks.whole("n_features", n_features, 1)
    checks.whole("n_agents", n_agents, 1)
    if n_agents > n_features:
        raise ValueError(
            f"n_agents: got {n_agents} for {n_features} features, which leaves an agent with no"
            f" features; allowed are 1 to {n_features}"
        )
    _check_choice("order", order, ("random", "sequential"))
    _check_choice("overlap_order", overlap_order, ("random", "ascending"))
    for name, share in (("overlap", overlap), ("max_overlap", max_overlap)):
        checks.number(name, share, checks.SHARE)

    rng = np.random.default_rng(seed)
    features = rng.permutation(n_features) if order == "random" else np.arange(n_features)
    groups = np.array_split(features, n_agents)
    agents = []
    for agent, own in enumerate(groups):
        others = [np.sort(group) for source, group in enumerate(groups) if source != agent]
        offered = np.concatenate([own[:0], *others])
        if overlap_order == "random":
            offered = rng.permutation(offered)
        taken = offered[rng.random(len(offered)) < overlap]
        agents.append(np.concatenate([own, taken[: int(max_overlap * len(own))]]))
    return tuple(agents)


def split_by_importance(
    seed: int, n_features: int, weights: Sequence[float]
) -> tuple[np.ndarray, ...]:
    """Deals features out to agents of unequal importance, as VertiBench does.

    Every agent gets one feature, drawn uniformly. Each other feature goes to agent i with
    probability r_i, where r is one draw from the Dirichlet distribution of the weights: agent i
    expects a share w_i / sum(w), and small weights give few agents nearly all features. Source: Wu
    et al., "VertiBench: advancing feature distribution diversity in vertical federated learning
    benchmarks", ICLR 2024, section 4.1, and for the first features its code.

    Args:
      seed: seeds all randomness.
      n_features: number of features.
      weights: of the agents, positive, [n_agents] with n_agents at most `n_features`.

    Returns:
      For each agent its features, int64: the first one drawn, then the others in ascending order.

    Raises:
      ValueError: an argument is out of range; the text names it.
    """
    checks.whole("seed", seed, 0)
    checks.whole("n_features", n_features, 1)
    alpha = np.asarray(weights, float)
    if alpha.ndim != 1 or not 1 <= len(alpha) <= n_features:
        raise ValueError(
            f"weights: got {np.shape(weights)} for {n_features} features; allowed are 1 to"
            f" {n_features} numbers, one for each agent"
        )
    if not (np.isfinite(alpha) & (alpha > 0)).all():
        raise ValueError(f"weights: got {alpha.tolist()}; allowed are finite numbers above 0")
    rng = np.random.default_rng(seed)
    first = rng.choice(n_features, len(alpha), replace=False)
    # Very small weights underflow where gamma variates are normalised; as logarithms they do not:
    # a variate of shape a is one of shape a + 1 times u^(1 / a).
    logs = np.log(rng.gamma(alpha + 1)) + np.log(rng.random(len(alpha))) / alpha
    shares = np.exp(logs - logs.max())
    agent = rng.choice(len(alpha), n_features, p=shares / shares.sum())
    agent[first] = -1
    return tuple(
        np.concatenate([first[i : i + 1], np.flatnonzero(agent == i)]) for i in range(len(alpha))
    )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def vertical_partition(n_samples: int, n_agents: int) -> tuple[Part, ...]:
    """Makes agents 0..n_agents-1 that each hold all samples, and view a for agent a.

    Args:
      n_samples: number of samples.
      n_agents: number of agents, which is the number of views.

    Returns:
      One part for each agent, for `Federation.from_arrays` with the agents' arrays as the views.

    Raises:
      ValueError: an argument is below 1.
    """
    checks.whole("n_samples", n_samples, 1)
    checks.whole("n_agents", n_agents, 1)
    samples = np.arange(n_samples, dtype=np.int32)[None]
    return tuple(Part((a,), samples, np.array([a], np.int32)) for a in range(n_agents))


def shuffle_places(seed: int, partition: Sequence[Part], share: float) -> tuple[Part, ...]:
    """Has agents hold a share of the samples in an order of their own, each but the first.

    The others stay in the same rows. For methods that align samples, as FCUIF with `align`.

    Args:
      seed: Of the draws.
      partition: Agents that hold all samples, as `vertical_partition` gives them.
      share: Of the samples, in [0, 1].

    Raises:
      ValueError: The seed is negative, the share is not in [0, 1], a part is not of one agent, or
        an agent lacks samples.
    """
    checks.whole("seed", seed, 0)
    checks.number("share", share, checks.SHARE)
    if not partition or any(len(part.sample_ids) != 1 for part in partition):
        sizes = [len(part.sample_ids) for part in partition]
        raise ValueError(f"partition: got parts of {sizes} clients; allowed is one agent a part")
    if any((np.asarray(part.sample_ids) < 0).any() for part in partition):
        raise ValueError("partition: agents lack samples; allowed are agents that hold all of them")
    rng = np.random.default_rng(seed)
    n = partition[0].sample_ids.shape[1]
    moved = np.sort(rng.permutation(n)[: round(share * n)])
    found = [partition[0]]
    for part in partition[1:]:
        ids = np.array(part.sample_ids)
        ids[0, moved] = rng.permutation(ids[0, moved])
        found.append(part._replace(sample_ids=ids))
    return tuple(found)


def align_agents(agents: Sequence[tuple[Any, Any]]) -> tuple[list[int | str], list[np.ndarray]]:
    """Brings agents' tables of the same samples, each in an order of its own, to one order.

    Args:
      agents: for each agent the ids [n] of its samples, whole numbers or strings, and its features
        [n, p_a].

    Returns:
      The ids [n] in the first agent's order, and each agent's features [n, p_a] in that order.

    Raises:
      ValueError: there are no agents; ids or features are unusable, or not as many; an id is there
        twice; or an agent's samples are not the first agent's. The text names the agent.
    """
    if len(agents) == 0:
        raise ValueError("agents: got none; at least one is needed")
    for agent, pair in enumerate(agents):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"agent {agent}: got a {type(pair).__name__}; allowed is a pair (ids, features), of"
                " which ids may be range(n) where all agents' rows are in one order"
            )
    tables = [_rows_by_id(agent, ids, x) for agent, (ids, x) in enumerate(agents)]
    first = tables[0][0]
    for agent, (rows, _) in enumerate(tables):
        missing = [key for key in first if key not in rows]
        extra = [key for key in rows if key not in first]
        if missing or extra:
            differences = ", ".join(
                f"{len(keys)} {kind} ({', '.join(map(repr, keys[:_IDS_NAMED]))}"
                f"{', ...' if len(keys) > _IDS_NAMED else ''})"
                for kind, keys in (("missing", missing), ("extra", extra))
                if keys
            )
            raise ValueError(
                f"agent {agent}: its sample ids differ from agent 0's: {differences}; all agents"
                " must hold the same samples"
            )
    return list(first), [x[[rows[key] for key in first]] for rows, x in tables]


def _rows_by_id(agent: int, ids: Any, x: Any) -> tuple[dict[int | str, int], np.ndarray]:
    """The row of each sample id, and the features [n, p] as an array; both checked."""
    # As Python's own numbers and strings: they compare exactly whatever their size, and an array
    # of large whole numbers might be one of floats.
    keys = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not keys:
        raise ValueError(f"agent {agent}: no ids; there must be one for each sample")
    for key in keys:
        if isinstance(key, bool) or not isinstance(key, (int, str, np.integer)):
            raise ValueError(f"agent {agent}: ids must be whole numbers or strings; got {key!r}")
    check_arrays([x], names=[f"of agent {agent}"])
    if len(keys) != len(x):
        raise ValueError(f"agent {agent}: got {len(keys)} ids for {len(x)} rows of features")
    if hasattr(x, "iloc"):  # a table of pandas, whose index may have the ids, too
        index = x.index.tolist()
        if index not in (keys, list(range(len(keys)))) and set(index) == set(keys):
            place = next(i for i, key in enumerate(keys) if index[i] != key)
            raise ValueError(
                f"agent {agent}: row {place} is {index[place]!r} in the index of its features;"
                f" allowed is {keys[place]!r}, as in its ids: give x.index for them, or an array"
            )
    check_order({f"agent {agent}: ids": ids, f"agent {agent}: features": x})
    rows: dict[int | str, int] = {}
    for row, key in enumerate(keys):
        if rows.setdefault(key, row) != row:
            raise ValueError(
                f"agent {agent}: id {key!r} is there twice; each sample needs an id of its own"
            )
    return rows, np.asarray(x)
