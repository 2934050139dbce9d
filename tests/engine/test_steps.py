"""A run called piece by piece is the run of `engine.run`."""

import dataclasses
import functools
import threading
from concurrent.futures import Future

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import Federation, data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import METHODS as METHODS_OF_ALL
from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, e_fkmvc
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.engine import programs as module
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.engine.steps import Steps, as_number
from tests.engine import test_run as toys

K, ROUNDS = 3, 2
KEY = jax.random.key(5)
FMCSC = FMCSCConfig(
    K,
    hidden=(8,),
    latent_dim=4,
    head_hidden=8,
    pretrain_epochs=2,
    local_epochs=1,
    distill_epochs=1,
    batch_size=16,
    n_init=2,
    leader_epochs=1,
)
METHODS = {
    "fmcsc": (functools.partial(fmcsc, FMCSC), FMCSCHyperparams(learning_rate=0.01)),
    "e_fkmvc": (functools.partial(e_fkmvc, FedHKConfig(K)), FedHKHyperparams(tol=0.0)),
    # Leaders, weights, keys and states; in a tenth of the compilation.
    "toy": (lambda hyper: toys.TOY, None),
}


@functools.cache
def federation(name="fmcsc"):
    if name == "toy":
        return toys.FEDERATION
    rng = np.random.default_rng(0)
    truth = np.arange(50) % K
    views = [2 * rng.normal(size=(K, d))[truth] + rng.normal(size=(50, d)) for d in (5, 4)]
    parts = data.hybrid_partition(0, n_samples=50, n_views=2, n_clients=7, ratio=(4, 3))
    return Federation.from_arrays(views, truth, partition=parts)


def stepped(name, chunk=None, **settings):
    make, hyper = METHODS[name]
    calls = []
    fed = federation(name)
    steps = Steps(make, hyper, fed, client_chunk=chunk, on_call=calls.append, **settings)
    reports, walked = [], []
    steps.compile(
        lambda *report: reports.append(report),
        until_ready=False,
        on_walked=lambda: walked.append(len(steps._programs)),
    )
    state = steps.start(fed, KEY)
    state, setup = steps.setup(fed, KEY, state)
    infos = []
    for r in range(ROUNDS):
        state, info = steps.one_round(fed, KEY, state, r)
        infos.append(info)
        found = steps.evaluate(fed, KEY, state, r)
    steps.calls()
    assert walked == [len(steps._programs)]  # the walk has found them all
    ready, n, _ = reports[-1]
    assert 0 < ready <= n <= len(steps._programs)
    steps.close()
    return steps, found, {"setup": setup, "rounds": infos}, calls


def complete():
    """The clients that hold all views."""
    cohort = federation().cohorts[0]
    assert len(cohort.view_ids) == 2
    return federation().replace(cohorts=(cohort,), labels=None)


@functools.cache
def whole(name, **settings):
    (make, hyper), fed = METHODS[name], federation(name)
    run = jax.jit(lambda hyper, key: engine.run(make(hyper), fed, key, ROUNDS, **settings))
    return jax.device_get(run(hyper, KEY))


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *(("toy", n) for n in (None, 1, 2)),
        *(
            pytest.param(name, n, marks=pytest.mark.slow)
            for name in ("e_fkmvc", "fmcsc")
            for n in (None, 1, 2)
        ),
    ],
)
def test_a_run_by_steps_is_a_whole_run(name, chunk):
    steps, found, info, calls = stepped(name, chunk)
    expected = whole(name)
    chex.assert_trees_all_close(found.state.server, expected.state.server, rtol=1e-3, atol=1e-4)
    chex.assert_trees_all_close(found.state.clients, expected.state.clients, rtol=1e-3, atol=1e-4)
    for labels, others in zip(found.labels, expected.labels, strict=True):
        np.testing.assert_array_equal(labels, others)
    chex.assert_trees_all_close(info["setup"], expected.info["setup"], rtol=1e-3, atol=1e-4)
    rounds = jax.tree.map(lambda *rows: np.stack(rows), *info["rounds"])
    chex.assert_trees_all_close(rounds, expected.info["rounds"], rtol=1e-3, atol=1e-4)
    counts = steps.calls()
    in_all = sum(counts["setup"].values()) + ROUNDS * sum(counts["round"].values())
    assert len(calls) == in_all + ROUNDS * sum(counts["finish"].values())
    assert steps.traffic() == engine.traffic(METHODS[name][0](METHODS[name][1]), federation(name))


