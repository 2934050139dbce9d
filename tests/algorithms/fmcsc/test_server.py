"""What FMCSC's server sends and averages, against loops over clients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fmcsc.client import Update
from jaxfedmvc.algorithms.fmcsc.method import fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import branch, features
from jaxfedmvc.algorithms.fmcsc.objective import distillation_loss, multi_view_loss
from jaxfedmvc.algorithms.fmcsc.server import ServerState, aggregate
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCHyperparams
from tests.algorithms.fmcsc.by_numpy import np_bits, np_features, np_partial_bits
from tests.algorithms.fmcsc.tiny import (
    BRANCHES,
    CLIENTS,
    CONFIG,
    FLOOR,
    FULL,
    KEY,
    NOTHING,
    PAIR,
    TAU_M,
    adam_step,
    at,
    build,
    client_program,
    close,
    exchange,
    jit,
    largest_difference,
    mean,
    members,
    parts_of,
    pretraining_step,
    real_views,
    round_program,
)


def test_the_leader_alone_pretrains_first(federation, started, led):
    """Client 0, of lowest id among those with all views; only autoencoders come from it."""
    (place,) = np.flatnonzero(np.asarray(federation.cohorts[0].client_ids) == 0)
    assert place != 0
    message = jit(pretraining_step)(started.server.models[FULL], at(federation.cohorts[0], place))
    assert set(led.server.models) == {FULL, PAIR, (0,), (1,), (2,)}
    for kind, model in led.server.models.items():
        close(model.autoencoders, {v: message[v] for v in kind})
        chex.assert_trees_all_equal(model.joint_head, started.server.models[kind].joint_head)
        chex.assert_trees_all_equal(model.view_heads, started.server.models[kind].view_heads)
    chex.assert_trees_all_equal(led.clients, started.clients)


def test_everyone_pretrains_from_the_leader_and_the_mean_is_taken(federation, led, pretrained):
    step, messages = jit(pretraining_step), {}
    for _, _, i, client in members(federation):
        messages[i] = step(led.server.models[client.view_ids], client)
    holders = {
        kind: [i for _, _, i, client in members(federation) if set(kind) <= set(client.view_ids)]
        for kind in led.server.models
    }
    assert sorted(holders[(0,)]) == [0, 2, 3, 5, 6] and sorted(holders[FULL]) == [0, 3, 5]
    for kind, model in pretrained.server.models.items():
        expected = mean([{v: messages[i][v] for v in kind} for i in holders[kind]])
        close(model.autoencoders, expected)
    for c, place, i, _ in members(federation):
        if c > 0:  # partial clients keep what they trained
            close(at(pretrained.clients[c], place).model.autoencoders, messages[i])


def bits_by_hand(federation, pretrained, exchanged):
    """`{client id: {kind: bits}}`."""
    found = {}
    for _, _, i, client in members(federation):
        views, bits = real_views(client), {}
        for kind, model in parts_of(exchanged[i][1]).items():
            out = np_features(model, views)
            if kind == FULL:
                bits[kind] = sum(np_bits(out["h"], h_view) for h_view in out["h_views"].values())
            else:
                received = np_features(pretrained.server.models[kind], views)["h"]
                bits[kind] = np_partial_bits(out, received)
        found[i] = bits
    return found


def test_weights_are_bits_with_a_floor_and_models_are_averaged_by_them(
    federation, pretrained, exchanged
):
    bits = bits_by_hand(federation, pretrained, exchanged)
    weights = {
        i: {kind: max(b, FLOOR) for kind, b in by_kind.items()} for i, by_kind in bits.items()
    }
    below = [b < FLOOR for by_kind in bits.values() for b in by_kind.values()]
    assert any(below) and not all(below)  # or the floor would not be tried
    for i, (_, update, info) in exchanged.items():
        close(update.weights, weights[i], rtol=1e-3)
        own = max(update.models, key=len)
        assert info["weight"] == pytest.approx(bits[i][own], rel=1e-3, abs=1e-4)
    (phase,) = build().round
    assert phase.reduce == "sum"
    updates = [[exchanged[int(i)][1] for i in c.client_ids] for c in federation.cohorts]
    sums = tuple(jax.tree.map(lambda *x: np.sum(x, axis=0), *of_cohort) for of_cohort in updates)
    counts = tuple(np.float32(len(of_cohort)) for of_cohort in updates)
    server, _ = jit(phase.server)(KEY, pretrained.server, sums, counts)
    for kind, model in server.models.items():
        sent = [
            (parts_of(u)[kind], weights[i][kind])
            for i, (_, u, _) in exchanged.items()
            if kind in u.models
        ]
        assert len(sent) == {FULL: 3, PAIR: 5, (0,): 3, (1,): 5, (2,): 3}[kind]
        models, shares = zip(*sent, strict=True)
        close(model, mean(models, weights=shares), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_partial_clients_keep_their_model_and_see_nobody_elses_update(
    federation, pretrained, exchanged, rounded
):
    """A client's step does not change when another client's samples do; the global models do."""
    for c, place, i, _ in members(federation):
        if c > 0:
            close(at(rounded.clients[c], place), exchanged[i][0])

    def other_data(cohort, place):
        views = tuple(x.at[place].multiply(-2.0) for x in cohort.views)
        return cohort.replace(views=views)

    full, one, pair = federation.cohorts
    changed = federation.replace(cohorts=(other_data(full, 1), other_data(one, 0), pair))
    after = round_program()(changed, KEY, pretrained)[0]
    chex.assert_trees_all_equal(at(after.clients[1], 1), at(rounded.clients[1], 1))
    chex.assert_trees_all_equal(after.clients[2], rounded.clients[2])
    assert largest_difference(*(at(x.clients[1].model, 0) for x in (after, rounded))) > 1e-3
    for kind in (FULL, (1,)):
        found = largest_difference(after.server.models[kind], rounded.server.models[kind])
        assert found > 1e-3


@pytest.mark.slow
def test_aggregation_of_identical_models_is_that_model(federation, pretrained):
    """Without epochs and without C every client returns what it was sent, at its own weight."""
    after = round_program("ABD", local_epochs=0, distill_epochs=0)(federation, KEY, pretrained)[0]
    close(after.server.models, pretrained.server.models, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_without_d_models_are_averaged_plainly(federation, pretrained):
    """Without epochs copies are the global model, and partial clients send what they keep."""
    after = round_program("ABC", local_epochs=0, distill_epochs=0)(federation, KEY, pretrained)[0]
    before = pretrained.server.models
    for c, kind in ((1, (1,)), (2, PAIR)):
        kept = [at(pretrained.clients[c], i).model for i in (0, 1)]
        assert largest_difference(*kept) > 1e-3
        close(after.server.models[kind], mean([before[kind]] * 3 + kept), atol=1e-6)
    for kind in (FULL, (0,), (2,)):
        close(after.server.models[kind], before[kind], atol=1e-6)


@pytest.mark.slow
def test_without_b_multi_view_clients_send_their_own_model_only(federation, pretrained):
    algorithm = build("ACD")
    found = exchange(algorithm, algorithm.round[0], federation, pretrained, cohorts=[0])
    assert all(set(found[i][1].models) == {FULL} for i in (0, 3, 5))
    assert all("distillation" not in found[i][2] for i in (0, 3, 5))
    assert set(algorithm.round[0].broadcast(pretrained.server, FULL)) == {FULL}
    after = round_program("ACD")(federation, KEY, pretrained)[0]
    for kind, model in after.server.models.items():
        if kind in ((0,), (2,)):  # nobody sent these
            chex.assert_trees_all_equal(model, pretrained.server.models[kind])
        else:
            assert largest_difference(model, pretrained.server.models[kind]) > 1e-3


@pytest.mark.parametrize("settle_rounds", [None, 2])
def test_global_models_go_a_falling_share_of_the_way_to_the_average(settle_rounds):
    """By hand: two clients with weights 1 and 3 at 4 and 8, so that the average is 7."""
    hyper = FMCSCHyperparams(settle_rounds=settle_rounds)
    kind, sums = (0,), Update({(0,): jnp.array([4.0 + 3 * 8.0])}, {(0,): jnp.array(4.0)})
    server = ServerState({kind: jnp.array([0.0])}, (), (), () if settle_rounds is None else 0.0)
    # The first of a round of two exchanges, and the last.
    begin, end = (jit(functools.partial(aggregate, CONFIG, hyper, last)) for last in (False, True))
    for share in (1.0, 1.0, 4 / 9, 1 / 4):
        server = server._replace(models={kind: jnp.array([0.0])})
        arguments = KEY, server, (sums,), (jnp.array(2.0),)
        first, _ = begin(*arguments)
        assert first.rounds == server.rounds
        server, _ = end(*arguments)
        chex.assert_trees_all_equal(first.models, server.models)
        close(server.models[kind], np.array([7.0 * (share if settle_rounds else 1.0)]))
    assert server.rounds == (4 if settle_rounds else ())


@pytest.mark.slow
def test_only_where_models_settle_does_the_server_count_rounds(federation):
    """What is sent is the same with it and without: clients need not know."""

    def start(**options):
        method = fmcsc(CONFIG, FMCSCHyperparams(**options))
        return jax.eval_shape(functools.partial(engine.start, method), federation, KEY)

    assert start().server.rounds == ()
    assert start(settle_rounds=5).server.rounds.shape == ()
    plain, settling = (
        engine.traffic(fmcsc(CONFIG, FMCSCHyperparams(settle_rounds=n)), federation)
        for n in (None, 5)
    )
    assert plain == settling


def test_what_is_sent_down_is_what_will_be_trained(pretrained):
    broadcast = build().round[0].broadcast
    assert set(broadcast(pretrained.server, FULL)) == set(pretrained.server.models)
    assert set(broadcast(pretrained.server, PAIR)) == {PAIR}
    assert set(broadcast(pretrained.server, (1,))) == {(1,)}


@pytest.mark.slow
def test_the_leader_may_train_all_models_before_the_rounds(federation, pretrained):
    """A step of eq. (8) on f_g, then one of eq. (6) on models that begin with f_g's encoders."""
    algorithm = build(leader_epochs=1)
    phase = algorithm.setup[2]
    assert len(algorithm.setup) == 3 and phase.who == "leader"
    client = at(federation.cohorts[0], 1)  # client 0, of the lowest id
    views, sent = client.by_view(), pretrained.server.models

    @jit
    def by_hand(sent):
        def loss(model):
            return multi_view_loss(CONFIG, TAU_M, model, views, client.mask)

        own = adam_step(sent[FULL], jax.grad(loss)(sent[FULL]))
        starts = {
            kind: model._replace(autoencoders={v: own.autoencoders[v] for v in kind})
            for kind, model in sent.items()
            if kind != FULL
        }
        target = features(own, views).h

        def distillation(models):
            return distillation_loss(CONFIG, models, views, target, client.mask)

        return {FULL: own, **adam_step(starts, jax.grad(distillation)(starts))}

    _, message, _ = jit(phase.client)(KEY, sent, NOTHING, client)
    close(message, by_hand(sent), atol=1e-4)
    alone = algorithm._replace(setup=(phase,))
    after, _ = jit(functools.partial(engine.setup, alone))(federation, KEY, pretrained)
    close(after.server.models, message, rtol=1e-3, atol=1e-4)  # no key is drawn from
    chex.assert_trees_all_equal(after.clients, pretrained.clients)


