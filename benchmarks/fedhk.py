"""E-FKMVC's speed and memory with many clients: `python -m benchmarks.fedhk`.

Gaussian blobs in several views, dealt evenly to the clients. Every measurement is made in a process
of its own, whose peak memory is then its own; ratios are of one run. Measured are rounds, several
of them in one jitted call, compilation apart; with `--setup` also the exchanges before them, where
clients and server run k-means. The most samples are measured with every `--client_chunk`, fewer of
them with the quickest, in CPU seconds. The peers (`benchmarks.references.fedhk`) make the same
round from the same start: the pseudo-code's loop over samples on a few of the clients, scaled up,
as its time for each sample is the same everywhere; and NumPy on all samples of a client at once.

Memory beside the data is what the compiler reserves for a call, known exactly, and the growth of
the process's peak; on a busy machine CPU seconds say more than wall time.
"""

# This process must stay small, and so the other imports are in the measuring ones: what the parent
# has in memory when it forks counts as its child's peak.
from __future__ import annotations

import json
import statistics
from typing import Any

from absl import app, flags

from benchmarks import commands
from benchmarks.commands import define_list, peak_mb, whole

FLAGS = flags.FLAGS
flags.DEFINE_integer("n_clients", 1000, "Clients, all with all views.", lower_bound=1)
define_list("n", [100_000, 300_000, 1_000_000], "Samples of all clients.", whole(1))
define_list("view_dims", [16, 8, 6, 4, 12, 10], "d_h.", whole(1))
flags.DEFINE_integer("n_clusters", 10, "c, also of the blobs.", lower_bound=2)
define_list("client_chunk", [1, 8, 64, 0], "Clients computed at once; 0: all.", whole(0))
flags.DEFINE_integer("rounds", 3, "Rounds in a call.", lower_bound=1)
flags.DEFINE_integer("repeats", 5, "Calls; their median counts.", lower_bound=1)
flags.DEFINE_bool("setup", False, "Also the setup with the most samples and the quickest chunk.")
flags.DEFINE_bool("peers", True, "Whether to measure the peers too.")
flags.DEFINE_integer("loop_samples", 5000, "Samples of the pseudo-code's loop.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the data and of the run.")
flags.DEFINE_integer("cores", 2, "Cores a measurement may use (Linux); 0: all.", lower_bound=0)
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_string("measure", None, "Internal: the measurement to make, as JSON.")

FUZZIFIER = 1.05
SPREAD = 3.0  # standard deviation of the blobs' centres in a view, over all of its features


# --- One measurement, in a process of its own -----------------------------------------------------


def blobs(case: dict[str, Any]) -> tuple[list[Any], Any]:
    """Draws views [clients, rows, d_h], normal noise around c centres, and their labels."""
    import numpy as np

    rng = np.random.default_rng(case["seed"])
    rows = case["n"] // case["n_clients"]
    labels = rng.integers(case["n_clusters"], size=(case["n_clients"], rows))
    views = []
    for d in case["view_dims"]:
        x = rng.standard_normal((*labels.shape, d), dtype=np.float32)
        centres = rng.normal(scale=SPREAD / d**0.5, size=(case["n_clusters"], d))
        for client, own in zip(x, labels, strict=True):  # one at a time: no copy of all the data
            client += centres[own]
        views.append(x)
    return views, labels


