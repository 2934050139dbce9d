"""What travels: sizes of messages, and changes made to them on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithm import Phase
from jaxfedmvc.federation import Cohort

# A client draws from its key by small numbers.
_TRANSFORM = 2**30


def nbytes(tree: Any) -> int:
    """Bytes of a pytree of arrays, or of the shapes that stand for them, as sent uncompressed."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def transformed(
    phase: Phase, transform: Callable[[jax.Array, Any, Any], Any], clients: Sequence[int]
) -> Phase:
    """The same exchange with the messages of some clients changed before they leave.

    Args:
      phase: Any exchange.
      transform: `(key, message, sent) -> message` of the same shapes and types; `sent` is what the
        client was sent.
      clients: Ids of the clients whose messages are changed.
    """
    chosen = jnp.asarray(clients, jnp.int32)

    def client(key: jax.Array, sent: Any, state: Any, client: Cohort) -> tuple[Any, Any, Any]:
        state, message, info = phase.client(key, sent, state, client)
        changed = transform(jax.random.fold_in(key, _TRANSFORM), message, sent)
        is_chosen = jnp.any(client.client_ids == chosen)
        message = jax.tree.map(lambda a, b: jnp.where(is_chosen, a, b), changed, message)
        return state, message, info

    return phase._replace(client=client)
