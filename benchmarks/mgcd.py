"""MGCD's speed and memory: `python -m benchmarks.mgcd`.

First, a federation's run against the number of samples, graphs as N x N arrays ("dense") beside
graphs as factors. Two views of 784 features, ten planted clusters in twenty dimensions. Every point
is measured in a process of its own. Compilation is apart: programs are compiled before the clock
and before the memory's baseline. "Grown" is by how much the run's
peak of resident memory exceeds that; beside it stand what the compiler reserves for a round (its
result and temporaries) and what `predicted_bytes` says. Times are medians of several calls, unless
one takes long; "clients" and "cluster" are parts of a round, measured again by themselves: what
both clients do, and one call of `clusters` on the graphs of the plain average, of which a trained
server makes a second one on its own graphs. The clusters are easy: ACC shows that all went well.

Then, views of different width under `vmap`: eq. (1) of six clients with the widths of Mfeat's
views, (i) padded to the widest and vmapped as one stack, or (ii) grouped by width, one group after
the other in one program. Padding costs FLOPs only in the first and the last layer, which are small
beside the hidden ones. What decides is how the products run, and so the rate is printed: on a CPU,
XLA is slower with one batched product of six clients than with six plain products of the paper's
widths. Losses differ by rounding; single parameters may by as much as Adam's steps, as it scales
up a gradient of the size of rounding too.
"""

# This process must stay small, and so the other imports are in the measuring ones.
from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import commands
from benchmarks.commands import define_list, memory_mb, one_of, whole

FLAGS = flags.FLAGS
TRANSPORTS, SERVERS = ("dense", "factored"), ("average", "trained")
SIZES, MFEAT = [1000, 2000, 5000, 10_000], [216, 76, 64, 6, 240, 47]
define_list("sizes", SIZES, "N; 20000 and 50000 take minutes.", whole(10))
define_list("view_dims", [784, 784], "Of the views in part one.", whole(1))
define_list("transports", TRANSPORTS, "How graphs are held and sent.", one_of(TRANSPORTS))
define_list("servers", SERVERS, "Servers; a trained one for one epoch.", one_of(SERVERS))
define_list("widths", MFEAT, "Of the views in part two.", whole(1))
define_list("hidden", [500, 500, 2000], "Hidden layers in part two.", whole(1))
flags.DEFINE_integer("width_samples", 2000, "Samples in part two; 0 leaves it out.", lower_bound=0)
flags.DEFINE_bool("quick", False, "Small sizes, to see that all of it works.")
flags.DEFINE_float("limit_gb", None, "Predicted to need more: refused. None: what is available.")
flags.DEFINE_integer("seed", 0, "Of the data and of the runs.")
flags.DEFINE_integer("cores", 2, "Cores a measurement may use (Linux); 0: all.", lower_bound=0)
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_string("measure", None, "Internal: the measurement to make, as JSON.")

CLUSTERS, RANK, SPREAD, NOISE = 10, 20, 1.2, 0.1  # of the data
SHORT, REPEATS = 10.0, 3  # seconds; what takes less is repeated


# --- Shared by the measurements -------------------------------------------------------------------


def blobs(seed: int, n: int, widths: Sequence[int]) -> tuple[list[Any], Any]:
    """Draws views [n, d_v] of clusters in `RANK` dimensions, a little noise on top; labels [n]."""
    import numpy as np

    rng = np.random.default_rng(seed)

    normal: Callable[..., Any] = partial(rng.standard_normal, dtype=np.float32)
    labels = rng.integers(CLUSTERS, size=n)
    views = []
    for d in widths:
        low = normal((n, RANK))
        low += np.float32(SPREAD) * normal((CLUSTERS, RANK))[labels]
        view = normal((n, d))
        view *= np.float32(NOISE)
        view += low @ normal((RANK, d))
        views.append(view)
    return views, labels


def median_seconds(call: Callable[[], Any]) -> float:
    """Times several calls, or one if it takes long; the median, without the first to warm up."""
    from benchmarks.machine import seconds

    took: list[float] = []
    while not took or (took[0] < SHORT and len(took) <= REPEATS):
        took.append(seconds(call))
    return statistics.median(took[1:] or took)


def available_gb() -> float:
    """Returns the memory that the machine can give now; Linux only."""
    return memory_mb("MemAvailable", "meminfo") / 1e3


# --- Part one: a run ------------------------------------------------------------------------------