@pytest.mark.slow
def test_clients_that_are_drawn_anew_are_those_of_a_whole_run():
    # Shares by which all centres differ: a row between two equal ones belongs to either.
    settings = {"participation": (0.75, 1.0, 0.5), "resample_participants": True}
    _, found, _, _ = stepped("e_fkmvc", 2, **settings)
    expected = whole("e_fkmvc", **settings)
    chex.assert_trees_all_close(found.state.server, expected.state.server, rtol=1e-3, atol=1e-4)
    for labels, others in zip(found.labels, expected.labels, strict=True):
        np.testing.assert_array_equal(labels, others)


def test_each_round_draws_who_takes_part_in_it():
    silent = toys.TOY._replace(round=())
    settings = {"participation": 0.4, "resample_participants": True}
    steps = Steps(lambda hyper: silent, None, toys.FEDERATION, **settings)
    state = steps.start(toys.FEDERATION, KEY)
    for r in range(3):
        state, _ = steps.one_round(toys.FEDERATION, KEY, state, r)
        expected = engine.draw_participants(toys.FEDERATION, KEY, 0.4, r)
        chex.assert_trees_all_equal(state.participants, jax.device_get(expected))


def test_hyperparameters_are_arguments_of_the_programs():
    """So that another value finds the same programs in JAX's cache."""
    make, hyper = METHODS["e_fkmvc"]
    texts = []
    for fuzzifier in (1.1, 1.5):
        steps = Steps(make, hyper.replace(fuzzifier=fuzzifier), complete())
        texts.append(sorted(p.traced.lower().as_text() for p in steps.programs()))
    assert texts[0] == texts[1]


def test_phases_share_the_programs_of_what_they_have_in_common():
    summing, stacking = toys.TOY.round[0], toys.TOY.setup[0]
    phases = (summing, stacking, stacking._replace(who="leader"), summing, stacking)
    method = toys.TOY._replace(round=phases)

    def first(part, **settings):
        steps = Steps(lambda hyper: method, None, toys.FEDERATION, **settings)
        return [steps._alike("round", p, part) for p in range(len(phases))]

    # Their clients compute the same, but are not reduced alike; a leader is one client.
    assert first("client") == [0, 1, 2, 0, 1]
    assert first("client", client_chunk=2) == [0, 1, 2, 0, 1]
    assert first("client", client_chunk=1) == [0, 1, 1, 0, 1]
    # A server that is given every message is its phase's own.
    assert first("server") == first("server", client_chunk=1) == [0, 1, 2, 0, 4]


def test_a_program_that_another_job_gave_up_is_compiled_anew():
    make, hyper = METHODS["toy"]
    compiled = {}

    def start():
        return Steps(make, hyper, toys.FEDERATION, compiled=compiled).start(toys.FEDERATION, KEY)

    expected = start()
    lost = Future()
    assert lost.cancel()
    compiled |= dict.fromkeys(compiled, lost)
    chex.assert_trees_all_equal(start(), expected)
    assert all(not job.cancelled() for job in compiled.values())


def test_whole_numbers_stay_whole_whoever_counted_them():
    assert as_number(np.int64(2)).dtype == as_number(2).dtype == np.int32
    assert as_number(np.float64(2)).dtype == as_number(2.0).dtype == np.float32


def test_numbers_that_jax_cannot_look_into_are_refused():
    """A plain dataclass is a leaf, whose numbers nothing could trace."""
    text = "hyperparams: got 'HyperOfPython'; allowed is numbers in a dataclass of flax.struct"
    with pytest.raises(ValueError, match=text):
        Steps(lambda hyper: toys.TOY, HyperOfPython(), toys.FEDERATION)


@dataclasses.dataclass
class HyperOfPython:
    rate: float = 0.1


def test_bytes_among_peers_are_known_without_a_walk_ahead():
    agents = Federation.from_agents([(np.arange(8), np.eye(8, 3)), (np.arange(8), np.eye(8, 2))])
    method = METHODS_OF_ALL["vertcohirf"]
    steps = Steps(
        functools.partial(method.make, method.config(3)), method.hyperparams(), agents, ahead=False
    )
    steps.start(agents, KEY)
    assert steps.traffic()["setup"].up == 0


def test_bytes_among_peers_are_those_of_who_takes_part_before_anything_was_run():
    peers = toys.TOY._replace(peers=True)
    steps = Steps(lambda hyper: peers, None, toys.FEDERATION, participation=0.5)
    expected = engine.traffic(peers, toys.FEDERATION, participation=0.5)
    assert steps.traffic() == expected != engine.traffic(peers, toys.FEDERATION)


