"""What may be done to models before they leave a client: a bound on their update, and noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxfedmvc.algorithm import Phase
from jaxfedmvc.algorithms.fmcsc.client import Update
from jaxfedmvc.algorithms.fmcsc.networks import Model, PyTree
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCHyperparams
from jaxfedmvc.messages.transforms import Transform, laplace_numbers, transformed


def protected(hyper: FMCSCHyperparams, phase: Phase) -> Phase:
    """Returns the same exchange, with what clients send clipped and noised where that is on."""
    if hyper.upload_clip is None and hyper.upload_noise is None:
        return phase
    return transformed(phase, released(hyper))


def released(hyper: FMCSCHyperparams) -> Transform:
    """Returns the transformation of messages: clipping, then noise, each where it is on."""

    def transform(key: jax.Array, message: PyTree, sent: PyTree) -> PyTree:
        if hyper.upload_clip is not None:
            message = clip_update(hyper.upload_clip, message, sent)
        if hyper.upload_noise is not None:
            message = add_noise(hyper.upload_noise, key, message)
        return message

    return transform


def clip_update(max_norm: jax.Array | float, message: PyTree, sent: PyTree) -> PyTree:
    """Scales an update, sent minus received, down to an L1 norm of at most `max_norm`.

    The norm is that of all parameters of all models together, up to rounding. An update whose norm
    is not finite becomes zero, so that the bound holds whatever a client computes.

    Args:
      max_norm: The bound, C.
      message: Models or autoencoders by their ids, or an `Update` with weights of one.
      sent: What the client received: the models of the message, among others, or the `Model` whose
        autoencoders the message has.
    """
    models = message.models if isinstance(message, Update) else message
    received = sent.autoencoders if isinstance(sent, Model) else {i: sent[i] for i in models}
    update = jax.tree.map(jnp.subtract, models, received)
    norm = sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(update))
    share = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    is_finite = jnp.isfinite(norm)
    # Selected, since zero times infinity is NaN.
    models = jax.tree.map(lambda x, u: jnp.where(is_finite, x + share * u, x), received, update)
    return message._replace(models=models) if isinstance(message, Update) else models


def add_noise(scale: jax.Array | float, key: jax.Array, message: PyTree) -> PyTree:
    """Adds Laplace noise of this scale to every parameter of a message, as in `clip_update`.

    The parameters of an `Update` are times a weight, and so is their noise.
    """
    models = message.models if isinstance(message, Update) else message
    # One draw for all parameters: a draw for each takes minutes to compile.
    flat, unravel = ravel_pytree(models)
    noise = unravel(scale * laplace_numbers(key, flat.shape))
    if not isinstance(message, Update):
        return jax.tree.map(jnp.add, models, noise)
    return message._replace(
        models={
            kind: jax.tree.map(lambda x, n, w=message.weights[kind]: x + w * n, model, noise[kind])
            for kind, model in models.items()
        }
    )
