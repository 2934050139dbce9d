"""What coarser matrix products cost in accuracy: `python -m benchmarks.precision`.

Every method, or those of --methods, with products of float32, TF32 and bfloat16 (`--precision` of
the experiments), on the same samples with the same keys. Where the device has no choice (a CPU
computes float32 whatever it is told), coarser products are emulated: in the traced program,
backward passes included, both operands of every product are rounded to the format's mantissa, and
sums stay float32, as tensor cores do it. Products that a method itself asks for in full float32,
which `--precision` leaves alone, stay as they are, but for the format "bfloat16, all". Products
within eigenvalues, SVD, QR, Cholesky and triangular systems are a library's and are not rounded.
This tells of accuracy and not of speed.

    python -m benchmarks.precision                            # again: goes on where it stopped
    python -m benchmarks.precision --methods=fmcsc,mgcd --seeds=10

Each seed draws its samples of scikit-learn's digits in three views, their partition among clients
and the run's key. Rows are appended to --csv, one for a method and a seed.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax import lax
from jax.extend import core

from benchmarks import commands
from benchmarks.commands import define_list, one_of
from benchmarks.roofline import federations_of, first_accepted
from experiments.lib.runner import matmul_precision
from jaxfedmvc import data, engine
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.registry import configured
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.host import client_tables, score, table_scores

FLAGS = flags.FLAGS
define_list("methods", None, "Names of methods; None: all.", one_of(sorted(METHODS)))
flags.DEFINE_integer("seeds", 5, "Of samples, partition and run.", lower_bound=2)
flags.DEFINE_string(
    "csv",
    "results/precision.csv",
    "Where rows are kept, and gone on from; delete it after a change of settings.",
)

SAMPLES, CLUSTERS, CLIENTS = 600, 10, 6

# Settings that differ from the defaults, of all methods that have them, and of single ones: small
# networks and short training.
SHORT: dict[str, Any] = {
    "hidden": (64,),
    "latent_dim": 16,
    "feature_dim": 32,
    "head_hidden": 32,
    "attention_hidden": 32,
    "imputer_hidden": (32,),
    "pretrain_epochs": 100,
    "contrast_epochs": 50,
    "tune_epochs": 50,
    "align_epochs": 50,
    "local_epochs": 10,
    "distill_epochs": 20,
    "imputer_epochs": 50,
    "neighbour_pretrain_epochs": 100,
    "neighbour_epochs": 50,
    "steps": 100,
    "batch_size": 100,
    "n_init": 10,
    "learning_rate": 1e-3,
}
OWN: dict[str, dict[str, Any]] = {
    "comvc": {"epochs": 40, "n_runs": 2},
    "mgcd": {"latent_dim": None, "local_epochs": 1, "pretrain_epochs": 20, "batch_size": 256},
    "proimp": {"epochs": 100, "pretrain_epochs": 30, "hidden": (64, 64)},
    "simvc": {"epochs": 40, "n_runs": 2},
}


# --- Rounding the products of a program -----------------------------------------------------------


class Bits(NamedTuple):
    """Bits of a mantissa that the operands of products keep; 23 are float32. May be traced.

    Attributes:
      left_open: Of products whose precision the program leaves open.
      in_full: Of those that it asks for in full float32.
    """

    left_open: Any
    in_full: Any = 23


FORMATS = {
    "float32": Bits(23),
    "tf32": Bits(10),
    "bfloat16": Bits(7),
    "bfloat16, all": Bits(7, 7),
}


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `(bits, *arguments)` -> what the function returns, its products' operands rounded.

    Raises:
      NotImplementedError: When it is called: a product is where no rounding reaches.
    """

    def wrapped(bits: Bits, *arguments: Any) -> Any:
        # With the coarsest as default, those that are asked for in full can be told apart.
        with jax.default_matmul_precision("bfloat16"):
            closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        out = _evaluate(closed, jax.tree.leaves(arguments), bits)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def rounded_entries(x: Any, bits: Any) -> Any:
    """Rounds float32 to the nearest with so many bits of mantissa, ties to even.

    As `lax.reduce_precision`, whose bits cannot be traced: one program serves all formats, so that
    they differ by rounding and by nothing that a compiler does.
    """
    if x.dtype != jnp.float32:
        return x
    whole = lax.bitcast_convert_type(x, jnp.uint32)
    dropped = (23 - jnp.asarray(bits)).astype(jnp.uint32)
    unit = jnp.uint32(1) << dropped
    odd = (whole >> dropped) & 1
    # Less than half a unit, so that a tie goes up where the last bit that stays is odd.
    carried = jnp.where(dropped > 0, (unit >> 1) - 1 + odd, 0)
    return lax.bitcast_convert_type((whole + carried) & ~(unit - 1), jnp.float32)


