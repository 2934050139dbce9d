"""VertCoHiRF's settings, static and traced, and which agent runs which base clusterer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from flax import struct
from jax import Array

from jaxfedmvc.checks import POSITIVE, at_least, choices, numbers, whole, wrong

Base = Literal["kmeans", "dbscan", "kernel_kmeans", "sc_srgf"]
Similarity = Literal["cosine", "rbf", "laplacian", "rbf_median"]

_BASES_ALLOWED = (
    f"one of {', '.join(get_args(Base))} for all agents, one for each of them, or agent:clusterer"
    " with each agent once"
)


class Bases(NamedTuple):
    """Base clusterers of the agents.

    Attributes:
      of_agent: Agent (its view id) -> clusterer.
      others: Clusterer of all agents that are not in `of_agent`, or None.
    """

    of_agent: dict[int, Base]
    others: Base | None

    def names(self) -> set[Base]:
        """Returns the names of all clusterers."""
        return {*self.of_agent.values(), *([] if self.others is None else [self.others])}

    def of(self, agent: int) -> Base:
        """Returns the clusterer of an agent, which must have one."""
        if self.others is None or agent in self.of_agent:
            return self.of_agent[agent]
        return self.others


@dataclasses.dataclass(frozen=True)
class VertCoHiRFConfig:
    """Static settings of VertCoHiRF: what changes shapes, loop lengths or the program.

    Attributes:
      n_clusters: Number of clusters in the data, or None where it is not known. The method finds
        its number of clusters itself; this one is the default of `local_clusters`. A job that
        chooses its settings looks for so many, if it is given the number.
      base: Base clusterers: kmeans, dbscan, kernel_kmeans or sc_srgf. One name is for all agents;
        several are for one agent each, in the order of their views. Entries such as 0:dbscan name
        the agent; one name beside these is for all other agents.
      local_clusters: Number of clusters that the base clusterers make (C); dbscan finds its own.
        None: n_clusters. auto: chosen without labels, by experiments.run alone, which does so too
        where no setting of the method is given.
      repetitions: Clusterings of random feature subsets, of which an agent sends the consensus
        (R). sc_srgf draws subspaces of its own, so it runs once.
      similarity: By whose mean over a cluster its members are ranked. cosine is linear in the
        active samples; the kernels rbf, exp(-d^2 / p), laplacian, exp(-|.|_1 / p), and rbf_median,
        exp(-d / (2 median d)), of rows with p features take memory quadratic in them.
      n_graphs: Subspace graphs of sc_srgf, two or more.
      refinements: Exchanges after the rounds in which agents list the clusters nearest to every
        sample, by means of their own features, and it joins the one of least rank sum. 0: none, as
        in the paper. At most 1000. More than 128 clusters stay as they are.
    """

    n_clusters: int | None = None
    base: tuple[str, ...] = ("kmeans",)
    local_clusters: int | Literal["auto"] | None = None
    repetitions: int = 2
    similarity: Similarity = "cosine"
    n_graphs: int = 20
    refinements: int = 0

    def __post_init__(self) -> None:
        """Checks what does not depend on the agents.

        Raises:
          ValueError: Names the setting, its value and what is allowed.
        """
        choices(self)
        at_least(self, 1, "n_clusters", "repetitions")
        if isinstance(self.local_clusters, str) and self.local_clusters != "auto":
            raise wrong("local_clusters", self.local_clusters, "1 or more, or 'auto'")
        if not isinstance(self.local_clusters, str):
            at_least(self, 1, "local_clusters")
        at_least(self, 2, "n_graphs")
        # Each is an exchange of the method: a node builds them all before it can refuse a job.
        whole("refinements", self.refinements, 0, 1000)
        self.bases()

    def bases(self) -> Bases:
        """Returns the clusterers in `base` by agent.

        Raises:
          ValueError: A clusterer is unknown, an agent is there twice or is no number, or several
            clusterers are left over for all other agents.
        """
        plain = [entry for entry in self.base if ":" not in entry]
        named = [entry.split(":", 1) for entry in self.base if ":" in entry]
        if not named and len(plain) > 1:
            named, plain = [[str(agent), name] for agent, name in enumerate(plain)], []
        of_agent: dict[int, Any] = {int(a): name for a, name in named if a.isdecimal()}
        known = set(get_args(Base)) >= {*of_agent.values(), *plain}
        if not self.base or not known or len(of_agent) < len(named) or len(plain) > 1:
            raise wrong("base", ",".join(self.base), _BASES_ALLOWED)
        others: Any = plain[0] if plain else None
        return Bases(of_agent, others)

    def check_agents(self, n_agents: int) -> None:
        """Checks that every one of these agents has a clusterer in `base`, and nobody else.

        Raises:
          ValueError: Names an agent that has none, or the agents that there are.
        """
        of_agent, others = self.bases()
        text = ",".join(self.base)
        if not set(of_agent) <= set(range(n_agents)):
            raise ValueError(
                f"base: got {text!r}; allowed are the agents 0 to {n_agents - 1}, each once"
            )
        left_out = sorted(set(range(n_agents)) - set(of_agent))
        if others is None and left_out:
            raise ValueError(
                f"base: got {text!r}, which gives agent {left_out[0]} None; allowed is"
                f" {_BASES_ALLOWED}"
            )


@struct.dataclass
class VertCoHiRFHyperparams:
    """Settings of VertCoHiRF that may be traced, so that a sweep over them is one program.

    Attributes:
      feature_share: Share of its features, in (0, 1], that a repetition of an agent sees (q); a
        whole number means that many features. sc_srgf sees all.
      relaxed: Threshold of the relaxed consensus of an agent's repetitions, an adjusted Rand index
        (h; 0.8 in the paper): repetitions that agree less with the rest are dropped. None: the
        strict consensus, without dropping any.
      relaxed_agents: Threshold of a relaxed consensus of the agents, an adjusted Rand index: agents
        that agree less with the others are left out of a round's clusters, and still rank. None:
        the strict consensus of all agents, which is the paper's.
      n_candidates: Most members of a cluster that are ranked (N_s), drawn at random from a key
        that all agents share; None: all of them.
      eps: Radius of dbscan.
      min_samples: Neighbours of a core sample of dbscan, itself included.
      gamma: Inverse squared width of the kernel exp(-gamma d^2) of kernel_kmeans.
      sampling_ratio: Share of the features in a subspace of sc_srgf, in (0, 1].
      limit: Number of clusters that the base clusterers make, at most local_clusters, so that one
        program serves a search over it; none: local_clusters.
    """

    feature_share: Array | float | int = 1.0
    relaxed: Array | float | None = None
    relaxed_agents: Array | float | None = None
    n_candidates: Array | int | None = None
    eps: Array | float = 2.25
    min_samples: Array | int = 5
    gamma: Array | float = 1.0
    sampling_ratio: Array | float = 0.5
    limit: Array | int | None = None


def is_share(q: np.ndarray) -> np.ndarray:
    """Tells which entries are shares in (0, 1], or whole numbers of 1 or more."""
    return (q > 0) & ((q <= 1) | np.issubdtype(q.dtype, np.integer))


# Of numbers that go by other names in `LocalStep`, too.
SHARE = (is_share, "a share in (0, 1], or a whole number of features, 1 or more")
RAND_INDEX = (lambda h: np.abs(h) <= 1, "a Rand index, -1 to 1")
COUNT = (lambda n: n >= 1, "1 or more")


def check_hyperparams(hp: VertCoHiRFHyperparams) -> None:
    """Checks the hyper-parameters that are not traced.

    Raises:
      ValueError: Names the first one that is out of range.
    """
    numbers(
        hp,
        {
            "feature_share": SHARE,
            "relaxed": RAND_INDEX,
            "relaxed_agents": RAND_INDEX,
            "n_candidates": COUNT,
            "eps": POSITIVE,
            "min_samples": POSITIVE,
            "gamma": POSITIVE,
            "sampling_ratio": (lambda r: (r > 0) & (r <= 1), "a share in (0, 1]"),
            "limit": COUNT,
        },
    )
