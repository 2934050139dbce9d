"""What an agent of DPFMPS holds, computes and sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithms.dpfmps.budget import Budget, sketch_delta, sketch_noise
from jaxfedmvc.algorithms.dpfmps.fm_sketch import add_noise, sketch_clusters
from jaxfedmvc.algorithms.dpfmps.lsh_tree import TreeNoise, private_centres
from jaxfedmvc.algorithms.dpfmps.settings import DPFMPSConfig
from jaxfedmvc.clustering import predict
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages.transforms import laplace_numbers


class AgentState(NamedTuple):
    """State of an agent.

    Attributes:
      hash_key: Key of the hash functions, the same for all agents.
      budget: Every mechanism's epsilon.
      tree: Noise of the tree that its centres come from.
      centres: Its columns [k, p_a] of the final centres, scaled; zeros before `finish`.
    """

    hash_key: Array
    budget: Budget
    tree: TreeNoise
    centres: Array


def send_size(key: Array, sent: tuple[()], state: AgentState, client: Cohort) -> Any:
    """Sends the number of rows with Laplace noise."""
    size = jnp.sum(client.mask) + laplace_numbers(key, ()) / state.budget.size
    return state, {"size": size.astype(jnp.int32)}, {}


def send_synopsis(
    config: DPFMPSConfig, key: Array, size: Array, state: AgentState, client: Cohort
) -> Any:
    """Sends private centres and private sketches of who is near each of them.

    `size` is the noisy number of rows, which sets the delta of the sketches.
    """
    tree_key, phantom_key = jax.random.split(key)
    x = scaled(client)
    k, m = config.n_clusters, config.sketches(len(x))
    centres = private_centres(tree_key, x, k, client.mask, state.tree, n_init=config.n_init)
    labels = jnp.where(client.mask, predict(x, centres), -1)
    sketches = sketch_clusters(state.hash_key, client.sample_ids, labels, k, m)
    noise = sketch_noise(state.budget.memberships, m, sketch_delta(size))
    sketches = add_noise(phantom_key, sketches, noise)
    # The agent's number is part of the message's structure: it orders the axes of the grid.
    return state, {client.view_ids[0]: {"centres": centres, "sketches": sketches}}, {}


def keep_columns(key: Array, centres: Array, state: AgentState, client: Cohort) -> Any:
    """Keeps the agent's columns of the final centres; sends nothing."""
    return state._replace(centres=centres), (), {}


def assign(server: Any, state: AgentState, client: Cohort) -> Array:
    """Labels the agent's rows by the nearest of its columns of the final centres."""
    return jnp.where(client.mask, predict(scaled(client), state.centres), -1)


def scaled(client: Cohort) -> Array:
    """Returns an agent's features [n, p_a], each scaled to [-1, 1] by its range over the rows.

    A constant feature is 0, and so are rows of padding.
    """
    x = jnp.concatenate(client.views, axis=-1)
    where = client.mask[:, None]
    low = jnp.min(jnp.where(where, x, jnp.inf), axis=0, keepdims=True)
    high = jnp.max(jnp.where(where, x, -jnp.inf), axis=0, keepdims=True)
    width = high - low
    unit = (x - low) / jnp.where(width > 0, width, 1.0)
    return jnp.where(where & (width > 0), jnp.clip(2 * unit - 1, -1.0, 1.0), 0.0)
