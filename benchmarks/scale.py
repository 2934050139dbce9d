"""Many clients on one machine: `python -m benchmarks.scale`.

Simulates federations of growing size whose data stays on the host, mapped from .npy files that are
written once, with `streaming.run_streaming`: a tiny FMCSC and, as the cheap method, E-FKMVC; 1 % of
the clients in a round, drawn anew every round, or all. Half of the clients hold both views, half
one; in FMCSC the latter keep a model of their own. Every size of every method is a fresh process,
in which 1 % comes first. Columns:

    part         clients that take part in a round
    first s      from the start to the end of the first round: initial states, set-up, and the
                 compilation of what no earlier process has compiled
    round s      median of the further rounds; "us/client" is that by participating client, which is
                 flat once there are enough of them to fill a chunk (`--chunk`)
    on device s  the same round of `engine.one_round`, where data and states lie on the device
    open         share of a streamed round that is more than that: gathering on the host, transfer
                 and dispatch that are not hidden behind the computation
    states MB    client states on the host; "data MB" is what the files hold
    grown MB     peak of resident memory beyond what the process had before the data was opened,
                 less the pages of files that were mapped in meanwhile and may be dropped
    anon MB      memory that is no file's, at the end, beyond what there was before; of both, what
                 the smallest size has too is the compiler's
    chunks MB    what lies on the device at once at most: two chunks' data and states

In the end stands what ten million clients would take, by the largest size's numbers.
"""

# This process must stay small, and so the other imports are in the measuring ones.
from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import commands
from benchmarks.commands import define_list, memory_mb, one_of, peak_mb, whole

