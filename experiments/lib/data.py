"""Data of a job: read, prepared, and dealt out over clients or agents for every seed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxfedmvc import checks, data
from jaxfedmvc.data import synthetic, vertical
from jaxfedmvc.federation import Federation

# The benchmark set of a paper whose columns are categories.
_CATEGORICAL = {"nursery": tuple(range(8))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(data.TableOptions):
    """Which data, and how they are prepared.

    Attributes:
      dataset: A named set (digits, bdgp, multimodal, unequal_0, ...); the path of a .npz, .mat,
        .csv, .tsv or .parquet file; several tables with commas between, joined on --id; or a folder
        with a file for each client.
      data_dir: Where sets lie; then $JAXFEDMVC_DATA, then ./data.
      scale: Scaling of features; auto: as is usual for a named set, else minmax.
      n_clusters: K; none: the number of classes where labels are known; auto: chosen without labels
        from --clusters_tried.
    """

    dataset: str | None = None
    data_dir: str | None = None
    scale: Literal["auto", "none", "minmax", "standard"] = "auto"
    n_clusters: int | Literal["auto"] | None = None

    @property
    def stem(self) -> str:
        """What files of results call the data."""
        names = [part.strip() for part in (self.dataset or "").split(",")]
        return "-".join(Path(name).stem for name in names).lower()

    @property
    def table(self) -> data.TableOptions:
        """What the columns of tables are."""
        names = (field.name for field in dataclasses.fields(data.TableOptions))
        return data.TableOptions(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class HorizontalSettings:
    """How samples are dealt out over clients, each of which holds all views or some.

    Attributes:
      n_clients: Clients of all kinds.
      ratio: Clients with all views : clients with a part of them.
      partial_views: Views that a partial client holds.
      samples_per_client: Samples of each client; none deals out all.
      dirichlet: Label skew beta; none deals out at random.
      scale_by: Whose rows say what --scale, minmax or standard, scales by: those of all clients,
        who have agreed on ranges, or each client's own.
    """

    n_clients: int = 12
    ratio: str = "1:1"
    partial_views: int = 1
    samples_per_client: int | None = None
    dirichlet: float | None = None
    scale_by: Literal["all", "client"] = "all"


@dataclasses.dataclass(frozen=True)
class VerticalSettings:
    """How features are split over agents, which all hold the same samples.

    Attributes:
      split: Features split over --agents, or one view for each agent; auto: views where there are
        several.
      agents: Agents that the features are split over.
      feature_order: How features are split.
      overlap: Probability of copying another agent's feature.
      max_overlap: Most copied features, as a share of an agent's own.
      overlap_order: In which order features are offered for copying; ascending fills the cap with
        low ids.
      importance: Weights of agents, as VertiBench splits features: one number for all agents, such
        as 0.5, or one for each; small ones are unequal. none: groups of equal size.
      categorical: Columns that are categories; none: those known of the set.
      hybrid: Rows that an agent holds: those of the clients with its view, in a division by
        --ratio as horizontal methods get it, such as 1:1; none: all rows.
      hybrid_clients: Clients of that division.
      shuffled: Share of the samples that each agent but the first has in an order of its own, for
        --algorithm=fcuif --align.
    """

    split: Literal["auto", "features", "views"] = "auto"
    agents: int = 3
    feature_order: Literal["random", "sequential"] = "random"
    overlap: float = 0.0
    max_overlap: float = 0.3
    overlap_order: Literal["random", "ascending"] = "random"
    importance: tuple[float, ...] | None = None
    categorical: tuple[int, ...] | None = None
    hybrid: str | None = None
    hybrid_clients: int = HorizontalSettings.n_clients
    shuffled: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        checks.numbers(self, {"shuffled": checks.SHARE})


class Problem(NamedTuple):
    """The data of one seed.

    Attributes:
      federation: Clients or agents; its sample ids are places in the arrays below.
      views: All views of all samples, [n, D_v] each, for references and silhouettes.
      labels: [n], for scoring only, or None.
      rows: [n], the row of the data set that each sample is, or what it is called there.
      held: [n, V], which samples have which views, and zeros where not; None: all have all.
      notes: What was found in the data, and what was done to it.
      repeats: What rows are called that were left out because they repeat a sample, and its place.
      fingerprint: Of the data set, see `fingerprint`.
      classes: What each class is called in the data; its number if None.
      view_names: What each view is called in the data; its number if None.
    """

    federation: Federation
    views: list[np.ndarray]
    labels: np.ndarray | None
    rows: np.ndarray
    held: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    repeats: tuple[np.ndarray, np.ndarray] | None = None
    fingerprint: str = ""
    classes: tuple[str, ...] | None = None
    view_names: tuple[str, ...] | None = None

    def called(self, label: int) -> str:
        """Returns what a class is called."""
        return str(label) if self.classes is None else self.classes[label]


def fingerprint(dataset: data.Dataset) -> str:
    """Returns a hash of what a set holds: views, labels, ids, and who holds what."""
    found = hashlib.sha256()
    held = (dataset.labels, dataset.ids, dataset.held, dataset.clients)
    for part in (*dataset.views, *held):
        x = np.ascontiguousarray(np.empty(0) if part is None else part)
        x = x.astype(str) if x.dtype == object else x
        found.update(f"{x.shape} {x.dtype.str};".encode())
        found.update(x.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


class Partitioned(NamedTuple):
    """A data set, and how each seed deals its samples out; all divisions of the same shapes."""

    dataset: data.Dataset
    parts: list[tuple[data.Part, ...]]


def partitioned(
    settings: DataSettings,
    split: HorizontalSettings,
    seeds: list[int],
    load: Callable[..., data.Dataset] = data.load,
) -> Partitioned:
    """Reads a set and divides its samples for each seed.

    Raises:
      ValueError, OSError: Says what is wrong with the settings or the data.
    """
    dataset = load(settings.dataset, settings.data_dir, settings.scale, settings.table)
    if dataset.held is not None or dataset.clients is not None:
        return _as_held(dataset, split, seeds)
    parts = [
        data.hybrid_partition(
            seed,
            n_samples=len(dataset.views[0]),
            n_views=len(dataset.views),
            n_clients=split.n_clients,
            ratio=data.parse_ratio(split.ratio),
            partial_views=split.partial_views,
            samples_per_client=split.samples_per_client,
            dirichlet=split.dirichlet,
            labels=dataset.labels,
        )
        for seed in seeds
    ]
    return Partitioned(dataset, parts)


def _as_held(dataset: data.Dataset, split: HorizontalSettings, seeds: list[int]) -> Partitioned:
    """Divides a set whose rows lack views, or lie with clients already."""
    if split.dirichlet is not None or split.samples_per_client is not None:
        raise ValueError(
            "dirichlet, samples_per_client: are for data whose rows all have all views and lie with"
            " nobody yet"
        )
    held = dataset.held
    if held is None:
        held = np.ones((len(dataset.views[0]), len(dataset.views)), bool)
    files = dataset.clients
    n_clients = split.n_clients if files is None else None
    parts = [data.partition_as_held(seed, held, n_clients, files) for seed in seeds]
    n_parts = sum(len(part.client_ids) for part in parts[0])
    notes = [f"{n_parts} clients that hold what the data say, and not --ratio and --partial_views"]
    if files is not None and n_parts > len(np.unique(files)):
        notes.append(
            "a file with rows of several kinds is a client for each kind:"
            f" {_of_files(parts[0], files)}"
        )
    return Partitioned(dataset._replace(notes=(*dataset.notes, *notes)), parts)


def _of_files(parts: Sequence[data.Part], files: np.ndarray) -> str:
    """Says which clients a file has become."""
    clients: dict[int, list[int]] = {}
    for part in parts:
        for client, rows in zip(part.client_ids, part.sample_ids, strict=True):
            clients.setdefault(int(files[rows[0]]), []).append(int(client))
    return "; ".join(
        f"file {file} clients {', '.join(map(str, sorted(mine)))}"
        for file, mine in sorted(clients.items())
    )


def load_clients(
    settings: DataSettings, split: HorizontalSettings, seeds: list[int]
) -> list[Problem]:
    """Returns the data of each seed as clients with samples of their own.

    Raises:
      ValueError, OSError: Says what is wrong with the settings or the data.
    """
    dataset, divisions = partitioned(settings, split, seeds)
    own = split.scale_by == "client"
    if own and settings.scale not in ("minmax", "standard"):
        raise ValueError(
            f"scale_by: got 'client' with --scale={settings.scale}; allowed are minmax, standard"
        )
    rows = np.arange(len(dataset.views[0])) if dataset.ids is None else dataset.ids
    constant = [v for v, x in enumerate(dataset.views) if not np.ptp(x, axis=0).any()]
    notes = [f"view {v} is the same in all rows: leave it out" for v in constant]
    whole = fingerprint(dataset)
    return [
        Problem(
            Federation.from_arrays(
                _scaled_apart(dataset.views, parts, settings.scale) if own else dataset.views,
                dataset.labels,
                partition=parts,
            ),
            list(dataset.views),
            dataset.labels,
            rows,
            dataset.held,
            (*dataset.notes, *notes),
            fingerprint=whole,
            classes=dataset.classes,
            view_names=dataset.view_names,
        )
        for parts in divisions
    ]


def _scaled_apart(
    views: Sequence[np.ndarray], parts: Sequence[data.Part], scale: str
) -> list[np.ndarray]:
    """Returns the views with each client's rows scaled by what these rows alone have."""
    found = [view.copy() for view in views]
    for part in parts:
        for ids in part.sample_ids:
            mine = ids[ids >= 0]
            for v in part.view_ids:
                found[v][mine] = data.scaled(views[v][mine], scale)
    return found