@pytest.mark.parametrize("ahead", [True, False])
def test_bytes_of_what_was_not_made_yet_are_known(ahead):
    """They were 0 for stages to come, where nothing had been compiled ahead."""
    steps = Steps(lambda hyper: toys.TOY, None, toys.FEDERATION, ahead=ahead)
    steps.setup(toys.FEDERATION, KEY, steps.start(toys.FEDERATION, KEY))
    assert steps.traffic() == engine.traffic(toys.TOY, toys.FEDERATION)


def test_a_number_that_a_state_takes_over_is_read():
    """Though nothing is computed from it there: what follows depends on it."""

    def make(hyper):
        return FederatedAlgorithm(
            init=lambda *_: (hyper["limit"], ((), ())),
            **dict.fromkeys(("setup", "round", "finish"), ()),
            assign=lambda server, state, client: jnp.zeros(client.mask.shape, jnp.int32),
        )

    steps = Steps(make, {"limit": 3, "other": 4}, toys.FEDERATION)
    assert steps.stages_that_read("limit") == {"start"}
    assert steps.stages_that_read("other") == set()


@pytest.mark.parametrize(
    ("done", "goes_on"),
    [(None, [True, True, False]), (False, [True, True, False]), (True, [False, False, False])],
)
def test_a_run_goes_on_until_its_rounds_are_made_or_it_is_done(done, goes_on):
    ends = None if done is None else lambda state: jax.numpy.bool_(done)
    steps = Steps(lambda hyper: toys.TOY._replace(done=ends), None, toys.FEDERATION)
    state = steps.start(toys.FEDERATION, KEY)
    found = [steps.goes_on(state, made, 2) for made in range(len(goes_on))]
    assert found == goes_on
    assert not steps.goes_on(state, 0, 0)


def test_clusters_are_found_after_the_end_which_the_rounds_know_nothing_of():
    count = toys.counter(9).round
    method = toys.counter(9)._replace(
        finish=count,
        assign=lambda server, state, client: jnp.full(client.mask.shape, server),
        embed=lambda server, state, client: jnp.full((*client.mask.shape, 1), server),
    )
    steps = Steps(lambda hyper: method, None, toys.FEDERATION)
    state = steps.start(toys.FEDERATION, KEY)
    for r in range(2):
        state, _ = steps.one_round(toys.FEDERATION, KEY, state, r)
        found = steps.evaluate(toys.FEDERATION, KEY, state, r)
        assert (state.server, found.state.server) == (r + 1, r + 2)
        for rows in (*found.labels, *found.embedding):
            assert (rows == r + 2).all()


def test_a_chunk_below_one_is_refused():
    make, hyper = METHODS["toy"]
    with pytest.raises(ValueError, match="client_chunk: got 0; allowed is 1 or more"):
        Steps(make, hyper, toys.FEDERATION, client_chunk=0)


