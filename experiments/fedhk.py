"""FedHK, federated end to end: `python -m experiments.fedhk [--method=...]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import base, common
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    FedHKHyperparams,
    e_fkmvc,
    fedhk_parafac2,
    fedhk_tucker,
)
from jaxfedmvc.algorithms.fedhk.private import (
    PrivacySettings,
    private_e_fkmvc,
    releases,
    spent,
)
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.secure import check_sums, secure_aggregation
from jaxfedmvc.privacy import gaussian_noise_multiplier

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)

METHODS = ("e_fkmvc", "parafac2", "tucker", "person_e_fkmvc", "person_parafac2", "person_tucker")
# Of the flags that all horizontal binaries share: every client has all views, and runs end alone.
DEFAULTS = {"n_clients": 8, "ratio": "1:0", "rounds": 50}

flags.DEFINE_enum("method", "e_fkmvc", METHODS, "What is run; person_*: clients end on their own.")
flags.DEFINE_enum(
    "hkc",
    "bandwidth",
    ["bandwidth", "minmax", "absmean"],
    "Heat-kernel coefficients: one for each view, or (23) or |(24)| of each sample and feature.",
)
flags.DEFINE_enum(
    "centre_rule",
    "stationary",
    ["stationary", "printed"],
    "Centres that never raise the objective, or (30) as printed.",
)
flags.DEFINE_enum(
    "aggregation",
    "statistics",
    ["statistics", "average"],
    "Sums over clients, or (60) averages of their centres as printed.",
)
flags.DEFINE_integer("local_steps", 1, "Steps of a client in a round, for averages.", 1)
flags.DEFINE_integer("n_restarts", 1, "Starts that share the rounds; bytes grow with them.", 1)
flags.DEFINE_list("ranks", [], "R1,R2,R3 of Tucker; empty: n_clusters, 2 n_clusters, all views.")
flags.DEFINE_enum(
    "alignment",
    "shared_basis",
    ["shared_basis", "procrustes"],
    "How Tucker's cores are made comparable; procrustes goes with averages.",
)
flags.DEFINE_integer("rank", None, "R of PARAFAC2; None: n_clusters, or what the slices allow.", 1)
flags.DEFINE_enum(
    "placement", "clients", ["clients", "views", "samples"], "What PARAFAC2's slices are."
)
flags.DEFINE_enum(
    "personal", "proximal", ["proximal", "mix", "gradient"], "How person_* methods end."
)
flags.DEFINE_integer("personal_steps", 20, "Steps of it.", 1)
flags.DEFINE_float("fuzzifier", 1.05, "m of the memberships, above 1.")
flags.DEFINE_float("alpha", float("inf"), "Exponent of the view weights, above 1; inf: all equal.")
flags.DEFINE_float("beta", 1.0, "Scale of the bandwidth coefficient.")
flags.DEFINE_float("tolerance", 1e-6, "Rounds end when log J changes by no more.")
flags.DEFINE_float("tau", 10.0, "Pull of proximal steps towards the global centres.")
flags.DEFINE_float("mix", 0.7, "Share of the global centres in (102).")
flags.DEFINE_float("view_mix", 1.0, "Share of the global view weights.")
flags.DEFINE_float("step_size", 0.01, "eta of (62) and (63).")
flags.DEFINE_float("quality", 0.0, "kappa of the clients' weights in averages.")
flags.DEFINE_enum(
    "privacy",
    "none",
    ["none", "secagg", "dp"],
    "What protects the clients: nothing, sums that hide messages, or noise that protects samples"
    " (e_fkmvc only, exactly --rounds rounds).",
)
flags.DEFINE_float("dp_epsilon", 8.0, "Of the whole run, for dp; inf: no noise.")
flags.DEFINE_float("dp_delta", 1e-5, "Of the whole run, for dp.")
flags.DEFINE_enum(
    "noise",
    "central",
    ["central", "local"],
    "For dp: one noise in the sum of all clients, under secure aggregation, or a full one of each.",
)
flags.DEFINE_float("clip", 1.0, "For dp: samples' largest norm, in deviations of their view.")
flags.DEFINE_integer(
    "fraction_bits", 16, "Of secagg's fixed-point numbers; sums stay below 2^(31 - bits).", 0, 31
)


# Flags of numbers that runs of one program may differ in.
TRACED = (
    "fuzzifier",
    "alpha",
    "beta",
    "tolerance",
    "tau",
    "mix",
    "view_mix",
    "step_size",
    "quality",
)


def traced() -> tuple[str, ...]:
    """Flags of numbers that runs of one program may differ in."""
    return TRACED


def no_axis() -> set[str]:
    """Flags that cannot be swept: the method is what --algorithm says."""
    return {"method"}


def defaults() -> None:
    """What flags say that are not given."""
    for flag, value in DEFAULTS.items():
        FLAGS.set_default(flag, value)
    FLAGS.dataset = FLAGS.dataset or "digits"


def config(n_clusters: int) -> FedHKConfig:
    """The static configuration, from flags."""
    return FedHKConfig(
        n_clusters,
        hkc=FLAGS.hkc,
        centre_rule=FLAGS.centre_rule,
        aggregation=FLAGS.aggregation,
        local_steps=FLAGS.local_steps,
        personal=FLAGS.personal if FLAGS.method.startswith("person_") else "none",
        personal_steps=FLAGS.personal_steps,
        n_restarts=FLAGS.n_restarts,
    )


def hyperparams() -> FedHKHyperparams:
    """The numbers that may be swept, from flags.

    Raises:
      ValueError: One is not a number.
    """
    if np.isnan(FLAGS.alpha):
        raise ValueError("alpha: got nan; allowed is more than 1, or inf")
    return FedHKHyperparams(**{name: FLAGS[name].value for name in TRACED})


def ranks() -> tuple[int | None, int | None, int | None]:
    """R1, R2, R3 from the flag.

    Raises:
      ValueError: Not three whole numbers.
    """
    if not FLAGS.ranks:
        return None, None, None
    try:
        first, second, third = (int(rank) for rank in FLAGS.ranks)
    except ValueError as error:
        raise ValueError(
            f"ranks: got {','.join(FLAGS.ranks)!r}; allowed are three whole numbers with commas"
        ) from error
    return first, second, third


# Flag -> whether it does anything; else giving it is a mistake.
_USED: dict[str, Callable[[], bool]] = {
    "local_steps": lambda: FLAGS.aggregation == "average",
    "quality": lambda: FLAGS.aggregation == "average",
    "ranks": lambda: FLAGS.method.endswith("tucker"),
    "alignment": lambda: FLAGS.method.endswith("tucker"),
    "rank": lambda: FLAGS.method.endswith("parafac2"),
    "placement": lambda: FLAGS.method.endswith("parafac2"),
    "personal": lambda: FLAGS.method.startswith("person_"),
    "personal_steps": lambda: FLAGS.method.startswith("person_"),
    "tau": lambda: FLAGS.method.startswith("person_") and FLAGS.personal == "proximal",
    "mix": lambda: FLAGS.method.startswith("person_") and FLAGS.personal == "mix",
    "view_mix": lambda: FLAGS.method.startswith("person_"),
    "step_size": lambda: FLAGS.method.startswith("person_") and FLAGS.personal == "gradient",
    "dp_epsilon": lambda: FLAGS.privacy == "dp",
    "dp_delta": lambda: FLAGS.privacy == "dp",
    "noise": lambda: FLAGS.privacy == "dp",
    "clip": lambda: FLAGS.privacy == "dp",
    "fraction_bits": lambda: is_masked(),
}


def check_flags() -> None:
    """Raises ValueError for a flag that was given and would do nothing."""
    for name, is_used in _USED.items():
        if FLAGS[name].present and not is_used():
            raise ValueError(
                f"{name}: has no effect on method {FLAGS.method} with aggregation"
                f" {FLAGS.aggregation} and privacy {FLAGS.privacy}; leave it out"
            )


def maker(
    n_clusters: int, federation: Federation
) -> Callable[[FedHKHyperparams], FederatedAlgorithm]:
    """`hyperparams -> algorithm`, all else from flags.

    Raises:
      ValueError: A flag's value is not allowed, or not together with another.
    """
    check_flags()
    name, fixed = FLAGS.method.removeprefix("person_"), config(n_clusters)
    method: Callable[[FedHKHyperparams], FederatedAlgorithm]
    if FLAGS.privacy == "dp":
        if FLAGS.method != "e_fkmvc":
            raise ValueError(f"method: got {FLAGS.method} with --privacy=dp; allowed is e_fkmvc")
        method = partial(private_e_fkmvc, fixed, privacy=settings())
    elif name == "tucker":
        method = partial(fedhk_tucker, fixed, ranks=ranks(), alignment=FLAGS.alignment)
    elif name == "parafac2":
        method = partial(fedhk_parafac2, fixed, rank=FLAGS.rank, placement=FLAGS.placement)
    else:
        method = partial(e_fkmvc, fixed)
    if not is_masked():
        return method
    mask = masking(federation)
    return lambda hyper: mask(method(hyper))


def build(n_clusters: int, federation: Federation) -> FederatedAlgorithm:
    """The algorithm, from flags.

    Raises:
      ValueError: A flag's value is not allowed, or not together with another.
    """
    return maker(n_clusters, federation)(hyperparams())


def is_masked() -> bool:
    """Whether clients' messages travel under secure aggregation."""
    return FLAGS.privacy == "secagg" or (FLAGS.privacy == "dp" and FLAGS.noise == "central")


