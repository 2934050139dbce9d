"""E-FKMVC with differential privacy of samples: everything that leaves a client is noised.

    setup:   one release of moments -> mean, variance and bandwidth of every view, random centres;
             `start_steps` releases of k-means sums -> where the rounds start
    round:   one release of the sums of `e_fkmvc`, without n_l and J_l

A release is the sum of all clients' messages of one exchange, with normal noise of deviation
sigma = z Delta on every entry; Delta is the most, in L2 norm, that one sample changes it, whoever
holds it and whatever came before. With one multiplier z for all releases a run of T of them spends
`privacy.gaussian_epsilon(z, T, delta)`; see `fedhk.accounting`.

Delta. A view's sample x (about an origin that is public, or an earlier release) is scaled down to
norm B, and u = x / B. Everything is sent in units in which Delta needs no scale of the features:

  * moments: sum u, sum |u|^2 and the number of samples: at most 1 + 1 for each view, and 1;
    Delta^2 = 2 s + 1 with s views.
  * k-means: a sample counts in one cluster, there with u of every view, and with g = sqrt(s) /
    D^(1/4) for the count, D features in all: Delta^2 = s + g^2.
  * rounds: with p_k = mu_k^m and e_k = exp(-phi_k) a sample adds in each view p_k e_k u to N_k,
    g p_k e_k to W_k, g = d^(-1/4), and sum_k p_k (1 - e_k) to C. Let a = sum_k p_k e_k, and b
    be the last: then a + b = sum_k p_k <= sum_k mu_k = 1 as m > 1, and the squares add up to no
    more than (1 + g^2) a^2 + b^2 <= (1 + g^2) (a + b)^2: C costs nothing beside N and W.
    Delta^2 = sum_h (1 + d_h^(-1/2)).

All of this holds for finite numbers, and a server that sends others, or centres so far out that
products overflow, would find out by a NaN which samples make it: clients bring what they are sent
into the range that an honest server keeps to (`believed`).

g makes the error of the quotient N / W least where |N| = B W. What the server makes of a release is
free: it keeps a centre that cannot be told from noise, and shrinks the others by what noise adds to
their norm (James and Stein, "Estimation with quadratic loss", 1961).

NOT covered: clients, whose samples are protected one by one, and which of them have any; the number
of a client's samples, which real nodes tell to the server (among data sets of as many samples one
is replaced, which costs what half the noise does); the `info` of a simulation, which is not sent;
the low bits of floating-point noise (see `jaxfedmvc.privacy`), and of sums, whose rounding a sample
changes, too: of 100 000 on a client by .002 Delta in the worst of the cases that were measured.
The method is that of K. P. Sinaga, arXiv 2509.16101, 2025, who states no sensitivity.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, send_nothing
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.accounting import PrivacySettings, privacy_settings
from jaxfedmvc.algorithms.fedhk.client import Samples, local_sums, nearest, samples_of
from jaxfedmvc.algorithms.fedhk.method import best, check_federation, e_fkmvc, first_states
from jaxfedmvc.algorithms.fedhk.model import (
    Centres,
    ClientState,
    Model,
    Scale,
    ServerState,
    Sums,
    positive,
    whole,
    widths,
)
from jaxfedmvc.algorithms.fedhk.rounds import broadcast, progress
from jaxfedmvc.algorithms.fedhk.settings import (
    FedHKConfig,
    FedHKHyperparams,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
    check_accountable,
)
from jaxfedmvc.federation import Cohort, Federation, check_views
from jaxfedmvc.messages import gaussian_noise, transformed
from jaxfedmvc.precision import matmul

# A cluster whose noisy weight is below so many deviations of its noise cannot be told from empty.
_DEVIATIONS = 3.0
# Least variance, relative to the square of the public radius: B and its inverse stay finite.
_LEAST_VARIANCE = 1e-6
_TINY = 1e-30
# Largest coefficient delta: times a distance of zero it is zero, where that of infinity is a NaN.
_MOST_DELTA = 1e30
# No noise is farther out than so many deviations (`messages.gaussian_noise`).
_FARTHEST = 9.5


class Release(NamedTuple):
    """A message, or the sum of all clients': of the moments, of a k-means step or of a round.

    Attributes:
      sums: Of u in every view [d_h]; of the clusters' u [c, d_h]; N / B [c, d_h].
      weights: Number of samples; g times the clusters' sizes [c]; g W [c] of every view.
      costs: Of every view sum |u|^2; nothing; C.
    """

    sums: dict[int, Array]
    weights: Any
    costs: dict[int, Array]


def sensitivity(kind: str, dims: Sequence[int]) -> float:
    """Computes Delta of a release ("moments", "start" or "round") for views of these widths."""
    if kind == "moments":
        return math.sqrt(2 * len(dims) + 1)
    if kind == "start":
        return math.sqrt(len(dims) + _unit(*dims) ** 2)
    return math.sqrt(sum(1 + _unit(d) ** 2 for d in dims))


def _unit(*dims: int) -> float:
    """Computes g of a weight that goes with the sums over views of these widths."""
    return math.sqrt(len(dims)) / math.sqrt(math.sqrt(sum(dims)))


def check_sums_fit(
    config: PrivateFedHKConfig,
    hyperparams: PrivateFedHKHyperparams | None,
    fraction_bits: int,
    dims: Sequence[int],
    rows: int,
) -> None:
    """Checks that secure aggregation's fixed-point numbers hold whatever a client may send.

    A sum cannot be read where a client's value does not fit, and whether it can would tell of this
    client's message, which has a part of central noise only.

    Args:
      config: The method's.
      hyperparams: The method's.
      fraction_bits: b.
      dims: Width of each view.
      rows: Samples of a client at most.

    Raises:
      ValueError: A client of so many samples could exceed the numbers' range.
      ImportError: Noise must be calibrated and dp-accounting is not installed.
    """
    settings = privacy_settings(config, hyperparams)
    share = float(np.asarray(settings.noise_multiplier)) / math.sqrt(settings.shared_by)
    delta = max(sensitivity(kind, dims) for kind in ("moments", "start", "round"))
    # A sample adds 1 at most to an entry, or g to that of a size.
    largest = 1.001 * rows * max(1.0, _unit(*dims)) + _FARTHEST * share * delta
    most = math.floor(31 - 1e-6 - math.log2(largest * settings.shared_by))
    if fraction_bits > most:
        allowed = f"{most} or less, for sums of {rows} rows and the noise of a client"
        raise checks.wrong("fraction_bits", fraction_bits, allowed)


def private_e_fkmvc(
    config: PrivateFedHKConfig, hyperparams: PrivateFedHKHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns E-FKMVC whose runs of `rounds` rounds spend the budget of the settings; see above.

    A run of more rounds would spend more, and is refused. All clients hold all views. All messages
    are sums; `fedhk.centres` gives the model. With noise "central" the messages must travel under
    secure aggregation.

    Raises:
      ValueError: A concrete hyper-parameter is out of range. From `init`: as `e_fkmvc_with_noise`.
      ImportError: Noise must be calibrated and dp-accounting is not installed.
    """
    hyper = checks.settings(config, PrivateFedHKConfig, hyperparams, PrivateFedHKHyperparams)
    method = e_fkmvc_with_noise(config, hyper, privacy_settings(config, hyper))
    return method._replace(most_rounds=config.rounds)


