"""FMCSC's speed and memory at MNIST-USPS sizes: `python -m benchmarks.fmcsc`.

Everything is measured in one run and given as ratios, since machines are noisy: against the matmul
peak of this machine, against the same maths as a Python loop over clients with a jitted step, and,
where torch is installed (`.venv/bin/pip install -e '.[bench]'`), against an eager PyTorch loop over
clients. Variants take turns (`--repeats`), the median time of each counts, compilation is apart.
Programs are compiled as the experiments compile theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags, logging

from benchmarks import commands
from benchmarks.commands import define_list, whole
from benchmarks.machine import bandwidth_of, compiled, device, machine_peaks, peak_of, take_turns
from benchmarks.references.authors import read_authors
from jaxfedmvc import data, engine
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import features, init_model
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    multi_view_loss,
    partial_view_loss,
    reconstruction_loss,
)
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
define_whole = partial(flags.DEFINE_integer, lower_bound=1)
define_whole("n_clients", 24, "Clients, half of them with all views.")
define_whole("rows", 208, "Samples of a client.")
define_list("view_dims", [784, 784], "D_v.", whole(1))
define_whole("pretrain_epochs", 20, "Epochs of pre-training that are timed; the paper has 250.")
define_whole("local_epochs", 25, "Epochs of a round.")
define_whole("distill_epochs", 50, "Epochs of eq. (6) in a round.")
define_list("chunks", None, "client_chunk values, 0: all; None: 1 on CPU, all on a GPU.", whole(0))
flags.DEFINE_integer("repeats", 3, "Turns; the median counts.", lower_bound=1)
flags.DEFINE_bool("memory", True, "Whether to tabulate memory against chunk and clients.")
flags.DEFINE_bool("peers", True, "Whether to time the peers.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
# Of a run of the paper's, for --authors; the rest of it are these flags' defaults.
PRETRAIN_EPOCHS, ROUNDS = 250, 5
OF_THE_PAPER = ("n_clients", "rows", "view_dims", "local_epochs", "distill_epochs")

# --- Prediction from shapes -----------------------------------------------------------------------


def weights_of(widths: tuple[int, ...]) -> int:
    """Entries of the weight matrices of an MLP with these widths, the input's among them."""
    return sum(a * b for a, b in itertools.pairwise(widths))


def step_flops(config: FMCSCConfig, dim: int, rows: int) -> float:
    """FLOPs of one training step of one view's autoencoder.

    Forward 2 n P; backward as much for weights and again for inputs, but not for the first layer's.
    """
    encoder = (dim, *config.hidden, config.latent_dim)
    weights = weights_of(encoder) + weights_of(encoder[::-1])
    return 2.0 * rows * (3 * weights - encoder[0] * encoder[1])


def head_flops(config: FMCSCConfig, n_inputs: int, rows: int) -> float:
    """FLOPs of a training step of one head."""
    return 6.0 * rows * weights_of((n_inputs, config.head_hidden, config.latent_dim))


def predicted(config: FMCSCConfig, federation: Federation) -> dict[str, dict[str, float]]:
    """FLOPs, and the bytes that Adam must move (reads p, m, v, g, writes p, m, v), from shapes."""
    total = {"pretrain": {"flops": 0.0, "bytes": 0.0}, "round": {"flops": 0.0, "bytes": 0.0}}
    d, e = config.latent_dim, config
    for cohort in federation.cohorts:
        rows, n_views = cohort.mask.shape[1], len(cohort.view_ids)
        full = federation.holds_all_views(cohort)
        contrast = 6.0 * rows * rows * d  # similarities and their two gradients, for one view
        for v in cohort.view_ids:
            step = step_flops(config, federation.view_dims[v], rows)
            n_parameters = 2 * weights_of((federation.view_dims[v], *config.hidden, d))
            joint = head_flops(config, d * n_views, rows) / n_views
            local = step + joint + (head_flops(config, d, rows) + contrast if full else 0.0)
            copy = step + head_flops(config, d, rows)
            steps = e.local_epochs + (e.distill_epochs if full else 0)
            work = e.local_epochs * local + (e.distill_epochs * copy if full else 0.0)
            n = cohort.n_clients
            total["pretrain"]["flops"] += n * e.pretrain_epochs * step
            total["pretrain"]["bytes"] += n * e.pretrain_epochs * 28 * n_parameters
            total["round"]["flops"] += n * work
            total["round"]["bytes"] += n * steps * 28 * n_parameters
    return total


# --- Measurement ----------------------------------------------------------------------------------