def masking(federation: Federation) -> Callable[[FederatedAlgorithm], FederatedAlgorithm]:
    """`method -> method` under secure aggregation, but for the summaries before the rounds.

    Raises:
      ValueError: There is nothing to hide in, or something else than summaries is no sum.
    """
    if any(float(share) < 1 for share in FLAGS.participation):
        raise ValueError(
            f"participation: got {','.join(FLAGS.participation)} with masked sums; allowed is 1"
        )
    for cohort in federation.cohorts:
        if cohort.n_clients < 2:
            raise ValueError(
                f"n_clients: one client alone holds the views {cohort.view_ids}, and a sum over it"
                " hides nothing; two of each kind are needed"
            )
    if FLAGS.hkc == "minmax":
        raise ValueError(
            "hkc: got minmax with masked sums; least and greatest values are no sums, allowed are"
            " bandwidth, absmean"
        )
    # The seeds' runs have the same shapes and ids; a deployment takes new secrets for every run.
    return partial(
        secure_aggregation,
        federation=federation,
        key=jax.random.key(_SECRETS),
        fraction_bits=FLAGS.fraction_bits,
        in_clear=() if FLAGS.privacy == "dp" else (f"setup[{_SUMMARIES}]",),
    )


_SECRETS = 2**30
_SUMMARIES = 2  # after means and variances


