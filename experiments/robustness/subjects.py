"""Who is attacked: the methods of the study, where they are guarded, and by whom they are attacked.

Attackers are the clients of the highest ids, so that the leader, who has the lowest, is honest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks, data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
    e_fkmvc,
    private_e_fkmvc,
)
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.mgcd import MGCDConfig, mgcd
from jaxfedmvc.algorithms.vertcohirf import VertCoHiRFConfig, VertCoHiRFHyperparams, vertcohirf
from jaxfedmvc.attacks import byzantine, hostile
from jaxfedmvc.data import vertical
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages import robust as rules_lib
from jaxfedmvc.messages.robust import Ratio, Rule, robust

METHODS = ("fmcsc", "e_fkmvc", "private_e_fkmvc", "mgcd", "vertcohirf")
MEAN = "no rule"
RULES: dict[str, Callable[[float], Rule]] = {
    "norm bounding": lambda share: rules_lib.norm_bounding(),
    "trimmed mean": rules_lib.trimmed_mean,
    "median": lambda share: rules_lib.median(),
    "geometric median": lambda share: rules_lib.geometric_median(),
    "multi-Krum": rules_lib.multi_krum,
}
QUICK_RULES = ("trimmed mean", "median")
QUICK_METHODS = ("fmcsc", "e_fkmvc", "vertcohirf")
FORGED = ("random_labels", "inverse_ranking")  # VertCoHiRF's, see `attacks.byzantine`
START = "start"  # what is sent before E-FKMVC's rounds, times the factor
CLAIM = "claim"  # a thousand rows of every cluster, all features at the factor
NOBODY = "nobody"


@dataclasses.dataclass(frozen=True)
class RobustnessSettings:
    """Settings of the study.

    Attributes:
      algorithm: The methods: fmcsc, e_fkmvc, private_e_fkmvc, mgcd, vertcohirf.
      hostile_shares: Shares of the clients that attack, rounded to clients, one at least.
      hostile_clients: Clients of horizontal methods, all with all views, and MGCD's agents, whom
        the features are split over.
      hostile_agents: VertCoHiRF's agents.
      assumed_share: Share of hostile clients that trimmed mean and multi-Krum are told of.
      factor: Of the attack that scales.
      deviations: z of "a little is enough".
      skewed: Dirichlet concentration of skewed clients, on which the price is measured, too.
      agent_samples: Samples of vertical methods, the first of a random order.
      quick: Whether to make a small run: some methods, rules and attacks, one share and one seed.
    """

    algorithm: tuple[str, ...] = METHODS
    hostile_shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    hostile_clients: int = 10
    hostile_agents: int = 3
    assumed_share: float = 0.3
    factor: float = 10.0
    deviations: float = 1.5
    skewed: float = 0.3
    agent_samples: int = 400
    quick: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if not self.algorithm or not set(self.algorithm) <= set(METHODS):
            raise checks.wrong("algorithm", ",".join(self.algorithm), ", ".join(METHODS))
        if not self.hostile_shares or not all(0 < share < 1 for share in self.hostile_shares):
            raise checks.wrong("hostile_shares", self.hostile_shares, "shares above 0, below 1")
        checks.at_least(self, 3, "hostile_clients", "hostile_agents")
        checks.at_least(self, 20, "agent_samples")
        if not 0 <= self.assumed_share < 0.5:
            raise checks.wrong("assumed_share", self.assumed_share, "0 or more, below 0.5")
        if len(set(self.algorithm)) < len(self.algorithm):
            raise checks.wrong("algorithm", ",".join(self.algorithm), "each method once")
        checks.number("skewed", self.skewed, checks.POSITIVE)


class Cell(NamedTuple):
    """What is attacked how, and by how many."""

    clients: str
    attack: str
    share: float


# Attack -> ids of the clients that make it, padded with -1.
Hostile = Mapping[str, Any]


class Subject(NamedTuple):
    """A method of the study.

    Attributes:
      federations: For each kind of clients, "alike" and "skewed", and each seed.
      algorithm: The honest method.
      rounds: Most rounds.
      attacks: What is done to it, by name: `(algorithm, ids) -> algorithm`.
      collusion: The same, of those that read single messages: they come after a reduction.
      guard: `(algorithm, rule) -> algorithm`; None where no rule applies.
      why_not: Why not.
    """

    federations: dict[str, dict[int, Federation]]
    algorithm: FederatedAlgorithm
    rounds: int
    attacks: dict[str, Callable[[FederatedAlgorithm, Any], FederatedAlgorithm]]
    collusion: dict[str, Callable[[FederatedAlgorithm, Any], FederatedAlgorithm]]
    guard: Callable[[FederatedAlgorithm, Rule], FederatedAlgorithm] | None
    why_not: str = ""

    @property
    def n_clients(self) -> int:
        """Number of clients, the same of all federations."""
        return next(iter(self.federations["alike"].values())).n_clients


# --- The methods ----------------------------------------------------------------------------------


def subject(
    name: str, settings: RobustnessSettings, dataset: Dataset, seeds: Sequence[int]
) -> Subject:
    """Returns a method of the study, with its data for each seed; the set has labels."""
    assert dataset.labels is not None
    n_clusters = len(np.unique(dataset.labels))
    if name == "vertcohirf":
        return _vertcohirf(settings, dataset, n_clusters, seeds)
    if name == "mgcd":
        return _mgcd(settings, dataset, n_clusters, seeds)
    federations = {
        kind: {seed: clients(settings, dataset, seed, skew) for seed in seeds}
        for kind, skew in (("alike", None), ("skewed", settings.skewed))
    }
    makers = {"fmcsc": _fmcsc, "e_fkmvc": _e_fkmvc, "private_e_fkmvc": _private_e_fkmvc}
    return makers[name](settings, n_clusters, federations)


def clients(
    settings: RobustnessSettings, dataset: Dataset, seed: int, skew: float | None
) -> Federation:
    """Deals the samples out to clients that hold all views, alike or skewed in their classes."""
    partition = data.hybrid_partition(
        seed,
        len(dataset.views[0]),
        len(dataset.views),
        settings.hostile_clients,
        ratio=(1, 0),
        dirichlet=skew,
        labels=dataset.labels,
    )
    return Federation.from_arrays(dataset.views, dataset.labels, partition=partition)


def agents(settings: RobustnessSettings, dataset: Dataset, seed: int, n_agents: int) -> Federation:
    """Splits the features of all views over agents, which hold the same samples."""
    pooled = np.concatenate(dataset.views, axis=1)
    x, rows = vertical.prepare(pooled, np.arange(len(pooled)), seed=seed)
    x, rows = x[: settings.agent_samples], rows[: settings.agent_samples]
    columns = vertical.split_features(seed, x.shape[1], n_agents)
    ids = np.arange(len(x))
    labels = None if dataset.labels is None else dataset.labels[rows]
    return Federation.from_agents([(ids, x[:, chosen]) for chosen in columns], labels)


def _on_messages(
    settings: RobustnessSettings, parts: tuple[int, ...] | None, start: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the attacks on a round's messages and on the start's, and the one by collusion."""

    def of(attack: hostile.Attack, phases: tuple[str, ...] | None = None) -> Any:
        return lambda algorithm, ids: hostile.attacked(algorithm, attack, ids, phases)

    scaled = hostile.scaled(settings.factor, parts)
    attacks = {"sign flip": of(hostile.sign_flip(parts)), "scaled": of(scaled)}
    if not settings.quick:
        attacks["permuted rows"] = of(hostile.permuted_rows(parts))
        if parts is not None:
            attacks[CLAIM] = of(hostile.claimed(settings.factor, 1000.0))
        if start:
            attacks[START] = of(scaled, start)
    little = of(hostile.little_is_enough(settings.deviations, parts))
    return attacks, {"a little is enough": little}


