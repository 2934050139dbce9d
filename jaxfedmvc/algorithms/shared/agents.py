"""What agents of vertical methods do alike: features of all views, and labels from the server."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxfedmvc.federation import Cohort


def n_features(agent: Cohort) -> int:
    """Returns the number of an agent's features, of all of its views together."""
    return sum(view.shape[-1] for view in agent.views)


def features(client: Cohort) -> Array:
    """Returns an agent's features [N, p], its views side by side; zero on padding."""
    return jnp.where(client.mask[:, None], jnp.concatenate(client.views, axis=-1), 0.0)


def keep_labels(key: Array, labels: Array, state: Any, client: Cohort) -> tuple[Any, tuple, dict]:
    """Keeps the labels [N] that the server sends as `state.labels`; for `Phase.client`."""
    return state._replace(labels=labels), (), {}


def kept_labels(server: Any, state: Any, client: Cohort) -> Array:
    """Returns what `keep_labels` kept, -1 for padding; for `FederatedAlgorithm.assign`."""
    return jnp.where(client.mask, state.labels, -1)