def e_fkmvc_with_noise(
    config: FedHKConfig, hyperparams: FedHKHyperparams | None, privacy: PrivacySettings
) -> FederatedAlgorithm:
    """Returns E-FKMVC with noise of explicit settings; see above.

    A run of T rounds, a number fixed beforehand, makes `accounting.releases(start_steps, T)`
    releases; what they spend is for the caller to account for. `shared_by` clients or more must
    take part; where one of them drops out nevertheless, there is no model, and all labels are -1.

    Args:
      config: Static settings.
      hyperparams: Numbers that may be traced; the defaults if None. `tol` has no effect.
      privacy: The noise, and what is public.

    Raises:
      ValueError: Settings that cannot be accounted, or a concrete number out of range. From `init`:
        a federation that does not fit them, or of fewer samples than clusters.
    """
    hyper = checks.settings(config, FedHKConfig, hyperparams, FedHKHyperparams)
    if hyper.limit is not None:
        raise checks.wrong("limit", hyper.limit, "None with noise")
    check_accountable(config)
    _check(privacy)
    base = e_fkmvc(config, hyper)

    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[ClientState, ...]]:
        if len(federation.cohorts) > 1:
            raise ValueError("federation: some clients lack views; allowed are those that hold all")
        if privacy.shared_by > (n := federation.n_clients):
            raise checks.wrong("shared_by", privacy.shared_by, f"1 to {n} clients")
        for name, value in (("origin", privacy.origin), ("radius", privacy.radius)):
            if isinstance(value, tuple) and len(value) != federation.n_views:
                allowed = f"{federation.n_views} entries, or a number"
                raise checks.wrong(name, value, allowed)
        check_federation(config, federation)
        return first_states(dataclasses.replace(config, n_restarts=1), whole(), federation)

    def assign(server: ServerState, state: ClientState, client: Cohort) -> Array:
        check_views(client, widths(server.scales), complete=True)
        model = best(server.models)
        samples = samples_of(config, hyper, server.scales, client)
        samples = clip_samples(privacy, server.scales, samples)
        # NaN after a refused sum: no cluster is better than the first one for every sample.
        is_model = jnp.all(jnp.isfinite(jnp.concatenate([a.ravel() for a in model.fit.values()])))
        labels = nearest(hyper, samples, model.fit, model.view_weights)
        return jnp.where(client.mask & is_model, labels, -1)

    setup = _moments(config, privacy), *[_start(config, hyper, privacy)] * privacy.start_steps
    each = (_round(config, hyper, privacy),)
    return base._replace(
        init=init,
        setup=setup,
        round=each,
        assign=assign,
        done=None,
        least_clients=privacy.shared_by,
    )