FLAGS = flags.FLAGS
METHODS = ("fmcsc", "e_fkmvc")
define_list("clients", [100, 1000, 10_000, 100_000], "Numbers of clients.", whole(2))
define_list("methods", METHODS, "Of these two.", one_of(METHODS))
SHARE = flags.FloatParser(lower_bound=0, upper_bound=1)
define_list("shares", [0.01, 1.0], "Shares of clients that take part in a round.", SHARE)
flags.DEFINE_integer("rounds", 3, "Rounds that are timed, after one that is not.", lower_bound=1)
flags.DEFINE_integer("chunk", 250, "Clients that are computed at once.", lower_bound=1)
flags.DEFINE_bool("compare", True, "Whether to time rounds with all data on the device too.")
flags.DEFINE_string("folder", None, "Where the data is written and kept; None: a temporary one.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_string("measure", None, "Internal: the measurement to make, as JSON.")

ROWS, DIMS, CLUSTERS = 16, (8, 6), 3
GOAL = 10**7  # clients of the estimate
MANY = 50_000  # participants, from which on rounds are few


# --- The data -------------------------------------------------------------------------------------


def write(folder: Path, n: int) -> None:
    """The cohorts of `n` clients as .npy files, a block of clients at a time."""
    import numpy as np

    rng = np.random.default_rng(0)
    centres = [2 * rng.standard_normal((CLUSTERS, d)) for d in DIMS]
    for c, (first, n_clients, views) in enumerate(cohorts_of(n)):
        where = folder / f"cohort{c}"
        where.mkdir(parents=True)
        shape = (n_clients, ROWS)
        np.save(where / "mask.npy", np.ones(shape, bool))
        ids = np.arange(first, first + n_clients, dtype=np.int32)
        np.save(where / "client_ids.npy", ids)
        np.save(where / "sample_ids.npy", ids[:, None] * ROWS + np.arange(ROWS, dtype=np.int32))
        files = [
            np.lib.format.open_memmap(
                where / f"view{v}.npy", mode="w+", dtype=np.float32, shape=(*shape, DIMS[v])
            )
            for v in views
        ]
        for start in range(0, n_clients, 4096):
            labels = rng.integers(CLUSTERS, size=(min(4096, n_clients - start), ROWS))
            for v, file in zip(views, files, strict=True):
                noise = rng.standard_normal((*labels.shape, DIMS[v]), np.float32)
                file[start : start + 4096] = centres[v][labels] + noise


def cohorts_of(n: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """First client id, number of clients and views of both cohorts."""
    return [(0, n // 2, (0, 1)), (n // 2, n - n // 2, (1,))]


def mapped(folder: Path, n: int) -> Any:
    """The federation, mapped from the files."""
    from jaxfedmvc.engine.streaming import open_mapped
    from jaxfedmvc.federation import Cohort, Federation

    cohorts = []
    for c, (_, _, views) in enumerate(cohorts_of(n)):
        found = open_mapped(folder / f"cohort{c}")
        features: Any = tuple(found[f"view{v}"] for v in views)
        rows: Any = {name: found[name] for name in ("mask", "sample_ids", "client_ids")}
        cohorts.append(Cohort(features, view_ids=views, **rows))
    return Federation(tuple(cohorts), None, view_dims=DIMS, n_classes=None)


# --- A measurement --------------------------------------------------------------------------------


def method(name: str) -> Any:
    """A small instance, without the exchanges after the rounds, and with no end of its own."""
    from jaxfedmvc.algorithms import FedHKConfig, FMCSCConfig, e_fkmvc, fmcsc

    config = FMCSCConfig(
        CLUSTERS,
        hidden=(16,),
        latent_dim=4,
        head_hidden=8,
        pretrain_epochs=1,
        local_epochs=2,
        distill_epochs=2,
        batch_size=ROWS,
    )
    algorithm = fmcsc(config) if name == "fmcsc" else e_fkmvc(FedHKConfig(CLUSTERS, n_restarts=1))
    return algorithm._replace(finish=(), done=None)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """All shares of one size of one method."""
    import jax
    import jax.numpy as jnp

    from benchmarks.machine import device
    from jaxfedmvc.engine.streaming import run_streaming
    from jaxfedmvc.messages import nbytes

    key, n, chunk = jax.random.key(0), case["n"], case["chunk"]
    jax.block_until_ready(jnp.zeros(1))  # the device is up
    names = ("VmRSS", "RssAnon", "RssFile")
    before = {name: memory_mb(name) for name in names}
    host = mapped(Path(case["folder"]), n)
    algorithm, results, drawn = method(case["method"]), list[dict[str, Any]](), list[Any]()
    for share in case["shares"]:
        part = sum(max(1, round(share * cohort.n_clients)) for cohort in host.cohorts)
        rounds = 1 + (min(2, case["rounds"]) if part > MANY else case["rounds"])
        times = [time.perf_counter()]
        state = run_streaming(
            algorithm,
            host,
            key,
            rounds,
            client_chunk=chunk,
            participation=share,
            resample_participants=share < 1,
            assign=False,
            on_round=lambda *_, times=times: times.append(time.perf_counter()),
        ).state
        drawn.append(state.participants)
        took = [end - begin for begin, end in itertools.pairwise(times)]
        seconds = statistics.median(took[1:])
        after = {name: memory_mb(name) for name in names}
        peak, file_pages = peak_mb(), after["RssFile"] - before["RssFile"]
        of_a_chunk = max(
            chunk * (nbytes(cohort) + nbytes(states)) / cohort.n_clients
            for cohort, states in zip(host.cohorts, state.clients, strict=True)
        )
        results.append(
            {
                "n": n,
                "method": case["method"],
                "share": share,
                "participating": part,
                "rounds": rounds,
                "first_seconds": took[0],
                "round_seconds": seconds,
                "client_us": seconds / part * 1e6,
                "data_MB": nbytes(host) / 1e6,
                "states_MB": nbytes(state.clients) / 1e6,
                "chunks_MB": 2 * of_a_chunk / 1e6,
                "peak_MB": peak,
                "grown_MB": peak - before["VmRSS"] - file_pages,
                "anon_MB": after["RssAnon"] - before["RssAnon"],
                "device": device(),
            }
        )
    if case["compare"]:  # last, since it needs the memory that was measured
        for m, participants in zip(results, drawn, strict=True):
            # As many as this share's: with others' state a second call would compile again.
            begin = state._replace(participants=participants)
            resample = m["share"] if m["share"] < 1 else None
            m["device_seconds"] = on_device(
                algorithm, host, key, begin, m["rounds"], resample=resample, client_chunk=chunk
            )
            m["open"] = 1 - m["device_seconds"] / m["round_seconds"]
    return results


def on_device(
    algorithm: Any, host: Any, key: Any, state: Any, rounds: int, **options: Any
) -> float:
    """Median seconds of a round whose data and states lie on the device; the first warms up."""
    import jax
    import jax.numpy as jnp

    from benchmarks.machine import median_seconds
    from jaxfedmvc import engine

    # The state is donated round by round, and other shares start from it too: copied.
    federation, state = jax.tree.map(jnp.asarray, host), jax.tree.map(jnp.array, state)
    one_round = jax.jit(
        lambda f, s, r: engine.one_round(algorithm, f, key, s, r, **options)[0], donate_argnums=1
    )
    counted = itertools.count()

    def call() -> Any:
        nonlocal state
        state = one_round(federation, state, next(counted))
        return state

    return median_seconds(call, rounds - 1)


# --- The tables -----------------------------------------------------------------------------------


COLUMNS = [
    ("participating", "part", 8, 0),
    ("first_seconds", "first s", 9, 1),
    ("round_seconds", "round s", 9, 3),
    ("client_us", "us/client", 11, 0),
    ("device_seconds", "on device s", 13, 3),
    ("open", "open", 7, 2),
    ("data_MB", "data MB", 9, 1),
    ("states_MB", "states MB", 11, 1),
    ("chunks_MB", "chunks MB", 11, 1),
    ("peak_MB", "peak MB", 9, 0),
    ("grown_MB", "grown MB", 10, 0),
    ("anon_MB", "anon MB", 9, 0),
]


def row(m: dict[str, Any]) -> str:
    """A line of the table."""
    return f"{m['method']:8s}{m['n']:9d}{commands.cells(m, COLUMNS)}"


def estimate(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What `GOAL` clients would take at the least share, by the rows of the most clients."""
    largest = max(rows, key=lambda m: (m["n"], -m["share"]))
    scale = GOAL / largest["n"]
    found = {
        "data_GB": largest["data_MB"] * scale / 1e3,
        "states_GB": largest["states_MB"] * scale / 1e3,
        "share": largest["share"],
        "round_seconds": largest["round_seconds"] * scale,
    }
    print(
        f"{largest['method']}, {GOAL} clients, by those of {largest['n']}: data"
        f" {found['data_GB']:.1f} GB on disk, states {found['states_GB']:.2f} GB on the host,"
        f" {found['round_seconds']:.0f} s a round with {found['share']:.0%} of the clients"
        f" ({round(GOAL * found['share'])})"
    )
    return found


def main() -> None:
    """Measures and prints; see the module's docstring."""
    if FLAGS.measure:
        case = json.loads(FLAGS.measure)
        if case["kind"] == "write":
            write(Path(case["folder"]), case["n"])
            print("{}")
        else:
            print(json.dumps(measure(case)))
        return
    write_results = commands.results_to(FLAGS.json)
    print(
        f"{commands.load()}; {ROWS} samples a client, views"
        f" of {DIMS} features, chunks of {FLAGS.chunk}"
    )
    print(f"{'':17s}{commands.titles(COLUMNS)}")
    results: dict[str, Any] = {"rows": [], "estimates": {}}
    with tempfile.TemporaryDirectory() as temporary:
        # The processes share compiled programs.
        shared = {
            "JAX_COMPILATION_CACHE_DIR": temporary,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }
        for n in FLAGS.clients:
            folder = Path(FLAGS.folder or temporary) / f"clients{n}"
            if not folder.exists():
                # Whole or not at all: one that broke off would hold zeros.
                new = folder.with_suffix(".new")
                case = {"kind": "write", "folder": str(new), "n": n}
                if failure := commands.in_process("scale", case):
                    raise SystemExit(f"writing {folder}: {failure['failed']}")
                new.rename(folder)
            for name in FLAGS.methods:
                case = {"kind": "measure", "folder": str(folder), "n": n, "method": name}
                case |= {flag: FLAGS[flag].value for flag in ("rounds", "chunk", "compare")}
                case |= {"shares": sorted(FLAGS.shares)}
                found = commands.in_process("scale", case, shared)
                if isinstance(found, dict):
                    print(f"{name:8s}{n:9d}  {found['failed']}", flush=True)
                    continue
                print("\n".join(map(row, found)), flush=True)
                results["rows"] += found
    print()
    for name in FLAGS.methods:
        rows = [m for m in results["rows"] if m["method"] == name]
        if rows:
            results["estimates"][name] = estimate(rows)
    devices = [m["device"] for m in results["rows"]]
    print(f"ran on {devices[0] if devices else 'no device'}; {commands.load()}")
    write_results(results)


if __name__ == "__main__":
    commands.run(main)
