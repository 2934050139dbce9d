"""The rounds of FedHK: sums or averages from the clients, view weights and centres from them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import Phase
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.client import (
    gradient_step,
    local_step,
    local_sums,
    samples_of,
)
from jaxfedmvc.algorithms.fedhk.model import (
    Averages,
    ClientState,
    Codec,
    Model,
    PyTree,
    Scale,
    ServerState,
    Sums,
    averaged,
    by_view,
    positive,
    widths,
)
from jaxfedmvc.algorithms.fedhk.settings import FedHKConfig, FedHKHyperparams
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages.clusters import large_only
from jaxfedmvc.messages.transforms import Transform


def broadcast(codec: Codec, state: ServerState, view_ids: tuple[int, ...]) -> tuple[PyTree, Array]:
    """Sends every start's centres and view weights, of the views that a client holds."""
    fits = jax.vmap(lambda fit: codec.sent(fit, view_ids))(state.models.fit)
    return fits, state.models.view_weights[:, jnp.array(view_ids)]


def statistics_round(config: FedHKConfig, hyper: FedHKHyperparams, codec: Codec) -> Phase:
    """Returns the round of sums: one pass of every client, and from the sums (31) and (30).

    The view weights come first and the centres are made with them: no step raises J.
    """

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        samples = samples_of(config, hyper, state.scales, client)

        def one_start(fit: PyTree, weights: Array) -> Sums:
            centres = codec.centres(fit, state.basis, widths(state.scales))
            sums = local_sums(config, hyper, samples, centres, weights)
            return sums._replace(numerators=codec.compress(sums.numerators, state.basis))

        sums = jax.vmap(one_start)(*sent)
        return state, sums, {"loss": _loss(sums.objective, sums.n_samples)}

    def server(key: Array, state: ServerState, messages: tuple[Sums, ...], weights: tuple) -> tuple:
        numerators, denominators, costs = (
            by_view([getattr(message, name) for message in messages])
            for name in ("numerators", "weights", "costs")
        )
        deltas, of_views = relative_deltas(config, state.scales), widths(state.scales)

        def one_start(model: Model, numerators: dict, denominators: dict, costs: dict) -> Model:
            new = reweighted(model, [costs[v] for v in state.scales], hyper.alpha)
            relevance = deltas * jnp.exp(hk.log_relevance(new.view_weights, hyper.alpha))
            fit = codec.update(
                model.fit, numerators, denominators, relevance, state.basis, of_views
            )
            return new._replace(fit=fit)

        models = jax.vmap(one_start)(state.models, numerators, denominators, costs)
        return state._replace(models=models), progress(models)

    return Phase(functools.partial(broadcast, codec), client, server, reduce="sum")


def reweighted(model: Model, costs: Sequence[Array], alpha: ArrayLike) -> Model:
    """Returns a start with log J of what it was, and view weights by (31); the centres stay.

    Args:
      model: As it was sent; views of weight 0 keep it.
      costs: C_h of each view, by its memberships.
      alpha: Exponent of the view weights.
    """
    of_views = jnp.stack(costs)
    objective = hk.log_objective(of_views, model.view_weights, alpha)
    view_weights = hk.view_weights(of_views, alpha, model.view_weights > 0)
    return Model(model.fit, view_weights, objective, jnp.abs(objective - model.log_objective))


def guarded(least: int) -> Transform:
    """Returns what keeps the sums N and W of clusters back whose weight W in a view is too small.

    The server then moves a centre by the other clients' sums alone, and J may rise.
    """

    def transform(key: Array, message: Sums, sent: PyTree) -> Sums:
        kept = {
            v: large_only(message.numerators[v], weights, least)
            for v, weights in message.weights.items()
        }
        return message._replace(
            numerators={v: numerators for v, (numerators, _) in kept.items()},
            weights={v: weights for v, (_, weights) in kept.items()},
        )

    return transform


def relative_deltas(config: FedHKConfig, scales: dict[int, Scale]) -> Array:
    """Returns delta of each view up to a common factor, [s], where W leaves it out; else ones."""
    if config.hkc != "bandwidth":
        return jnp.ones(len(scales))
    deltas = jnp.stack([hk.bandwidth(scale.variance) for scale in scales.values()])
    return deltas / positive(jnp.max(deltas))


def average_round(config: FedHKConfig, hyper: FedHKHyperparams, codec: Codec) -> Phase:
    """Returns the round of algorithm 1 as printed: local steps, and averages by size (60), (61).

    With `personal="gradient"` a client begins its round with (62) and (63).
    """

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        samples = samples_of(config, hyper, state.scales, client)

        def one_start(fit: PyTree, weights: Array) -> Averages:
            centres = codec.centres(fit, state.basis, widths(state.scales))
            if config.personal == "gradient":
                centres, weights = gradient_step(config, hyper, samples, centres, weights)

            def step(carry: tuple, _: None) -> tuple[tuple, None]:
                return local_step(config, hyper, samples, *carry), None

            (centres, weights), _ = jax.lax.scan(
                step, (centres, weights), None, length=config.local_steps
            )
            sums = local_sums(config, hyper, samples, centres, weights)
            quality = sums.objective / jnp.maximum(sums.n_samples, 1.0)
            weight = sums.n_samples * jnp.exp(-jnp.asarray(hyper.quality) * quality)  # (101)
            payload = codec.encode(centres, fit, state.basis)
            return Averages(
                jax.tree.map(lambda x: weight * x, payload),
                dict(zip(client.view_ids, weight * weights, strict=True)),
                weight,
                sums.objective,
            )

        sums = jax.vmap(one_start)(*sent)
        return state, sums, {"loss": _loss(sums.objective, jnp.sum(client.mask))}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        of_views = widths(state.scales)

        def one_start(model: Model, messages: tuple[Averages, ...]) -> Model:
            shares = [message.weight for message in messages]
            fit = codec.decode(
                [m.payload for m in messages], shares, model.fit, state.basis, of_views
            )
            old = dict(zip(state.scales, model.view_weights, strict=True))
            views = averaged([m.view_weights for m in messages], shares, old)
            view_weights = jnp.stack(list(views.values()))
            objective = jnp.log(jnp.maximum(sum(m.objective for m in messages), 1e-30))
            change = jnp.abs(objective - model.log_objective)
            return Model(fit, view_weights / jnp.sum(view_weights), objective, change)

        models = jax.vmap(one_start)(state.models, messages)
        return state._replace(models=models), progress(models)

    return Phase(functools.partial(broadcast, codec), client, server, reduce="sum")


def _loss(objectives: Array, n_samples: Array) -> Array:
    """Returns J per sample of a client's best start."""
    return jnp.min(objectives / jnp.maximum(n_samples, 1.0))


def progress(models: Model) -> dict[str, Array]:
    """Returns the server's report of a round: log J and view weights of every start."""
    return {"log_objective": models.log_objective, "view_weights": models.view_weights}