def first_rows(views: list[Any], n: int) -> list[Any]:
    """Returns the first n samples, to start from."""
    return [x.reshape(-1, x.shape[2])[:n].copy() for x in views]


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """Measures rounds of the engine, or its setup."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from sklearn.metrics import adjusted_rand_score

    from benchmarks.machine import compiled, device
    from jaxfedmvc import engine
    from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, e_fkmvc
    from jaxfedmvc.engine.phases import RunState
    from jaxfedmvc.federation import Cohort, Federation

    views, labels = blobs(case)
    rows = first_rows(views, case["n_clusters"])
    cohort = Cohort(
        # One at a time: there are never two copies of all the data.
        views=tuple(jnp.asarray(views.pop(0)) for _ in case["view_dims"]),
        mask=jnp.ones(labels.shape, bool),
        sample_ids=jnp.arange(labels.size).reshape(labels.shape),
        client_ids=jnp.arange(case["n_clients"]),
        view_ids=tuple(range(len(case["view_dims"]))),
    )
    federation = Federation((cohort,), None, tuple(case["view_dims"]), None)
    hyper = FedHKHyperparams(fuzzifier=FUZZIFIER)
    algorithm = e_fkmvc(FedHKConfig(case["n_clusters"]), hyper)
    chunk = case["chunk"] or None
    key = jax.random.key(case["seed"])

    def begin(federation: Federation, key: jax.Array) -> RunState:
        chosen = algorithm if case["setup"] else starting_at(algorithm, rows)
        state = engine.start(chosen, federation, key)
        return engine.setup(chosen, federation, key, state, client_chunk=chunk)[0]

    def rounds(federation: Federation, key: jax.Array, state: RunState) -> tuple[RunState, Any]:
        def body(state: RunState, r: jax.Array) -> tuple[RunState, Any]:
            state, _ = engine.one_round(algorithm, federation, key, state, r, client_chunk=chunk)
            return state, state.server.models.log_objective[0]

        return jax.lax.scan(body, state, jnp.arange(case["rounds"]))

    start, start_compile = compiled(begin, federation, key)
    if case["setup"]:
        # Once, and nothing before it: compilation is apart, and it takes long.
        took = clocked(lambda: jax.block_until_ready(start(federation, key)), 1)
        return {**took, "compile_seconds": start_compile, "peak_MB": peak_mb()}
    state = start(federation, key)
    step, compile_seconds = compiled(rounds, federation, key, state)
    assign, _ = compiled(
        lambda *a: engine.assign(algorithm, *a, client_chunk=chunk)[0], federation, state
    )
    objectives: list[Any] = []

    def call() -> None:
        nonlocal state
        state, history = jax.block_until_ready(step(federation, key, state))
        objectives.extend(history.tolist())

    before = peak_mb()
    took = clocked(call, case["repeats"] + 1)
    grown = peak_mb() - before
    found = np.asarray(assign(federation, state))
    return {
        "seconds": took["seconds"] / case["rounds"],
        "cpu_seconds": took["cpu_seconds"] / case["rounds"],
        "compile_seconds": compile_seconds,
        "temporary_MB": step.memory_analysis().temp_size_in_bytes / 1e6,
        "grown_MB": grown,
        "peak_MB": peak_mb(),
        "log_objective": objectives[case["rounds"] - 1],
        "ari": float(adjusted_rand_score(labels.ravel(), found.ravel())),
        "device": device(),
    }


def starting_at(algorithm: Any, rows: list[Any]) -> Any:
    """Returns the algorithm with these centres in place of the setup's k-means."""
    import dataclasses

    from jaxfedmvc.algorithm import Phase

    def broadcast(state: Any, view_ids: tuple[int, ...]) -> dict[int, Any]:
        return {v: state.scales[v].variance for v in view_ids}

    def client(key: Any, sent: dict[int, Any], state: Any, client: Any) -> tuple:
        scales = {v: state.scales[v]._replace(variance=sent[v]) for v in sent}
        return dataclasses.replace(state, scales=scales), (), {}

    def server(key: Any, state: Any, messages: tuple, weights: tuple) -> tuple:
        fits = {v: (x - state.scales[v].origin[None])[None] for v, x in enumerate(rows)}
        return state._replace(models=state.models._replace(fit=fits)), {}

    means, variances, *_ = algorithm.setup
    return algorithm._replace(setup=(means, variances, Phase(broadcast, client, server)))


