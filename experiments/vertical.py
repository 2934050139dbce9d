"""Flags, data, scores and files of vertical jobs: all agents hold the same samples.

A set of several views gives every agent a view; a set of one view is prepared as the paper does
(duplicates dropped, categories one-hot, standardised, shuffled) and its features are split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import (
    adjusted_rand_score,
    normalized_mutual_info_score,
    silhouette_score,
)
from sklearn.metrics.cluster import contingency_matrix

from experiments import base
from jaxfedmvc import data
from jaxfedmvc.data import synthetic, vertical
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)

flags.DEFINE_enum(
    "split",
    "auto",
    ["auto", "features", "views"],
    "Features split over --agents, or one view for each agent; auto: views where there are several",
)
flags.DEFINE_integer("agents", 3, "Agents that the features are split over.", lower_bound=1)
flags.DEFINE_enum("feature_order", "random", ["random", "sequential"], "How features are split.")
flags.DEFINE_float("overlap", 0.0, "Probability of copying another agent's feature.")
flags.DEFINE_float("max_overlap", 0.3, "Most copied features, as a share of an agent's own.")
flags.DEFINE_enum(
    "overlap_order",
    "random",
    ["random", "ascending"],
    "In which order features are offered for copying; ascending fills the cap with low ids.",
)
flags.DEFINE_list("categorical", None, "Columns that are categories; None: those known of the set.")

METRICS = ("ari", "nmi", "acc", "silhouette")
# The benchmark set of the paper whose columns are categories.
_CATEGORICAL = {"nursery": tuple(range(8))}
# Silhouettes of more samples than this are estimated on as many, drawn with a fixed seed.
_SILHOUETTE_ROWS = 5000


class Agents(NamedTuple):
    """The data of one seed.

    Attributes:
      federation: One cohort for each agent.
      views: Their features [n, p_a], for silhouettes.
      labels: [n], for scoring only, or None.
      rows: [n], the row of the data set that each sample is.
    """

    federation: Federation
    views: list[np.ndarray]
    labels: np.ndarray | None
    rows: np.ndarray


class SplitOptions(NamedTuple):
    """How the features of a set of one view are split; as `data.vertical.split_features` says."""

    agents: int = 3
    order: str = "random"
    overlap: float = 0.0
    max_overlap: float = 0.3
    overlap_order: str = "random"


def load_agents(
    name: str,
    seed: int,
    options: SplitOptions,
    *,
    data_dir: str | None = None,
    scale: str = "auto",
    split: str = "auto",
    categorical: Sequence[int] | None = None,
) -> Agents:
    """The data of one seed: generated, split or dealt out with it.

    Raises:
      ValueError, OSError: What is wrong with the data or the options.
    """
    if is_multimodal(name):
        dataset = synthetic.multimodal(seed, "text" if name.lower() == "multimodal" else "table1")
    else:
        dataset = data.load(name, data_dir, scale)
    if split == "views" or (split == "auto" and len(dataset.views) > 1):
        return _agents(list(dataset.views), dataset.labels, np.arange(len(dataset.views[0])))
    if categorical is None:
        categorical = _CATEGORICAL.get(Path(name).stem.lower())
    pooled = np.concatenate(dataset.views, axis=1)
    x, rows = vertical.prepare(pooled, np.arange(len(pooled)), categorical=categorical, seed=seed)
    labels = None if dataset.labels is None else dataset.labels[rows]
    columns = vertical.split_features(
        seed,
        x.shape[1],
        options.agents,
        order=options.order,
        overlap=options.overlap,
        max_overlap=options.max_overlap,
        overlap_order=options.overlap_order,
    )
    return _agents([x[:, chosen] for chosen in columns], labels, rows)


def default_set() -> str:
    """Mfeat where it is found, else the digits that ship with scikit-learn."""
    try:
        data.load("mfeat", FLAGS.data_dir, "none")
    except (OSError, ValueError):
        return "digits"
    return "mfeat"


def is_multimodal(name: str) -> bool:
    """Whether a set is one of the two generated ones, which every seed draws anew."""
    return name.lower() in ("multimodal", "multimodal_table1")


def agents_of_flags(seed: int) -> Agents:
    """`load_agents` as the flags say."""
    categorical = FLAGS.categorical
    try:
        categorical = None if categorical is None else [int(column) for column in categorical]
    except ValueError as error:
        raise ValueError(
            f"categorical: got {','.join(FLAGS.categorical)!r}; allowed are column numbers with"
            " commas"
        ) from error
    options = SplitOptions(
        FLAGS.agents, FLAGS.feature_order, FLAGS.overlap, FLAGS.max_overlap, FLAGS.overlap_order
    )
    return load_agents(
        FLAGS.dataset,
        seed,
        options,
        data_dir=FLAGS.data_dir,
        scale=FLAGS.scale,
        split=FLAGS.split,
        categorical=categorical,
    )


def _agents(views: list[np.ndarray], labels: np.ndarray | None, rows: np.ndarray) -> Agents:
    federation = Federation.from_arrays(
        views, labels, partition=vertical.vertical_partition(len(views[0]), len(views))
    )
    federation.check_vertical()
    return Agents(federation, views, labels, rows)


# Scores, on the host: the number of clusters is not known beforehand.


def rate(agents: Agents, predicted: Sequence[Any]) -> dict[str, float]:
    """Mean over agents of ARI, NMI, ACC and own-view silhouette, and the number of clusters.

    Args:
      agents: The data.
      predicted: For each agent its clusters [n]; a shared array is scored once.
    """
    seen: dict[int, dict[str, float]] = {}
    rows = []
    for view, labels in zip(agents.views, predicted, strict=True):
        if id(labels) not in seen:
            seen[id(labels)] = external(agents.labels, np.asarray(labels))
        rows.append(seen[id(labels)] | {"silhouette": silhouette(view, np.asarray(labels))})
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def external(truth: np.ndarray | None, labels: np.ndarray) -> dict[str, float]:
    """ARI, NMI, ACC and purity, NaN without labels, and the number of clusters."""
    clusters = {"clusters": float(len(np.unique(labels)))}
    if truth is None:
        return dict.fromkeys(("ari", "nmi", "acc", "purity"), np.nan) | clusters
    table = contingency_matrix(truth, labels)
    matched = linear_sum_assignment(-table)
    return {
        "ari": float(adjusted_rand_score(truth, labels)),
        "nmi": float(normalized_mutual_info_score(truth, labels)),
        "acc": float(table[matched].sum() / len(labels)),
        "purity": float(table.max(axis=0).sum() / len(labels)),
    } | clusters


def silhouette(view: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette on one agent's features; NaN with one cluster, or one for every sample."""
    rows = slice(None)
    if len(view) > _SILHOUETTE_ROWS:
        rows = np.random.default_rng(0).choice(len(view), _SILHOUETTE_ROWS, replace=False)
    labels = labels[rows]
    if not 1 < len(np.unique(labels)) < len(labels):
        return float("nan")
    return float(silhouette_score(view[rows], labels))


