"""What the attacks are made on: settings of the study, and the data of one seed."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from sklearn.cluster import KMeans

from jaxfedmvc import checks
from jaxfedmvc.attacks import reconstruction
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation

METHODS = (
    "mgcd",
    "latents",
    "fmcsc",
    "feddmvc",
    "fcuif",
    "fedmvl",
    "e_fkmvc",
    "vertcohirf",
    "label_consensus",
)


@dataclasses.dataclass(frozen=True)
class LeakageSettings:
    """Settings of the study.

    Attributes:
      algorithm: Whose messages are read: mgcd, latents, fmcsc, feddmvc, fcuif, fedmvl, e_fkmvc,
        vertcohirf, label_consensus.
      leak_forms: Forms of MGCD's message, by name; none: all of them.
      leak_insiders: Share of participants whose features are known.
      leak_rounds: Most rounds of MGCD, whose first messages are read, and of FMCSC, FedDMVC and
        FCUIF, whose last are.
      leak_neighbours: k of the graphs of neighbours.
      leak_fit_epochs: Epochs between snapshots of the inverter.
      leak_pretrain_epochs: Epochs of pre-training of FMCSC, FedDMVC and FCUIF.
      leak_clients: Clients of E-FKMVC. The fewer rows each has, the fewer stand behind a sum.
    """

    algorithm: tuple[str, ...] = METHODS
    leak_forms: tuple[str, ...] | None = None
    leak_insiders: float = 0.1
    leak_rounds: int = 1
    leak_neighbours: int = 10
    leak_fit_epochs: int = 60
    leak_pretrain_epochs: int = 100
    leak_clients: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        check_names("algorithm", self.algorithm, METHODS)
        checks.at_least(
            self, 1, "leak_rounds", "leak_neighbours", "leak_fit_epochs", "leak_clients"
        )
        checks.at_least(self, 0, "leak_pretrain_epochs")


def check_names(name: str, got: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless there are some, and all of them are allowed."""
    if not got or not set(got) <= set(allowed):
        raise ValueError(f"{name}: got {','.join(got)!r}; allowed are {', '.join(allowed)}")


class Scenario(NamedTuple):
    """The data of one seed: disjoint halves of the set, each as a vertical federation.

    Attributes:
      participants: Whose messages are read.
      public: What the shadow attacker holds.
      views: The participants' features, [n, D_v] each.
      public_views: [n, D_v] each.
      labels: Of the participants, for scores only.
      insiders: Rows of the participants whose features are known.
      others: The other rows.
      n_clusters: Number of clusters.
    """

    participants: Federation
    public: Federation
    views: list[np.ndarray]
    public_views: list[np.ndarray]
    labels: np.ndarray
    insiders: np.ndarray
    others: np.ndarray
    n_clusters: int


def deal(
    dataset: Dataset, seed: int, n_clusters: int | None, settings: LeakageSettings
) -> Scenario:
    """Deals a set out to participants and the public.

    Raises:
      ValueError: No labels, one view, no insider or nobody else, or too many neighbours.
    """
    if dataset.labels is None or len(dataset.views) < 2:
        raise ValueError(f"dataset: {dataset.name} needs labels to score with and several views")
    order = np.random.default_rng(seed).permutation(len(dataset.labels))
    n = len(order) // 2
    m = round(settings.leak_insiders * n)
    if not 4 <= m < n:
        raise ValueError(
            f"leak_insiders: got {settings.leak_insiders}, {m} of {n} participants; allowed are"
            " shares that make 4 or more, and not all"
        )
    if settings.leak_neighbours >= n:
        allowed = f"below {n}, the participants"
        raise checks.wrong("leak_neighbours", settings.leak_neighbours, allowed)
    views = [view[order[:n]] for view in dataset.views]
    public_views = [view[order[n : 2 * n]] for view in dataset.views]
    parts = vertical_partition(n, len(dataset.views))
    return Scenario(
        Federation.from_arrays(views, None, partition=parts),
        Federation.from_arrays(public_views, None, partition=parts),
        views,
        public_views,
        dataset.labels[order[:n]],
        np.arange(m),
        np.arange(m, n),
        n_clusters or len(np.unique(dataset.labels)),
    )


def public_prototypes_r2(scenario: Scenario, seed: int) -> float:
    """Computes what the k-means centres of public samples tell: R^2, the mean over the views.

    An oracle assigns participants to them, as it does for prototypes that messages give away.
    """
    k_means = KMeans(scenario.n_clusters, n_init=20, random_state=seed)
    centres = [k_means.fit(public).cluster_centers_ for public in scenario.public_views]
    found = map(reconstruction.best_prototype_r2, scenario.views, centres)
    return float(np.mean([float(r2) for r2 in found]))
