"""Comparison methods beside the form that authors give them: `python -m benchmarks.pooled`.

Deep methods against eager PyTorch loops over batches (`benchmarks.references`; they take
`.venv/bin/pip install -e '.[bench]'`): MFLVC on two wide views, where nearly all is products of
matrices, and CoMVC on six of handwritten digits' widths, in batches of 100 rows, where much is
small steps between them. Two of anchor graphs: IMVC-CBG against NumPy
(`benchmarks.references.anchor`), in float64, which is MATLAB's type, and in float32; LMVSC against
SciPy, which solves a quadratic program for each sample as its authors do. Views are random; the
number of passes of IMVC-CBG is fixed, since it is all that depends on them. All variants take turns
in one run, the median time of each counts, compilation is apart.

Last the memory that XLA plans for IMVC-CBG, by the number of samples: it should grow with N (D + m)
and never with N^2.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from benchmarks import commands
from benchmarks.commands import define_list, one_of, whole
from benchmarks.machine import compiled, device, machine_peaks, peak_of, take_turns
from benchmarks.references.anchor import imvc_cbg_labels, lmvsc_labels
from jaxfedmvc.algorithms.pooled import imvc_cbg, lmvsc, mflvc, simvc

FLAGS = flags.FLAGS
CLUSTERS = 10
PARTS = ("deep", "contrast", "anchor", "lmvsc", "memory")
define_list("parts", PARTS, f"Which of {', '.join(PARTS)}.", one_of(PARTS))
define_whole = partial(flags.DEFINE_integer, lower_bound=1)
define_whole("deep_rows", 2048, "Samples of MFLVC, a multiple of 256.")
flags.register_validator(
    "deep_rows", lambda n: n % 256 == 0, "allowed are multiples of 256: all batches are full"
)
define_whole("deep_width", 784, "Features of each of its two views.")
define_whole("effort", 20, "MFLVC's epochs and k-means starts, divided by this.")
define_whole("contrast_rows", 2000, "Samples of CoMVC.")
MFEAT = [216, 76, 64, 6, 240, 47]
define_list("contrast_widths", MFEAT, "Features of its views; those of Mfeat.", whole(1))
flags.DEFINE_integer("contrast_epochs", 4, "CoMVC's epochs, of one start, not 100.", lower_bound=4)
define_whole("anchor_rows", 10_000, "Samples of IMVC-CBG and LMVSC.")
define_list("anchor_widths", [512, 256, 128], "Features of their views.", whole(CLUSTERS))
define_whole("anchors_per_cluster", 2, "Anchors of a view, for each of ten clusters.")
define_whole("passes", 20, "Passes of IMVC-CBG.")
define_list("memory_rows", [10_000, 40_000], "Samples whose memory is tabulated.", whole(1))
flags.DEFINE_integer("repeats", 2, "Turns; the median counts.", lower_bound=1)
flags.DEFINE_string("json", None, "Also write the numbers to this file.")

# Epochs of MFLVC's phases, and starts of k-means, at its defaults.
DEFAULTS = {"pretrain_epochs": 200, "contrast_epochs": 50, "tune_epochs": 50, "n_init": 100}
Calls = dict[str, Callable[[], Any]]


def random_views(rows: int, widths: list[int]) -> tuple[np.ndarray, ...]:
    """Returns views in [0, 1]."""
    rng = np.random.default_rng(0)
    return tuple(rng.random((rows, width), np.float32) for width in widths)


def our_calls(
    title: str,
    fit: Callable[..., Any],
    views: tuple[np.ndarray, ...],
    observed: np.ndarray | None = None,
) -> tuple[Calls, dict[str, float]]:
    """Returns a run of ours, and what it took to compile; all views are observed if None are."""
    seen = np.ones((len(views[0]), len(views)), bool) if observed is None else observed
    data = jax.random.key(0), tuple(map(jnp.asarray, views)), jnp.asarray(seen)
    program, took = compiled(fit, *data)
    return {f"{title}, ours": partial(program, *data)}, {f"{title}, ours": took}


# --- Deep methods ---------------------------------------------------------------------------------


def deep_config() -> mflvc.MFLVCConfig:
    """Returns MFLVC's defaults with a part of their epochs, which are alike, and of its starts."""
    return mflvc.MFLVCConfig(
        CLUSTERS, **{name: max(1, value // FLAGS.effort) for name, value in DEFAULTS.items()}
    )


def deep_flops(config: mflvc.MFLVCConfig, rows: int, widths: list[int]) -> float:
    """Returns the operations of the networks in a run, from shapes.

    Forward 2 n P; backward as much for weights and again for inputs, but not the first layer's.
    """
    total = 0.0
    for width in widths:
        encoder = (width, *config.hidden, config.latent_dim)
        half = sum(a * b for a, b in itertools.pairwise(encoder))
        step = 2.0 * rows * (3 * 2 * half - width * encoder[1])
        total += step * (config.pretrain_epochs + config.contrast_epochs)
        total += 2.0 * rows * (3 * half - width * encoder[1]) * config.tune_epochs
    return total


def beside_torch(
    title: str, fit: Callable[..., Any], config: Any, hyper: Any, views: tuple[np.ndarray, ...]
) -> tuple[Calls, dict[str, float]]:
    """Returns a run of ours and of the loop, and what ours took to compile.

    Args:
      title: Of the method; in small letters its module in `benchmarks.references`.
      fit: Ours.
      config: Of both.
      hyper: Of both.
      views: Complete.
    """
    calls, took = our_calls(title, lambda *data: fit(*data, config, hyper), views)
    name = title.lower()
    try:
        peer = importlib.import_module(f"benchmarks.references.{name}")
        calls[f"{title}, torch"] = getattr(peer, f"{name}_run")(config, hyper, views)
    except ImportError:
        print("torch is not installed: that peer is left out")
    return calls, took


def deep_calls() -> tuple[Calls, dict[str, float]]:
    """Returns MFLVC's calls, on two wide views."""
    views = random_views(FLAGS.deep_rows, [FLAGS.deep_width] * 2)
    return beside_torch("MFLVC", mflvc.fit, deep_config(), mflvc.MFLVCHyperparams(), views)


def contrast_calls() -> tuple[Calls, dict[str, float]]:
    """Returns CoMVC's calls, on many small views."""
    config = simvc.CoMVCConfig(CLUSTERS, epochs=FLAGS.contrast_epochs, n_runs=1)
    views = random_views(FLAGS.contrast_rows, FLAGS.contrast_widths)
    return beside_torch("CoMVC", simvc.fit_comvc, config, simvc.CoMVCHyperparams(), views)


# --- The anchor graph -----------------------------------------------------------------------------


def anchor_fit(passes: int) -> Callable[..., Any]:
    """Returns IMVC-CBG's fit with so many passes."""
    config = imvc_cbg.IMVCCBGConfig(CLUSTERS, FLAGS.anchors_per_cluster, max_iter=passes)
    hyper = imvc_cbg.IMVCCBGHyperparams(tol=0.0)
    return lambda *data: imvc_cbg.fit(*data, config, hyper)


def anchor_data(rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Returns views, and which of them are observed: a third of the rows lack one."""
    views = random_views(rows, FLAGS.anchor_widths)
    observed = np.ones((rows, len(views)), bool)
    lacking = np.arange(0, rows, 3)
    observed[lacking, lacking // 3 % len(views)] = False
    return views, observed


def anchor_calls() -> tuple[Calls, dict[str, float]]:
    """Returns a run of ours and of NumPy in both types, and what they took to compile."""
    views, observed = anchor_data(FLAGS.anchor_rows)
    calls, took = our_calls("IMVC-CBG", anchor_fit(FLAGS.passes), views, observed)
    for dtype in (np.float64, np.float32):
        peer = [view.astype(dtype) for view in views]
        calls[f"IMVC-CBG, NumPy {np.dtype(dtype).name}"] = partial(
            imvc_cbg_labels,
            peer,
            observed,
            CLUSTERS,
            n_anchors=FLAGS.anchors_per_cluster * CLUSTERS,
            max_iter=FLAGS.passes,
            tol=0.0,
        )
    return calls, took


def lmvsc_calls() -> tuple[Calls, dict[str, float]]:
    """Returns a run of ours and of SciPy, and what they took to compile."""
    views = random_views(FLAGS.anchor_rows, FLAGS.anchor_widths)
    config = lmvsc.LMVSCConfig(CLUSTERS, FLAGS.anchors_per_cluster * CLUSTERS)
    hyper = lmvsc.LMVSCHyperparams()
    calls, took = our_calls("LMVSC", lambda *data: lmvsc.fit(*data, config, hyper), views)
    calls["LMVSC, SciPy"] = lambda: lmvsc_labels(
        views,
        CLUSTERS,
        n_anchors=FLAGS.anchors_per_cluster * CLUSTERS,
        alpha=float(hyper.alpha),
        n_init=config.n_init,
    )
    return calls, took


def memory_table() -> list[dict[str, float]]:
    """Returns what XLA plans for a fit of so many samples, in MB; nothing is computed."""
    rows = []
    for n in FLAGS.memory_rows:
        shapes = [jax.ShapeDtypeStruct((n, w), jnp.float32) for w in FLAGS.anchor_widths]
        observed = jax.ShapeDtypeStruct((n, len(shapes)), bool)
        program, _ = compiled(anchor_fit(FLAGS.passes), jax.random.key(0), tuple(shapes), observed)
        stats = program.memory_analysis()
        rows.append(
            {
                "rows": n,
                "views_MB": stats.argument_size_in_bytes / 1e6,
                "temporary_MB": stats.temp_size_in_bytes / 1e6,
                "bytes_a_row": stats.temp_size_in_bytes / n,
                "square_MB": 4 * n * n / 1e6,
            }
        )
    return rows


# --- The program ----------------------------------------------------------------------------------


def main() -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    write = commands.results_to(FLAGS.json)
    print(f"{device()}; {commands.load()}")
    makers = {
        "deep": deep_calls,
        "contrast": contrast_calls,
        "anchor": anchor_calls,
        "lmvsc": lmvsc_calls,
    }
    variants: Calls = {"matmul": machine_peaks()["matmul"]}
    compiling: dict[str, float] = {}
    for part in (part for part in FLAGS.parts if part in makers):
        calls, seconds = makers[part]()
        variants |= calls
        compiling |= seconds
    result: dict[str, Any] = {"compile": compiling}
    if compiling:
        times = take_turns(variants, FLAGS.repeats)
        took_each = {name: statistics.median(found) for name, found in times.items()}
        peak = peak_of(took_each.pop("matmul"))
        print(f"measured peak: matmul {peak / 1e9:.0f} GFLOP/s")
        result |= {"matmul_GFLOPs": peak / 1e9, "seconds": took_each}
        for name, took in took_each.items():
            mine = took_each[f"{name.split(',')[0]}, ours"]
            span = f"({min(times[name]):.2f} to {max(times[name]):.2f})"
            line = f"  {name:26s} {took:8.2f} s a run {span}, {took / mine:5.2f} x ours"
            print(line + (f", compile {compiling[name]:.1f} s" if name in compiling else ""))
    if "deep" in FLAGS.parts:
        need = deep_flops(deep_config(), FLAGS.deep_rows, [FLAGS.deep_width] * 2)
        took = result["seconds"]["MFLVC, ours"]
        print(
            f"MFLVC: {FLAGS.deep_rows} samples, one part in {FLAGS.effort} of the default epochs;"
            f" {need / 1e9:.0f} GFLOP of networks, {need / peak:.1f} s at peak, which no form can"
            f" beat: ours has {need / took / peak:.0%} of it"
        )
    if "memory" in FLAGS.parts:
        print("\nmemory of IMVC-CBG (XLA's account)")
        result["memory"] = memory_table()
        for row in result["memory"]:
            print(
                f"  N = {row['rows']:6.0f}: views {row['views_MB']:6.1f} MB, temporary"
                f" {row['temporary_MB']:6.1f} MB = {row['bytes_a_row']:5.0f} bytes a sample (one"
                f" N x N matrix: {row['square_MB']:.0f} MB)"
            )
    write(result)


if __name__ == "__main__":
    commands.run(main)