def make_federation(n_clients: int) -> Federation:
    """Random views in [0, 1] of the wanted shapes, 1:1."""
    dims = FLAGS.view_dims
    n = n_clients * FLAGS.rows
    rng = np.random.default_rng(0)
    views = [rng.random((n, d), np.float32) for d in dims]
    partition = data.hybrid_partition(0, n, len(dims), n_clients)
    return Federation.from_arrays(views, partition=partition)


def compiled_parts(
    config: FMCSCConfig,
    federation: Federation,
    chunk: int | None,
    names: Sequence[str] = ("pretrain", "round"),
) -> tuple[dict[str, Any], dict[str, float], engine.RunState]:
    """Pre-training of all clients, and one round; their compile times; a state to start from."""
    # Without the leader's pre-training (component A), the set-up is every client's, once.
    alone = fmcsc(dataclasses.replace(config, components="BCD"))
    algorithm = fmcsc(config)
    key = jax.random.key(0)
    state = jax.jit(lambda: engine.start(algorithm, federation, key))()
    programs = {
        "pretrain": lambda f, s: engine.setup(alone, f, key, s, client_chunk=chunk),
        "round": lambda f, s: engine.one_round(algorithm, f, key, s, 0, client_chunk=chunk),
    }
    made, took = dict[str, Any](), dict[str, float]()
    for name in names:
        made[name], took[name] = compiled(programs[name], federation, state)
    return made, took, state