def moments(privacy: PrivacySettings, client: Cohort) -> Release:
    """Computes a client's first message, without noise."""
    units = {}
    for v, x in client.by_view().items():
        origin, radius = _public(privacy, v, x.shape[1])
        x = jnp.where(client.mask[:, None], x - origin[None], 0.0)
        units[v] = in_ball(x, radius) / radius
    return Release(
        {v: jnp.sum(u, axis=0) for v, u in units.items()},
        jnp.sum(client.mask).astype(jnp.float32),
        {v: jnp.sum(u * u) for v, u in units.items()},
    )


def clip_samples(privacy: PrivacySettings, scales: dict[int, Scale], samples: Samples) -> Samples:
    """Scales samples about the released mean (`client.samples_of`) to each view's B.

    Coefficients stay finite, whatever `beta` a job has: a sample on a centre would be a NaN.
    """
    views = {v: in_ball(x, _bound(privacy, scales[v])) for v, x in samples.views.items()}
    deltas = {v: jnp.minimum(delta, _MOST_DELTA) for v, delta in samples.deltas.items()}
    return samples._replace(views=views, deltas=deltas)


def believed(privacy: PrivacySettings, scales: dict[int, Scale]) -> dict[int, Scale]:
    """Brings mean and variance of each view into their ranges; a variance that is unknown stays."""
    found = {}
    for v, scale in scales.items():
        origin, radius = _public(privacy, v, scale.origin.shape[0])
        near = jnp.clip(_finite(scale.origin), origin - radius, origin + radius)
        variance = jnp.clip(scale.variance, _LEAST_VARIANCE * radius**2, radius**2)
        known = jnp.isfinite(scale.variance)
        found[v] = scale._replace(origin=near, variance=jnp.where(known, variance, scale.variance))
    return found


def believed_centres(
    privacy: PrivacySettings, scales: dict[int, Scale], centres: Centres
) -> Centres:
    """Brings centres to within each view's B, as `moved` leaves them."""
    return {v: in_ball(_finite(a), _bound(privacy, scales[v])) for v, a in centres.items()}


def _finite(x: Array) -> Array:
    return jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def start_sums(
    privacy: PrivacySettings, scales: dict[int, Scale], samples: Samples, centres: Centres
) -> Release:
    """Computes the message of a k-means step, every view divided by its variance; without noise."""
    views = samples.views
    squares = [hk.exponents(x, centres[v], 1 / scales[v].variance) for v, x in views.items()]
    nearest = jax.nn.one_hot(jnp.argmin(sum(squares), axis=1), squares[0].shape[1])
    nearest = jnp.where(samples.mask[:, None], nearest, 0.0)
    units = {v: x / _bound(privacy, scales[v]) for v, x in views.items()}
    sums = {v: matmul(nearest.T, u) for v, u in units.items()}
    counts = _unit(*[x.shape[1] for x in views.values()]) * jnp.sum(nearest, axis=0)
    return Release(sums, counts, {})