def measure_run(case: dict[str, Any]) -> dict[str, Any]:
    """Measures seconds, memory, bytes and accuracy of one point."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.machine import compiled, device
    from jaxfedmvc import engine
    from jaxfedmvc.algorithms.mgcd import MGCDConfig, graph, mgcd
    from jaxfedmvc.algorithms.mgcd.affinity import clusters
    from jaxfedmvc.algorithms.mgcd.sizes import predicted_bytes
    from jaxfedmvc.federation import Federation
    from jaxfedmvc.metrics import host

    config = MGCDConfig(
        CLUSTERS,
        server=case["server"],
        server_epochs=1,
        dense=case["transport"] == "dense",
        memory_limit=case["limit_gb"],
    ).resolved()
    predicted = predicted_bytes(config, case["n"], case["view_dims"])
    if predicted > config.memory_limit * 1e9:
        return {"refused_GB": predicted / 1e9, "limit_GB": config.memory_limit}
    views, labels = blobs(case["seed"], case["n"], case["view_dims"])
    federation = Federation.from_agents([(np.arange(case["n"]), view) for view in views])
    del views
    algorithm, key = mgcd(config), jax.random.key(case["seed"])
    phase = algorithm.round[0]

    def assigned(federation: Any, key: Any, state: Any, r: Any) -> Any:
        state, _ = engine.finish(algorithm, federation, key, state, r)
        return engine.assign(algorithm, federation, state)[0][0]

    def clients(federation: Any, key: Any, state: Any) -> list[Any]:
        """Returns what both clients send, and their losses."""
        sent = phase.broadcast(state.server, ())
        first = jax.tree.map(lambda x: x[0], (state.clients, federation.cohorts))
        return [phase.client(key, sent, *of)[1:] for of in zip(*first, strict=True)]

    def clustering(uploads: list[Any], key: Any, server: Any) -> Any:
        old = server.graph
        average = graph.total([old, graph.scaled(graph.total(uploads), 1 / len(uploads))])
        each = [graph.total([old, upload]) for upload in uploads]
        return clusters(key, each, average, server.where, config).labels

    start, setup = partial(engine.start, algorithm), partial(engine.setup, algorithm)
    one_round = partial(engine.one_round, algorithm)
    r = jnp.int32(0)
    shapes = jax.eval_shape(start, federation, key)
    starting, start_compile = compiled(start, federation, key)
    preparing, setup_compile = compiled(setup, federation, key, shapes)
    a_round, round_compile = compiled(one_round, federation, key, shapes, r, donate_argnums=2)
    assigning, assign_compile = compiled(assigned, federation, key, shapes, r)

    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is there
    state = jax.block_until_ready(starting(federation, key))
    setup_seconds = median_seconds(lambda: preparing(federation, key, state))
    state = preparing(federation, key, state)[0]

    def call() -> Any:
        nonlocal state, r
        state, r = a_round(federation, key, state, r)[0], r + 1
        return state

    round_seconds = median_seconds(call)
    found = np.asarray(assigning(federation, key, state, r))
    peak = memory_mb("VmHWM")

    everyone = np.ones((1, case["n"]), bool)
    (table,) = host.client_tables(labels[None], found[None], everyone, (CLUSTERS, CLUSTERS))
    account = a_round.memory_analysis()
    # The state is donated: its result lies where the argument was.
    reserved = account.temp_size_in_bytes + account.output_size_in_bytes
    sending, _ = compiled(clients, federation, key, state)
    clients_seconds = median_seconds(lambda: sending(federation, key, state))
    uploads = [message for message, _ in sending(federation, key, state)]
    cutting, _ = compiled(clustering, uploads, key, state.server)
    clustering_seconds = median_seconds(lambda: cutting(uploads, key, state.server))
    traffic = engine.traffic(algorithm, federation)["round"]
    up, down = (total / len(federation.cohorts) / 1e6 for total in (traffic.up, traffic.down))
    return {
        "setup_seconds": setup_seconds,
        "round_seconds": round_seconds,
        "clients_seconds": clients_seconds,
        "clustering_seconds": clustering_seconds,
        "compile_seconds": start_compile + setup_compile + round_compile + assign_compile,
        "peak_MB": peak,
        "grown_MB": peak - before,
        "reserved_MB": reserved / 1e6,
        "predicted_MB": predicted / 1e6,
        "up_MB": up,
        "down_MB": down,
        "rounds": int(r),
        "acc": host.table_scores(table)["acc"],
        "device": device(),
    }


# --- Part two: views of different width -----------------------------------------------------------


def padded(tree: Any, shapes: Any) -> Any:
    """Adds zeros at the end of every array's axes, up to the shapes of another tree.

    A parameter that starts at zero, and whose input or target is zero, has no gradient: it stays
    zero, and the others learn as they would without it.
    """
    import jax
    import jax.numpy as jnp

    def pad(x: Any, wanted: Any) -> Any:
        return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, wanted.shape, strict=True)])

    return jax.tree.map(pad, tree, shapes)


def measure_widths(case: dict[str, Any]) -> dict[str, Any]:
    """Measures seconds an epoch, compilation, FLOPs and results of both ways, which take turns."""
    import jax
    import jax.numpy as jnp

    from benchmarks.machine import compiled, take_turns
    from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams
    from jaxfedmvc.algorithms.mgcd.client import pretrain
    from jaxfedmvc.algorithms.mgcd.model import init_autoencoder

    hidden = tuple(case["hidden"])
    config = MGCDConfig(CLUSTERS, encoder="deep", hidden=hidden, pretrain_epochs=1).resolved()
    widths, widest = case["widths"], max(case["widths"])
    views = [jnp.asarray(view) for view in blobs(case["seed"], case["n"], widths)[0]]
    key = jax.random.key(case["seed"])
    keys = jax.random.split(key, len(views))
    params = [init_autoencoder(k, config, d) for k, d in zip(keys, widths, strict=True)]
    groups = [[v for v, d in enumerate(widths) if d == one] for one in dict.fromkeys(widths)]

    def stack(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def train(key: Any, params: Any, x: Any) -> Any:
        return pretrain(key, params, x, jnp.ones(len(x), bool), config, MGCDHyperparams())

    def one_stack(*stacked: Any) -> Any:
        if len(stacked[-1]) > 1:
            return jax.vmap(train)(*stacked)
        # A batch of one is none, as in the engine.
        alone = train(*jax.tree.map(lambda x: x[0], stacked))
        return jax.tree.map(lambda x: x[None], alone)

    def one_by_one(keys: Any, params: Any, xs: Any) -> list[Any]:
        return [one_stack(*group) for group in zip(keys, params, xs, strict=True)]

    wide = jax.eval_shape(lambda: init_autoencoder(key, config, widest))
    shape = jax.ShapeDtypeStruct((case["n"], widest), jnp.float32)
    inputs: dict[str, tuple[Any, ...]] = {
        "padded": (
            keys,
            stack([padded(p, wide) for p in params]),
            stack([padded(x, shape) for x in views]),
        ),
        "grouped": tuple(
            [stack([of[v] for v in places]) for places in groups] for of in (keys, params, views)
        ),
    }
    functions = {"padded": one_stack, "grouped": one_by_one}
    out: dict[str, dict[str, Any]] = {name: {} for name in functions}
    programs, results = dict[str, Any](), dict[str, Any]()
    for name, function in functions.items():
        # A loop's body is counted once: with one batch that is all of an epoch.
        keys_, params_, x = inputs[name]
        batch = jax.tree.map(lambda x: x[:, : config.batch_size], x)
        cost: Any = jax.jit(function).lower(keys_, params_, batch).cost_analysis()
        out[name]["flops"] = cost["flops"] * case["n"] / min(config.batch_size, case["n"])
        programs[name], out[name]["compile_seconds"] = compiled(function, *inputs[name])
        results[name] = programs[name](*inputs[name])
    calls = {name: partial(program, *inputs[name]) for name, program in programs.items()}
    for name, took in take_turns(calls, REPEATS, in_a_turn=1).items():
        out[name]["seconds"] = statistics.median(took)

    alone: dict[int, Any] = {}
    for places, group in zip(groups, results["grouped"], strict=True):
        for i, v in enumerate(places):
            trained, loss = jax.tree.map(lambda x, i=i: x[i], group)
            alone[v] = padded(trained, wide), loss
    mine, theirs = stack([alone[v] for v in range(len(views))]), results["padded"]
    off = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), mine[0], theirs[0])
    of_loss = float(jnp.max(jnp.abs(theirs[1] / mine[1] - 1)))
    return {**out, "max_difference": max(jax.tree.leaves(off)), "loss_difference": of_loss}


# --- The tables -----------------------------------------------------------------------------------


COLUMNS = [
    ("setup_seconds", "setup s", 8, 2),
    ("round_seconds", "round s", 8, 2),
    ("clients_seconds", "clients", 8, 2),
    ("clustering_seconds", "cluster", 8, 2),
    ("compile_seconds", "compile", 8, 1),
    ("peak_MB", "peak MB", 8, 0),
    ("grown_MB", "grown", 7, 0),
    ("reserved_MB", "XLA", 7, 0),
    ("predicted_MB", "predict", 8, 0),
    ("up_MB", "up MB", 9, 2),
    ("down_MB", "down MB", 9, 2),
    ("acc", "ACC", 6, 3),
]


def row(case: dict[str, Any], m: dict[str, Any]) -> str:
    """Returns a line of the first table."""
    name = f"{case['n']:6d} {case['transport']:8s} {case['server']:8s}"
    if "refused_GB" in m:
        return f"{name}  refused: {m['refused_GB']:.1f} GB predicted, of {m['limit_GB']:.1f} GB"
    if "failed" in m:
        return f"{name}  {m['failed']}"
    return name + commands.cells(m, COLUMNS)


def runs(common: Any, sizes: Sequence[int], servers: Sequence[str]) -> list[dict[str, Any]]:
    """Measures and prints part one."""
    print(f"\na run, views of {common['view_dims']}\n{'':24s}{commands.titles(COLUMNS)}")
    results: list[dict[str, Any]] = []
    for n, server in itertools.product(sizes, servers):
        of: dict[str, dict[str, Any]] = {}
        for transport in FLAGS.transports:
            limit = FLAGS.limit_gb or available_gb()
            case = {**common, "n": n, "server": server, "transport": transport}
            of[transport] = commands.in_process("mgcd", {**case, "kind": "run", "limit_gb": limit})
            print(row(case, of[transport]), flush=True)
            results.append({**case, **of[transport]})
        if len(of) == 2 and all("round_seconds" in m for m in of.values()):
            keys = ("round_seconds", "grown_MB", "up_MB")
            time_, memory, upload = (of["dense"][k] / of["factored"][k] for k in keys)
            print(
                f"{'':24s}dense / factored: {time_:.2f} in a round's time, {memory:.2f} in"
                f" memory, {upload:.1f} in an upload",
                flush=True,
            )
    return results


def widths(case: dict[str, Any]) -> dict[str, Any]:
    """Measures and prints part two."""
    print(
        f"\neq. (1), {case['n']} samples, views of {case['widths']}, hidden layers"
        f" {case['hidden']}, one epoch"
    )
    m = commands.in_process("mgcd", {**case, "kind": "widths"})
    if "failed" in m:
        print(m["failed"])
        return m
    a, b = m["padded"], m["grouped"]
    for name, of in (("padded", a), ("grouped", b)):
        print(
            f"{name:8s} {of['seconds']:8.3f} s, compile {of['compile_seconds']:5.1f} s,"
            f" {of['flops'] / 1e9:8.2f} GFLOP,"
            f" {of['flops'] / of['seconds'] / 1e9:6.1f} GFLOP/s"
        )
    more, slower = a["flops"] / b["flops"], a["seconds"] / b["seconds"]
    print(
        f"padded / grouped: {slower:.2f} in time = {more:.2f} in FLOPs x {slower / more:.2f} in"
        f" time for a FLOP; {a['compile_seconds'] / b['compile_seconds']:.2f} in compilation\n"
        f"largest difference: {m['max_difference']:.1e} of a parameter,"
        f" {m['loss_difference']:.1e} of a loss, relative"
    )
    return m


def main() -> None:
    """Measures and prints; see the module's docstring."""
    if FLAGS.measure:
        case = json.loads(FLAGS.measure)
        commands.use_cores(case["cores"])
        print(json.dumps(measure_run(case) if case["kind"] == "run" else measure_widths(case)))
        return
    write = commands.results_to(FLAGS.json)
    common = {"seed": FLAGS.seed, "cores": FLAGS.cores}
    sizes, servers, view_dims = FLAGS.sizes, FLAGS.servers, FLAGS.view_dims
    n, of_widths, hidden = FLAGS.width_samples, FLAGS.widths, FLAGS.hidden
    if FLAGS.quick:
        sizes, servers, view_dims = [400], ["trained"], [64, 64]
        n, of_widths, hidden = min(n, 512), of_widths[:2], [32, 32, 64]
    print(
        f"{commands.load()}, {FLAGS.cores or 'all'} of them used; {available_gb():.1f} GB available"
    )
    results: dict[str, Any] = {"runs": runs({**common, "view_dims": view_dims}, sizes, servers)}
    if n:
        results["widths"] = widths({**common, "n": n, "widths": of_widths, "hidden": hidden})
    devices = [m["device"] for m in results["runs"] if "device" in m]
    print(f"\nran on {devices[0] if devices else 'no device'}; {commands.load()}")
    write(results)


if __name__ == "__main__":
    commands.run(main)
