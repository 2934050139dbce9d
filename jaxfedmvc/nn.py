"""Networks, and the one training loop that clients run on their own rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxfedmvc import checks, keys

PyTree = Any


def init_mlps(key: jax.Array, shapes: Mapping[Any, tuple[int, Sequence[int]]]) -> dict[Any, PyTree]:
    """Returns fresh parameters of several networks of fully connected layers; see `apply`.

    Weights are U(-1/sqrt(fan_in), 1/sqrt(fan_in)): what deep multi-view clustering papers start
    from without saying so, since it is the default of PyTorch, in which they are written. Biases
    are zero, where PyTorch draws them from the same range. All weights are one draw, which compiles
    in a fraction of the time of many; the first MLPs are the same whatever follows them.

    Args:
      key: PRNG key.
      shapes: By name `(n_inputs, widths)`: of the input rows, and of each layer's output.

    Returns:
      By name the parameters in the form that flax.linen gives to a module of Dense layers.
    """
    layers = {name: list(itertools.pairwise((n, *widths))) for name, (n, widths) in shapes.items()}
    sizes = [a * b for pairs in layers.values() for a, b in pairs]
    draws = jax.random.uniform(key, (sum(sizes),), minval=-1.0)
    weights = iter(jnp.split(draws, np.cumsum(sizes)[:-1]))
    return {
        name: {
            "params": {
                f"Dense_{i}": {
                    "kernel": next(weights).reshape(a, b) / a**0.5,
                    "bias": jnp.zeros(b),
                }
                for i, (a, b) in enumerate(pairs)
            }
        }
        for name, pairs in layers.items()
    }


def init_mlp(key: jax.Array, n_inputs: int, widths: Sequence[int]) -> PyTree:
    """Returns fresh parameters of one network; see `init_mlps`."""
    return init_mlps(key, {0: (n_inputs, widths)})[0]


def apply(params: PyTree, x: jax.Array) -> jax.Array:
    """Applies fully connected layers, ReLU between them, [..., rows, d] -> [..., rows, width].

    Written out, since a module of flax traces each parameter's initialiser to compare shapes, which
    takes half of the time in which such a network is traced.
    """
    layers = params["params"]
    for i in range(len(layers)):
        layer = layers[f"Dense_{i}"]
        x = x if i == 0 else jax.nn.relu(x)
        x = x @ layer["kernel"] + jnp.expand_dims(layer["bias"], range(x.ndim - 1))
    return x


# --- Networks of equal shapes ---------------------------------------------------------------------


@struct.dataclass
class Alike:
    """Parameters of several networks; those of equal shapes are stacked.

    A stack of k networks takes the kernels of one: its products are batched, and Adam passes over
    it once. That pays where launching kernels takes the time, on accelerators with few rows.

    Attributes:
      stacks: Parameters of each group, with leading axis [k]; without it where a group is a single
        network.
      names: Of the networks of each group.
    """

    stacks: tuple[PyTree, ...]
    names: tuple[tuple[Hashable, ...], ...] = struct.field(pytree_node=False)


def stacks(choice: bool | None) -> bool:
    """Returns whether networks of equal shapes are stacked; None asks for it off the CPU."""
    return jax.default_backend() != "cpu" if choice is None else choice


def alike(networks: Mapping[Any, PyTree], stack: bool = True) -> Alike:
    """Stacks networks of equal shapes, or puts each into a group of its own."""
    groups: dict[Hashable, list[Any]] = {}
    for place, (name, params) in enumerate(networks.items()):
        leaves, tree = jax.tree.flatten(params)
        form = (tree, *((x.shape, x.dtype) for x in leaves)) if stack else place
        groups.setdefault(form, []).append(name)
    names = tuple(tuple(group) for group in groups.values())
    return Alike(tuple(_stacked([networks[name] for name in group]) for group in names), names)


def apart(networks: Alike) -> dict[Any, PyTree]:
    """Returns the networks by name, as they were before `alike`."""
    return each(lambda params: params, networks)


def each(
    function: Callable[..., PyTree],
    networks: Mapping[Any, PyTree] | Alike,
    *inputs: Mapping[Any, PyTree],
) -> dict[Any, PyTree]:
    """Returns `function(params, *inputs)` of every network by name; a stack is one vmapped call.

    Args:
      function: Of one network's parameters, and its inputs.
      networks: By name.
      inputs: By the same names; those of a stack have equal shapes.
    """
    found: dict[Any, PyTree] = {}
    groups = networks if isinstance(networks, Alike) else alike(networks, stack=False)
    for params, names in zip(groups.stacks, groups.names, strict=True):
        if len(names) == 1:
            found[names[0]] = function(params, *(x[names[0]] for x in inputs))
            continue
        stacked = [_stacked([x[name] for name in names]) for x in inputs]
        out = jax.vmap(function)(params, *stacked)
        found |= {name: jax.tree.map(lambda x, i=i: x[i], out) for i, name in enumerate(names)}
    return found


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees) if len(trees) > 1 else trees[0]


# --- Training -------------------------------------------------------------------------------------


def fit(
    key: jax.Array,
    params: PyTree,
    loss: Callable[..., jax.Array],
    rows: PyTree,
    mask: jax.Array,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: jax.Array | float,
    keyed: bool = False,
    least_steps: int = 1,
) -> tuple[PyTree, jax.Array]:
    """Minimises `loss` with a fresh Adam; the arguments are those of `fit_on`.

    Returns:
      The trained parameters and the mean loss of each epoch, [epochs].

    Raises:
      ValueError: As `fit_on`.
    """
    opt_state = optax.adam(learning_rate).init(params)
    params, _, losses = fit_on(
        key,
        params,
        opt_state,
        loss,
        rows,
        mask,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        keyed=keyed,
        least_steps=least_steps,
    )
    return params, losses


def fit_on(
    key: jax.Array,
    params: PyTree,
    opt_state: PyTree,
    loss: Callable[..., jax.Array],
    rows: PyTree,
    mask: jax.Array,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: jax.Array | float,
    keyed: bool = False,
    least_steps: int = 1,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Minimises `loss` over the rows of one client, with an Adam that goes on from `opt_state`.

    Rows are shuffled in every epoch if they do not fit into one batch. Masked rows are sorted
    behind the real ones, and of several batches one without real rows makes no step, so that
    padding changes nothing beyond rounding.

    Args:
      key: For shuffling, and for the keys of `loss`.
      params: Where training starts.
      opt_state: State of `optax.adam`, initially `optax.adam(learning_rate).init(params)`.
      loss: `(params, rows, mask) -> scalar` of a batch; `(params, rows, mask, key)` if `keyed`.
      rows: Pytree of arrays with leading axis [rows].
      mask: bool [rows].
      epochs: Static number of passes, where rows make enough batches.
      batch_size: Static number of rows in a step.
      learning_rate: Adam's step size, which may be traced.
      keyed: Whether `loss` takes a key, another one in every step.
      least_steps: Static fewest steps of an epoch. Rows that make fewer batches are gone through
        several times, so that a client of few rows trains about as long as others.

    Returns:
      The trained parameters, Adam's state, and the mean loss of each epoch, [epochs].

    Raises:
      ValueError: `epochs` is below 0, or `batch_size` or `least_steps` below 1.
    """
    checks.whole("epochs", epochs, 0)
    checks.whole("batch_size", batch_size, 1)
    checks.whole("least_steps", least_steps, 1)
    # Batches are taken by traced places, which NumPy's arrays do not know.
    rows, mask = jax.tree.map(jnp.asarray, (rows, mask))
    optimizer = optax.adam(learning_rate)
    n_rows = mask.shape[0]
    n_batches = -(-n_rows // batch_size)
    # Of the real rows: padding adds no steps and takes none away.
    passes = -(-least_steps // jnp.maximum(-(-jnp.sum(mask) // batch_size), 1))

    def step(
        carry: PyTree, batch: tuple[PyTree, jax.Array], number: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        params, opt_state = carry
        # Shuffles fold epochs into the key itself; no step may have an epoch's key.
        own = (jax.random.fold_in(jax.random.fold_in(key, keys.STEPS), number),) if keyed else ()
        value, grads = jax.value_and_grad(loss)(params, *batch, *own)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    # Steps are numbered so that batches of padding alone, behind the others, shift no number: in a
    # second pass there are fewer real ones than `least_steps`.
    def step_number(epoch: jax.Array, p: Any, place: Any) -> jax.Array:
        return epoch + epochs * (place + least_steps * p)

    def one_batch_pass(carry: PyTree, epoch: jax.Array, p: Any) -> tuple[PyTree, jax.Array]:
        return step(carry, (rows, mask), step_number(epoch, p, 0))

    def shuffled_pass(carry: PyTree, epoch: jax.Array, p: Any) -> tuple[PyTree, jax.Array]:
        own = jax.random.fold_in(key, epoch + epochs * p)
        order, real = _shuffled(own, mask, batch_size, keep_single=keyed)

        def masked_step(carry: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
            index, batch_mask, place = batch
            taken = jax.tree.map(lambda a: a[index], rows)
            new, value = step(carry, (taken, batch_mask), step_number(epoch, p, place))
            has_rows = jnp.any(batch_mask)
            keep = jax.tree.map(lambda a, b: jnp.where(has_rows, a, b), new, carry)
            return keep, value * jnp.sum(batch_mask)

        carry, sums = jax.lax.scan(
            masked_step,
            carry,
            (order, real, jnp.arange(n_batches)),
        )
        return carry, jnp.sum(sums) / jnp.maximum(jnp.sum(mask), 1)

    one_pass = one_batch_pass if n_batches == 1 else shuffled_pass

    def epoch_of_passes(carry: PyTree, epoch: jax.Array) -> tuple[PyTree, jax.Array]:
        def another(p: jax.Array, carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            trained, value = one_pass(carry[0], epoch, p)
            return trained, carry[1] + value

        carry, values = jax.lax.fori_loop(0, passes, another, (carry, jnp.zeros(())))
        return carry, values / passes

    epoch_fn = partial(one_pass, p=0) if least_steps == 1 else epoch_of_passes
    (params, opt_state), losses = jax.lax.scan(epoch_fn, (params, opt_state), jnp.arange(epochs))
    return params, opt_state, losses


def _shuffled(
    key: jax.Array, mask: jax.Array, batch_size: int, *, keep_single: bool
) -> tuple[jax.Array, jax.Array]:
    """Shuffles rows into batches, padding behind the real ones.

    Args:
      key: Of the shuffle.
      mask: bool [rows].
      batch_size: Static.
      keep_single: Whether rows that are a single batch but for padding stay where they are, as they
        do without it: for losses that draw for places.

    Returns:
      The places of each batch's rows, int32 [batches, batch_size], and which are real, bool.
    """
    n_rows = mask.shape[0]
    n_batches = -(-n_rows // batch_size)
    # The first numbers of a longer draw are those of a shorter one: padding changes none.
    draws = jax.random.uniform(key, (n_rows,))
    order = jnp.argsort(jnp.where(mask, draws, jnp.inf))
    order = jnp.pad(order, (0, n_batches * batch_size - n_rows))
    places = jnp.arange(n_batches * batch_size)
    real = places < jnp.sum(mask)
    if keep_single:
        is_single = ~jnp.any(mask[batch_size:])
        order = jnp.where(is_single, jnp.minimum(places, n_rows - 1), order)
        real = jnp.where(is_single, (places < batch_size) & mask[order], real)
    shape = (n_batches, batch_size)
    return order.reshape(shape), real.reshape(shape)


def last(losses: jax.Array) -> jax.Array:
    """Returns the last epoch's loss of `fit` or `fit_on`; 0 where there was no epoch."""
    return losses[-1:].sum()