def settings() -> PrivacySettings:
    """Of differential privacy, from flags; features are taken to lie in [0, 1].

    Raises:
      ValueError: A flag's value is not allowed.
    """
    shape = PrivacySettings(0.0, shared_by=FLAGS.n_clients if FLAGS.noise == "central" else 1)
    if not FLAGS.dp_epsilon > 0:
        raise ValueError(f"dp_epsilon: got {FLAGS.dp_epsilon}; allowed is more than 0, or inf")
    if not 0 < FLAGS.dp_delta < 1:
        raise ValueError(f"dp_delta: got {FLAGS.dp_delta}; allowed is a number between 0 and 1")
    n = releases(shape, FLAGS.rounds)
    z = 0.0
    if np.isfinite(FLAGS.dp_epsilon):
        z = gaussian_noise_multiplier(FLAGS.dp_epsilon, FLAGS.dp_delta, n)
        # Every release's Delta is 1 at least. What is rounded is one client's share of the noise.
        if FLAGS.noise == "central" and 2.0**-FLAGS.fraction_bits > 0.01 * z / FLAGS.n_clients**0.5:
            raise ValueError(
                f"fraction_bits: got {FLAGS.fraction_bits}, which rounds the noise away; give more"
            )
    return shape.replace(noise_multiplier=z, clip=FLAGS.clip)  # type: ignore[attr-defined]


def read(info: list[Any]) -> list[Any]:
    """A stage's info without what secure aggregation wraps around it.

    Raises:
      ValueError: A sum could not be read, or values did not fit into its numbers.
    """
    if not is_masked():
        return info
    check_sums(info)
    clipped = sum(
        int(np.sum(c.clipped)) for phase in info for c in phase["clients"] if hasattr(c, "clipped")
    )
    if clipped:
        raise ValueError(
            f"fraction_bits: got {FLAGS.fraction_bits}, and {clipped} values of messages lie beyond"
            f" 2^(31 - bits) / clients; give fewer bits"
        )
    return [
        {"clients": [getattr(c, "inner", c) for c in phase["clients"]], "server": phase["server"]}
        for phase in info
    ]


def facts() -> dict[str, Any]:
    """For summary.json: what protects the clients, and what does not."""
    if FLAGS.privacy == "none":
        return {"privacy": {"kind": "none"}}
    if FLAGS.privacy == "secagg":
        return {
            "privacy": {
                "kind": "secure aggregation",
                "covered": "in the rounds, the server sees sums over a cohort and no message",
                "not_covered": [
                    "the clients' summaries before the rounds, centres of five samples on"
                    " average and two at least, which are read one by one",
                    "what a sum itself tells; nothing is noised",
                    "malicious clients or a malicious server, key agreement, dropout",
                    _SIMULATED,
                ],
            }
        }
    epsilon, delta, notes = spent(settings(), FLAGS.rounds, FLAGS.dp_delta)
    told = {"kind": f"differential privacy, {FLAGS.noise} noise"} | notes
    told["not covered"] = [
        told["not covered"],
        "several runs on the same samples, such as seeds: epsilon and delta are of one, and add up",
        "scaling by ranges that were measured on the data (--scale)",
        _SIMULATED,
    ]
    return {
        "privacy": told | {"epsilon": epsilon if np.isfinite(epsilon) else None, "delta": delta}
    }


_SIMULATED = (
    "this folder: losses and scores are computed in the clear, and the seed, from which noise and"
    " masks are drawn, stands in flags.txt"
)


def cost(stage: str, phase: int, held: int, n_views: int) -> float:
    """Work of one client in passes over one view, for the time left."""
    return float(held) * (FLAGS.local_steps if stage == "round" else 1)


def main() -> None:
    """Runs the job that the flags describe."""
    defaults()
    common.main_job(FLAGS.method, build, cost, facts, read)


if __name__ == "__main__":
    base.launch(main)
