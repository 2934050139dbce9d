"""Secure aggregation: exact cancellation, what the server sees, refusal of wrong sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.engine.phases import run_phases
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages import gaussian_noise, transformed
from jaxfedmvc.messages.secure import (
    Announced,
    SecureInfo,
    SecureState,
    SumReport,
    any_unread,
    check_sums,
    decode,
    encode,
    pairwise_mask,
    secure_aggregation,
)

KEY, SECRETS = jax.random.key(0), jax.random.key(99)
BITS = 16
# Cohorts of 5, 2 and 1 clients, whose ids are not in the order of the cohorts.
VIEWS = [(0, 1), (0,), (0, 1), (1,), (0, 1), (0, 1), (0,), (0, 1)]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs of this file are compiled for a handful of runs of a few numbers."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def build(seed=0, views_of=VIEWS):
    rng = np.random.default_rng(seed)
    return Federation.from_clients(
        [{v: rng.normal(size=(3 + i % 2, 2)) for v in views} for i, views in enumerate(views_of)]
    )


def toy(message_of=None):
    """Clients send the sum of their rows and how many there are, and noise of their own."""

    def init(key, federation):
        counts = tuple(jnp.zeros(cohort.n_clients, jnp.int32) for cohort in federation.cohorts)
        return {"center": jnp.zeros(2), "ready": jnp.bool_(False)}, counts

    def broadcast(server, view_ids):
        return server["center"]

    def client(key, sent, times, client):
        rows = jnp.where(client.mask[:, None], client.views[0] - sent[None], 0.0)
        message = {
            "sum": jnp.sum(rows, axis=0) + 0.1 * jax.random.uniform(key, (2,)),
            "stats": (jnp.sum(client.mask, dtype=jnp.float32), jnp.sum(jnp.square(rows))),
        }
        message = message if message_of is None else message_of(client, message)
        return times + 1, message, {"id": client.client_ids}

    def add(key, server, messages, weights):
        mean = sum(m["sum"] for m in messages) / sum(m["stats"][0] for m in messages)
        center = server["center"] + 0.5 * mean + 0.01 * jax.random.uniform(key, (2,))
        return {**server, "center": center}, {"messages": messages, "weights": weights}

    def listen(key, sent, times, client):
        return times, (), {}

    def ready(key, server, messages, weights):
        return {**server, "ready": jnp.bool_(True)}, {}

    def assign(server, times, client):
        return (client.views[0][:, 0] > server["center"][0]).astype(jnp.int32)

    summing = Phase(broadcast, client, add, "sum")
    return FederatedAlgorithm(
        init,
        setup=(summing,),
        round=(Phase(broadcast, listen, ready, "stack"), summing),
        finish=(Phase(broadcast, listen, ready, "sum"),),
        assign=assign,
        embed=lambda server, times, client: client.views[0] - server["center"][None],
    )


FEDERATION = build()
RUNS = build(views_of=[views for views in VIEWS if views != (1,)])  # cohorts of 5 and of 2
TOY = toy()


def masked(algorithm=TOY, federation=FEDERATION, **options):
    options = {"fraction_bits": BITS, **options}
    return secure_aggregation(algorithm, federation, SECRETS, **options)


@functools.cache
def plain_run(**options):
    return jax.jit(lambda f: engine.run(TOY, f, KEY, 2, **options))(RUNS)


@functools.cache
def compiled():
    return jax.jit(lambda f: engine.run(masked(federation=RUNS), f, KEY, 2))


def assert_same(secure, plain):
    """The sums of a run within fixed-point rounding, and all that follows from them."""
    check_sums(secure.info)
    for stage, phase in (("setup", 0), ("rounds", 1)):
        ours, theirs = secure.info[stage][phase], plain.info[stage][phase]
        for a, b in zip(ours["clients"], theirs["clients"], strict=True):
            assert not a.clipped.any()
            np.testing.assert_array_equal(a.inner["id"], b["id"])
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=5e-4, rtol=1e-5),
            ours["server"].inner,
            theirs["server"],
        )
    center = secure.state.server.inner["center"]
    np.testing.assert_allclose(center, plain.state.server["center"], atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, secure.state.clients, plain.state.clients)
    jax.tree.map(np.testing.assert_array_equal, secure.labels, plain.labels)


@pytest.mark.slow
def test_a_run_is_the_plain_run_up_to_fixed_point_rounding():
    result = compiled()(RUNS)
    assert_same(result, plain_run())
    assert result.state.server.rounds == 2
    client = jax.tree.map(lambda x: x[0], RUNS.cohorts[0])
    embedded = masked().embed(result.state.server, (), client)
    expected = TOY.embed(plain_run().state.server, (), client)
    np.testing.assert_allclose(embedded, expected, atol=1e-4)


@pytest.mark.slow
def test_participants_that_are_drawn_anew_every_round():
    options = {"participation": 0.6, "resample_participants": True}

    @jax.jit
    def run(anew):
        def drawn(r):
            return engine.draw_participants(RUNS, KEY, 0.6, anew * r)

        secure = masked(federation=RUNS, participants=drawn)
        return engine.run(secure, RUNS, KEY, 2, **options)

    assert_same(run(1), plain_run(**options))
    # The draw does vary: masks over the first round's participants would not cancel.
    fixed = run(0)
    with pytest.raises(ValueError, match="not the participants that were announced"):
        check_sums(fixed.info)
    assert np.isnan(fixed.state.server.inner["center"]).all()


def test_done_and_compact_get_the_inner_state():
    secure = masked(
        TOY._replace(
            done=lambda server: server["center"][0] > 1e6,
            compact=lambda server: {**server, "center": server["center"][:1]},
        )
    )
    state = SecureState({"center": jnp.array([2e6, 0.0]), "ready": jnp.bool_(True)}, jnp.int32(4))
    assert secure.done(state)
    compacted = secure.compact(state)
    assert compacted.rounds == 4 and compacted.inner["center"].shape == (1,)
    without = masked(TOY._replace(embed=None))
    assert without.done is without.compact is without.embed is None


def test_bytes_count_the_announcement_and_the_masked_message():
    traffic = engine.traffic(masked(), FEDERATION)
    # Up: 4 values and the check. Down: the centre, the number of the exchange, the ids.
    assert traffic["setup"] == (8 * 20, 8 * (8 + 4) + 4 * (5 * 5 + 2 * 2 + 1))


# --- Exact cancellation ---------------------------------------------------------------------------


def seen_by_server(phase, federation, state, reduce, client_chunk=None):
    """What reaches the server of a masked phase, for each cohort."""

    def look(key, server, messages, weights):
        return server, messages

    spy = phase._replace(server=look, reduce=reduce)
    everyone = tuple(jnp.arange(cohort.n_clients) for cohort in federation.cohorts)
    clients = TOY.init(KEY, federation)[1]
    run = engine.RunState(state, clients, everyone)
    _, (info,) = run_phases((spy,), "round", federation, KEY, run, client_chunk, None)
    return info["server"]


def state_in_round(r):
    return SecureState(TOY.init(KEY, FEDERATION)[0], jnp.int32(r))


@functools.cache
def compiled_look(reduce, client_chunk):
    @jax.jit
    def look(federation, secrets, state):
        secure = secure_aggregation(TOY, FEDERATION, secrets, fraction_bits=BITS)
        return seen_by_server(secure.round[1], federation, state, reduce, client_chunk)

    return look


def look_at(reduce, federation=FEDERATION, r=0, secrets=SECRETS, client_chunk=None):
    """As `seen_by_server`, for the sums of round r."""
    seen = compiled_look(reduce, client_chunk)(federation, secrets, state_in_round(r))
    return jax.tree.map(np.asarray, seen)


@jax.jit
def encoded_messages(federation):
    phase = TOY.round[1]
    stacked = seen_by_server(phase, federation, TOY.init(KEY, federation)[0], "stack")
    return [
        jax.tree.map(
            lambda x, n=cohort.n_clients: jax.vmap(lambda v: encode(v, BITS, n)[0])(x), message
        )
        for cohort, message in zip(federation.cohorts, stacked, strict=True)
    ]


def plain_messages(federation=FEDERATION):
    """The plain messages of round 0 of each cohort, as integers."""
    return jax.tree.map(np.asarray, encoded_messages(federation))


@pytest.mark.parametrize("client_chunk", [None, 2])
def test_masks_cancel_bit_for_bit_in_every_cohort(client_chunk):
    assert [cohort.n_clients for cohort in FEDERATION.cohorts] == [5, 2, 1]
    sums = look_at("sum", client_chunk=client_chunk)
    for total, messages, n in zip(sums, plain_messages(), (5, 2, 1), strict=True):
        expected = jax.tree.map(lambda x: x.sum(axis=0, dtype=np.uint32), messages)
        jax.tree.map(np.testing.assert_array_equal, total.values, expected)
        assert total.check == n
        assert total.check.dtype == total.values["sum"].dtype == np.uint32


def test_masks_do_not_depend_on_the_data():
    ours, theirs = look_at("stack"), look_at("stack", build(1))
    plain, other = plain_messages(), plain_messages(build(1))
    for a, b, x, y in zip(ours, theirs, plain, other, strict=True):
        jax.tree.map(
            lambda a, b, x, y: np.testing.assert_array_equal(a - b, x - y), a.values, b.values, x, y
        )
        assert np.any(x["sum"] != y["sum"])


def test_masks_differ_in_every_exchange_and_for_other_secrets():
    def masks_of(**options):
        """The masks of the cohort of five, one row for each client."""
        seen = look_at("stack", **options)[0]
        minus = jax.tree.map(lambda a, b: a - b, seen.values, plain_messages()[0])
        return np.concatenate([np.reshape(x, (5, -1)) for x in jax.tree.leaves(minus)], axis=1)

    first = masks_of()
    for other in (masks_of(r=1), masks_of(secrets=jax.random.key(98))):
        assert not np.any(first == other)
    np.testing.assert_array_equal(first, masks_of())
    # All entries of all clients' masks are different, too.
    assert np.unique(first).size == first.size


def test_no_two_exchanges_of_a_run_have_the_same_number():
    """Scoring every round makes the last exchanges after each of them."""
    secure = masked(in_clear=["round[0]"])
    numbers = [
        int(phase.broadcast(state_in_round(r), (0, 1)).exchange)
        for r in range(4)
        for stage, phases in (
            ("setup", secure.setup),
            ("round", secure.round[1:]),
            ("finish", secure.finish),
        )
        for phase in phases
        if stage != "setup" or r == 0
    ]
    assert len(set(numbers)) == len(numbers) == 9


def test_all_sums_of_a_round_name_the_participants_of_that_round():
    """And those of the end the last round's, or the first ones' where no round was made."""
    summing = TOY.setup[0]
    method = TOY._replace(setup=(summing,), round=(summing, summing), finish=(summing,))

    def drawn(r):
        return jnp.array([r]), jnp.array([0]), jnp.array([0])

    secure = masked(method, participants=drawn)
    ids = FEDERATION.cohorts[0].client_ids

    def named(phase, rounds):
        return int(phase.broadcast(state_in_round(rounds), (0, 1)).participants[0])

    for r in range(3):
        assert [named(phase, r) for phase in secure.round] == [ids[r]] * 2
        assert named(secure.finish[0], r + 1) == ids[r]
    assert named(secure.setup[0], 0) == named(secure.finish[0], 0) == ids[0]


def test_a_round_is_counted_after_its_last_sum():
    empty = TOY.round[0]._replace(client=lambda key, sent, state, client: (state, (), ()))
    secure = masked(TOY._replace(round=(empty, empty)))
    state = state_in_round(4)
    counts = [phase.server(KEY, state, ((),), ())[0].rounds for phase in secure.round]
    assert counts == [4, 5]


jit_encode = jax.jit(encode, static_argnums=(1, 2))
jit_decode = jax.jit(decode, static_argnums=1)
jit_mask = jax.jit(pairwise_mask)


def test_a_masked_message_is_uniform():
    ids = np.array([3, 8, 5])
    message = np.full(40_000, jit_encode(np.float32(1.5), BITS, 3)[0])
    for own in (3, 5, 8):
        mask = jit_mask(SECRETS, np.int32(own), ids, message)
        seen = message + np.asarray(mask)
        for shift in (0, 12, 24):
            counts = np.bincount((seen >> shift) & 255, minlength=256)
            assert chisquare(counts).pvalue > 1e-3
        assert abs(np.corrcoef(seen[1:], seen[:-1])[0, 1]) < 0.02


def test_masks_of_any_participants_sum_to_zero():
    mask = jax.jit(jax.vmap(pairwise_mask, in_axes=(None, 0, None, None)))
    like = {"a": np.zeros((2, 3)), "b": np.zeros(())}
    for ids in ([7], [2, 1], [2**31 - 1, 0, 5, 9, 4]):
        masks = mask(SECRETS, np.array(ids), np.array(ids), like)
        for leaf in jax.tree.leaves(masks):
            assert not np.asarray(leaf).sum(axis=0, dtype=np.uint32).any()
            assert np.any(leaf) == (len(ids) > 1)


def test_participants_may_be_numpys_outside_of_jit():
    ids, like = np.array([2, 1]), np.zeros(3)
    np.testing.assert_array_equal(
        pairwise_mask(SECRETS, np.int32(2), ids, like), jit_mask(SECRETS, np.int32(2), ids, like)
    )


def test_no_two_pairs_share_a_mask():
    """Not even pairs whose ids have one sum, product or difference."""
    pairs = [(0, 3), (1, 2), (3, 4), (2, 6), (0, 1)]
    drawn = [jit_mask(SECRETS, np.int32(a), np.array([a, b]), np.zeros(3)) for a, b in pairs]
    assert np.unique(np.concatenate(drawn)).size == 3 * len(pairs)


# --- Fixed point ----------------------------------------------------------------------------------


def test_fixed_point_of_hand_worked_values():
    x = np.float32([0.0, 1.0, -1.0, 0.3, -0.625, np.nan, 1000.0, -np.inf])
    coded, clipped = jit_encode(x, 2, 2**26)  # 31 units for each of 2^26 clients
    signed = np.asarray(coded).astype(np.int32)
    np.testing.assert_array_equal(signed, [0, 4, -4, 1, -2, 0, 31, -31])
    assert clipped == 2
    np.testing.assert_array_equal(np.asarray(jit_decode(coded, 2))[:5], [0, 1, -1, 0.25, -0.5])
    np.testing.assert_array_equal(jit_encode(np.float32([768]), -8, 3)[0], [3])


@pytest.mark.parametrize(
    ("n", "most", "above"),
    [(1, 2147483520, 2147483648), (3, 715827840, 715827904), (1000, 2147483, 2147484)],
)
def test_the_largest_number_is_not_clipped_and_the_next_one_is(n, most, above):
    """Those of 24 bits up to (2^31 - 1) / n, and the float32 after them."""
    for value, n_clipped in ((most, 0), (above, 2)):
        coded, clipped = jit_encode(np.array([value, -value], np.float32), 0, n)
        assert clipped == n_clipped and jit_decode(coded, 0).tolist() == [most, -most]


@pytest.mark.parametrize("n", [1, 2, 7, 100])
@pytest.mark.parametrize("bits", [-3, 24])
def test_a_sum_is_within_the_stated_bound(n, bits):
    limit = 2.0 ** (31 - bits)
    x = np.random.default_rng(n).uniform(-1, 1, (n, 400)).astype(np.float32) * limit / n / 1.001
    coded, clipped = jax.device_get(jax.jit(jax.vmap(lambda v: encode(v, bits, n)))(x))
    assert not clipped.any()
    exact = x.astype(np.float64).sum(axis=0)
    total = coded.sum(axis=0, dtype=coded.dtype)
    error = np.abs(np.asarray(jit_decode(total, bits), np.float64) - exact)
    bound = n * 2.0**-bits / 2
    assert np.all(error <= bound + np.abs(exact) * 2.0**-24)


@pytest.mark.parametrize("n", [1, 3, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_clipped_values_never_wrap_around(n, sign):
    coded, clipped = jit_encode(np.float32([sign * 1e30, sign * np.inf]), 8, n)
    total = np.asarray(jit_decode(np.asarray(coded) * np.uint32(n), 8))
    assert clipped == 2
    np.testing.assert_allclose(total, sign * 2.0**23, rtol=1e-6 * n)
    assert np.all(np.abs(total) <= 2.0**23)


def test_leaves_may_have_different_fraction_bits_and_clipping_is_reported():
    bits = {"setup[0]": {"sum": 28, "stats": (BITS, 10)}, "round[1]": BITS, "finish[0]": 0}

    @jax.jit
    def summed(values):
        message = {"sum": values, "stats": (jnp.float32(8000.0), jnp.float32(9000.0))}
        phase = masked(toy(lambda client, _: message), fraction_bits=bits).setup[0]
        state = state_in_round(0)
        sent = phase.broadcast(state, (0,))
        step = jax.vmap(phase.client, (None, None, 0, 0))
        _, messages, info = step(KEY, sent, jnp.zeros(2, jnp.int32), FEDERATION.cohorts[1])
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=jnp.uint32), messages)
        weights = (jnp.float32(0), jnp.float32(2), jnp.float32(0))
        _, report = phase.server(KEY, state, (total, total, total), weights)
        return info.clipped, report.inner["messages"][1]

    # 28 bits leave 8 for a sum over clients, and 4 for each of two; 16 bits leave 16384 for each.
    clipped, total = summed(jnp.array([3.0, 0.25]))
    np.testing.assert_array_equal(clipped, [0, 0])
    np.testing.assert_array_equal(total["sum"], [6.0, 0.5])
    np.testing.assert_array_equal(total["stats"], [16000.0, 18000.0])
    clipped, total = summed(jnp.array([5.0, -np.inf]))
    np.testing.assert_array_equal(clipped, [2, 2])
    np.testing.assert_allclose(total["sum"], [8.0, -8.0], rtol=1e-6)


# --- Refusals -------------------------------------------------------------------------------------


def test_a_sum_that_lacks_a_client_is_refused():
    phase = masked().round[1]
    stacked = look_at("stack")
    run_server = jax.jit(
        lambda state, messages, weights: phase.server(KEY, state, messages, weights)
    )

    def served(places):
        five = jax.tree.map(lambda x: x[places].sum(axis=0, dtype=np.uint32), stacked[0])
        others = [jax.tree.map(lambda x: x.sum(axis=0, dtype=np.uint32), m) for m in stacked[1:]]
        weights = (jnp.float32(len(places)), jnp.float32(2), jnp.float32(1))
        return run_server(state_in_round(0), (five, *others), weights)

    state, report = served(np.arange(5))
    check_sums(report)
    assert np.isfinite(state.inner["center"]).all()
    for left, missing in (([0, 1, 3, 4], 1), ([2, 4], 3)):
        state, report = served(np.array(left))
        for leaf in jax.tree.leaves(report.inner["messages"][0]):
            assert np.isnan(leaf).all()
        # Other cohorts' sums are whole.
        assert np.isfinite(report.inner["messages"][1]["sum"]).all()
        with pytest.raises(ValueError, match=rf"\(cohort 0\): {missing} of 5 clients' messages"):
            check_sums(report)


def test_a_sum_over_other_clients_is_refused_though_their_number_is_right():
    phase = masked().round[1]
    stacked = jax.device_get(look_at("stack"))
    receive = jax.jit(phase.server)
    for places, is_garbled in (([0, 1, 2, 3, 4], False), ([0, 1, 2, 3, 3], True)):
        five = jax.tree.map(lambda x, p=places: x[np.array(p)].sum(0, np.uint32), stacked[0])
        others = [jax.tree.map(lambda x: x.sum(0, np.uint32), m) for m in stacked[1:]]
        weights = (np.float32(5), np.float32(2), np.float32(1))
        _, report = receive(KEY, state_in_round(0), (five, *others), weights)
        np.testing.assert_array_equal(report.garbled, [is_garbled, False, False])


def test_a_client_that_drops_out_of_a_run_is_noticed():
    first = RUNS.cohorts[0]
    dropped = first.replace(mask=first.mask.at[3].set(False))
    federation = RUNS.replace(cohorts=(dropped, *RUNS.cohorts[1:]))
    result = compiled()(federation)
    assert np.isnan(result.state.server.inner["center"]).all()
    with pytest.raises(ValueError, match="1 of 5 clients' messages are missing"):
        check_sums(result.info)
    with pytest.raises(ValueError, match=r"cohort 0, round 0\): 1 of 5"):
        check_sums(result.info["rounds"])


def test_a_nan_is_not_hidden():
    first = RUNS.cohorts[0]
    broken = first.replace(views=(first.views[0].at[2, 0, 1].set(jnp.nan), first.views[1]))
    info = compiled()(RUNS.replace(cohorts=(broken, *RUNS.cohorts[1:]))).info
    report = info["setup"][0]["server"]
    np.testing.assert_array_equal(report.garbled, [True, False])
    np.testing.assert_array_equal(report.agreed, report.received)
    assert np.isnan(report.inner["messages"][0]["stats"][0])
    with pytest.raises(ValueError, match="holds a NaN"):
        check_sums(info)


def test_one_nan_among_numbers_is_told():
    """What is sent without masks, as a node encodes it before it adds its own."""
    sent = Announced((), np.int32(0), np.array([4, 7], np.int32))

    def checked(message):
        phase = TOY.setup[0]._replace(client=lambda key, sent, state, client: (state, message, ()))
        client = masked(TOY._replace(setup=(phase,)), masked=False).setup[0].client
        return jax.jit(client)(KEY, sent, (), None)[1].check

    assert checked({"a": np.float32([1.0, 2.0]), "b": np.float32(3.0)}) == 1
    assert checked({"a": np.float32([1.0, np.nan]), "b": np.float32(3.0)}) == 0
    assert checked({"a": np.float32([1.0, 2.0]), "b": np.float32(np.nan)}) == 0


def test_of_a_whole_run_the_round_and_the_cohort_are_named():
    agreed, garbled = np.full((3, 2), 4), np.zeros((3, 2), bool)
    check_sums([SumReport((), agreed, agreed, garbled)])
    received = agreed.copy()
    received[2, 1] = 3
    with pytest.raises(ValueError, match=r"\(cohort 1, round 2\): 1 of 4 clients'"):
        check_sums([SumReport((), agreed, received, garbled)])
    # Of several runs side by side too.
    with pytest.raises(ValueError, match=r"\(cohort 1, round 2\): 1 of 4 clients'"):
        check_sums(SumReport((), agreed[None], received[None], garbled[None]))


def test_it_is_told_of_a_whole_run_whether_a_sum_is_unread_or_clipped():
    two, whole = jnp.array([2, 2]), jnp.zeros(2, bool)
    good = SumReport((), two, two, whole), SecureInfo({"id": jnp.arange(2)}, jnp.zeros(2, int))
    assert not any_unread(({"loss": jnp.float32(9.0)}, ())) and not any_unread(good)
    for bad in (
        SumReport((), two, jnp.array([2, 1]), whole),
        SumReport((), two, two, jnp.array([False, True])),
        SecureInfo((), jnp.array([0, 1])),
    ):
        assert any_unread((good, {"rounds": [bad]}, good))


def shapes_of(secure):
    return engine.traffic(secure, FEDERATION)


@pytest.mark.parametrize(
    "change", [{"reduce": "stack"}, {"who": "leader"}, {"reduce": "stack", "who": "leader"}]
)
def test_a_phase_that_is_no_sum_over_everyone_is_refused(change):
    bad = TOY._replace(round=(*TOY.round, TOY.setup[0]._replace(**change)))
    with pytest.raises(ValueError, match=r"^round\[2\]: its server reads single messages"):
        shapes_of(masked(bad))


def test_a_phase_may_be_left_in_clear():
    def keep_first(key, server, messages, weights):
        return {**server, "center": messages[0]["sum"][0]}, {"weights": weights}

    collect = TOY.setup[0]._replace(reduce="stack", server=keep_first)
    plain = TOY._replace(setup=(collect,))
    secure = masked(plain, in_clear=["setup[0]"], fraction_bits={"round[1]": BITS, "finish[0]": 0})
    start = engine.start(secure, FEDERATION, KEY), engine.start(plain, FEDERATION, KEY)

    @jax.jit
    def both(ours, theirs):
        return (
            engine.setup(secure, FEDERATION, KEY, ours),
            engine.setup(plain, FEDERATION, KEY, theirs),
        )

    (ours, info), (theirs, expected) = both(*start)
    jax.tree.map(np.testing.assert_array_equal, info, expected)
    jax.tree.map(np.testing.assert_array_equal, ours.server.inner, theirs.server)
    shapes_of(secure)  # the rest can be traced


def test_an_integer_leaf_is_refused():
    counting = toy(lambda client, message: {**message, "n": jnp.sum(client.mask)})
    with pytest.raises(ValueError, match=r"message\['n'\]: is int32; only floating-point"):
        shapes_of(masked(counting))


@pytest.mark.parametrize(
    "options, line",
    [
        ({"fraction_bits": 65}, r"^fraction_bits: got 65 for setup\[0\]"),
        ({"fraction_bits": -65}, r"^fraction_bits: got -65 for setup\[0\]"),
        ({"fraction_bits": 1.5}, r"^fraction_bits: got 1.5"),
        ({"fraction_bits": True}, r"^fraction_bits: got True"),
        ({"fraction_bits": {"round[1]": 3}}, r"^fraction_bits: got nothing for .* setup\[0\]"),
        ({"fraction_bits": {"rund[1]": 3}}, r"^fraction_bits: got 'rund\[1\]'; allowed are setup"),
        ({"in_clear": ["round[7]"]}, r"^in_clear: got 'round\[7\]'; allowed are setup\[0\], round"),
    ],
)
def test_bad_options_are_named(options, line):
    with pytest.raises(ValueError, match=line):
        masked(**options)


def test_fraction_bits_may_be_of_numpy():
    masked(fraction_bits=np.int64(16))


# --- With noise -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_noise_is_added_before_the_masks_and_none_after():
    noise = gaussian_noise(5.0)
    noisy = TOY._replace(round=(TOY.round[0], transformed(TOY.round[1], noise)))

    @jax.jit
    def messages():
        secure, state = masked(noisy).round[1], state_in_round(0)
        return (
            seen_by_server(secure, FEDERATION, state, "sum"),
            seen_by_server(noisy.round[1], FEDERATION, state.inner, "sum"),
        )

    for total, expected, plain in zip(*messages(), plain_messages(), strict=True):
        found = decode(total.values["sum"], BITS)
        np.testing.assert_allclose(found, expected["sum"], atol=1e-3)
        assert np.abs(found - decode(plain["sum"].sum(axis=0), BITS)).max() > 0.5
    late = masked()
    late = late._replace(setup=(transformed(late.setup[0], noise),))
    with pytest.raises(ValueError, match="is uint32; only floating-point leaves can take noise"):
        shapes_of(late)


def test_what_is_sent_names_the_participants_of_the_cohort():
    sent = masked().setup[0].broadcast(state_in_round(0), (0,))
    np.testing.assert_array_equal(sent.participants, [1, 6])
    np.testing.assert_array_equal(sent.inner, [0.0, 0.0])