def _evaluate(closed: Any, arguments: Sequence[Any], bits: Bits) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        out = _applied(equation, [read(atom) for atom in equation.invars], bits)
        values |= dict(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _applied(equation: Any, inputs: list[Any], bits: Bits) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLED:
        called = params[_CALLED[name]]
        if not isinstance(called, core.ClosedJaxpr):  # from jax 0.11 on all are
            called = core.ClosedJaxpr(called, ())
        return _evaluate(called, inputs, bits)
    if name == "dot_general":
        kept = bits.in_full if _is_in_full(params["precision"]) else bits.left_open
        inputs = [rounded_entries(x, kept) for x in inputs]
    elif _has_products(equation):
        if name not in _RULES:
            raise NotImplementedError(f"{name}: got one with products; allowed are {[*_RULES]}")
        return list(_RULES[name](params, inputs, bits))
    out = equation.primitive.bind(*inputs, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def _is_in_full(precision: Any) -> bool:
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p == lax.Precision.HIGHEST for p in both)


def _has_products(equation: Any) -> bool:
    """Whether an equation runs products that are written out in its parameters."""
    tuples = [x if isinstance(x, tuple) else (x,) for x in equation.params.values()]
    inner = [getattr(x, "jaxpr", x) for several in tuples for x in several]
    return equation.primitive.name == "dot_general" or any(
        _has_products(e) for jaxpr in inner if isinstance(jaxpr, core.Jaxpr) for e in jaxpr.eqns
    )


def _scan(params: dict[str, Any], inputs: list[Any], bits: Bits) -> list[Any]:
    if "num_consts" in params:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.11
        n_consts, n_carry, _ = map(len, params["ft_in"].unpack())
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = _evaluate(params["jaxpr"], [*consts, *carry, *x], bits)
        return out[:n_carry], out[n_carry:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, carry, inputs[n_consts + n_carry :], **how)
    return [*carry, *stacked]


def _while(params: dict[str, Any], inputs: list[Any], bits: Bits) -> list[Any]:
    n_ask, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_ask, of_body = inputs[:n_ask], inputs[n_ask : n_ask + n_body]

    def going(carry: list[Any]) -> Any:
        return _evaluate(params["cond_jaxpr"], [*of_ask, *carry], bits)[0]

    def step(carry: list[Any]) -> list[Any]:
        out = _evaluate(params["body_jaxpr"], [*of_body, *carry], bits)
        if not (n_dims := params["cond_jaxpr"].out_avals[0].ndim):
            return out
        # A batch has a flag for each, and those that are done stay as they are.
        flag = going(carry)
        flags = [flag.reshape(flag.shape + (1,) * (x.ndim - n_dims)) for x in out]
        return [jnp.where(f, new, old) for f, new, old in zip(flags, out, carry, strict=True)]

    return lax.while_loop(lambda carry: jnp.any(going(carry)), step, inputs[n_ask + n_body :])


def _cond(params: dict[str, Any], inputs: list[Any], bits: Bits) -> list[Any]:
    index, *operands = inputs
    branches = params["branches"]
    if platforms := params.get("branches_platforms"):
        here = [p is None or jax.default_backend() in p for p in platforms].index(True)
        return _evaluate(branches[here], operands, bits)
    return lax.switch(
        index, [lambda *x, b=branch: _evaluate(b, x, bits) for branch in branches], *operands
    )


def _solve(params: dict[str, Any], inputs: list[Any], bits: Bits) -> list[Any]:
    """Solves a linear system; its products with the matrix serve derivatives alone."""
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts, right = inputs[first : first + lengths.solve], inputs[sum(lengths) :]
    return _evaluate(params["jaxprs"].solve, [*consts, *right], bits)


_CALLED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_RULES = {"scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _solve}


# --- Runs of a method -----------------------------------------------------------------------------


def settings_of(name: str) -> dict[str, Any]:
    """Returns the settings of a method that differ from its defaults."""
    method = METHODS[name]
    fields = {
        f.name for kind in (method.config, method.hyperparams) for f in dataclasses.fields(kind)
    }
    return {key: x for key, x in SHORT.items() if key in fields} | OWN.get(name, {})


def digits_of(name: str, seed: int) -> list[Federation]:
    """Returns federations of some digits that a method may accept; the first is preferred."""
    digits = data.load("digits")
    rows = np.random.default_rng(seed).permutation(len(digits.views[0]))[:SAMPLES]
    views, labels = [view[rows] for view in digits.views], np.asarray(digits.labels)[rows]
    return federations_of(name, views, labels, CLIENTS, seed)


def is_emulated() -> bool:
    """Whether the device has no coarser products of its own."""
    return jax.default_backend() == "cpu"


class Runs:
    """Runs of a method, with products of all formats."""

    def __init__(self, name: str) -> None:
        """Chooses the federation that the method accepts."""
        method = METHODS[name]
        of_the_run = {"n_clusters": CLUSTERS, "n_clients": CLIENTS, "rounds": method.rounds}
        self.name = name
        self._algorithm = method.make(*configured(method, settings_of(name), of_the_run))
        self._rounds = max(1, method.rounds)
        self._place, _ = first_accepted(
            name,
            digits_of(name, 0),
            lambda f: jax.eval_shape(self._labels, f, jax.random.key(0)),
        )
        # One program for all formats where they are emulated; else one for each.
        self._emulated = jax.jit(rounded(self._labels), compiler_options=compiler_options())
        self._native = jax.jit(self._labels)

    def row(self, seed: int) -> dict[str, Any]:
        """Runs all formats; returns the columns of a row."""
        began, federation = time.perf_counter(), digits_of(self.name, seed)[self._place]
        formats = FORMATS if is_emulated() else list(FORMATS)[:3]
        found = {name: self._run(name, federation, jax.random.key(seed)) for name in formats}
        row: dict[str, Any] = {"method": self.name, "seed": seed, "device": device()}
        for name, labels in found.items():
            row[f"acc {name}"] = score(federation, labels)["all"]["pooled"]["acc"]
            row[f"same {name}"] = same(found["float32"], labels)
        return row | {"seconds": time.perf_counter() - began}

    def _labels(self, federation: Federation, key: jax.Array) -> list[jax.Array]:
        chunk = 1 if is_emulated() else None
        run = engine.run(self._algorithm, federation, key, self._rounds, client_chunk=chunk)
        return list(run.labels)

    def _run(self, name: str, federation: Federation, key: jax.Array) -> list[np.ndarray]:
        federation = federation.without_labels()
        if is_emulated():
            bits = Bits(*(jnp.int32(n) for n in FORMATS[name]))
            return jax.device_get(self._emulated(bits, federation, key))
        with jax.default_matmul_precision(matmul_precision(name, jax.default_backend())):
            return jax.device_get(self._native(federation, key))


def same(labels: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Returns the share of rows that two clusterings put alike, clusters matched one to one."""
    one, other = (np.concatenate([np.ravel(x) for x in each])[None] for each in (labels, others))
    shape = (int(one.max()) + 1, int(other.max()) + 1)
    return table_scores(client_tables(one, other, one >= 0, shape)[0])["acc"]


# --- Rows and the table ---------------------------------------------------------------------------


COLUMNS = (
    *("method", "seed", "device", "seconds"),
    *(f"{what} {name}" for name in FORMATS for what in ("acc", "same")),
)


def device() -> str:
    """Names the device, and whose its coarser products are."""
    return f"{jax.devices()[0].device_kind}, {'emulated' if is_emulated() else 'native'}"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Reads the rows of this device; a line that was not written to its end is taken away."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [row for row in csv.DictReader(whole.splitlines()) if row["device"] == device()]


def append(path: Path, row: dict[str, Any]) -> None:
    """Writes a row, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or not path.stat().st_size
    with open(path, "a", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def line_of(name: str, rows: Sequence[dict[str, str]]) -> str:
    """Returns a line of the table in Markdown, from a method's rows."""
    cells = [name]
    full = np.array([float(row["acc float32"]) for row in rows])
    for format_name in FORMATS:
        if not rows[0].get(f"acc {format_name}"):
            continue
        acc = np.array([float(row[f"acc {format_name}"]) for row in rows])
        paired = acc - full
        cells.append(f"{acc.mean():.3f} +- {acc.std(ddof=1):.3f}")
        if format_name != "float32":
            alike = np.mean([float(row[f"same {format_name}"]) for row in rows])
            cells += [f"{paired.mean():+.3f} +- {paired.std(ddof=1):.3f}", f"{alike:.3f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    names = FLAGS.methods or sorted(METHODS)
    path = Path(FLAGS.csv)
    print(device())
    heads = [f"{n} ACC | by seed | same" if n != "float32" else "float32 ACC" for n in FORMATS]
    print(f"| method | {' | '.join(heads)} |", flush=True)
    for name in names:
        have = {int(row["seed"]) for row in rows_of(path) if row["method"] == name}
        if left := set(range(FLAGS.seeds)) - have:
            runs = Runs(name)
            for seed in sorted(left):
                append(path, runs.row(seed))
            jax.clear_caches()
        rows = [row for row in rows_of(path) if row["method"] == name]
        print(line_of(name, [r for r in rows if int(r["seed"]) < FLAGS.seeds]), flush=True)


if __name__ == "__main__":
    commands.run(main)
