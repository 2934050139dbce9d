"""What coarser matrix products cost in accuracy: `python -m benchmarks.precision`.

FMCSC on the digits, the same seeds with products of float32, TF32 and bfloat16 (`--precision` of
experiments.sweep). Where the device has no choice (a CPU computes float32 whatever it is told), the
coarser ones are emulated: in the traced program, backward passes included, both operands of every
product are rounded to the format's mantissa, and sums stay float32, as tensor cores do it. This
tells of accuracy and not of speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from jax.extend import core

from experiments.lib.runner import matmul_precision
from jaxfedmvc import data, engine
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, fmcsc
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.host import table_scores

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 5, "Of partition and run.", lower_bound=1)
flags.DEFINE_list("hidden", ["64"], "Widths of the encoder's hidden layers.")
flags.DEFINE_integer("pretrain_epochs", 100, "Epochs of reconstruction before the rounds.")
flags.DEFINE_integer("rounds", 5, "Rounds of 10 local epochs.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")

MANTISSAS = {"float32": 23, "tf32": 10, "bfloat16": 7}


def rounded(function: Callable[..., Any], mantissa_bits: int) -> Callable[..., Any]:
    """`function` with the operands of every matrix product rounded to so many bits."""

    def wrapped(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        out = _evaluate(closed, jax.tree.leaves(arguments), mantissa_bits)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _evaluate(closed: Any, arguments: Sequence[Any], bits: int) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        params = dict(equation.params)
        name = equation.primitive.name
        inner = [key for key, x in params.items() if isinstance(x, core.ClosedJaxpr)]
        if name == "dot_general":
            inputs = [jax.lax.reduce_precision(x, 8, bits) for x in inputs]
        if name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"):
            out = _evaluate(params[inner[0]], inputs, bits)
        else:
            for key in inner:
                params[key] = _transformed(params[key], bits)
            if name == "cond":
                params["branches"] = tuple(_transformed(b, bits) for b in params["branches"])
            out = equation.primitive.bind(*inputs, **params)
            out = out if equation.primitive.multiple_results else [out]
        values |= dict(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _transformed(closed: Any, bits: int) -> Any:
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in closed.jaxpr.invars
    ]
    return jax.make_jaxpr(lambda *a: _evaluate(closed, a, bits))(*shapes)


def main(_: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    out = open(FLAGS.json, "w") if FLAGS.json else None  # now: a bad path must not cost the run
    emulated = jax.default_backend() == "cpu"
    config = FMCSCConfig(
        10,
        hidden=tuple(int(width) for width in FLAGS.hidden),
        pretrain_epochs=FLAGS.pretrain_epochs,
        local_epochs=10,
        distill_epochs=20,
        n_init=10,
    )
    digits = data.load("digits")

    def table(federation: Federation, key: jax.Array) -> jax.Array:
        result = engine.run(
            fmcsc(config),
            federation,
            key,
            FLAGS.rounds,
            client_chunk=1 if emulated else None,
            n_clusters=10,
        )
        return result.tables[-1].sum(axis=0)

    print(
        f"{jax.devices()[0].device_kind}; coarser products {'emulated' if emulated else 'native'}"
    )
    result = {}
    for name, bits in MANTISSAS.items():
        precision = matmul_precision(name, jax.default_backend())
        jax.config.update("jax_default_matmul_precision", precision)
        changed = partial(rounded, mantissa_bits=bits) if emulated and bits < 23 else lambda f: f
        program = jax.jit(changed(table))
        found = []
        for seed in range(FLAGS.seeds):
            parts = data.hybrid_partition(seed, len(digits.labels), 3, 12)
            federation = Federation.from_arrays(digits.views, digits.labels, partition=parts)
            found.append(table_scores(program(federation, jax.random.key(seed)))["acc"])
        result[name] = found
        paired = np.subtract(found, result["float32"])
        print(
            f"{name:10s} ACC {np.mean(found):.3f} +- {np.std(found, ddof=1):.3f}, against float32"
            f" by seed {np.mean(paired):+.3f} +- {np.std(paired, ddof=1):.3f}"
        )
    if out is not None:
        json.dump({"emulated": emulated, "acc": result}, out, indent=1)
        out.close()


if __name__ == "__main__":
    app.run(main)
