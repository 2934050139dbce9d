"""What a run of private E-FKMVC spends, how much noise that takes, and what is not covered.

A run makes one release of moments, `start_steps` of k-means sums and one a round. All have the same
noise multiplier z = sigma / Delta, so that T of them spend `privacy.gaussian_epsilon(z, T, delta)`.
What a release is, and its Delta: see `fedhk.private`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flax import struct
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.algorithms.fedhk.settings import (
    FedHKConfig,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
)
from jaxfedmvc.privacy import gaussian_epsilon, gaussian_noise_multiplier


@struct.dataclass
class PrivacySettings:
    """How much noise there is, and what is publicly known of the features.

    `origin` and `radius` are for all views, or a tuple with one entry for each, and must not be
    measured on the data: features in [0, 1] have 0.5 and 0.5.

    Attributes:
      noise_multiplier: z = sigma / Delta of each release, 0 for none; traced.
      origin: Centre of the features, a number or [d_h].
      radius: Moments are taken of samples scaled to within radius * sqrt(d_h) of the origin.
      clip: B_h of the later releases, as a multiple of the view's released standard deviation
        sqrt(variance): 1 is the norm of a typical sample. The noise follows it.
      shared_by: Number of clients whose noise together makes up sigma (static). 1: every client
        adds all of it, and its messages may be read one by one. M, the number of those that take
        part: each adds sigma / sqrt(M), which protects no more than their sum: for secure
        aggregation. A sum of fewer messages becomes NaN.
      start_steps: Releases of k-means sums before the rounds (static).
    """

    noise_multiplier: ArrayLike
    origin: Any = 0.5
    radius: Any = 0.5
    clip: ArrayLike = 1.0
    shared_by: int = struct.field(pytree_node=False, default=1)
    start_steps: int = struct.field(pytree_node=False, default=2)


def releases(start_steps: int, rounds: int) -> int:
    """Returns the number of releases of a run."""
    return 1 + start_steps + rounds


def privacy_settings(
    config: PrivateFedHKConfig, hyperparams: PrivateFedHKHyperparams | None = None
) -> PrivacySettings:
    """Returns the noise of a run, calibrated to its budget unless a multiplier is set.

    Raises:
      ImportError: dp-accounting is needed and not installed.
    """
    hyper = checks.settings(config, PrivateFedHKConfig, hyperparams, PrivateFedHKHyperparams)
    z = hyper.noise_multiplier
    if z is None:
        n_releases = releases(config.start_steps, config.rounds)
        z = gaussian_noise_multiplier(config.dp_epsilon, config.dp_delta, n_releases)
    origin, radius = (
        value[0] if len(value) == 1 else value for value in (config.origin, config.radius)
    )
    shared_by = (config.n_clients or 1) if config.noise == "central" else 1
    return PrivacySettings(z, origin, radius, hyper.clip, shared_by, config.start_steps)


def spent(
    config: PrivateFedHKConfig, hyperparams: PrivateFedHKHyperparams | None = None
) -> tuple[float, float]:
    """Computes (epsilon, delta) of a run; epsilon is infinite without noise.

    Raises:
      ImportError: dp-accounting is not installed.
    """
    z = float(np.asarray(privacy_settings(config, hyperparams).noise_multiplier))
    n_releases = releases(config.start_steps, config.rounds)
    epsilon = gaussian_epsilon(z, n_releases, config.dp_delta) if z > 0 else math.inf
    return epsilon, config.dp_delta


def privacy_statement(
    config: FedHKConfig, hyperparams: Any = None, *, secure: bool = False
) -> dict[str, Any]:
    """Says what protects the clients of a run of FedHK and what does not, for its summary.

    Args:
      config: Of any of FedHK's methods.
      hyperparams: Its hyper-parameters.
      secure: Whether the run is one under secure aggregation.

    Returns:
      "kind", and unless that is "none" the sentences "covered" and "not_covered"; of a private
      method also "neighbours", "epsilon" (None if infinite) and "delta".

    Raises:
      ImportError: dp-accounting is needed and not installed.
    """
    if isinstance(config, PrivateFedHKConfig):
        epsilon, delta = spent(config, hyperparams)
        n_releases = releases(config.start_steps, config.rounds)
        seen = "all messages"
        if config.noise == "central":
            seen = f"only sums over {config.n_clients} clients"
        return {
            "kind": f"differential privacy, {config.noise} noise",
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": delta,
            "neighbours": "data sets of which one has one sample more; replacing one costs more",
            "covered": f"all {n_releases} releases of the run, if one sees {seen} and knows no"
            " client's noise",
            "not_covered": [
                "clients (all samples of one together, and which of them have any)",
                "the number of a client's samples, which real nodes tell to the server",
                "settings measured on the data, such as ranges to scale features by",
                "labels, if published",
                "several runs on the same samples, such as seeds: epsilon and delta are of one, and"
                " add up",
                "the low bits of floating-point noise and sums",
                _SIMULATED,
            ],
        }
    if not secure:
        return {"kind": "none"}
    return {
        "kind": "secure aggregation",
        "covered": "in the rounds, the server sees sums over a cohort and no message",
        "not_covered": [
            "the clients' summaries before the rounds, centres of five samples on average and two"
            " at least, which are read one by one, and the sum of the samples that are in none",
            "what a sum itself tells; nothing is noised",
            "malicious clients or a malicious server, key agreement, dropout",
            _SIMULATED,
        ],
    }


_SIMULATED = (
    "what a simulation records: losses and scores are computed in the clear, and noise and masks"
    " are drawn from a seed that stands among the settings"
)


def check_fraction_bits(
    config: PrivateFedHKConfig, hyperparams: PrivateFedHKHyperparams | None, fraction_bits: int
) -> None:
    """Checks that secure aggregation's fixed-point numbers do not round central noise away.

    Raises:
      ValueError: A unit of the numbers is more than a hundredth of one client's noise.
      ImportError: dp-accounting is needed and not installed.
    """
    settings = privacy_settings(config, hyperparams)
    # Every release's Delta is 1 at least. What is rounded is one client's share of the noise.
    share = float(np.asarray(settings.noise_multiplier)) / math.sqrt(settings.shared_by)
    if share > 0 and 2.0**-fraction_bits > 0.01 * share:
        least = math.ceil(-math.log2(0.01 * share))
        raise checks.wrong("fraction_bits", fraction_bits, f"{least} or more, for the noise")
