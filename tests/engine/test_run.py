"""The engine against Python loops, on a toy method that shows what every client was given.

The toy draws noise from every key that it is handed, keeps in each client's state what was sent to
it, and reports what reached the server, so that a wrong key, chunk, weight or client is seen.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine.phases import Exchanged, Traffic, chunk_sizes, leading_cohort
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.engine.streaming import run_streaming
from jaxfedmvc.engine.traffic import of_run, total
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host

INIT, SETUP, ROUND, FINISH = range(4)  # the stages, as keys derive from them
SERVER = 2**31  # beyond every client id
ROUNDS = 2
KEY = jax.random.key(7)
HALF = {"participation": 0.5, "client_chunk": 1}

# 5 clients hold both views, 3 hold view 1. The lowest id of all is no leader: it is not full-view.
IDS = ((7, 3, 9, 2, 5), (4, 0, 1))
COUNTS = ((3, 2, 4, 1, 3), (2, 4, 3))
VIEW_IDS = ((0, 1), (1,))
WIDTH = 4

traces = []  # one entry whenever a client function is traced
inits = []  # the federations that `init` was given


def toy(scale=0.5):
    """Common centre of view 1, by a sum; a leader that signs it; and rows in stripes around it."""

    def noise(key):
        bits = jax.random.key_data(key) >> 8
        return scale * (bits * 2.0**-23 - 1.0)

    def init(key, federation):
        inits.append(federation)
        server = {"center": noise(key), "leader": jnp.full((), -1, jnp.int32)}
        states = tuple(
            {
                "times": jnp.zeros(cohort.n_clients, jnp.int32),
                "led": jnp.zeros(cohort.n_clients, jnp.int32),
                "sent": jnp.zeros((cohort.n_clients, 2)),
                "start": jax.vmap(lambda i: noise(jax.random.fold_in(key, i)))(cohort.client_ids),
            }
            for cohort in federation.cohorts
        )
        return server, states

    def broadcast(server, view_ids):
        return {"center": server["center"], "width": jnp.full((), len(view_ids), jnp.int32)}

    def client(key, sent, state, client):
        traces.append(client.view_ids)
        total = jnp.sum(jnp.where(client.mask[:, None], client.by_view()[1], 0.0), axis=0)
        n = jnp.sum(client.mask)
        mean = total / n + noise(key)  # NaN without a real row
        state = {
            **state,
            "times": state["times"] + 1,
            "sent": state["sent"] * 0.5 + sent["center"] * sent["width"],
        }
        message = {"mean": mean + state["start"], "n": n}
        return state, message, {"id": client.client_ids, "mean": mean}

    def gather(key, server, messages, weights):
        weight, n = jnp.concatenate(weights), jnp.concatenate([m["n"] for m in messages])
        means = jnp.concatenate([m["mean"] for m in messages])
        kept = jnp.where(weight[:, None] > 0, means * n[:, None], 0.0)
        center = jnp.sum(kept, axis=0) / jnp.sum(n * weight) + noise(key)
        return {**server, "center": center}, {"messages": messages, "weights": weights}

    def add(key, server, messages, weights):
        center = sum(m["mean"] for m in messages) / sum(weights) + noise(key)
        center = 0.5 * (center + server["center"])
        return {**server, "center": center}, {"messages": messages, "weights": weights}

    def lead(key, sent, state, client):
        traces.append(client.view_ids)
        message = {"id": client.client_ids, "shift": noise(key)}
        return {**state, "led": state["led"] + 1}, message, {}

    def follow(key, server, messages, weights):
        (message,), (weight,) = messages, weights
        center = server["center"] + message["shift"][0] + noise(key)
        return {"center": center, "leader": message["id"][0]}, {"weight": weight}

    def assign(server, state, client):
        # Narrow stripes, so that a small change of the centre moves many rows.
        return jnp.floor(8 * embed(server, state, client)[:, 0]).astype(jnp.int32) % 2

    def embed(server, state, client):
        return client.by_view()[1] - server["center"][None] + state["start"][None]

    return FederatedAlgorithm(
        init,
        setup=(Phase(broadcast, client, gather, "stack"),),
        round=(
            Phase(broadcast, client, add, "sum"),
            Phase(broadcast, lead, follow, "stack", "leader"),
        ),
        finish=(Phase(broadcast, client, gather, "stack"),),
        assign=assign,
        embed=embed,
    )


TOY = toy()


def build(places=((0, 1, 2, 3, 4), (0, 1, 2)), seed=0):
    """The federation, with the clients of each cohort in the order of `places`."""
    rng, start, partition = np.random.default_rng(seed), 0, []
    n = sum(map(sum, COUNTS))
    views = rng.normal(size=(n, 1)), rng.normal(size=(n, 2))
    labels = rng.permutation(np.arange(n) % 3)
    for view_ids, ids, counts, order in zip(VIEW_IDS, IDS, COUNTS, places, strict=True):
        samples = np.full((len(ids), WIDTH), -1, np.int32)
        for i, count in enumerate(counts):
            samples[i, :count] = start + np.arange(count)
            start += count
        partition.append(Part(view_ids, samples[list(order)], np.array(ids, np.int32)[list(order)]))
    return Federation.from_arrays(views, labels, partition=partition)


FEDERATION = build()
ORDER = ((3, 0, 4, 2, 1), (2, 0, 1))
PERMUTED = build(ORDER)


@functools.cache
def compiled(**options):
    """`(federation, key) -> RunResult`, compiled once for each set of options."""
    rounds = options.pop("rounds", ROUNDS)
    return jax.jit(lambda f, key: engine.run(TOY, f, key, rounds, **options))


@functools.cache
def result(**options):
    return compiled(**options)(FEDERATION, KEY)


@functools.cache
def parts():
    """The parts of a run, compiled each."""
    return {
        "start": jax.jit(lambda f, key: engine.start(TOY, f, key)),
        "setup": jax.jit(lambda f, key, s: engine.setup(TOY, f, key, s)),
        "round": jax.jit(lambda f, key, s, r: engine.one_round(TOY, f, key, s, r)),
        "finish": jax.jit(lambda f, key, s, r: engine.finish(TOY, f, key, s, r)),
        "assign": jax.jit(lambda f, s: engine.assign(TOY, f, s)),
    }


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs of this file are compiled for a handful of runs of a few numbers."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def pick(tree, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], tree)


def stack(trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


# --- A loop over clients, from the documentation alone ---------------------------------------


jitted = functools.cache(jax.jit)


def loop_phase(phase, key, federation, server, clients, places):
    """One phase of the clients at `places` of each cohort, one after another."""
    messages, weights, infos = [], [], []
    clients = [list(states) for states in clients]
    taking_part = list(enumerate(places))
    if phase.who == "leader":
        ids = [IDS[0][i] for i in places[0]]
        taking_part = [(0, [places[0][ids.index(min(ids))]])]
    for c, members in taking_part:
        cohort = federation.cohorts[c]
        sent = phase.broadcast(server, cohort.view_ids)
        said = []
        for i in members:
            one = pick(cohort, i)
            client_key = jax.random.fold_in(key, int(one.client_ids))
            clients[c][i], message, info = jitted(phase.client)(
                client_key, sent, clients[c][i], one
            )
            said.append((message, np.float32(one.mask.any()), info))
        each, weight, info = (stack(x) for x in zip(*said, strict=True))
        if phase.reduce == "sum":
            each, weight = jax.tree.map(lambda x: x.sum(0), (each, weight))
        messages.append(each)
        weights.append(weight)
        infos.append(info)
    server, info = jitted(phase.server)(
        jax.random.fold_in(key, SERVER), server, tuple(messages), tuple(weights)
    )
    return server, clients, {"clients": tuple(infos), "server": info}


def loop_stage(phases, key, federation, server, clients, places):
    infos = []
    for p, phase in enumerate(phases):
        server, clients, info = loop_phase(
            phase, jax.random.fold_in(key, p), federation, server, clients, places
        )
        infos.append(info)
    return server, clients, infos


@functools.cache
def looped():
    """The whole run in Python: server, stacked client states, labels and infos."""
    start = jax.random.fold_in(KEY, INIT)
    server, stacked = jitted(TOY.init)(start, FEDERATION.without_labels())
    clients = [[pick(s, i) for i in range(len(ids))] for s, ids in zip(stacked, IDS, strict=True)]
    places = tuple(range(5)), tuple(range(3))
    run = functools.partial(loop_stage, federation=FEDERATION, places=places)

    def key(stage, r):
        return jax.random.fold_in(jax.random.fold_in(KEY, stage), r)

    server, clients, before = run(TOY.setup, key(SETUP, 0), server=server, clients=clients)
    rounds = []
    for r in range(ROUNDS):
        server, clients, info = run(TOY.round, key(ROUND, r), server=server, clients=clients)
        rounds.append(info)
    server, clients, after = run(
        TOY.finish, key(FINISH, ROUNDS - 1), server=server, clients=clients
    )
    labels = tuple(
        stack(
            [jitted(TOY.assign)(server, state, pick(cohort, i)) for i, state in enumerate(states)]
        )
        for cohort, states in zip(FEDERATION.cohorts, clients, strict=True)
    )
    info = {"setup": before, "rounds": stack(rounds), "finish": after}
    return server, tuple(map(stack, clients)), labels, info


def test_a_run_is_a_loop_over_clients():
    server, clients, labels, info = looped()
    got = result()
    assert_close(got.state.server, server)
    assert_close(got.state.clients, clients)
    assert_equal(got.labels, labels)
    assert_close(got.info, info)
    assert got.tables is None and got.participants is None
    assert {0, 1} == set(np.concatenate([x.ravel() for x in got.labels]).tolist())


@pytest.mark.parametrize(
    "chunk", [2, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 3))]
)
def test_chunks_change_nothing(chunk):
    # States, messages, weights and infos; 2 divides neither 5 nor 3 clients, and 3 not 5.
    assert_close(result(client_chunk=chunk), result())


def test_chunks_are_evened_out():
    """So that four at once of five are three and two, not four and one with three of padding."""
    asked = ((5, 4), (9, 4), (7, 3), (3, 8), (6, None), (6, 1))
    assert [chunk_sizes(*a) for a in asked] == [(2, 3), (3, 3), (3, 3), (1, 3), (1, 6), (6, 1)]


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True])
def test_chunks_that_are_no_number_of_clients_raise(chunk):
    with pytest.raises(ValueError, match=rf"client_chunk: got {chunk}; .*1 or more, or None"):
        engine.run(TOY, FEDERATION, KEY, 1, client_chunk=chunk)
    state = engine.start(TOY, FEDERATION, KEY)
    for function in (engine.assign, engine.embed):
        with pytest.raises(ValueError, match=rf"client_chunk: got {chunk}; .*1 or more, or None"):
            function(TOY, FEDERATION, state, client_chunk=chunk)


def test_the_same_key_gives_the_same_bits_and_another_does_not():
    run = compiled()
    assert_equal(run(FEDERATION, jax.random.key(7)), result())
    other = run(FEDERATION, jax.random.key(8))
    assert np.abs(other.state.server["center"] - result().state.server["center"]).min() > 1e-4
    for a, b in zip(other.state.clients, result().state.clients, strict=True):
        assert np.abs(a["start"] - b["start"]).min() > 1e-6


def test_every_client_stage_round_and_phase_draws_noise_of_its_own():
    info = result().info

    def drawn(phase):
        """The noise of each client: its mean, less the mean of its rows."""
        out = []
        for c, cohort in enumerate(FEDERATION.cohorts):
            x = np.asarray(cohort.by_view()[1])
            means = x.sum(1) / np.asarray(cohort.mask.sum(1))[:, None]
            out.append((phase["clients"][c]["mean"] - means).reshape(-1))
        return np.concatenate(out)

    rounds = [pick(info["rounds"], r)[0] for r in range(ROUNDS)]
    draws = np.concatenate(list(map(drawn, [*info["setup"], *rounds, *info["finish"]])))
    assert draws.size == 4 * 8 * 2
    assert np.diff(np.sort(draws)).min() > 1e-6  # no two alike
    assert 0.25 < draws.std() < 0.33  # uniform within 0.5


def test_the_order_of_clients_does_not_matter():
    permuted = compiled()(PERMUTED, KEY)
    for c, order in enumerate(ORDER):
        order = np.array(order)
        assert_close(permuted.state.clients[c], pick(result().state.clients[c], order))
        np.testing.assert_array_equal(permuted.labels[c], result().labels[c][order])
        setup, plain = (r.info["setup"][0]["clients"][c] for r in (permuted, result()))
        assert_close(setup, pick(plain, order))
        rounds, plain = (r.info["rounds"][0]["clients"][c] for r in (permuted, result()))
        assert_close(rounds, jax.tree.map(lambda x, o=order: x[:, o], plain))
    assert_close(permuted.state.server, result().state.server)


# --- Participation --------------------------------------------------------------------------


def drawn_ids(federation, participants):
    return [
        set(np.asarray(cohort.client_ids)[np.asarray(p)].tolist())
        for cohort, p in zip(federation.cohorts, participants, strict=True)
    ]


@pytest.mark.parametrize("share", [1, 1.0, (1.0, 1.0)])
def test_full_participation_is_everyone(share):
    drawn = engine.draw_participants(FEDERATION, KEY, share)
    assert_equal(drawn, (jnp.arange(5), jnp.arange(3)))
    assert_equal(result().state.participants, drawn)


def test_only_the_drawn_clients_take_part():
    # Half of 5 and half of 3, rounded: 2 and 2.
    got = result(**HALF)
    start = parts()["start"](FEDERATION, KEY)
    for c, n in enumerate((5, 3)):
        drawn = np.asarray(got.state.participants[c])
        assert len(set(drawn.tolist())) == len(drawn) == 2
        absent = np.setdiff1d(np.arange(n), drawn)
        states = got.state.clients[c]
        np.testing.assert_array_equal(states["times"][drawn], 1 + ROUNDS + 1)
        assert_equal(pick(states, absent), pick(start.clients[c], absent))
        np.testing.assert_array_equal(
            got.info["setup"][0]["clients"][c]["id"], np.array(IDS[c])[drawn]
        )
        # Who was absent is assigned clusters all the same, from the start that it has.
        for i in range(n):
            expected = jitted(TOY.assign)(
                got.state.server, pick(states, i), pick(FEDERATION.cohorts[c], i)
            )
            np.testing.assert_array_equal(got.labels[c][i], expected)
    # The sums hold the drawn clients alone.
    np.testing.assert_array_equal(got.info["rounds"][0]["server"]["weights"], np.full((2, 2), 2.0))


def test_a_partial_run_is_a_loop_over_the_drawn_clients():
    got = result(**HALF)
    places = tuple(np.asarray(p).tolist() for p in got.state.participants)
    start = parts()["start"](FEDERATION, KEY)
    clients = [
        [pick(s, i) for i in range(len(i_))] for s, i_ in zip(start.clients, IDS, strict=True)
    ]
    key = jax.random.fold_in(jax.random.fold_in(KEY, SETUP), 0)
    _, _, info = loop_stage(TOY.setup, key, FEDERATION, start.server, clients, places)
    assert_close(got.info["setup"], info)


def test_the_draw_follows_client_ids_and_not_places():
    for seed in range(5):
        key = jax.random.key(seed)
        plain = engine.draw_participants(FEDERATION, key, 0.5)
        permuted = engine.draw_participants(PERMUTED, key, 0.5)
        assert drawn_ids(FEDERATION, plain) == drawn_ids(PERMUTED, permuted)
        for p in (*plain, *permuted):
            assert (np.diff(p) > 0).all()
    drawn = compiled(**HALF)(PERMUTED, KEY)
    assert_close(drawn.state.server, result(**HALF).state.server)


def test_every_client_is_drawn_as_often_as_another():
    draw = jax.jit(jax.vmap(lambda k: engine.draw_participants(FEDERATION, k, (0.4, 0.34))))
    drawn = draw(jax.random.split(jax.random.key(0), 600))
    for places, n, size in zip(drawn, (5, 3), (2, 1), strict=True):
        assert places.shape == (600, size)
        share = np.bincount(np.ravel(places), minlength=n) / 600
        p = size / n
        np.testing.assert_allclose(share, p, atol=4 * (p * (1 - p) / 600) ** 0.5)


def test_shares_are_rounded_and_keep_one_client_at_least():
    def sizes(share):
        return [len(p) for p in engine.draw_participants(FEDERATION, KEY, share)]

    assert sizes(0.01) == [1, 1]
    assert sizes((0.7, 0.5)) == [4, 2]  # 3.5 and 1.5, to even
    assert sizes((0.3, 1.0)) == [2, 3]


@pytest.mark.parametrize(
    "share",
    [
        *(0, 0.0, -0.5, 1.01, 2, float("nan"), None, "half"),
        *((0.5,), (0.5, 0.0), (1.0, 1.5), (1.0,) * 3, (), (None, 1.0)),
    ],
)
def test_shares_outside_the_range_raise(share):
    with pytest.raises(ValueError, match=r"participation: got .*allowed is one share"):
        engine.start(TOY, FEDERATION, KEY, participation=share)


def test_another_round_draws_others():
    draws = [engine.draw_participants(FEDERATION, KEY, 0.4, r) for r in range(6)]
    assert len({tuple(map(int, d[0])) for d in draws}) > 2
    # The first draw is that of `start`.
    assert_equal(engine.start(TOY, FEDERATION, KEY, participation=0.4).participants, draws[0])


@pytest.mark.slow
def test_participants_may_be_drawn_anew_every_round():
    rounds, share = 6, 0.4
    algorithm = TOY._replace(setup=(), round=TOY.round[:1], finish=())
    got = jax.jit(
        lambda key: engine.run(
            algorithm, FEDERATION, key, rounds, participation=share, resample_participants=True
        )
    )(KEY)
    draws = [engine.draw_participants(FEDERATION, KEY, share, r) for r in range(rounds)]
    assert_equal(got.state.participants, draws[-1])
    for c, n in enumerate((5, 3)):
        times = np.zeros(n)
        for r, d in enumerate(draws):
            times[d[c]] += 1
            ids = got.info["rounds"][0]["clients"][c]["id"][r]
            np.testing.assert_array_equal(ids, np.array(IDS[c])[d[c]])
        np.testing.assert_array_equal(got.state.clients[c]["times"], times)


# --- Clients without rows, and the leader ----------------------------------------------------


def without_rows(federation, c, i):
    cohort = federation.cohorts[c]
    mask = np.array(cohort.mask)
    mask[i] = False
    cohort = cohort.replace(mask=mask)
    return federation.replace(
        cohorts=(*federation.cohorts[:c], cohort, *federation.cohorts[c + 1 :])
    )


@pytest.mark.parametrize("chunk", [None, 2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("c", "i"), [(0, 4), (1, 1)])
def test_a_client_without_rows_reaches_nothing(chunk, c, i):
    # Its message is 0 / 0 in part; whatever the weight, a NaN would spoil a plain sum.
    federation = without_rows(FEDERATION, c, i)
    got = compiled(client_chunk=chunk)(federation, KEY)
    assert np.isnan(got.info["setup"][0]["clients"][c]["mean"][i]).all()
    weights = [np.ones(5), np.ones(3)]
    weights[c][i] = 0.0
    assert_equal(got.info["setup"][0]["server"]["weights"], tuple(map(np.float32, weights)))
    sums = got.info["rounds"][0]["server"]
    for other in range(2):
        np.testing.assert_array_equal(sums["weights"][other], [weights[other].sum()] * ROUNDS)
        assert np.isfinite(sums["messages"][other]["mean"]).all()
    for x in jax.tree.leaves(got.state.server):
        assert np.isfinite(x).all()
    # The same as a loop that never asked it.
    places = [list(range(5)), list(range(3))]
    places[c].remove(i)
    start = parts()["start"](federation, KEY)
    clients = [
        [pick(s, j) for j in range(len(i_))] for s, i_ in zip(start.clients, IDS, strict=True)
    ]
    key = jax.random.fold_in(jax.random.fold_in(KEY, SETUP), 0)
    server, clients, _ = loop_stage(TOY.setup, key, federation, start.server, clients, places)
    key = jax.random.fold_in(jax.random.fold_in(KEY, ROUND), 0)
    _, _, info = loop_stage(TOY.round[:1], key, federation, server, clients, places)
    assert_close(pick(sums, 0), info[0]["server"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("federation", [FEDERATION, PERMUTED], ids=["plain", "permuted"])
def test_the_leader_is_the_lowest_participating_id_of_the_widest_cohort(federation, seed):
    got = compiled(**HALF)(federation, jax.random.key(seed))
    leader = min(drawn_ids(federation, got.state.participants)[0])
    assert got.state.server["leader"] == leader
    led = [np.asarray(states["led"]) for states in got.state.clients]
    np.testing.assert_array_equal(
        led[0], ROUNDS * (np.asarray(federation.cohorts[0].client_ids) == leader)
    )
    np.testing.assert_array_equal(led[1], 0)
    np.testing.assert_array_equal(got.info["rounds"][1]["server"]["weight"], np.ones((ROUNDS, 1)))


def test_the_leader_is_found_wherever_the_widest_cohort_stands():
    turned = FEDERATION.replace(cohorts=FEDERATION.cohorts[::-1], labels=FEDERATION.labels[::-1])
    algorithm = TOY._replace(setup=(), round=TOY.round[1:], finish=())
    got = jax.jit(lambda f: engine.run(algorithm, f, KEY, 1).state)(turned)
    assert got.server["leader"] == min(IDS[0])
    np.testing.assert_array_equal(got.clients[0]["led"], 0)
    np.testing.assert_array_equal(got.clients[1]["led"], np.array(IDS[0]) == min(IDS[0]))


# --- Runs from parts, compilation, keys and hyper-parameters ----------------------------------


def test_of_several_widest_cohorts_the_lowest_views_lead_wherever_they_stand():
    views = [(1, 2), (0,), (0, 2), (0, 1)]
    for turn in range(4):
        order = views[turn:] + views[:turn]
        federation = Federation.from_clients([{v: np.ones((2, 1)) for v in ids} for ids in order])
        cohorts = tuple(reversed(federation.cohorts)) if turn % 2 else federation.cohorts
        federation = federation.replace(cohorts=cohorts)
        assert cohorts[leading_cohort(federation)].view_ids == (0, 1)


def test_a_run_is_its_parts():
    p = parts()
    state = p["start"](FEDERATION, KEY)
    state, before = p["setup"](FEDERATION, KEY, state)
    rounds = []
    for r in range(ROUNDS):
        state, info = p["round"](FEDERATION, KEY, state, r)
        rounds.append(info)
    state, after = p["finish"](FEDERATION, KEY, state, ROUNDS - 1)
    labels = p["assign"](FEDERATION, state)
    info = {"setup": before, "rounds": stack(rounds), "finish": after}
    assert_close(engine.RunResult(state, labels, info, None, None, jnp.int32(ROUNDS)), result())


def test_keys_rounds_and_federations_of_one_shape_share_a_program():
    run, one_round = compiled(), parts()["round"]
    run(FEDERATION, KEY)
    state = parts()["start"](FEDERATION, KEY)
    one_round(FEDERATION, KEY, state, 0)
    assert traces
    before = len(traces)
    for seed in range(3):
        run(PERMUTED, jax.random.key(seed))
        state, _ = one_round(PERMUTED, jax.random.key(seed), state, seed)
    run(build(seed=5), KEY)
    assert len(traces) == before


def test_clients_are_traced_once_a_phase_and_cohort_whatever_their_number_and_the_rounds():
    before = len(traces)
    jax.eval_shape(lambda key: engine.run(TOY, FEDERATION, key, 9), KEY)
    # Both cohorts in the set-up, in the round and at the end; one leader.
    assert len(traces) - before == 2 + 2 + 1 + 2


@pytest.fixture(scope="module")
def mapped():
    """Runs of two other keys, then of no noise and of ten times the noise, in one program."""
    others = jax.random.split(jax.random.key(3), 2)
    keys = jnp.concatenate([others, jnp.stack([KEY, KEY])])
    scales = jnp.array([0.5, 0.5, 0.0, 5.0])
    run = jax.vmap(lambda key, scale: engine.run(toy(scale), FEDERATION, key, ROUNDS))
    return others, jax.jit(run)(keys, scales)


@pytest.mark.slow
def test_keys_may_be_mapped(mapped):
    keys, together = mapped
    for i, key in enumerate(keys):
        assert_close(pick(together, i), compiled()(FEDERATION, key))


def test_hyper_parameters_may_be_mapped(mapped):
    center = np.asarray(mapped[1].state.server["center"])
    # Without noise the end is the mean over all rows.
    x = [np.asarray(cohort.by_view()[1], float) for cohort in FEDERATION.cohorts]
    of_rows = sum(v.sum((0, 1)) for v in x) / sum(map(sum, COUNTS))
    np.testing.assert_allclose(center[2], of_rows, rtol=1e-5, atol=1e-6)
    # What noise adds there is linear in its scale.
    added = np.asarray(result().state.server["center"]) - of_rows
    np.testing.assert_allclose(center[3] - of_rows, 10 * added, rtol=1e-4, atol=1e-5)


# --- Labels, scores, rounds --------------------------------------------------------------------


def test_the_method_never_sees_labels():
    inits.clear()
    result(n_clusters=2)
    engine.traffic(TOY, FEDERATION)
    jax.eval_shape(lambda f: engine.start(TOY, f, KEY), FEDERATION)
    jax.eval_shape(lambda f: engine.run(TOY, f, KEY, 1, n_clusters=2).labels, FEDERATION)
    assert len(inits) >= 3
    assert all(seen.labels is None and seen.n_classes is None for seen in inits)
    # Nor do other labels change anything but the tables.
    other = FEDERATION.replace(
        labels=tuple(
            np.where(x >= 0, (x * x + 1) % 3, x) for x in jax.device_get(FEDERATION.labels)
        )
    )
    got, plain = compiled(n_clusters=2)(other, KEY), result(n_clusters=2)
    assert_equal((got.state, got.labels, got.info), (plain.state, plain.labels, plain.info))
    assert np.any(got.tables[-1] != plain.tables[-1])


def test_every_round_is_counted_as_if_it_were_the_last():
    # `finish` leaves the state of the round after it alone.
    counted = result(n_clusters=2)
    assert_close(counted._replace(tables=None, participants=None), result())
    assert counted.tables.shape == (ROUNDS, 8, 3, 2)
    p = parts()
    state, _ = p["setup"](FEDERATION, KEY, p["start"](FEDERATION, KEY))
    for r in range(ROUNDS):
        state, _ = p["round"](FEDERATION, KEY, state, r)
        finished, _ = p["finish"](FEDERATION, KEY, state, r)
        labels = p["assign"](FEDERATION, finished)
        np.testing.assert_array_equal(counted.tables[r], host.tables(FEDERATION, labels))
        assert_equal(pick(counted.participants, r), pick(state.participants, slice(None)))
    assert 0.0 < host.table_scores(np.sum(counted.tables[-1], axis=0))["nmi"] < 1.0


@pytest.mark.slow
def test_who_took_part_is_known_of_every_round():
    anew = result(n_clusters=2, participation=0.5, resample_participants=True).participants
    for r in range(ROUNDS):
        assert_equal(pick(anew, r), engine.draw_participants(FEDERATION, KEY, 0.5, r))


def counter(end):
    """A method that counts its rounds up to `end`, and draws a number in `finish`."""

    def silent(key, sent, state, client):
        return state, (), ()

    def count(key, server, messages, weights):
        return server + 1, {"n": server + 1}

    def draw(key, server, messages, weights):
        return server, jax.random.uniform(key)

    return FederatedAlgorithm(
        init=lambda key, federation: (jnp.int32(0), ((), ())),
        setup=(),
        round=(Phase(lambda server, ids: (), silent, count, "sum"),),
        finish=(Phase(lambda server, ids: (), silent, draw, "sum"),),
        assign=lambda server, state, client: jnp.zeros(client.mask.shape, jnp.int32),
        done=lambda server: server >= end,
    )


def test_a_run_ends_with_the_round_of_the_largest_number():
    def number(labels):
        return sum((mine * (1 + np.arange(mine.size).reshape(mine.shape))).sum() for mine in labels)

    @jax.jit
    def kept(federation, key, sign):
        def keep(labels):
            return sign * number(labels)

        return engine.run(TOY, federation, key, ROUNDS + 1, keep=keep, keep_from=ROUNDS)

    p, ends = parts(), {}
    state, _ = p["setup"](FEDERATION, KEY, p["start"](FEDERATION, KEY))
    for r in range(ROUNDS + 1):
        state, _ = p["round"](FEDERATION, KEY, state, r)
        end, info = p["finish"](FEDERATION, KEY, state, r)
        ends[r + 1] = end, p["assign"](FEDERATION, end), info
    before, after = (number(jax.device_get(ends[r][1])) for r in (ROUNDS, ROUNDS + 1))
    assert before != after
    larger = ROUNDS if before > after else ROUNDS + 1
    smaller = 2 * ROUNDS + 1 - larger
    # A number that is NaN throughout keeps the last round.
    for sign, r in ((1.0, larger), (-1.0, smaller), (np.nan, ROUNDS + 1)):
        found = kept(FEDERATION, KEY, sign)
        assert (found.kept, found.n_rounds) == (r, ROUNDS + 1)
        assert_close((found.state, found.labels, found.info["finish"]), ends[r])


@pytest.mark.parametrize(
    ("method", "keep_from", "match"),
    [
        (TOY, 0, "keep_from: got 0"),
        (TOY, 3, "keep_from: got 3; allowed is one of the 2 rounds"),
        (TOY._replace(round=()), 1, "keep: is for methods that make all their rounds"),
        (TOY._replace(done=jnp.isnan), 1, "keep: is for methods that make all their rounds"),
    ],
)
def test_rounds_that_cannot_be_kept_are_refused(method, keep_from, match):
    with pytest.raises(ValueError, match=match):
        engine.run(method, FEDERATION, KEY, 2, keep=lambda labels: 0.0, keep_from=keep_from)


def test_rounds_end_where_the_method_is_done_and_the_rest_is_zero():
    run = jitted(lambda end: engine.run(counter(end), FEDERATION, KEY, 4))
    for end, n_rounds in ((0, 0), (1, 1), (3, 3), (9, 4)):
        got = run(end)
        assert got.n_rounds == got.state.server == n_rounds
        counts = np.arange(1, 5)
        np.testing.assert_array_equal(
            got.info["rounds"][0]["server"]["n"], np.where(counts <= n_rounds, counts, 0)
        )
        # The key of the end is that of the last round made, or of the first.
        key = KEY
        for number in (FINISH, max(n_rounds - 1, 0), 0, SERVER):
            key = jax.random.fold_in(key, number)
        assert got.info["finish"][0]["server"] == jax.random.uniform(key)


def test_rounds_whose_state_shrinks_draw_what_those_of_a_run_draw():
    method = counter(3)
    (count,), (draw,) = method.round, method.finish
    method = method._replace(round=(count, draw), compact=lambda server: server)
    plain = jax.jit(lambda f, key: engine.run(method, f, key, 5))(FEDERATION, KEY)
    found = engine.run_compacting(lambda _: method, FEDERATION, KEY, 5)
    assert found.n_rounds == plain.n_rounds == 3
    drawn = plain.info["rounds"][1]["server"][:3]
    assert len(np.unique(drawn)) == 3
    assert_equal(found.info["rounds"][1]["server"], drawn)
    assert_equal(found.info["finish"], plain.info["finish"])


def test_fewer_clients_than_a_method_needs_are_refused():
    engine.start(counter(1)._replace(least_clients=8), FEDERATION, KEY)
    with pytest.raises(ValueError, match=r"participation: got 1\.0; allowed is .* 9 clients .* 8$"):
        engine.start(counter(1)._replace(least_clients=9), FEDERATION, KEY)


def test_no_rounds_are_the_set_up_and_the_end():
    got = result(rounds=0)
    for states in got.state.clients:
        np.testing.assert_array_equal(states["times"], 1 + 1)
        np.testing.assert_array_equal(states["led"], 0)
    p = parts()
    state, before = p["setup"](FEDERATION, KEY, p["start"](FEDERATION, KEY))
    state, after = p["finish"](FEDERATION, KEY, state, 0)
    assert_close(got.state, state)
    assert_close((got.info["setup"], got.info["finish"]), (before, after))
    assert {x.shape[0] for x in jax.tree.leaves(got.info["rounds"])} == {0}
    run = jax.eval_shape(lambda key: engine.run(TOY, FEDERATION, key, 0, n_clusters=2), KEY)
    assert run.tables.shape == (0, 8, 3, 2)


def test_bad_rounds_and_tables_without_labels_raise():
    for rounds in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"rounds: got {rounds}; allowed is"):
            engine.run(TOY, FEDERATION, KEY, rounds)
    with pytest.raises(ValueError, match="no labels"):
        engine.run(TOY, FEDERATION.without_labels(), KEY, 1, n_clusters=2)


def changed(stage, place, **fields):
    """The toy with another phase."""
    phases = list(getattr(TOY, stage))
    phases[place] = phases[place]._replace(**fields)
    return TOY._replace(**{stage: tuple(phases)})


WAYS = {
    "run": lambda toy: jax.eval_shape(lambda: engine.run(toy, FEDERATION, KEY, 1)),
    "chunks": lambda toy: jax.eval_shape(
        lambda: engine.run(toy, FEDERATION, KEY, 1, participation=0.5, client_chunk=1)
    ),
    "streaming": lambda toy: run_streaming(toy, FEDERATION, KEY, 1, client_chunk=2),
    "steps": lambda toy: Steps(lambda hyper: toy, None, FEDERATION).state_shapes(),
    "traffic": lambda toy: engine.traffic(toy, FEDERATION),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_phase_with_an_unknown_setting_is_named(way):
    with pytest.raises(ValueError, match=r"^round\[1\]\.who: got 'all'; allowed is 'everyone' or"):
        WAYS[way](changed("round", 1, who="all"))
    with pytest.raises(
        ValueError, match=r"^finish\[0\]\.reduce: got 'mean'; allowed is 'stack' or"
    ):
        WAYS[way](changed("finish", 0, reduce="mean"))


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_returns_something_else_is_named(way):
    lead, add = TOY.round[1].client, TOY.round[0].server
    without_info = changed("round", 1, client=lambda *args: lead(*args)[:2])
    text = r"^round\[1\]\.client: returned 2 values; allowed is \(state, message, info\)"
    with pytest.raises(ValueError, match=text):
        WAYS[way](without_info)
    state_alone = changed("round", 0, server=lambda *args: add(*args)[0])
    text = r"^round\[0\]\.server: returned one value, dict; allowed is \(state, info\)"
    with pytest.raises(ValueError, match=text):
        WAYS[way](state_alone)


def remade(**fields):
    """The toy whose functions of these names return what these make of it."""

    def then(name, change):
        whole = getattr(TOY, name)
        return lambda *args: change(whole(*args))

    return TOY._replace(**{name: then(name, change) for name, change in fields.items()})


def with_state(stage, place, name, change):
    """The toy, of one of whose phases a function changes the state that it returns."""
    whole = getattr(getattr(TOY, stage)[place], name)

    def other(*args):
        state, *others = whole(*args)
        return change(state), *others

    return changed(stage, place, **{name: other})


def with_message(change):
    add = TOY.round[0].client

    def other(key, *args):
        state, message, info = add(key, *args)
        return state, change(key, message), info

    return changed("round", 0, client=other)


@pytest.mark.parametrize(
    ("toy", "text"),
    [
        (TOY._replace(round=TOY.round[0]), r"round: got Phase; allowed is a tuple of Phase"),
        (TOY._replace(setup=None), r"setup: got NoneType; allowed is a tuple of Phase"),
        (TOY._replace(finish=(len,)), r"finish: got builtin_function_or_method among the phases;"),
        (remade(init=lambda made: made[0]["center"]), r"init: returned .*Tracer; allowed is \(ser"),
        (
            remade(init=lambda made: (made[0], ())),
            r"init: returned 0 stacks .* here 2;",
        ),
        (remade(init=lambda made: (made[0], None)), r"init: returned NoneType of client states;"),
        (
            remade(init=lambda made: (made[0], made[1][::-1])),
            r"init: .* states of shape \[3\] for views \(0, 1\); .* axis of 5 clients",
        ),
        (
            with_state("round", 1, "client", lambda state: {**state, "led": jnp.zeros(2)}),
            r"round\[1\]\.client: returned shape \[2\] at state\['led'\]; allowed is shape",
        ),
        (
            with_state("setup", 0, "client", lambda state: {**state, "more": 1}),
            r"setup\[0\]\.client: returned shape \[\] at state\['more'\]; allowed is nothing, as",
        ),
        (
            with_state("finish", 0, "server", lambda state: {"center": state["center"]}),
            r"finish\[0\]\.server: returned nothing at state\['leader'\]; allowed is an array",
        ),
        (
            with_state("round", 0, "server", lambda state: {**state, "empty": ()}),
            r"round\[0\]\.server: returned a state PyTreeDef.*'empty'.*; allowed is PyTreeDef",
        ),
        (
            with_message(lambda key, message: {**message, "n": key}),
            r"round\[0\]\.client: returned message\['n'\] of type key<fry>; allowed are arr",
        ),
        (
            with_message(lambda key, message: {**message, "n": "two"}),
            r"round\[0\]\.client: returned message\['n'\] of type str;",
        ),
    ],
)
def test_what_a_run_cannot_go_on_with_is_named(toy, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        WAYS["run"](toy)


@pytest.mark.parametrize("way", ["run", "streaming", "steps"])
def test_labels_that_are_none_are_refused(way):
    """Numbers between clusters, and one label for all rows, would pass for clusters."""
    for change, got in (
        (lambda labels: 0.5 * labels, r"float32\[4\]"),
        (lambda labels: labels[0], r"int32\[\]"),
    ):
        text = rf"^assign: returned {got}; allowed are whole numbers of shape \[4\], a label"
        with pytest.raises(ValueError, match=text):
            WAYS[way](remade(assign=change))


def test_a_federation_without_labels_runs():
    got = jax.eval_shape(compiled(), FEDERATION.without_labels(), KEY)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, result())


@pytest.mark.parametrize("chunk", [None, 2])
def test_embed_and_assign_reach_every_client(chunk):
    state = result(**HALF).state
    embed, assign = (
        jax.jit(functools.partial(f, TOY, client_chunk=chunk))
        for f in (engine.embed, engine.assign)
    )
    embedded, labels = embed(FEDERATION, state), assign(FEDERATION, state)
    center = np.asarray(state.server["center"])
    for c, cohort in enumerate(FEDERATION.cohorts):
        start = np.asarray(state.clients[c]["start"])[:, None]
        expected = np.asarray(cohort.by_view()[1]) - center + start
        np.testing.assert_allclose(embedded[c], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(labels[c], np.floor(8 * expected[..., 0]) % 2)


def test_a_method_without_a_representation_says_so():
    with pytest.raises(ValueError, match="no representation"):
        engine.embed(TOY._replace(embed=None), FEDERATION, result().state)


# --- Traffic and progress --------------------------------------------------------------------


@pytest.mark.parametrize(("share", "n"), [(1.0, 5 + 3), (0.5, 2 + 2), ((0.2, 1.0), 1 + 3)])
def test_traffic_is_counted_by_hand(share, n):
    down = 2 * 4 + 4  # a centre of two float32, an int32
    up = 2 * 4 + 4  # a mean, a count
    lead = 4 + 2 * 4  # an id, a shift
    assert engine.traffic(TOY, FEDERATION, participation=share) == {
        "setup": Traffic(n * up, n * down),
        "round": Traffic(n * up + lead, n * down + down),
        "finish": Traffic(n * up, n * down),
    }


def test_among_peers_every_message_goes_to_all_others_and_nothing_is_broadcast():
    exchanged = [Exchanged(3, 10, 99), Exchanged(2, 100, 99)]
    assert total(exchanged, None) == (230, 5 * 99)
    assert total(exchanged, 5) == (4 * 230, 4 * 230)


def test_peers_send_to_those_who_take_part_and_to_no_others():
    found = engine.traffic(TOY._replace(peers=True), FEDERATION, participation=0.5)
    setup = (2 + 2) * 3 * 12  # to three each: a mean and a count
    assert found["setup"] == Traffic(setup, setup)


def test_traffic_of_a_run_counts_its_rounds_and_all_else_once():
    stages = {"setup": Traffic(1, 2), "round": Traffic(10, 20), "finish": Traffic(100, 200)}
    assert of_run(stages, 3) == Traffic(131, 262)
    assert of_run(stages, 0) == Traffic(101, 202)


def test_traffic_follows_each_cohorts_own_messages():
    # What travels may differ by view: two bytes and a float32 for each view held.
    def client(key, sent, state, client):
        return state, [jnp.zeros((2,), jnp.int8), *[jnp.zeros(()) for _ in client.views]], {}

    phase = Phase(
        lambda server, view_ids: {v: jnp.zeros((3,), jnp.float16) for v in view_ids},
        client,
        lambda key, server, messages, weights: (server, {}),
        "sum",
    )
    algorithm = TOY._replace(setup=(), round=(phase, phase), finish=())
    up, down = 5 * (2 + 2 * 4) + 3 * (2 + 4), 5 * 2 * 6 + 3 * 6
    assert engine.traffic(algorithm, FEDERATION) == {
        "setup": Traffic(0, 0),
        "round": Traffic(2 * up, 2 * down),
        "finish": Traffic(0, 0),
    }


def test_a_number_that_is_broadcast_is_a_scalar_on_the_wire():
    phase = Phase(
        lambda server, view_ids: (1, 0.5),
        lambda key, sent, state, client: (state, sent[1], {}),
        lambda key, server, messages, weights: (server, {}),
        "sum",
    )
    algorithm = TOY._replace(setup=(), round=(phase,), finish=())
    assert engine.traffic(algorithm, FEDERATION)["round"] == Traffic(8 * 4, 8 * 8)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "chunk"), [(1.0, None), (1.0, 2), ((0.8, 0.7), 2)])
def test_progress_adds_up_to_the_participants(share, chunk):
    calls = []

    def progress(stage, phase, cohort, n):
        calls.append((stage, phase, cohort, n))

    options = {"client_chunk": chunk, "progress": progress}

    state = engine.start(TOY, FEDERATION, KEY, participation=share)
    one_round = jax.jit(lambda s, r: engine.one_round(TOY, FEDERATION, KEY, s, r, **options)[0])
    state = jax.jit(lambda s: engine.setup(TOY, FEDERATION, KEY, s, **options)[0])(state)
    jax.block_until_ready(one_round(one_round(state, 0), 1))
    jax.effects_barrier()
    sizes = [len(p) for p in engine.draw_participants(FEDERATION, KEY, share)]
    done = {}
    for *where, n in calls:
        done[tuple(where)] = done.get(tuple(where), 0) + n
    assert done == {
        ("setup", 0, 0): sizes[0],
        ("setup", 0, 1): sizes[1],
        ("round", 0, 0): 2 * sizes[0],
        ("round", 0, 1): 2 * sizes[1],
        ("round", 1, 0): 2,
    }
    if chunk is not None:
        assert max(n for *_, n in calls) == chunk


def test_traffic_needs_no_data():
    """Zeros that take no memory will do, for a leader and for a part of the clients, too."""
    empty = FEDERATION.replace(
        cohorts=tuple(
            c.replace(views=tuple(np.broadcast_to(np.float32(0), v.shape) for v in c.views))
            for c in jax.device_get(FEDERATION.cohorts)
        )
    )
    for share in (1.0, 0.5):
        found = engine.traffic(TOY, empty, participation=share)
        assert found == engine.traffic(TOY, FEDERATION, participation=share)


def test_what_is_no_algorithm_or_no_federation_is_named():
    with pytest.raises(ValueError, match=r"^algorithm: got 'str'; allowed is a FederatedAlgorithm"):
        engine.run("fmcsc", FEDERATION, KEY, 1)
    with pytest.raises(ValueError, match=r"^federation: got 'list'; allowed is a Federation"):
        engine.run(TOY, [np.ones((3, 2))], KEY, 1)
    with pytest.raises(ValueError, match=r"^federation: got 'list'; allowed is a Federation"):
        engine.run(TOY, [np.ones((3, 2))], KEY, 1, n_clusters=2)
    with pytest.raises(ValueError, match=r"^key: got 0; allowed is a key of JAX, such as jax.ran"):
        engine.run(TOY, FEDERATION, 0, 1)
    with pytest.raises(ValueError, match=r"^state: got 'RunResult'; allowed is a RunState, as run"):
        engine.assign(TOY, FEDERATION, result())
