"""Streamed runs against the engine's, on the toy of its tests and on a method."""

import functools

import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fedhk import FedHKConfig, e_fkmvc
from jaxfedmvc.engine.streaming import _one_behind, open_mapped, run_streaming
from jaxfedmvc.federation import Federation
from tests.algorithms import test_common as common
from tests.engine import test_run as toys

KEY = jax.random.key(7)
ANEW = {"participation": 0.6, "resample_participants": True}


def on_host(federation):
    return jax.tree.map(np.asarray, federation)


HOST = on_host(toys.FEDERATION)


def plain_run(algorithm, federation, rounds, **options):
    run = common.jit(lambda f, key: engine.run(algorithm, f, key, rounds, **options))
    return run(federation, KEY)


def assert_same(streamed, plain, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(streamed) == jax.tree.structure(plain)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), streamed, plain
    )


# --- The same as on the device ----------------------------------------------------------------


# 2 divides neither the 5 and 3 clients nor the 3 that are drawn of 5. All tests with the toy use
# chunks of 2, and so the same programs.
@pytest.mark.ci
def test_the_toy_is_the_engines_run():
    # Keys, chunks, leaders, states, weights, messages as the server got them, infos.
    streamed = run_streaming(toys.TOY, HOST, KEY, 2, client_chunk=2, **ANEW)
    assert_same(streamed, plain_run(toys.TOY, toys.FEDERATION, 2, client_chunk=2, **ANEW))
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(streamed.state.clients))


@pytest.mark.slow
def test_a_method_is_the_engines_run():
    clients = (((0, 1), {3: 8, 0: 5, 5: 6}), ((1,), {1: 7, 4: 6}))
    federation = common.federation("horizontal", common.parts("horizontal", clients))
    algorithm, traced = e_fkmvc(FedHKConfig(common.K, n_restarts=1)), []

    def counted(phase):
        def client(*args):
            traced.append(args[-1].view_ids)
            return phase.client(*args)

        return phase._replace(client=client)

    algorithm = algorithm._replace(round=tuple(map(counted, algorithm.round)))
    streamed = run_streaming(algorithm, on_host(federation), KEY, 2, client_chunk=1, **ANEW)
    assert traced == [(0, 1), (1,)]  # in the first of two rounds
    plain = plain_run(algorithm, federation, 2, client_chunk=1, **ANEW)
    jax.tree.map(np.testing.assert_array_equal, streamed.labels, plain.labels)
    assert_same(streamed, plain, rtol=1e-3, atol=1e-4)


def test_a_method_that_finds_its_own_end_is_stopped():
    # The toy has a leader after the first round.
    algorithm = toys.TOY._replace(done=lambda server: server["leader"] >= 0)
    seen = []
    streamed = run_streaming(
        algorithm, HOST, KEY, 4, client_chunk=2, on_round=lambda n, *_: seen.append(n)
    )
    plain = run_streaming(toys.TOY, HOST, KEY, 1, client_chunk=2)
    assert streamed.n_rounds == 1 and seen == [1]
    assert_same(streamed, plain, rtol=0, atol=0)


# --- What is read, kept and compiled ------------------------------------------------------------


def test_absent_clients_are_neither_read_nor_changed():
    options = {"client_chunk": 2, "participation": 0.5, "assign": False}
    before = run_streaming(toys.TOY, HOST, KEY, 2, **options)
    start = engine.start(toys.TOY, toys.FEDERATION, KEY)
    cohorts = []
    for c, cohort in enumerate(HOST.cohorts):
        absent = np.setdiff1d(np.arange(cohort.n_clients), before.state.participants[c])
        assert 0 < len(absent)
        views = tuple(np.array(x) for x in cohort.views)
        for x in views:
            x[absent] = np.nan
        cohorts.append(cohort.replace(views=views))
        jax.tree.map(
            lambda x, y, at=absent: np.testing.assert_array_equal(x[at], y[at]),
            before.state.clients[c],
            start.clients[c],
        )
    spoilt = HOST.replace(cohorts=tuple(cohorts))
    after = run_streaming(toys.TOY, spoilt, KEY, 2, **options)
    assert after.labels == ()
    assert_same(after, before, rtol=0, atol=0)
    for x in jax.tree.leaves(after.state.server):
        assert np.isfinite(x).all()