# What a job leaves behind.


def table(
    rows: Mapping[str, Sequence[Mapping[str, float]]],
    names: Sequence[str] = (*METRICS, "clusters"),
    margin: int = 24,
) -> list[str]:
    """Lines for the terminal: for each row the mean over seeds, with its spread if there are two.

    Args:
      rows: Name -> one `rate` for each seed.
      names: Of the columns.
      margin: Width of the rows' names.
    """
    n_seeds = len(next(iter(rows.values())))
    width = 16 if n_seeds > 1 else 10
    head = f"{'':{margin}s}" + "".join(f"{_TITLES[name]:>{width}s}" for name in names)
    lines = [head]
    for name, scores in rows.items():
        cells = "".join(_cell([s[metric] for s in scores], metric, width) for metric in names)
        lines.append(f"{name:{margin}s}{cells}")
    return lines


_TITLES = {
    "ari": "ARI",
    "nmi": "NMI",
    "acc": "ACC",
    "silhouette": "silh.",
    "clusters": "clusters",
    "purity": "PUR",
}


def _cell(values: Sequence[float], metric: str, width: int) -> str:
    if np.isnan(values).any():
        return f"{'-':>{width}s}"
    digits = 1 if metric == "clusters" else 3
    text = f"{np.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" +- {np.std(values):.{digits}f}"
    return f"{text:>{width}s}"


def statistics(scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean, standard deviation (over seeds, population form) and every seed's value, for JSON."""
    result = {}
    for name in scores[0]:
        values = [score[name] for score in scores]
        if not np.isnan(values).any():
            result[name] = {
                "mean": float(np.mean(values)),
                "std": float(np.std(values)),
                "per_seed": values,
            }
    return result


def write_summary(folder: Path, content: Mapping[str, Any]) -> None:
    """summary.json with what results depend on."""
    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
    summary = {**content, "device": device, "versions": base.versions()}
    base.write(folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def n_classes(agents: Agents) -> int | None:
    """K of the methods that are given one: the flag, or the number of classes, or None."""
    if FLAGS.n_clusters is not None or agents.labels is None:
        return FLAGS.n_clusters
    return len(np.unique(agents.labels))