def load_agents(settings: DataSettings, split: VerticalSettings, seed: int) -> Problem:
    """Returns the data of one seed, as agents: generated, split or dealt out with it.

    A set of several views gives every agent a view; a set of one view is prepared as VertCoHiRF's
    paper does (duplicates dropped, categories one-hot, standardised, shuffled) and split.

    Raises:
      ValueError, OSError: Says what is wrong with the settings or the data.
    """
    name = settings.dataset or ""
    if is_multimodal(name):
        variant = "text" if name.lower() == "multimodal" else "table1"
        dataset = synthetic.multimodal(seed, variant)
    else:
        dataset = data.load(name, settings.data_dir, settings.scale, settings.table)
    n = len(dataset.views[0])
    ids = np.arange(n) if dataset.ids is None else dataset.ids
    if dataset.clients is not None:
        raise ValueError(f"dataset: {name} has a file for each client; agents hold the same rows")
    if split.split == "views" or (split.split == "auto" and len(dataset.views) > 1):
        if split.importance is not None:
            raise ValueError("importance: is for features that are split, not for views")
        views = list(dataset.views)
        if split.agents not in (VerticalSettings.agents, len(views)):
            raise ValueError(
                f"agents: got {split.agents}, but each of the {len(views)} views is an agent's;"
                " allowed is --split=features"
            )
        if split.overlap:
            raise ValueError("overlap: is for features that are split, not for views")
        held = None if dataset.held is None else dataset.held.T
        if held is not None and split.hybrid is not None:
            raise ValueError(f"hybrid: got {split.hybrid!r}; the data say who lacks what already")
        if held is None:
            held = _held(split, seed, n, len(views))
        found = _agents(views, dataset.labels, ids, held, split.shuffled, seed)
        return found._replace(
            held=dataset.held,
            notes=dataset.notes,
            fingerprint=fingerprint(dataset),
            classes=dataset.classes,
            view_names=dataset.view_names,
        )
    if dataset.held is not None:
        raise ValueError("split: rows lack views; allowed is --split=views")
    if split.hybrid is not None:
        raise ValueError(f"hybrid: got {split.hybrid!r} for one view; allowed is a set of several")
    categorical = split.categorical
    if categorical is None:
        categorical = _CATEGORICAL.get(Path(name).stem.lower())
    pooled = np.concatenate(dataset.views, axis=1)
    x, rows = vertical.prepare(pooled, np.arange(n), categorical=categorical, seed=seed)
    columns = _columns(split, seed, x.shape[1])
    labels = None if dataset.labels is None else dataset.labels[rows]
    agents = [x[:, chosen] for chosen in columns]
    found = _agents(agents, labels, ids[rows], shuffled=split.shuffled, seed=seed)
    notes = ["features: then each with mean 0 and variance 1, constant ones left out"]
    if repeated := n - len(rows):
        notes.append(
            f"{repeated} rows repeat the features of others: they are left out, and get the others'"
            " clusters in labels.csv"
        )
    left_out, places = _repeats(pooled, rows)
    return found._replace(
        notes=(*dataset.notes, *notes),
        repeats=(ids[left_out], places),
        fingerprint=fingerprint(dataset),
        classes=dataset.classes,
    )