def test_a_program_that_does_not_compile_stops_a_run_before_it_begins(monkeypatch):
    make, hyper = METHODS["toy"]
    steps = Steps(make, hyper, toys.FEDERATION)
    monkeypatch.setattr(module, "compiler_options", lambda trains: {"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        steps.compile()


def test_a_run_goes_on_while_later_programs_are_traced(monkeypatch):
    """Tracing stands still before `finish` until setup and a round are through."""
    make, hyper = METHODS["toy"]
    begun, trace = threading.Event(), module._trace

    def waiting(program, *arguments):
        if program.name.startswith("finish"):
            assert begun.wait(timeout=300)
        return trace(program, *arguments)

    monkeypatch.setattr(module, "_trace", waiting)
    steps = Steps(make, hyper, toys.FEDERATION)
    steps.compile(until_ready=False)
    state, _ = steps.setup(toys.FEDERATION, KEY, steps.start(toys.FEDERATION, KEY))
    state, _ = steps.one_round(toys.FEDERATION, KEY, state, 0)
    assert not steps._programs._walk.done()
    begun.set()
    found = steps.evaluate(toys.FEDERATION, KEY, state, 0)
    assert all(np.asarray(x).max() < 2 for x in found.labels)
    steps.close()


def test_what_tracing_raises_is_raised_by_the_call_that_waits():
    make, hyper = METHODS["toy"]

    def broken(hyper):
        def assign(server, state, data):
            raise ValueError("no such clusters")

        return make(hyper)._replace(assign=assign)

    steps = Steps(broken, hyper, toys.FEDERATION)
    steps.compile(until_ready=False)
    state = steps.start(toys.FEDERATION, KEY)
    with pytest.raises(ValueError, match="no such clusters"):
        steps.evaluate(toys.FEDERATION, KEY, state, 0)
    steps.close()


def test_a_job_that_is_given_up_stops_tracing(monkeypatch):
    make, hyper = METHODS["toy"]
    names, trace = [], module._trace
    first, closing = threading.Event(), threading.Event()

    def told(program, *arguments):
        names.append(program.name)
        first.set()
        assert closing.wait(timeout=300)
        return trace(program, *arguments)

    monkeypatch.setattr(module, "_trace", told)
    steps = Steps(make, hyper, toys.FEDERATION)
    steps.compile(until_ready=False)
    assert first.wait(timeout=300)
    threading.Timer(0.2, closing.set).start()  # `close` waits for the one that is being traced
    steps.close()
    assert names == ["start"]
    # What follows from shapes is known all the same, for who asks.
    assert steps.calls()["finish"] and steps.traffic()["round"].up > 0


def test_other_threads_trace_with_the_precision_of_the_caller():
    def multiply(server, state, client):
        return (client.by_view()[1] @ server["center"] > 0).astype(np.int32)

    steps = Steps(lambda hyper: toys.TOY._replace(assign=multiply), None, toys.FEDERATION)
    with jax.default_matmul_precision("high"):
        steps.compile(until_ready=False)
        steps.calls()
    steps.close()
    assigns = [p for p in steps.programs() if p.name.startswith("assign")]
    assert assigns and all("Precision.HIGH," in str(p.traced.jaxpr) for p in assigns)


def test_other_numbers_can_be_taken_while_programs_are_traced():
    make, hyper = METHODS["toy"]
    walked = []
    steps = Steps(make, hyper, toys.FEDERATION)
    steps.compile(until_ready=False, on_walked=lambda: walked.append(0))
    other = steps.with_numbers(hyper)
    state = steps.start(toys.FEDERATION, KEY)
    steps.close()
    other.evaluate(toys.FEDERATION, KEY, state, 0)
    assert walked == [0]


@pytest.mark.slow
def test_other_numbers_share_the_programs_and_stages_tell_what_they_read():
    hyper = FMCSCHyperparams(learning_rate=0.01, limit=K)
    steps = Steps(functools.partial(fmcsc, FMCSC), hyper, complete())
    assert steps.stages_that_read("limit") == {"finish", "assign"}
    assert "setup" in steps.stages_that_read("learning_rate")
    assert "finish" not in steps.stages_that_read("learning_rate")
    steps.compile()
    compiled = len(steps._programs.compiled)
    state, _ = steps.setup(complete(), KEY, steps.start(complete(), KEY))
    labels = {
        k: np.concatenate(
            [
                x.ravel()
                for x in steps.with_numbers(hyper.replace(limit=k))
                .evaluate(complete(), KEY, state, 0)
                .labels
            ]
        )
        for k in (1, 2, K)
    }
    assert len(steps._programs.compiled) == compiled
    for k, found in labels.items():
        assert set(found[found >= 0]) == set(range(k))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_copies_that_training_is_spared_change_no_bit(name, monkeypatch):
    """What XLA is told beside its level moves memory and computes nothing else."""
    monkeypatch.setattr(jax.config, "read", lambda flag: False)
    options = compiler_options()
    monkeypatch.undo()
    make, hyper = METHODS[name]
    run = jax.jit(lambda federation, key: engine.run(make(hyper), federation, key, ROUNDS))
    lowered = run.lower(federation(name), KEY)
    level = {"xla_backend_optimization_level": options["xla_backend_optimization_level"]}
    assert options != level
    found = [lowered.compile(told)(federation(name), KEY) for told in (options, level)]
    plain = [jax.tree.map(lambda x: np.asarray(x), (r.labels, r.info)) for r in found]
    chex.assert_trees_all_equal(*plain)


def test_an_option_that_xla_does_not_have_is_left_out():
    assert module._if_known("xla_backend_optimization_level_of_another_version") == {}
    assert module._if_known("xla_llvm_disable_expensive_passes") != {}


def test_a_gpu_searches_no_kernels_unless_the_users_flags_speak_of_it(monkeypatch):
    """The names of these options are XLA's, whatever it compiles for."""
    monkeypatch.setattr(jax.config, "read", lambda flag: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    told = compiler_options(trains=True)
    assert told == {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    assert compiler_options(trains=False) == told
    for option in ("--xla_gpu_autotune_level=4", "--xla_gpu_enable_triton_gemm=true"):
        monkeypatch.setenv("XLA_FLAGS", option)
        assert compiler_options() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert compiler_options() is None