@pytest.mark.slow
def test_partial_clients_may_stay_out_of_the_rounds(federation, pretrained, exchanged):
    algorithm = build(partial_rounds=False)
    broadcast = algorithm.round[0].broadcast
    assert broadcast(pretrained.server, PAIR) == {} == broadcast(pretrained.server, (1,))
    assert set(broadcast(pretrained.server, FULL)) == set(pretrained.server.models)
    phase, client = algorithm.round[0], at(federation.cohorts[1], 0)
    state = at(pretrained.clients[1], 0)
    kept, nothing, _ = phase.client(KEY, {}, state, client)
    assert kept is state and jax.tree.leaves(nothing) == []
    mine = [update for i, (_, update, _) in exchanged.items() if i in CLIENTS[0][1]]
    total = jax.tree.map(lambda *x: sum(x), *mine)
    server, _ = phase.server(KEY, pretrained.server, (total, nothing, nothing), (3, 2, 2))
    for kind, model in server.models.items():
        expected = mean(
            [parts_of(update)[kind] for update in mine], [float(u.weights[kind]) for u in mine]
        )
        close(model, expected, rtol=1e-3, atol=1e-4)
    both = [engine.traffic(a, federation)["round"] for a in (algorithm, build())]
    assert both[0].up < both[1].up and both[0].down < both[1].down