def round_sums(privacy: PrivacySettings, scales: dict[int, Scale], sums: Sums) -> Release:
    """Makes the message of a round from `client.local_sums`; without noise."""
    numerators = {v: x / _bound(privacy, scales[v]) for v, x in sums.numerators.items()}
    weights = {v: _unit(x.shape[1]) * sums.weights[v] for v, x in numerators.items()}
    return Release(numerators, weights, sums.costs)


def in_ball(x: Array, radius: ArrayLike) -> Array:
    """Scales rows down to a norm of at most `radius`."""
    norms = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x * jnp.minimum(1.0, radius / positive(norms))


def _public(privacy: PrivacySettings, v: int, width: int) -> tuple[Array, Array]:
    """Returns the public centre [d] of a view, and the radius of the ball about it."""
    origin, radius = (
        jnp.asarray(value[v] if isinstance(value, tuple) else value, jnp.float32)
        for value in (privacy.origin, privacy.radius)
    )
    return jnp.broadcast_to(origin, (width,)), radius * math.sqrt(width)


def _bound(privacy: PrivacySettings, scale: Scale) -> Array:
    """Returns B of a view."""
    return jnp.asarray(privacy.clip, jnp.float32) * jnp.sqrt(scale.variance)


def _sigma(privacy: PrivacySettings, kind: str, message: Release, n_clients: ArrayLike) -> Array:
    """Computes the deviation of the noise in the sum of so many messages."""
    delta = sensitivity(kind, [x.shape[-1] for x in message.sums.values()])
    share = jnp.sqrt(jnp.asarray(n_clients, jnp.float32) / privacy.shared_by)
    return jnp.asarray(privacy.noise_multiplier, jnp.float32) * delta * share