def theirs(case: dict[str, Any]) -> dict[str, Any]:
    """Measures rounds of a peer."""
    import math

    import numpy as np

    from benchmarks.references import fedhk as peer

    views, _ = blobs(case)
    centres, n = first_rows(views, case["n_clusters"]), case["n"]
    one_pass = peer.pass_vectorised
    clients = [list(parts) for parts in zip(*views, strict=True)]
    if case["who"] == "loop":
        one_pass = peer.pass_by_sample
        clients = clients[: max(1, case["loop_samples"] // len(clients[0][0]))]
        n = sum(len(parts[0]) for parts in clients)
    delta = peer.bandwidths(clients)
    model = peer.Model(centres, np.full(len(centres), 1 / len(centres)))
    objectives: list[float] = []

    def call() -> None:
        nonlocal model
        model, objective = peer.one_round(clients, delta, model, one_pass, FUZZIFIER, math.inf)
        objectives.append(objective)

    before = peak_mb()
    took = clocked(call, max(case["rounds"], case["repeats"] + 1))
    grown = peak_mb() - before
    scaled = {name: value * case["n"] / n for name, value in took.items()}
    return {
        **scaled,
        "samples": n,
        "grown_MB": grown,
        "peak_MB": peak_mb(),
        **({"log_objective": objectives[case["rounds"] - 1]} if n == case["n"] else {}),
    }


def clocked(call: Any, times: int) -> dict[str, float]:
    """Measures the median wall and CPU seconds of a call; of several the first warms up."""
    took = [commands.timed(call) for _ in range(times)]
    later = took[1:] or took
    return {
        name: statistics.median(getattr(t, name) for t in later)
        for name in ("seconds", "cpu_seconds")
    }


# --- The table ------------------------------------------------------------------------------------


COLUMNS = [
    ("seconds", "seconds", 9, 3),
    ("cpu_seconds", "CPU s", 9, 3),
    ("us", "us/n", 9, 3),
    ("compile_seconds", "compile", 8, 1),
    ("temporary_MB", "temp MB", 9, 1),
    ("grown_MB", "grown", 7, 0),
    ("peak_MB", "peak", 7, 0),
    ("log_objective", "log J", 9, 4),
    ("ari", "ARI", 7, 3),
]


def row(case: dict[str, Any], m: dict[str, Any]) -> str:
    """Returns a line of the table."""
    names = {
        "ours": "setup" if case["setup"] else f"ours, chunk {case['chunk'] or 'all'}",
        "vectorised": "NumPy vectorised",
        "loop": f"NumPy loop on {m.get('samples')}",
    }
    m = {**m, "us": 1e6 * m["seconds"] / case["n"]}
    return f"{case['n']:8d} {names[case['who']]:20s}{commands.cells(m, COLUMNS)}"


def main() -> None:
    """Measures and prints; see the module's docstring."""
    if FLAGS.measure:
        case = json.loads(FLAGS.measure)
        commands.use_cores(case["cores"])
        print(json.dumps(ours(case) if case["who"] == "ours" else theirs(case)))
        return
    # As many samples for each client; at least c in all, to start from.
    sizes = sorted({n // FLAGS.n_clients * FLAGS.n_clients for n in FLAGS.n}, reverse=True)
    if sizes[-1] < FLAGS.n_clusters:
        raise app.UsageError(
            f"--n: got {FLAGS.n}; allowed is one sample for each of the"
            f" {FLAGS.n_clients} clients or more, and c in all"
        )
    write = commands.results_to(FLAGS.json)
    names = "n_clients view_dims n_clusters rounds repeats loop_samples seed cores".split()
    common = {name: getattr(FLAGS, name) for name in names}
    common |= {"setup": False, "chunk": 0}
    results: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def add(who: str, n: int, **more: Any) -> dict[str, Any]:
        case = {**common, "who": who, "n": n, **more}
        found = commands.in_process("fedhk", case)
        if "failed" in found:
            raise SystemExit(f"{who}, {n} samples: {found['failed']}")
        results.append((case, found))
        print(row(*results[-1]), flush=True)
        return results[-1][1]

    data = sizes[0] * sum(common["view_dims"]) * 4 / 1e6
    print(
        f"{FLAGS.n_clients} clients, c = {FLAGS.n_clusters}, views of {common['view_dims']}:"
        f" {data:.0f} MB; {commands.load()},"
        f" {FLAGS.cores or 'all'} of them used"
    )
    print(f"{'n':>8s} {'a round':20s}{commands.titles(COLUMNS)}")
    tried = {c: add("ours", sizes[0], chunk=c) for c in FLAGS.client_chunk}
    quickest = min(tried, key=lambda chunk: tried[chunk]["cpu_seconds"])
    if FLAGS.peers:
        for who in ("vectorised", "loop"):
            peer = add(who, sizes[0])
            ratios = {k: peer[k] / tried[quickest][k] for k in ("seconds", "cpu_seconds")}
            print(
                f"{'':9s}over ours with chunk {quickest or 'all'}: {ratios['seconds']:.2f} in"
                f" time, {ratios['cpu_seconds']:.2f} in CPU time",
                flush=True,
            )
    for n in sizes[1:]:
        add("ours", n, chunk=quickest)
    if FLAGS.setup:
        add("ours", sizes[0], chunk=quickest, setup=True)
    print(f"ours ran on {tried[quickest]['device']}; {commands.load()}")
    write([{**case, **m} for case, m in results])


if __name__ == "__main__":
    commands.run(main)