def _fmcsc(
    settings: RobustnessSettings, n_clusters: int, federations: dict[str, dict[int, Federation]]
) -> Subject:
    config = FMCSCConfig(
        n_clusters,
        hidden=(64,),
        pretrain_epochs=10 if settings.quick else 30,
        local_epochs=2 if settings.quick else 10,
        partial_rounds=False,
        partial_models="branch",
        centroids="federated",
        centroid_rounds=1 if settings.quick else 3,
        n_init=5,
    )
    hyper = FMCSCHyperparams(learning_rate=3e-3, tau_m=0.7, mask_rate=0.3)
    tallies = {f"finish[{i}]": Ratio(0, 1) for i in range(1, 1 + config.centroid_rounds)}
    guard = partial(
        robust,
        ratios={"round[0]": Ratio(0, 1)} | tallies,
        # A leader's first autoencoders, and the centroids that clients begin with.
        unguarded=("setup[0]", "finish[0]"),
    )
    rounds = 2 if settings.quick else 5
    attacks, collusion = _on_messages(settings, (0,))
    return Subject(federations, fmcsc(config, hyper), rounds, attacks, collusion, guard)


def _e_fkmvc(
    settings: RobustnessSettings, n_clusters: int, federations: dict[str, dict[int, Federation]]
) -> Subject:
    guard = partial(
        robust,
        # Fewer than five samples of a cluster say nothing of its centre.
        ratios={"setup[0]": Ratio(0, 1), "round[0]": Ratio(0, 1, least=5.0)},
        unguarded=("setup[2]",),
    )
    attacks, collusion = _on_messages(settings, (0,), ("setup[2]",))
    algorithm = e_fkmvc(FedHKConfig(n_clusters))
    return Subject(federations, algorithm, 30, attacks, collusion, guard)