def test_each_client_of_a_padded_chunk_keeps_its_own_state():
    """Ten clients are three chunks of four, the last of them two clients and two copies."""
    phase = Phase(
        lambda server, view_ids: (),
        lambda key, sent, state, client: (client.client_ids, client.client_ids, ()),
        lambda key, server, messages, weights: (server, (messages, weights)),
    )
    algorithm = FederatedAlgorithm(
        lambda key, f: ((), (np.zeros(10, np.int32),)), (phase,), (), (), lambda *_: None
    )
    clients = on_host(Federation.from_clients([{0: np.ones((1, 1))}] * 10))
    found = run_streaming(algorithm, clients, KEY, 0, client_chunk=4, assign=False)
    (messages,), (weights,) = found.info["setup"][0]["server"]
    for each in (found.state.clients[0], messages):
        np.testing.assert_array_equal(each, np.arange(10))
    np.testing.assert_array_equal(weights, np.ones(10))


def test_clients_are_traced_once_a_phase_and_cohort():
    algorithm, n = toys.toy(), len(toys.traces)
    for key, rounds in ((KEY, 3), (jax.random.key(8), 1)):
        run_streaming(algorithm, HOST, key, rounds, client_chunk=2, **ANEW)
        # Both cohorts in the set-up, which is the same exchange as the one at the end, and in the
        # round; one leader.
        assert len(toys.traces) - n == 2 + 2 + 1


def test_the_next_chunk_is_under_way_before_this_one_is_waited_for_and_no_other():
    events = []

    def sent():
        for i in range(4):
            events.append(f"send {i}")
            yield i

    for i in _one_behind(sent()):
        events.append(f"wait {i}")
    expected = "send 0,send 1,wait 0,send 2,wait 1,send 3,wait 2,wait 3"
    assert events == expected.split(",")


def test_everyone_at_once_is_mapped_where_it_lies():
    """Neither gather nor scatter, which would bring shards of clients together."""
    phase = Phase(
        lambda server, view_ids: server,
        lambda key, sent, state, client: (state + sent, client.views[0].sum(), ()),
        lambda key, server, messages, weights: (messages[0] / weights[0], ()),
        "sum",
    )
    algorithm = FederatedAlgorithm(
        lambda key, f: (np.float32(1), tuple(np.zeros(c.n_clients) for c in f.cohorts)),
        (),
        (phase,),
        (),
        lambda *_: None,
    )

    def primitives(share):
        state = engine.start(algorithm, toys.FEDERATION, KEY, participation=share)
        one_round = functools.partial(engine.one_round, algorithm)
        return str(jax.make_jaxpr(one_round)(toys.FEDERATION, KEY, state, 0))

    assert "gather" in primitives(0.5) and "scatter" in primitives(0.5)
    assert "gather" not in primitives(1.0) and "scatter" not in primitives(1.0)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("rounds", -1),
        ("rounds", 2.5),
        ("client_chunk", 0),
        ("client_chunk", 1.5),
        ("participation", (0.5, 0.0)),
    ],
)
def test_bad_arguments_are_named(name, bad):
    arguments = {"rounds": 1, "client_chunk": 2, name: bad}
    with pytest.raises(ValueError, match=f"{name}: got"):
        run_streaming(toys.TOY, HOST, KEY, **arguments)


# --- Files --------------------------------------------------------------------------------------


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "b": np.arange(7, dtype=np.int8),
        "x": rng.normal(size=(5, 3, 2)).astype(np.float32),
        "t": np.asfortranarray(rng.normal(size=(4, 3))),
    }


def save(folder, arrays):
    for name, x in arrays.items():
        np.save(folder / f"{name}.npy", x)


def test_files_are_mapped_and_not_read(tmp_path, arrays):
    save(tmp_path, arrays)
    found = open_mapped(tmp_path)
    assert set(found) == set(arrays)
    assert set(open_mapped(tmp_path / "x.npy")) == {"x"}
    for name, x in arrays.items():
        assert isinstance(found[name], np.memmap) and not found[name].flags.writeable
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


def test_a_run_from_mapped_files_is_one_from_memory(tmp_path):
    leaves, structure = jax.tree.flatten(HOST.without_labels())
    save(tmp_path, {str(i): leaf for i, leaf in enumerate(leaves)})
    found = open_mapped(tmp_path)
    mapped = structure.unflatten([found[str(i)] for i in range(len(leaves))])
    options = {"client_chunk": 2, "participation": 0.5}
    assert_same(
        run_streaming(toys.TOY, mapped, KEY, 1, **options),
        run_streaming(toys.TOY, HOST, KEY, 1, **options),
        rtol=0,
        atol=0,
    )


def test_what_cannot_be_mapped_is_refused(tmp_path, arrays):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=r"data.npz'; allowed is a folder .* numpy\.save\("):
        open_mapped(tmp_path / "data.npz")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.npy"):
        with pytest.raises(ValueError, match="allowed is a folder"):
            open_mapped(path)
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    with pytest.raises(ValueError, match=r"objects\.npy cannot be mapped: .*Python objects"):
        open_mapped(tmp_path)
