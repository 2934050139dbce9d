"""Speed of the tensor decompositions against TensorLy: `python -m benchmarks.tensor`.

64 planted tensors with noise of a tenth of their norm. Ours decomposes them as one batch in
float32, by one jitted vmap, which runs until its last tensor has stopped; TensorLy (NumPy backend)
one after another in float64, as in float32 its error, from a difference of squared norms, is too
coarse to stop by. Both start alike (HOSVD; leading eigenvectors) and stop alike: when the relative
error changed by less than 1e-6, or after 20 sweeps (Tucker; TensorLy makes three at least) or 200
(PARAFAC2). PARAFAC2 is measured with one inner sweep on both sides, without TensorLy's line search:
then both are the same algorithm; and as both come, with 5 inner sweeps and TensorLy's line search.

Wall and CPU seconds are those of the quickest of some turns, in which all take part one after the
other. Compilation is apart: what a first call took beyond that. Errors are |X - fit| / |X|, of the
reconstructed tensors, in float64; `max diff` and `worst` are by how much they differ from ours, and
by how much ours are larger, on the tensor where that is most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import commands
from benchmarks.commands import timed
from benchmarks.machine import device
from jaxfedmvc.tensor import parafac2, tucker

try:
    import tensorly as tl
    from tensorly.decomposition import parafac2 as tensorly_parafac2
    from tensorly.decomposition import tucker as tensorly_tucker
except ImportError as error:
    raise SystemExit(f"TensorLy, the peer, is missing ({error}): pip install tensorly") from None

FLAGS = flags.FLAGS
flags.DEFINE_integer("n", 64, "Number of tensors.", lower_bound=1)
flags.DEFINE_integer("turns", 3, "Measurements of each; the quickest counts.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the tensors.")

SHAPE, RANKS = (10, 64, 3), (6, 12, 3)  # of Tucker
SLICES, ROWS, COLUMNS, RANK = 8, 10, 64, 5  # of PARAFAC2
NOISE = 0.1
TOL = 1e-6
TUCKER_SWEEPS, PARAFAC2_SWEEPS = 20, 200

Run = Callable[[np.ndarray], Sequence[np.ndarray] | np.ndarray]


def tucker_tensor(rng: np.random.Generator) -> np.ndarray:
    """Draws a tensor of multilinear ranks `RANKS`."""
    x = rng.normal(size=RANKS)
    for mode, (size, rank) in enumerate(zip(SHAPE, RANKS, strict=True)):
        factor = np.linalg.qr(rng.normal(size=(size, rank)))[0]
        x = np.moveaxis(np.tensordot(factor, x, (1, mode)), 0, mode)
    return x


def parafac2_tensor(rng: np.random.Generator) -> np.ndarray:
    """Draws slices of a PARAFAC2 model with a random H and scales from 0.5 to 2."""
    p = np.linalg.qr(rng.normal(size=(SLICES, ROWS, RANK)))[0]
    h, q = rng.normal(size=(RANK, RANK)), rng.normal(size=(COLUMNS, RANK))
    return (p @ h * rng.uniform(0.5, 2, size=(SLICES, 1, RANK))) @ q.T


def noisy(make: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    """Draws a batch of tensors with noise, float32."""
    rng = np.random.default_rng(FLAGS.seed)
    batch = []
    for _ in range(FLAGS.n):
        x = make(rng)
        noise = rng.normal(size=x.shape)
        batch.append(x + NOISE * np.linalg.norm(x) / np.linalg.norm(noise) * noise)
    return np.stack(batch).astype(np.float32)


# --- The runs: a batch of tensors to their reconstructions ----------------------------------------


def our_tucker() -> Run:
    """Returns HOOI, vmapped."""

    def one(x: jax.Array) -> tucker.Tucker:
        return tucker.hooi(x, RANKS, max_sweeps=TUCKER_SWEEPS, tol=TOL).tucker

    return batched(one, tucker.reconstruct)


def our_parafac2(**options: Any) -> Run:
    """Returns PARAFAC2 from one start, vmapped."""

    def one(x: jax.Array) -> parafac2.Parafac2:
        result = parafac2.parafac2(None, x, RANK, max_sweeps=PARAFAC2_SWEEPS, tol=TOL, **options)
        return result.parafac2

    return batched(one, parafac2.reconstruct)


def batched(one: Callable[..., Any], reconstruct: Callable[..., Any]) -> Run:
    """Returns one compiled program for the batch."""
    compiled = jax.jit(jax.vmap(lambda x: reconstruct(one(x))))
    return lambda batch: np.asarray(compiled(batch))


def their_tucker(x: np.ndarray) -> np.ndarray:
    """Runs TensorLy's HOOI."""
    form = tensorly_tucker(x, RANKS, n_iter_max=TUCKER_SWEEPS, tol=TOL)
    return tl.tucker_to_tensor(form)


