"""How much work a traced program is, roughly: enough to guess how long one takes beside another."""

from __future__ import annotations

import math
from typing import Any

import jax.extend

# Passes of loops whose end depends on the data: k-means and power iterations take about as many.
_PASSES = 20
# Factorisations of [.., m, n]: of the order of m n min(m, n).
_CUBIC = {"cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "svd"}


def operations(jaxpr: Any) -> float:
    """Counts operations: multiply-adds of products and factorisations, one an entry of all else.

    Args:
      jaxpr: Such as `jax.jit(f).trace(x).jaxpr`.
    """
    return sum(_of_equation(e) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any) -> float:
    inner = list(map(operations, jax.extend.core.jaxprs_in_params(equation.params)))
    if not inner:
        entries = sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
        if equation.primitive.name in _CUBIC:
            shape = equation.invars[0].aval.shape
            return math.prod(shape) * min(shape[-2:])
        if equation.primitive.name != "dot_general":
            return entries
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return entries * math.prod(shape[i] for i in contracted)
    if equation.primitive.name == "cond":
        return max(inner)
    passes = {"scan": equation.params.get("length", 1), "while": _PASSES}
    return sum(inner) * passes.get(equation.primitive.name, 1)