def python_loop(config: FMCSCConfig, federation: Federation) -> dict[str, Callable[[], Any]]:
    """The same maths by hand: for every client, for every epoch, one jitted step."""
    adam = optax.adam(3e-4)

    def stepper(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
        def step(params: Any, opt_state: Any, *rows: Any) -> Any:
            grads = jax.grad(loss)(params, *rows)
            updates, opt_state = adam.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

        return jax.jit(step, donate_argnums=(0, 1))

    def train(step: Callable[..., Any], params: Any, epochs: int, *rows: Any) -> Any:
        params = jax.tree.map(jnp.copy, params)  # the step's memory is donated
        opt_state = adam.init(params)
        for _ in range(epochs):
            params, opt_state = step(params, opt_state, *rows)
        return params

    def reconstruction(model: Any, views: Any, mask: jax.Array) -> jax.Array:
        out = features(model, views).reconstruction
        return reconstruction_loss(out, views, mask)

    pretrain_step = stepper(reconstruction)
    multi_step = stepper(lambda p, *rows: multi_view_loss(config, 0.5, p, *rows))
    copy_step = stepper(lambda p, *rows: distillation_loss(config, p, *rows))
    partial_step = stepper(lambda p, *rows: partial_view_loss(config, 0.5, p, *rows))
    embed = jax.jit(lambda p, views: features(p, views).h)
    mean = jax.jit(lambda *models: jax.tree.map(lambda *x: sum(x) / len(x), *models))
    kinds = [cohort.view_ids for cohort in federation.cohorts]
    server = {
        kind: init_model(jax.random.key(0), config, federation.view_dims, kind) for kind in kinds
    }
    clients = [
        jax.tree.map(lambda x, i=i: x[i], cohort)
        for cohort in federation.cohorts
        for i in range(cohort.n_clients)
    ]

    def average(trained: list[tuple[Any, Any]]) -> Any:
        return {kind: mean(*[m for k, m in trained if k == kind]) for kind in kinds}

    def pretrain() -> Any:
        trained = []
        for client in clients:
            rows, model = (client.by_view(), client.mask), server[client.view_ids]
            trained.append(
                (client.view_ids, train(pretrain_step, model, config.pretrain_epochs, *rows))
            )
        return average(trained)

    def one_round() -> Any:
        trained = []
        for client in clients:
            kind, views, mask = client.view_ids, client.by_view(), client.mask
            if len(kind) == federation.n_views:
                model = train(multi_step, server[kind], config.local_epochs, views, mask)
                copies = {k: m for k, m in server.items() if k != kind}
                h = embed(model, views)
                copies = train(copy_step, copies, config.distill_epochs, views, h, mask)
                trained += copies.items()
            else:
                h = embed(server[kind], views)
                model = train(partial_step, server[kind], config.local_epochs, views, h, mask)
            trained.append((kind, model))
        return average(trained)

    return {"pretrain": pretrain, "round": one_round}


def memory_table(config: FMCSCConfig) -> list[dict[str, float]]:
    """Working memory of a round by XLA's own account, for chunks and numbers of clients."""
    rows = []
    for n_clients in (FLAGS.n_clients, 2 * FLAGS.n_clients):
        federation = make_federation(n_clients)
        for chunk in (1, 2, 4, None):
            programs, *_ = compiled_parts(config, federation, chunk, ["round"])
            stats = programs["round"].memory_analysis()
            rows.append(
                {
                    "n_clients": n_clients,
                    "client_chunk": chunk or 0,
                    "temporary_MB": stats.temp_size_in_bytes / 1e6,
                    "data_and_states_MB": stats.argument_size_in_bytes / 1e6,
                }
            )
    return rows


def main() -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    write = commands.results_to(FLAGS.json)
    try:
        authors = read_authors(FLAGS.authors) if FLAGS.authors else None
        for name in OF_THE_PAPER if authors else ():
            if FLAGS[name].value != FLAGS[name].default:
                raise ValueError(
                    f"authors: got {name} {FLAGS[name].value}; allowed is the authors'"
                    f" {FLAGS[name].default}"
                )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    config = FMCSCConfig(
        n_clusters=10,
        pretrain_epochs=FLAGS.pretrain_epochs,
        local_epochs=FLAGS.local_epochs,
        distill_epochs=FLAGS.distill_epochs,
    )
    federation = make_federation(FLAGS.n_clients)
    gpu = jax.default_backend() != "cpu"
    chunks = FLAGS.chunks or [0 if gpu else 1]
    print(f"{device()}; {commands.load()}")
    print(federation.describe())
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "compile": {}}

    variants: dict[str, Callable[[], Any]] = dict(machine_peaks())
    for chunk in chunks:
        programs, seconds, state = compiled_parts(config, federation, chunk or None)
        for part, program in programs.items():
            name = f"{part}, chunk {chunk or 'all'}"
            variants[name] = partial(program, federation, state)
            result["compile"][name] = seconds[part]
    if FLAGS.peers:
        for part, function in python_loop(config, federation).items():
            variants[f"{part}, python loop"] = function
        try:
            from benchmarks.references.fmcsc import torch_loop

            for part, function in torch_loop(config, federation).items():
                variants[f"{part}, torch"] = function
        except ImportError:
            print("torch is not installed: that peer is left out")
    times = take_turns(variants, FLAGS.repeats)
    took_each = {name: statistics.median(found) for name, found in times.items()}

    peak, bandwidth = peak_of(took_each.pop("matmul")), bandwidth_of(took_each.pop("triad"))
    print(f"measured peaks: matmul {peak / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s")
    result |= {"matmul_GFLOPs": peak / 1e9, "memory_GBs": bandwidth / 1e9, "parts": {}}
    for part, need in predicted(config, federation).items():
        compute, move = need["flops"] / peak, need["bytes"] / bandwidth
        print(
            f"\n{part}: {need['flops'] / 1e9:.0f} GFLOP and {need['bytes'] / 1e9:.1f} GB of Adam"
            f" predicted, {compute:.2f} s at peak + {move:.2f} s at memory speed"
        )
        mine = min(took for name, took in took_each.items() if name.startswith(f"{part}, chunk"))
        for name, took in took_each.items():
            if not name.startswith(f"{part},"):
                continue
            epochs = config.pretrain_epochs if part == "pretrain" else 1
            unit = "an epoch" if part == "pretrain" else "a round"
            rate = need["flops"] / took
            compiling = result["compile"].get(name)
            print(
                f"  {name:24s} {took / epochs:7.3f} s {unit} ({min(times[name]) / epochs:.3f} to"
                f" {max(times[name]) / epochs:.3f}), {rate / 1e9:6.0f} GFLOP/s"
                f" = {rate / peak:4.0%} of peak, {took / mine:5.2f} x ours"
                + (f", compile {compiling:.1f} s" if compiling else "")
            )
            result["parts"][name] = {
                "seconds": took / epochs,
                "of_peak": rate / peak,
                "ratio": took / mine,
            }
    if authors:
        epoch, one_round = (
            min(x["seconds"] for name, x in result["parts"].items() if name.startswith(start))
            for start in ("pretrain, chunk", "round, chunk")
        )
        whole = PRETRAIN_EPOCHS * epoch + ROUNDS * one_round
        print(
            f"\n{PRETRAIN_EPOCHS} epochs and {ROUNDS} rounds, added up;"
            f" {authors.beside(whole, result['device'])}"
        )
    if FLAGS.memory:
        print("\nmemory of a round (XLA's account): clients, client_chunk (0 = all), MB")
        result["memory"] = memory_table(config)
        for row in result["memory"]:
            print(
                f"  {row['n_clients']:4.0f} {row['client_chunk']:3.0f}   temporary"
                f" {row['temporary_MB']:8.0f}   data and states {row['data_and_states_MB']:8.0f}"
            )
    print(f"\npeak memory of this process, peers included: {commands.peak_mb():.0f} MB")
    write(result)


if __name__ == "__main__":
    commands.run(main)