def _private_e_fkmvc(
    settings: RobustnessSettings, n_clusters: int, federations: dict[str, dict[int, Federation]]
) -> Subject:
    """The form that starts from sums, so that all of it is guarded; without noise."""
    config = PrivateFedHKConfig(
        n_clusters, rounds=20, start_steps=10, n_clients=settings.hostile_clients, noise="local"
    )
    algorithm = private_e_fkmvc(config, PrivateFedHKHyperparams(noise_multiplier=0.0))
    start = tuple(f"setup[{i}]" for i in range(len(algorithm.setup)))
    # Weights are in units of about a third of a sample.
    ratios = dict.fromkeys((*start, "round[0]"), Ratio(0, 1, least=1.5))
    attacks, collusion = _on_messages(settings, (0,), start)
    guard = partial(robust, ratios=ratios)
    return Subject(federations, algorithm, config.rounds, attacks, collusion, guard)


def _mgcd(
    settings: RobustnessSettings, dataset: Dataset, n_clusters: int, seeds: Sequence[int]
) -> Subject:
    """Dense graphs: factors of graphs have no entries that stand for the same on two agents."""
    federations = {s: agents(settings, dataset, s, settings.hostile_clients) for s in seeds}
    guard = partial(robust, centred=("round[0]",))
    attacks, collusion = _on_messages(settings, None)
    algorithm = mgcd(MGCDConfig(n_clusters, dense=True))
    return Subject({"alike": federations}, algorithm, 3, attacks, collusion, guard)


def _vertcohirf(
    settings: RobustnessSettings, dataset: Dataset, n_clusters: int, seeds: Sequence[int]
) -> Subject:
    federations = {s: agents(settings, dataset, s, settings.hostile_agents) for s in seeds}
    config = VertCoHiRFConfig(n_clusters)

    def forged(name: str, algorithm: FederatedAlgorithm, ids: Any) -> FederatedAlgorithm:
        return byzantine.attacked(algorithm, name, ids)

    return Subject(
        {"alike": federations},
        vertcohirf(config, VertCoHiRFHyperparams()),
        30,
        {name: partial(forged, name) for name in FORGED},
        {},
        None,
        "labels and identifiers are names, which have no mean; what all agents must agree on"
        " bounds each of them already",
    )


# --- Runs -----------------------------------------------------------------------------------------


def program(subject: Subject, rules: Sequence[Rule] | None) -> Callable[..., tuple[Any, ...]]:
    """Compiles `(federation, key, hostile, rule's place) -> labels of each cohort`.

    One program does for all attacks, shares and rules: who makes an attack is traced, and the rule
    is a branch. Without rules it is the plain method.
    """

    def run(
        federation: Federation, key: jax.Array, hostile: Hostile, place: jax.Array
    ) -> tuple[jax.Array, ...]:
        algorithm = subject.algorithm
        for name, attack in subject.attacks.items():
            algorithm = attack(algorithm, hostile[name])
        if rules is not None and subject.guard is not None:
            algorithm = subject.guard(
                algorithm, lambda x, mask: jax.lax.switch(place, rules, x, mask)
            )
        for name, attack in subject.collusion.items():
            algorithm = attack(algorithm, hostile[name])
        hidden = federation.without_labels()
        return engine.run(algorithm, hidden, key, subject.rounds, client_chunk=1).labels

    return jax.jit(run)


def cells(subject: Subject, settings: RobustnessSettings) -> list[Cell]:
    """Returns what is run for every rule: nobody attacks, on all kinds of clients; each attack.

    Claims are made on all kinds of clients, too: skewed ones are those that they harm.
    """
    n = subject.n_clients
    counts = sorted({max(1, round(share * n)) for share in settings.hostile_shares})
    found = [Cell(kind, NOBODY, 0.0) for kind in subject.federations]
    for attack in (*subject.attacks, *subject.collusion):
        kinds = tuple(subject.federations) if attack == CLAIM else ("alike",)
        found += [Cell(kind, attack, count / n) for kind in kinds for count in counts]
    return found


def attackers(subject: Subject, cell: Cell) -> dict[str, jax.Array]:
    """Returns who makes which attack: the clients of the highest ids."""
    n = subject.n_clients
    nobody = np.full(n, -1, np.int32)
    mine = nobody.copy()
    count = round(cell.share * n)
    mine[:count] = np.arange(n - count, n)
    names = (*subject.attacks, *subject.collusion)
    return {name: jnp.asarray(mine if name == cell.attack else nobody) for name in names}