def _noised(privacy: PrivacySettings, kind: str, send: Any, client: Any, server: Any) -> Phase:
    """Returns an exchange of noisy sums; `server`: `(key, state, sum, sigma) -> (state, info)`."""

    def noise(key: Array, message: Release, sent: Any) -> Any:
        return gaussian_noise(_sigma(privacy, kind, message, 1))(key, message, sent)

    def received(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        (message,), (n_clients,) = messages, weights
        short = n_clients < privacy.shared_by
        total = jax.tree.map(lambda x: jnp.where(short, jnp.nan, x), message)
        return server(key, state, total, _sigma(privacy, kind, total, n_clients))

    return transformed(Phase(send, client, received, reduce="sum"), noise)


def _moments(config: FedHKConfig, privacy: PrivacySettings) -> Phase:
    """Releases mean and variance of every view; centres start around the mean."""

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        return state, moments(privacy, client), {}

    def server(key: Array, state: ServerState, total: Release, sigma: Array) -> tuple:
        n = jnp.maximum(total.weights, 1.0)
        scales, fits = {}, {}
        for v, scale in state.scales.items():
            width = scale.origin.shape[0]
            origin, radius = _public(privacy, v, width)
            mean = total.sums[v] / n
            # The noise adds d sigma^2 / n^2 to the squared norm of the mean.
            spread = total.costs[v] / n - jnp.sum(mean * mean) + width * (sigma / n) ** 2
            spread = jnp.clip(spread, jnp.clip(sigma / n, _LEAST_VARIANCE, 1.0), 1.0)
            scales[v] = scale._replace(
                origin=origin + radius * in_ball(mean, 1.0), variance=spread * radius**2
            )
            drawn = jax.random.normal(jax.random.fold_in(key, v), (config.n_clusters, width))
            length = jnp.sqrt(scales[v].variance) * jnp.minimum(1.0, privacy.clip)
            fits[v] = length * drawn[None] / jnp.linalg.norm(drawn, axis=1)[None, :, None]
        return state._replace(scales=scales, models=state.models._replace(fit=fits)), {}

    return _noised(privacy, "moments", send_nothing, client, server)


def _start(config: FedHKConfig, hyper: FedHKHyperparams, privacy: PrivacySettings) -> Phase:
    """Releases one step of k-means."""

    def send(state: ServerState, view_ids: tuple[int, ...]) -> tuple[dict[int, Scale], Centres]:
        return state.scales, best(state.models).fit

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        scales, centres = sent
        scales = believed(privacy, scales)
        centres = believed_centres(privacy, scales, centres)
        samples = clip_samples(privacy, scales, samples_of(config, hyper, scales, client))
        message = start_sums(privacy, scales, samples, centres)
        return dataclasses.replace(state, scales=scales), message, {}

    def server(key: Array, state: ServerState, total: Release, sigma: Array) -> tuple:
        unit = _unit(*[x.shape[1] for x in total.sums.values()])
        total = total._replace(weights=dict.fromkeys(total.sums, total.weights))
        fit = moved(privacy, state, total, dict.fromkeys(total.sums, unit), sigma)
        fits = {v: a[None] for v, a in fit.items()}
        return state._replace(models=state.models._replace(fit=fits)), {}

    return _noised(privacy, "start", send, client, server)


def _round(config: FedHKConfig, hyper: FedHKHyperparams, privacy: PrivacySettings) -> Phase:
    """Returns `rounds.statistics_round` for one start, of noisy sums."""

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        centres, view_weights = jax.tree.map(lambda x: x[0], sent)
        # Also here: a client that was left out of the start has none yet.
        scales = believed(privacy, state.scales)
        centres = believed_centres(privacy, scales, centres)
        view_weights = jnp.clip(_finite(view_weights), 0.0, 1.0)
        samples = clip_samples(privacy, scales, samples_of(config, hyper, scales, client))
        sums = local_sums(config, hyper, samples, centres, view_weights)
        info = {"loss": sums.objective / jnp.maximum(sums.n_samples, 1.0)}
        return state, round_sums(privacy, scales, sums), info

    def server(key: Array, state: ServerState, total: Release, sigma: Array) -> tuple:
        model = best(state.models)
        units = {v: _unit(x.shape[1]) for v, x in total.sums.items()}
        fit = moved(privacy, state, total, units, sigma)
        costs = jnp.maximum(jnp.stack([total.costs[v] for v in state.scales]), sigma)
        objective = hk.log_objective(costs, model.view_weights, hyper.alpha)
        view_weights = hk.view_weights(costs, hyper.alpha)
        new = Model(fit, view_weights, objective, jnp.abs(objective - model.log_objective))
        models = jax.tree.map(lambda x: x[None], new)
        return state._replace(models=models), progress(models)

    return _noised(privacy, "round", functools.partial(broadcast, whole()), client, server)


def moved(
    privacy: PrivacySettings,
    state: ServerState,
    total: Release,
    units: dict[int, float],
    sigma: Array,
) -> Centres:
    """Computes centres from N / B and g W, with `units` g of each view: N / W within B, shrunk.

    Shrunk towards the mean by the positive-part James-Stein factor 1 - (d - 2) e^2 / |a|^2, where
    e = B sigma / W is the noise of a coordinate. A centre keeps its previous value where the factor
    is not positive, or W below three deviations of its noise.
    """
    fit = {}
    for v, scale in state.scales.items():
        previous, bound = state.models.fit[v][0], _bound(privacy, scale)
        empty = total.weights[v] < _DEVIATIONS * sigma
        weight = jnp.maximum(total.weights[v], 0.0) / units[v]
        new = in_ball(hk.centres_from(bound * total.sums[v], weight, previous), bound)
        error = bound * sigma / jnp.maximum(weight, _TINY)  # a NaN stays one
        norms = jnp.maximum(jnp.sum(new * new, axis=1), _TINY)
        share = 1 - max(new.shape[1] - 2, 0) * error**2 / norms
        fit[v] = jnp.where((empty | (share <= 0))[:, None], previous, share[:, None] * new)
    return fit


def _check(privacy: PrivacySettings) -> None:
    """Checks that the settings are finite and in range.

    Raises:
      ValueError: Names the first that is not.
    """
    checks.at_least(privacy, 1, "shared_by", "start_steps")
    rules = {"noise_multiplier": checks.NOT_NEGATIVE, "clip": checks.POSITIVE}
    checks.numbers(privacy, rules)
    # One number or array for all views, or one for each.
    for x in jax.tree.leaves(privacy.origin):
        if not isinstance(x, jax.core.Tracer) and not np.all(np.isfinite(x)):
            raise checks.wrong("origin", x, "finite")
    for x in jax.tree.leaves(privacy.radius):
        if not isinstance(x, jax.core.Tracer) and not np.all((x > 0) & np.isfinite(x)):
            raise checks.wrong("radius", x, "more than 0, and finite")