def _repeats(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of `x` that are not among `rows`, and whose place there they repeat."""
    which = np.unique(x.astype(np.float64), axis=0, return_inverse=True)[1].reshape(-1)
    place = np.empty(which.max() + 1, int)
    place[which[rows]] = np.arange(len(rows))
    left_out = np.setdiff1d(np.arange(len(x)), rows)
    return left_out, place[which[left_out]]


def _columns(split: VerticalSettings, seed: int, n_features: int) -> tuple[np.ndarray, ...]:
    """Returns each agent's features, for data of one view."""
    if split.importance is None:
        return vertical.split_features(
            seed,
            n_features,
            split.agents,
            order=split.feature_order,
            overlap=split.overlap,
            max_overlap=split.max_overlap,
            overlap_order=split.overlap_order,
        )
    if split.overlap:
        raise ValueError(f"overlap: got {split.overlap} with --importance; allowed is 0")
    weights = split.importance
    if not weights or min(weights) <= 0:
        raise ValueError(f"importance: got {weights}; allowed are numbers above 0")
    if len(weights) not in (1, split.agents):
        raise ValueError(
            f"importance: got {len(weights)} weights for {split.agents} agents; allowed is one for"
            " all, or one for each"
        )
    weights = weights * split.agents if len(weights) == 1 else weights
    return vertical.split_by_importance(seed, n_features, weights)


def _held(split: VerticalSettings, seed: int, n_samples: int, n_views: int) -> np.ndarray:
    """Tells which agent holds which sample, bool [agents, n]."""
    held = np.full((n_views, n_samples), split.hybrid is None)
    if split.hybrid is not None:
        for part in data.hybrid_partition(
            seed,
            n_samples=n_samples,
            n_views=n_views,
            n_clients=split.hybrid_clients,
            ratio=data.parse_ratio(split.hybrid),
        ):
            for v in part.view_ids:
                held[v, part.sample_ids[part.sample_ids >= 0]] = True
    return held


def _agents(
    views: list[np.ndarray],
    labels: np.ndarray | None,
    rows: np.ndarray,
    held: np.ndarray | None = None,
    shuffled: float = 0.0,
    seed: int = 0,
) -> Problem:
    partition = vertical.vertical_partition(len(views[0]), len(views))
    if shuffled:
        if held is not None and not held.all():
            raise ValueError(f"shuffled: got {shuffled}, but agents lack samples; allowed is 0")
        partition = vertical.shuffle_places(seed, partition, shuffled)
    elif held is not None:
        partition = tuple(
            part._replace(sample_ids=np.where(mine[None], part.sample_ids, -1))
            for part, mine in zip(partition, held, strict=True)
        )
    federation = Federation.from_arrays(views, labels, partition=partition)
    complete = held is None or bool(held.all())
    federation.check_vertical(complete=complete, aligned=not shuffled)
    federation.check_features()
    return Problem(federation, views, labels, rows)


def is_multimodal(name: str) -> bool:
    """Says whether a set is one of the two generated ones, which every seed draws anew."""
    return name.lower() in ("multimodal", "multimodal_table1")


def count_classes(settings: DataSettings, labels: np.ndarray | None) -> int | None:
    """Returns K: as the flag says, or the number of classes, or None where neither is known.

    Raises:
      ValueError: It is to be chosen, which single jobs alone do.
    """
    if settings.n_clusters == "auto":
        raise ValueError("n_clusters: got 'auto'; allowed is a number, but for experiments.run")
    if settings.n_clusters is not None or labels is None:
        return settings.n_clusters
    return len(np.unique(labels))