def test_partial_models_may_be_branches_of_the_new_global_model(federation, pretrained, exchanged):
    algorithm = build(**BRANCHES)
    (phase,) = algorithm.round
    server, client = pretrained.server, at(federation.cohorts[0], 0)
    assert set(phase.broadcast(server, FULL)) == {FULL}
    assert phase.broadcast(server, (1,)) == {} == phase.broadcast(server, PAIR)
    _, update, _ = client_program(phase.client)(
        jax.random.fold_in(KEY, 3), phase.broadcast(server, FULL), NOTHING, client
    )
    assert set(update.models) == {FULL}
    new = parts_of(update)[FULL]
    close(new, parts_of(exchanged[3][1])[FULL], rtol=1e-5)
    nothing = ({}, {})
    updates = update, *(type(update)(*nothing),) * 2
    after, _ = jit(phase.server)(KEY, server, updates, (1, 2, 2))
    assert set(after.models) == {FULL, (0,), (1,), (2,)}
    for v in FULL:
        close(after.models[v,], branch(new, v), rtol=1e-4)


def test_partial_clients_pre_train_nothing_where_partial_models_are_branches(federation, started):
    algorithm = build(**BRANCHES)
    phase, server = algorithm.setup[1], started.server
    client = at(federation.cohorts[1], 0)
    assert phase.broadcast(server, (1,)) == () == phase.broadcast(server, PAIR)
    state, nothing, info = phase.client(KEY, (), NOTHING, client)
    assert (state, nothing, info) == (NOTHING, {}, {})
    trained = jax.device_get(server.models[FULL].autoencoders)
    full = {v: jax.tree.map(lambda x: 3 * x, trained[v]) for v in FULL}
    after, _ = jit(phase.server)(KEY, server, (full, {}, {}), (2, 0, 0))
    new = after.models[FULL]
    close(new.autoencoders, jax.tree.map(lambda x: x / 2, full), rtol=1e-5)
    for v in FULL:
        chex.assert_trees_all_equal(after.models[v,], branch(new, v))


@pytest.mark.slow
def test_the_leader_trains_no_copies_where_partial_models_are_branches(federation, pretrained):
    algorithm = build(leader_epochs=1, **BRANCHES)
    phase, client = algorithm.setup[2], at(federation.cohorts[0], 1)
    sent = phase.broadcast(pretrained.server, FULL)
    assert set(sent) == {FULL}
    _, message, _ = client_program(phase.client)(KEY, sent, NOTHING, client)
    assert set(message) == {FULL}
    stacked = jax.tree.map(lambda x: x[None], message)
    after, _ = phase.server(KEY, pretrained.server, (stacked,), (1,))
    chex.assert_trees_all_equal(after.models[1,], branch(message[FULL], 1))


def test_branches_are_for_one_view_each(federation):
    with pytest.raises(ValueError, match=r"partial_models: got 'branch' .* views \(0, 2\), .*;"):
        build(**BRANCHES).init(KEY, federation)
    with pytest.raises(ValueError, match=r"partial_models: got 'branch'; .* without component B"):
        build("ACD", **BRANCHES)
