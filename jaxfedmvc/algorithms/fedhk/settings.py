"""FedHK's settings: what shapes the programs, and the numbers that may be swept."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
from flax import struct
from jax import Array

from jaxfedmvc import checks

# Nearer to 1 the logarithms of memberships are so large that their rounding overflows, for some
# samples and not for others: a server could tell by a NaN which ones a private client has.
_LEAST_FUZZIFIER = 1.000001


@dataclasses.dataclass(frozen=True)
class FedHKConfig:
    """Static settings of E-FKMVC, and of the methods that compress its centres.

    Attributes:
      n_clusters: Number of clusters, c.
      hkc: Heat-kernel coefficients delta. "bandwidth": one for each view. "minmax", "absmean": one
        for each sample and feature, by (23) or the absolute value of (24), divided by the view's
        number of features.
      centre_rule: "stationary": centres that never raise the objective. "printed": (30) to the
        letter. The two differ for coefficients of each sample only.
      aggregation: "statistics": clients send sums, and the server computes what one place with all
        data would. "average": clients send centres, which are averaged by (60) and (61).
      local_steps: Steps of a client in a round; of use with aggregation "average" only.
      personal: How clients make the model their own in the end. "none": not at all. "proximal":
        steps that are pulled to the global centres. "mix": (102) after as many local steps.
        "gradient": (62) and (63) as often.
      personal_steps: Number of steps by which clients make the model their own.
      n_restarts: Number of starts; they share the rounds and multiply their bytes, and the one of
        least objective is kept. None: ten where clients with all views hold fewer than 150
        rows for each cluster, padding included, and otherwise one; one, too, with min_cluster_size,
        since every start sends sums of its own.
      min_cluster_size: Least weight of a client's rows in a cluster for which their sum is sent.
        A row weighs 1 at most, so that a sum is over so many rows or more, and none of them is a
        greater share of it. Clients need as many rows. None: off.
      choose_views: Whether the clusters are those of the views that agree, of three or more: before
        the rounds every view is clustered alone, and views whose clusters are unlike those of all
        others, see `least_agreement`, are left out of memberships. None: yes, unless
        min_cluster_size is set: the counts that are sent for it may be of single samples.
    """

    n_clusters: int
    hkc: Literal["bandwidth", "minmax", "absmean"] = "bandwidth"
    centre_rule: Literal["stationary", "printed"] = "stationary"
    aggregation: Literal["statistics", "average"] = "statistics"
    local_steps: int = 1
    personal: Literal["none", "proximal", "mix", "gradient"] = "none"
    personal_steps: int = 20
    n_restarts: int | None = None
    min_cluster_size: int | None = None
    choose_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "local_steps", "personal_steps", "n_restarts")
        checks.at_least(self, 1, "min_cluster_size")
        checks.choices(self)
        is_guarded = self.min_cluster_size is not None
        if is_guarded and (self.aggregation, self.hkc) != ("statistics", "bandwidth"):
            raise checks.wrong(
                "min_cluster_size",
                self.min_cluster_size,
                "None but with aggregation='statistics' and hkc='bandwidth', where clients send"
                " sums in which a row weighs 1 at most",
            )
        if is_guarded and self.choose_views:
            raise checks.wrong(
                "choose_views",
                self.choose_views,
                "None or False with min_cluster_size: counts of rows would tell of single ones",
            )

    @property
    def chooses_views(self) -> bool:
        """Whether views may be left out."""
        return self.min_cluster_size is None if self.choose_views is None else self.choose_views


@struct.dataclass
class FedHKHyperparams:
    """Numbers of E-FKMVC that may be traced.

    Attributes:
      fuzzifier: Exponent m of the memberships, 1.000001 or more. With many features larger values
        let clusters collapse.
      alpha: Exponent of the view weights, above 1; inf: views of equal weight. The weights favour
        compact views, that is those of few features, whether they are informative or not.
      beta: Scale of the bandwidth coefficient, positive.
      tol: Rounds end when log J changes by no more than this.
      tau: Pull of proximal steps towards the global centres, relative to the client's mean weight.
      mix: Share of the global centres in personal ones by (102), from 0 to 1.
      view_mix: Share of the global view weights in personal ones, from 0 to 1, in every local step
        and not only after the last: centres are fitted with the weights that they are used with.
      step_size: Step eta of (62) and (63), positive; of J per sample, so that steps of clients of
        all sizes are alike.
      quality: kappa of the clients' weights n_l exp(-kappa J_l / n_l); of use with aggregation
        "average" only.
      limit: Number of clusters in use, at most n_clusters, so that one program serves a search over
        the number of clusters; messages keep their size for n_clusters; E-FKMVC's own
        form alone has it; none: all.
      least_agreement: Least agreement of a view that counts, as a share of the greatest one's, with
        choose_views; a view's agreement is the mean adjusted Rand index of its own clusters with
        those of every other view.
    """

    fuzzifier: Array | float = 1.05
    alpha: Array | float = math.inf
    beta: Array | float = 1.0
    tol: Array | float = 1e-6
    tau: Array | float = 10.0
    mix: Array | float = 0.7
    view_mix: Array | float = 1.0
    step_size: Array | float = 0.01
    quality: Array | float = 0.0
    limit: Array | int | None = None
    least_agreement: Array | float = 0.2


def check_hyperparams(hyper: FedHKHyperparams) -> None:
    """Checks the hyper-parameters that are concrete.

    Raises:
      ValueError: Names the first one that is out of range, and says why.
    """
    checks.numbers(
        hyper,
        {
            "fuzzifier": (
                lambda m: (m >= _LEAST_FUZZIFIER) & (m < np.inf),
                "more than 1: the exponent -1/(m-1) of the memberships has no value at 1, and"
                " below it samples would go to the farthest centre;"
                f" {_LEAST_FUZZIFIER} at least, since nearer to 1 they overflow",
            ),
            "alpha": (
                lambda a: a > 1,
                "more than 1, infinity included: J is linear in the view weights at 1 and concave"
                " below, so that its minimum lies at one single view",
            ),
            "beta": checks.POSITIVE,
            "tol": (lambda t: t >= 0, "0 or more"),
            "tau": (lambda t: t >= 0, "0 or more, infinity included"),
            "mix": checks.SHARE,
            "view_mix": checks.SHARE,
            "step_size": checks.POSITIVE,
            "quality": checks.NOT_NEGATIVE,
            "least_agreement": checks.SHARE,
        },
    )


# --- Compressed centres ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FedHKTuckerConfig(FedHKConfig):
    """Static settings of FedHK-Tucker: those of E-FKMVC, and of the Tucker form.

    Attributes:
      ranks: R1,R2,R3 of the modes of clusters, features and views, each no more than the size of
        its mode and than the product of the others; empty: n_clusters, 2 n_clusters and all views,
        or what the sizes allow, which compresses features alone.
      alignment: How cores of different clients are made comparable. "shared_basis": all share
        factors that are made before the rounds. "procrustes": clients rotate their own factors
        towards those they were sent; goes with aggregation "average" only.
    """

    ranks: tuple[int, ...] = ()
    alignment: Literal["shared_basis", "procrustes"] = "shared_basis"

    def __post_init__(self) -> None:
        """Checks the settings; whether the tensor can have the ranks, `init` finds out.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        super().__post_init__()
        if not isinstance(self.ranks, tuple | list) or len(self.ranks) not in (0, 3):
            raise checks.wrong("ranks", self.ranks, "three, of clusters, features and views")
        if not all(isinstance(rank, int | np.integer) for rank in self.ranks):
            raise checks.wrong("ranks", self.ranks, "three whole numbers")
        if self.aggregation == "average":
            return
        _check_bandwidth(self)
        if self.alignment == "procrustes":
            raise checks.wrong(
                "alignment",
                self.alignment,
                "'shared_basis', since the sums of aggregation 'statistics' need no alignment",
            )