def their_parafac2(x: np.ndarray, **options: Any) -> np.ndarray:
    """Runs TensorLy's PARAFAC2."""
    form = tensorly_parafac2(
        x, RANK, n_iter_max=PARAFAC2_SWEEPS, tol=TOL, init="svd", random_state=0, **options
    )
    return np.stack(tl.parafac2_tensor.parafac2_to_slices(form))


def one_by_one(run: Callable[..., np.ndarray], **options: Any) -> Run:
    """Returns a loop over the batch, in float64."""
    return lambda batch: [run(x, **options) for x in batch.astype(np.float64)]


# --- The table ------------------------------------------------------------------------------------


def compare(name: str, batch: np.ndarray, runs: dict[str, Run]) -> None:
    """Measures all runs in turns, and prints their lines; the first run is ours."""
    ours = next(iter(runs))
    first = timed(partial(runs[ours], batch)).seconds
    exact = batch.astype(np.float64).reshape(len(batch), -1)
    wall, cpu, error = dict.fromkeys(runs, np.inf), dict.fromkeys(runs, np.inf), {}
    for _ in range(FLAGS.turns):
        for who, run in runs.items():
            took, took_cpu, fitted = timed(partial(run, batch))
            wall[who], cpu[who] = min(took, wall[who]), min(took_cpu, cpu[who])
            residual = exact - np.asarray(fitted, np.float64).reshape(exact.shape)
            error[who] = np.linalg.norm(residual, axis=1) / np.linalg.norm(exact, axis=1)
    for who in runs:
        compiling = first - wall[who] if who == ours else 0.0
        print(
            f"{name:17s} {who:8s} {wall[who]:8.3f} {cpu[who]:8.3f} {compiling:8.2f}"
            f" {wall[who] / wall[ours]:7.1f} {error[who].mean():9.6f}"
            f" {np.abs(error[ours] - error[who]).max():9.1e}"
            f" {(error[ours] - error[who]).max():9.1e}",
            flush=True,
        )


def main() -> None:
    """Measures and prints; see the module's docstring."""
    tl.set_backend("numpy")
    print(
        f"{commands.processor(os.cpu_count() or 1)}; {commands.load()}; ours on {device()};"
        f" TensorLy {tl.__version__}; {FLAGS.n} tensors"
    )
    print(
        f"{'':26s} {'seconds':>8s} {'CPU s':>8s} {'compile':>8s} {'ratio':>7s} {'error':>9s}"
        f" {'max diff':>9s} {'worst':>9s}"
    )
    peer = one_by_one(their_tucker)
    compare("Tucker", noisy(tucker_tensor), {"ours": our_tucker(), "TensorLy": peer})
    batch = noisy(parafac2_tensor)
    peer = one_by_one(their_parafac2, n_iter_parafac=1, linesearch=False)
    compare("PARAFAC2, 1 inner", batch, {"ours": our_parafac2(n_inner=1), "TensorLy": peer})
    peer = one_by_one(their_parafac2)
    compare("PARAFAC2, 5 inner", batch, {"ours": our_parafac2(), "TensorLy": peer})


if __name__ == "__main__":
    commands.run(main)
