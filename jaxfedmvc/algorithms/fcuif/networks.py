"""FCUIF's networks on the server: one kind fills in what agents lack, the other aligns rows.

Arrays of all agents have the axes [N, A, ...], agents in the order of the views that they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fcuif.client import xavier_mlps
from jaxfedmvc.algorithms.fcuif.settings import FCUIFConfig, FCUIFHyperparams
from jaxfedmvc.losses import masked_mean

# `(key, z, p, qbar, prototypes, held) -> Z [N, A, d]` whose missing blocks are filled in.
Imputer = Callable[[Array, Array, Array, Array, Array, Array], Array]


class Aligned(NamedTuple):
    """Encodings and soft clusters in the order of the first agent's rows.

    Attributes:
      z: [N, A, d].
      p: [N, A, c].
      places: Where each agent's rows were put, int32 [N, A].
    """

    z: Array
    p: Array
    places: Array


# `(key, z, p, prototypes, complete, loose) -> Aligned`.
Aligner = Callable[[Array, Array, Array, Array, Array, Array], Aligned]


def extension(qbar: Array, prototypes: Array) -> Array:
    """Computes qbar_i C_v of all rows and agents, [N, A, d]: FedDMVC's data extension."""
    return jnp.einsum("nc,cad->nad", qbar, prototypes)


def _drawn(key: Array, agents: int, width: int, hidden: tuple[int, ...]) -> Any:
    """Draws a network for each agent that keeps the width, as one stack."""
    drawn = xavier_mlps(key, dict.fromkeys(range(agents), (width, (*hidden, width))))
    return jax.tree.map(lambda *x: jnp.stack(x), *drawn.values())


_of_all = jax.vmap(nn.apply, in_axes=(0, 1), out_axes=1)


def network_imputer(config: FCUIFConfig, hyper: FCUIFHyperparams) -> Imputer:
    """Returns FCUIF's imputer.

    A network for each view maps prototypes to encodings, (mean of the other agents' P) C_v -> Z^v
    on complete rows, and fills in its outputs of qbar_i C_v.
    """

    def impute(
        key: Array, z: Array, p: Array, qbar: Array, prototypes: Array, held: Array
    ) -> Array:
        n, agents, width = z.shape
        networks = _drawn(key, agents, width, config.imputer_hidden)
        others = (jnp.sum(p, axis=1, keepdims=True) - p) / max(agents - 1, 1)
        inputs = jnp.einsum("nac,cad->nad", others, prototypes)

        def loss(networks: Any, batch: tuple[Array, Array], mask: Array) -> Array:
            inputs, z = batch
            errors = jnp.mean((_of_all(networks, inputs) - z) ** 2, axis=-1)
            return masked_mean(jnp.sum(errors, axis=1), mask)

        networks, _ = nn.fit(
            key,  # of no use: all rows are one batch
            networks,
            loss,
            (inputs, z),
            jnp.all(held, axis=1),
            epochs=config.imputer_epochs,
            batch_size=n,
            learning_rate=hyper.imputer_rate,
        )
        return jnp.where(held[..., None], z, _of_all(networks, extension(qbar, prototypes)))

    return impute


def network_aligner(config: FCUIFConfig, hyper: FCUIFHyperparams) -> Aligner:
    """Returns FCUIF's alignment of rows that agents have in orders of their own.

    A network for each view maps P^v C to H^v. Agent v's rows are a mixture of rows of H^v for each
    row of the first agent's, A = softmax(H^0 H^v^T / s), which is learnt on rows that are aligned,
    shuffled anew in every step: mean squared error of A H^v and H^0, plus the weighted distance
    |A - the shuffle|_F. Then Z^v and P^v of the others become A Z^v and A P^v. s is the root of the
    number of rows in training, and that of the width in use, which is how the code's 20 is read.

    Memory is quadratic in the number of rows.
    """

    def attention(of_first: Array, of_agent: Array, rows: Array, columns: Array, s: Array) -> Array:
        """Mixes columns for each row, [N, N]; rows and columns outside the masks are zero."""
        scores = jnp.where(columns[None], of_first @ of_agent.T / s, -jnp.inf)
        weights = jax.nn.softmax(jnp.where(jnp.any(columns), scores, 0.0), axis=1)
        return jnp.where(rows[:, None] & columns[None], weights, 0.0)

    def align(
        key: Array, z: Array, p: Array, prototypes: Array, complete: Array, loose: Array
    ) -> Aligned:
        n, agents, _ = z.shape
        width = prototypes.shape[1] * prototypes.shape[2]
        inputs = jnp.einsum("nac,cw->naw", p, prototypes.reshape(-1, width))
        key_draw, key_steps = jax.random.split(key)
        optimiser = optax.adam(hyper.align_rate)
        networks = _drawn(key_draw, agents, width, config.imputer_hidden)
        root = jnp.sqrt(jnp.maximum(jnp.sum(complete), 1).astype(jnp.float32))

        def loss(networks: Any, key: Array) -> Array:
            h = _of_all(networks, inputs)

            def of_agent(key: Array, h_v: Array) -> Array:
                order = jax.random.permutation(key, n)
                a = attention(h[:, 0], h_v[order], complete, complete[order], root)
                true = jax.nn.one_hot(jnp.argsort(order), n) * complete[:, None]
                errors = jnp.mean((h[:, 0] - a @ h_v[order]) ** 2, axis=1)
                # The gradient of a norm that is zero is not a number.
                distance = jnp.sqrt(jnp.sum((a - true) ** 2) + 1e-12)
                return masked_mean(errors, complete) + hyper.align_weight * distance

            keys = jax.random.split(key, agents - 1)
            return jnp.sum(jax.vmap(of_agent, in_axes=(0, 1))(keys, h[:, 1:]))

        def step(carry: Any, i: Array) -> tuple[Any, None]:
            networks, state = carry
            grads = jax.grad(loss)(networks, jax.random.fold_in(key_steps, i))
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(networks, updates), state), None

        start = networks, optimiser.init(networks)
        (networks, _), _ = jax.lax.scan(step, start, jnp.arange(config.align_steps))
        h = _of_all(networks, inputs)

        def put(h_v: Array, z_v: Array, p_v: Array) -> Aligned:
            a = attention(h[:, 0], h_v, loose, loose, jnp.sqrt(jnp.float32(width)))
            moved = loose[:, None]
            places = jnp.where(loose, jnp.argmax(a, axis=0), jnp.arange(n)).astype(jnp.int32)
            return Aligned(jnp.where(moved, a @ z_v, z_v), jnp.where(moved, a @ p_v, p_v), places)

        others = jax.vmap(put, in_axes=1, out_axes=1)(h[:, 1:], z[:, 1:], p[:, 1:])
        first = Aligned(z[:, :1], p[:, :1], jnp.arange(n, dtype=jnp.int32)[:, None])
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), first, others)

    return align