@dataclasses.dataclass(frozen=True)
class FedHKParafac2Config(FedHKConfig):
    """Static settings of FedHK-PARAFAC2: those of E-FKMVC, and of the PARAFAC2 form.

    Attributes:
      rank: Number of components R; none: the largest that the slices allow, which for slices of
        centres is the number of clusters, or of features if less (with placement "views" those of
        the narrowest view), and for samples the number of clusters.
      placement: What the slices are. "clients": the centres of every client. "views": the centres
        of every view, the same for all clients. "samples": the clients' samples, whose scores are
        clustered.
    """

    rank: int | None = None
    placement: Literal["clients", "views", "samples"] = "clients"

    def __post_init__(self) -> None:
        """Checks the settings; whether the slices can have the rank, `init` finds out.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        super().__post_init__()
        checks.at_least(self, 1, "rank")
        if self.aggregation != "statistics":
            raise checks.wrong(
                "aggregation", self.aggregation, "'statistics', since PARAFAC2 is fitted to sums"
            )
        if self.min_cluster_size is not None:
            raise checks.wrong(
                "min_cluster_size",
                self.min_cluster_size,
                "None with PARAFAC2, whose messages are not all sums of a cluster's rows",
            )
        if self.placement == "views":
            _check_bandwidth(self)
        if self.placement == "samples" and self.choose_views:
            raise checks.wrong(
                "choose_views",
                self.choose_views,
                "None or False with placement='samples', whose scores are of all views",
            )

    @property
    def chooses_views(self) -> bool:
        """Whether views may be left out."""
        return super().chooses_views and self.placement != "samples"


def _check_bandwidth(config: FedHKConfig) -> None:
    """Checks that a centre is a linear function of the sums, so that they can be compressed."""
    if config.hkc != "bandwidth":
        raise checks.wrong(
            "hkc",
            config.hkc,
            "'bandwidth' with compressed sums: with a weight for each feature a centre is no linear"
            " function of them",
        )


# --- Differential privacy -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PrivateFedHKConfig(FedHKConfig):
    """Static settings of private E-FKMVC: those of E-FKMVC, the budget, and what is public.

    `origin` and `radius` must not be measured on the data: features in [0, 1] have 0.5 and 0.5.

    Attributes:
      dp_epsilon: Privacy budget epsilon of the whole run, above 0; inf: no noise.
      dp_delta: Probability delta with which dp_epsilon may be broken, between 0 and 1.
      noise: "central": the clients' noises add up to the one that is needed, which protects no more
        than their sum, for secure aggregation. "local": every client adds all of it, and its
        messages may be read one by one.
      origin: Centre of the features, a number for all views or one for each.
      radius: Moments are taken of samples scaled to within radius * sqrt(features) of the origin, a
        number for all views or one for each.
      start_steps: Releases of k-means sums before the rounds, at most 1000.
      rounds: Number of rounds, fixed beforehand, that the noise is calibrated for.
      n_clients: Number of clients that take part, whose noises add up if noise is "central".
    """

    dp_epsilon: float = 8.0
    dp_delta: float = 1e-5
    noise: Literal["central", "local"] = "central"
    origin: tuple[float, ...] = (0.5,)
    radius: tuple[float, ...] = (0.5,)
    start_steps: int = 2
    rounds: int = dataclasses.field(kw_only=True)
    n_clients: int | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        super().__post_init__()
        check_accountable(self)
        checks.at_least(self, 0, "rounds")
        checks.at_least(self, 1, "n_clients")
        # Each is an exchange of the method: a node builds them all before it can refuse a job.
        checks.whole("start_steps", self.start_steps, 1, 1000)
        if not self.dp_epsilon > 0:
            raise checks.wrong("dp_epsilon", self.dp_epsilon, "more than 0, or inf")
        if not 0 < self.dp_delta < 1:
            raise checks.wrong("dp_delta", self.dp_delta, "a number between 0 and 1")
        for name in ("origin", "radius"):
            if not getattr(self, name):
                raise checks.wrong(name, getattr(self, name), "one number, or one for each view")
        if self.noise == "central" and self.n_clients is None:
            raise checks.wrong("n_clients", None, "the number of clients whose noises add up")

    @property
    def chooses_views(self) -> bool:
        """Whether views may be left out: never, all sums being calibrated releases."""
        return False


@struct.dataclass
class PrivateFedHKHyperparams(FedHKHyperparams):
    """Numbers of private E-FKMVC that may be traced; `tol` has no effect.

    Attributes:
      clip: Largest norm of samples after the first release, in released standard deviations of
        their view: 1 is the norm of a typical sample. The noise follows it.
      noise_multiplier: Deviation of the noise of every release over its sensitivity; a number
        overrides dp_epsilon and dp_delta; none: the least that keeps the run within them.
    """

    clip: Array | float = 1.0
    noise_multiplier: Array | float | None = None


def check_accountable(config: FedHKConfig) -> None:
    """Checks that the sensitivity of every release is known for these settings.

    Raises:
      ValueError: Names the setting that cannot be accounted, and says why.
    """
    for name, allowed, why in (
        ("hkc", "bandwidth", "the others are ranges and means of the samples"),
        ("aggregation", "statistics", "averages of centres have no bounded sensitivity"),
        ("personal", "none", "personal centres know of no clipping"),
        ("n_restarts", 1, "each start would be a release of its own in every round"),
        ("min_cluster_size", None, "which sums are left out would depend on single samples"),
        ("choose_views", False, "the counts that it takes would be one release more"),
    ):
        got = getattr(config, name)
        # None says one start, and all views, too: what sums it takes are not this method's.
        if got != allowed and not (name in ("n_restarts", "choose_views") and got is None):
            raise checks.wrong(name, got, f"{allowed!r} with differential privacy: {why}")
