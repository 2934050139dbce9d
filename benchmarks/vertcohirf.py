"""VertCoHiRF's speed and memory: `python -m benchmarks.vertcohirf`.

Blobs of 12 features around 5 centres, dealt to 3 agents; `--shuttle` adds the Shuttle data. Ours
and the NumPy reference (`benchmarks.references.vertcohirf`, scikit-learn's clusterers and a matrix
of cosines for each cluster) take turns, each measurement in a process of its own, whose peak memory
is then its own; ratios are of one run. Compilation is apart: what the first call took beyond later
ones. CPU seconds are given beside wall time, as they say more on a busy machine; there scikit-learn
loses much with several threads, and so one core is the default.

The two draw different random numbers, so that k-means gives different clusters in a different
number of iterations; with DBSCAN both find the same ones.
"""

# This process must stay small, and so the other imports are in the measuring ones: what the parent
# has in memory when it forks counts as its child's peak.
from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from absl import flags

from benchmarks import commands
from benchmarks.commands import define_list, peak_mb, timed, whole

FLAGS = flags.FLAGS
define_list("n", [1000, 10_000, 50_000], "Numbers of samples of the blobs.", whole(5))
flags.DEFINE_multi_enum("method", ["kmeans", "dbscan"], ["kmeans", "dbscan"], "Base clusterers.")
define_list("candidates", [0, 2000], "N_s, where there are more samples; 0: all.", whole(0))
flags.DEFINE_bool("reference", True, "Whether to measure the reference too.")
flags.DEFINE_bool("n_million", False, "Also 10^6 blobs with k-means, ours only.")
flags.DEFINE_bool("shuttle", False, "Also the 58 000 samples of Shuttle, standardised.")
flags.DEFINE_string("data_dir", None, "Where shuttle.npz is; see jaxfedmvc.data.load.")
flags.DEFINE_integer("seed", 0, "Of the data, of its split, and of the runs.")
flags.DEFINE_integer("turns", 1, "Measurements of each; the quickest counts.", lower_bound=1)
flags.DEFINE_integer(
    "cores", 1, "Cores a measurement may use (Linux); 0: all, if idle.", lower_bound=0
)
flags.DEFINE_float("reference_gb", 12.0, "Address space that the reference may take.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_string("measure", None, "Internal: the measurement to make, as JSON.")

AGENTS = 3
CLUSTERS, REPETITIONS, SHARE = 5, 5, 0.6  # of k-means
EPS, MIN_SAMPLES = 1.5, 5  # of DBSCAN
MAX_ITER = 100
SHORT = 5.0  # seconds; what takes less is repeated
REPEATS = 3


# --- One measurement, in a process of its own -----------------------------------------------------


def load(case: dict[str, Any]) -> tuple[list[Any], Any]:
    """Returns an array [n, p_a] for each agent, features dealt at random, and the labels."""
    import numpy as np
    from sklearn.datasets import make_blobs

    if case["data"] == "shuttle":
        from jaxfedmvc import data

        dataset = data.load("shuttle", case["data_dir"], scale="standard")
        x, labels = dataset.views[0], dataset.labels
    else:
        x, labels = make_blobs(case["n"], n_features=12, centers=5, random_state=case["seed"])
    features = np.random.default_rng(case["seed"]).permutation(x.shape[1])
    return [x[:, part].astype(np.float32) for part in np.array_split(features, AGENTS)], labels


def ours(case: dict[str, Any], views: list[Any]) -> Callable[[], dict[str, Any]]:
    """Returns a run of the compacting engine."""
    import jax
    import numpy as np

    from jaxfedmvc import engine
    from jaxfedmvc.algorithms.vertcohirf import (
        VertCoHiRFConfig,
        VertCoHiRFHyperparams,
        vertcohirf,
    )
    from jaxfedmvc.federation import Federation

    is_kmeans = case["method"] == "kmeans"
    repetitions = REPETITIONS if is_kmeans else 1
    config = VertCoHiRFConfig(CLUSTERS, base=(case["method"],), repetitions=repetitions)
    hyperparams = VertCoHiRFHyperparams(
        feature_share=SHARE if is_kmeans else 1.0,
        n_candidates=case["candidates"] or None,
        eps=EPS,
        min_samples=MIN_SAMPLES,
    )
    make = partial(vertcohirf, config)
    ids = np.arange(len(views[0]))
    federation = Federation.from_agents([(ids, view) for view in views])
    key = jax.random.key(case["seed"])

    def run() -> dict[str, Any]:
        result = engine.run_compacting(make, federation, key, MAX_ITER, hyperparams=hyperparams)
        return {"labels": np.asarray(result.labels[0][0]), "n_iter": int(result.n_rounds)}

    return run


def theirs(case: dict[str, Any], views: list[Any]) -> Callable[[], dict[str, Any]]:
    """Returns a run of the reference."""
    from benchmarks.references import vertcohirf as peer

    if case["method"] == "kmeans":
        step = peer.kmeans_step(CLUSTERS, REPETITIONS, SHARE, case["seed"])
    else:
        step = peer.dbscan_step(EPS, MIN_SAMPLES)
    listed = peer.random_candidates(case["candidates"], case["seed"])

    def run() -> dict[str, Any]:
        chosen = listed if case["candidates"] else None
        result = peer.reference(views, step, candidates=chosen, max_iter=MAX_ITER)
        return {"labels": result.labels, "n_iter": result.n_iter, "parts": result.seconds}

    return run


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measures seconds, memory and result of one case."""
    commands.use_cores(case["cores"])
    import numpy as np
    from sklearn.metrics import adjusted_rand_score

    views, labels = load(case)
    is_ours = case["who"] == "ours"
    run = (ours if is_ours else theirs)(case, views)
    before = peak_mb()
    if not is_ours:
        limit = int(case["reference_gb"] * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    try:
        runs = [timed(run)]
        if is_ours or runs[0].seconds < SHORT:
            runs.append(timed(run))
            runs += [timed(run) for _ in range(REPEATS - 1) if runs[1].seconds < SHORT]
    except MemoryError:
        return {"failed": f"needs more than {case['reference_gb']:g} GB"}
    later = runs[1:] or runs
    wall = statistics.median(t.seconds for t in later)
    result = runs[-1].result
    measured = {
        "seconds": wall,
        "cpu_seconds": statistics.median(t.cpu_seconds for t in later),
        "compile_seconds": runs[0].seconds - wall if is_ours else 0.0,
        "peak_MB": peak_mb(),
        "before_MB": before,
        "ari": float(adjusted_rand_score(labels, result["labels"])),
        "clusters": len(np.unique(result["labels"])),
        "n_iter": result["n_iter"],
        "parts": result.get("parts", {}),
    }
    if is_ours:
        import jax

        from benchmarks.machine import device

        measured["device"] = device()
        on_device = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in on_device:
            measured["device_MB"] = on_device["peak_bytes_in_use"] / 1e6
    return measured


# --- The table ------------------------------------------------------------------------------------


def cases() -> list[dict[str, Any]]:
    """Returns the measurements that the flags ask for."""
    common = {
        "seed": FLAGS.seed,
        "cores": FLAGS.cores,
        "data_dir": FLAGS.data_dir,
        "reference_gb": FLAGS.reference_gb,
    }
    data = [("blobs", n) for n in FLAGS.n] + [("shuttle", 58_000)] * FLAGS.shuttle
    out = [
        {"data": name, "n": n, "method": method, "candidates": listed, **common}
        for name, n in data
        for method in FLAGS.method
        for listed in FLAGS.candidates
        if listed < n
    ]
    if FLAGS.n_million:
        out.append({"data": "blobs", "n": 10**6, "method": "kmeans", "candidates": 0, **common})
    return out


COLUMNS = [
    ("seconds", "seconds", 9, 2),
    ("cpu_seconds", "CPU s", 9, 2),
    ("compile_seconds", "compile", 9, 2),
    ("peak_MB", "peak MB", 8, 0),
    ("before_MB", "before", 8, 0),
    ("ari", "ARI", 7, 3),
    ("clusters", "found", 7, 0),
    ("n_iter", "rounds", 7, 0),
]


def row(case: dict[str, Any], who: str, m: dict[str, Any]) -> str:
    """Returns a line of the table."""
    listed = case["candidates"] or "all"
    name = f"{case['data']} {case['n']:8d} {case['method']:7s} N_s {listed!s:5s} {who:9s}"
    if "failed" in m:
        return f"{name}  {m['failed']}"
    parts = ", ".join(f"{part} {took:.2f}" for part, took in m["parts"].items())
    if "device_MB" in m:
        parts = f"on the device {m['device_MB']:.0f} MB"
    return f"{name}{commands.cells(m, COLUMNS)}   {parts}"


def main() -> None:
    """Measures and prints; see the module's docstring."""
    if FLAGS.measure:
        print(json.dumps(measure(json.loads(FLAGS.measure))))
        return
    write = commands.results_to(FLAGS.json)
    machine = commands.processor(FLAGS.cores or "all")
    print(f"{machine}; {commands.load()}")
    print(f"{'':42s}{commands.titles(COLUMNS)}")
    results, device = [], None
    for case in cases():
        sides = ["ours", "reference"] if FLAGS.reference and case["n"] < 10**6 else ["ours"]
        best: dict[str, dict[str, Any]] = {}
        for _turn in range(FLAGS.turns):
            for who in sides:
                m = commands.in_process("vertcohirf", {**case, "who": who})
                if who not in best or m.get("seconds", 0.0) < best[who].get("seconds", 0.0):
                    best[who] = m
        for who, m in best.items():
            print(row(case, who, m), flush=True)
            device = m.get("device", device)
        if len(best) == 2 and all("seconds" in m for m in best.values()):
            mine, peer = best["ours"], best["reference"]
            ratios = {
                name: peer[name] / mine[name] for name in ("seconds", "cpu_seconds", "peak_MB")
            }
            print(
                f"{'':33s}reference / ours: {ratios['seconds']:.2f} in time,"
                f" {ratios['cpu_seconds']:.2f} in CPU time, {ratios['peak_MB']:.2f} in memory",
                flush=True,
            )
            best["ratio"] = ratios
        results.append({**case, **best})
    print(f"ours ran on {device}; {commands.load()}")
    write({"machine": machine, "device": device, "cases": results})


if __name__ == "__main__":
    commands.run(main)
