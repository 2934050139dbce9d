"""Robust reductions: rules against known answers, and what they make of a method's sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import trim_mean

from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, e_fkmvc
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.client import Update
from jaxfedmvc.algorithms.fmcsc.server import ServerState, aggregate
from jaxfedmvc.attacks.hostile import attacked, scaled
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.robust import (
    Ratio,
    geometric_median,
    median,
    multi_krum,
    norm_bounding,
    robust,
    trimmed_mean,
)
from jaxfedmvc.messages.secure import secure_aggregation
from jaxfedmvc.metrics import host
from tests.algorithms.fmcsc.tiny import jit  # compiles fast, runs slowly

KEY = jax.random.key(0)
RULES = {
    "norm_bounding": norm_bounding(1.0),
    "trimmed_mean": trimmed_mean(0.3),
    "median": median(),
    "geometric_median": geometric_median(50),
    "multi_krum": multi_krum(0.3),
}
each_rule = pytest.mark.parametrize("name", RULES)
X = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


@functools.cache
def program(name):
    return jax.jit(RULES[name])


def combined(name, x, mask=None):
    mask = np.ones(len(x), bool) if mask is None else mask
    return np.asarray(program(name)(x, mask))


@jax.jit
def trim(share, x, mask):
    return trimmed_mean(share)(x, mask)


@jax.jit
def bound(radius, x, mask):
    return norm_bounding(radius)(x, mask)


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.19, 0.3, 0.45, 0.49, 0.49999])
@pytest.mark.parametrize("n", [1, 3, 7, 10])
def test_trimmed_mean_is_scipys(share, n):
    found = trim(share, X[:n], np.ones(n, bool))
    np.testing.assert_allclose(found, trim_mean(X[:n].astype(float), share), rtol=1e-5, atol=1e-6)


def test_a_share_that_rounding_left_short_cuts_whole_clients():
    """In float32 eight of 41, times 41, is less than 8."""
    x = np.arange(41, dtype=np.float32)[:, None] ** 2
    assert np.float32(8 / 41) * np.float32(41) < 8
    found = trim(np.float32(8 / 41), x, np.ones(41, bool))
    np.testing.assert_allclose(found, [np.mean(x[8:33])], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_median_is_numpys(n):
    found = combined("median", X[:n])
    np.testing.assert_allclose(found, np.median(X[:n], axis=0), rtol=1e-6)


def test_geometric_median_has_the_least_sum_of_distances():
    def total(y):
        return np.linalg.norm(X.astype(float) - y, axis=1).sum()

    options = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 5000, "maxfev": 5000}
    best = minimize(total, X.mean(axis=0), method="Nelder-Mead", options=options)
    found = combined("geometric_median", X)
    assert total(found) == pytest.approx(best.fun, rel=1e-5)
    np.testing.assert_allclose(found, best.x, atol=1e-3)


def test_geometric_median_of_collinear_points_is_the_middle_one():
    found = combined("geometric_median", np.array([[0.0], [1.0], [2.0], [90.0], [-50.0]]))
    assert found == pytest.approx(1.0, abs=1e-3)


def test_geometric_median_does_not_depend_on_where_the_origin_is():
    """The middle one of five again, by steps of 2^-10 beside numbers of a size of 2^12."""
    places = np.array([[0.0], [1.0], [5.0], [90.0], [-50.0]])
    found = combined("geometric_median", (4096 + places / 1024).astype(np.float32))
    assert 1024 * (found - 4096) == pytest.approx(1.0, abs=0.3)


def test_geometric_median_is_as_good_of_small_numbers():
    found = combined("geometric_median", np.float32(1e-9) * X)
    np.testing.assert_allclose(1e9 * found, combined("geometric_median", X), atol=1e-4)


def test_multi_krum_looks_at_as_many_others_as_it_says():
    """Of six at f = 1 sums over three others leave out 0, those over two or four the last."""
    x = np.array([[0.0], [1.0], [6.0], [7.0], [8.0], [12.0]], np.float32)
    nearest = np.sort((x - x.T) ** 2, axis=1)
    left_out = [nearest[:, 1 : 1 + n].sum(axis=1).argmax() for n in (2, 3, 4)]
    assert left_out == [5, 0, 5]
    found = jax.jit(multi_krum(0.2))(x, np.ones(6, bool))
    np.testing.assert_allclose(found, [34 / 5])


def test_multi_krum_by_hand():
    """Six on a line, f = 1: scores are sums over the 3 nearest others; 9 is left out."""
    x = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [9.0]], np.float32)
    squares = (x - x.T) ** 2
    scores = np.sort(squares, axis=1)[:, 1:4].sum(axis=1)
    assert scores.argmax() == 5
    found = jax.jit(multi_krum(0.2))(x, np.ones(6, bool))
    np.testing.assert_allclose(found, [2.0])


def test_norm_bounding_by_hand():
    """Deviations from the median (0, 0) have lengths 1, 1, 1, 1 and 5: the last is cut to 1."""
    x = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0], [3, 4]], np.float32)
    centre = np.median(x, axis=0)
    away = x - centre
    norms = np.linalg.norm(away, axis=1)
    most = 0.5 * np.median(norms)
    expected = centre + (away * np.minimum(1, most / np.maximum(norms, 1e-9))[:, None]).mean(0)
    np.testing.assert_allclose(bound(0.5, x, np.ones(6, bool)), expected, rtol=1e-5)
    np.testing.assert_allclose(bound(0.0, x, np.ones(6, bool)), centre, atol=1e-7)


@each_rule
@pytest.mark.parametrize("far", [1e2, 1e15, 1e30])
def test_three_of_ten_attackers_do_not_leave_the_honest_hull(name, far):
    """In one direction, in opposite ones, and each in its own; by a margin for rules that bound."""
    honest = X[:7]
    reach = 2 * np.abs(honest - np.median(honest, axis=0)).max()
    for forged in (
        np.full((3, 4), far),
        far * np.array([[1], [-1], [1]]) * np.ones(4),
        far * X[7:],
    ):
        found = combined(name, np.concatenate([honest, forged]).astype(np.float32))
        if name in ("geometric_median", "norm_bounding"):
            assert np.abs(found - np.median(honest, axis=0)).max() < reach
        else:
            assert (found >= honest.min(axis=0) - 1e-6).all()
            assert (found <= honest.max(axis=0) + 1e-6).all()


@each_rule
def test_the_order_of_clients_changes_rounding_at_most(name):
    order = np.random.default_rng(1).permutation(10)
    np.testing.assert_allclose(combined(name, X[order]), combined(name, X), rtol=1e-4, atol=1e-6)


@each_rule
def test_clients_of_weight_zero_count_nowhere(name):
    padded = np.concatenate([X[:6], np.full((3, 4), 1e6, np.float32), X[6:]])
    mask = np.abs(padded).max(axis=1) < 1e5
    np.testing.assert_allclose(
        combined(name, padded, mask), combined(name, X), rtol=1e-4, atol=1e-6
    )
    assert np.isfinite(combined(name, X, np.zeros(10, bool))).all()


@each_rule
def test_of_one_or_two_clients_all_are_the_mean(name):
    np.testing.assert_allclose(combined(name, X[:1]), X[0], rtol=1e-5)
    np.testing.assert_allclose(combined(name, X[:2]), X[:2].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_shares_may_be_traced_and_batched():
    shares = np.array([0.0, 0.1, 0.4], np.float32)
    found = jax.jit(jax.vmap(lambda s: trimmed_mean(s)(X, np.ones(10, bool))))(shares)
    np.testing.assert_allclose(found, [trim_mean(X, s) for s in shares], rtol=1e-4, atol=1e-6)


def test_rules_refuse_what_is_out_of_range():
    for make in (trimmed_mean, multi_krum):
        with pytest.raises(ValueError, match=r"share: got 0.5; allowed is 0 or more, below 0.5"):
            make(0.5)
        with pytest.raises(ValueError, match=r"share: got array\(\[0.1\]\); allowed"):
            make(np.array([0.1]))
        with pytest.raises(ValueError, match=r"share: got '0.1'; allowed"):
            make("0.1")
    with pytest.raises(ValueError, match=r"radius: got -1.0; allowed is 0 or more"):
        norm_bounding(-1.0)
    with pytest.raises(ValueError, match=r"steps: got 0; allowed is 1 or more"):
        geometric_median(0)


# --- Reductions -----------------------------------------------------------------------------------


def method(phase):
    """A method of one exchange, whose server hands out what it gets."""
    return FederatedAlgorithm(
        init=lambda key, federation: ((), ()),
        setup=(),
        round=(phase,),
        finish=(),
        assign=lambda *args: None,
    )


def echo(key, state, messages, weights):
    return (messages, weights), {}


def summing(reduce="sum", who="everyone"):
    return Phase(lambda state, ids: (), lambda *args: None, echo, reduce, who)


def served(algorithm, messages, weights):
    """What the method's server gets of stacked messages."""
    (phase,) = algorithm.round
    assert phase.reduce == "stack"
    server = jax.jit(lambda *given: phase.server(KEY, (), *given)[0])
    return server(messages, tuple(map(jnp.asarray, weights)))


def test_a_server_gets_the_sum_and_the_number_that_it_expects():
    message = {"a": jnp.array([[1.0], [2.0], [30.0]]), "b": jnp.array([5.0, 5.0, -8.0])}
    guarded = robust(method(summing()), median())
    (sums,), (count,) = served(guarded, (message,), ([1.0, 1.0, 1.0],))
    assert count == 3 and sums["a"].tolist() == [6.0] and sums["b"] == 15
    (sums,), (count,) = served(guarded, (message,), ([1.0, 1.0, 0.0],))
    assert count == 2 and sums["a"].tolist() == [3.0] and sums["b"] == 10


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_message_that_is_no_number_counts_nowhere(bad):
    message = (jnp.array([[1.0, bad], [3.0, 4.0]]), jnp.array([1.0, 1.0]))
    guarded = robust(method(summing()), trimmed_mean(0.0))
    (sums,), (count,) = served(guarded, (message,), ([1.0, 1.0],))
    assert count == 1 and sums[0].tolist() == [3.0, 4.0]


def test_without_ratios_a_mean_of_all_is_the_plain_sum():
    message = (X, X[:, 0])
    (sums,), (count,) = served(
        robust(method(summing()), trimmed_mean(0.0)), (message,), (X[:, 0] * 0 + 1,)
    )
    np.testing.assert_allclose(sums[0], X.sum(axis=0), rtol=1e-5)
    assert count == 10


def test_parts_of_a_message_are_combined_on_their_own():
    """The second part, by a thousand larger, does not decide who is left out of the first."""
    first = np.array([[0.0], [0.1], [0.2], [0.3], [50.0]], np.float32)
    second = 1e3 * np.array([[9.0], [0.1], [0.2], [0.3], [0.4]], np.float32)
    guarded = robust(method(summing()), multi_krum(0.2))
    (sums,), _ = served(guarded, ((first, second),), (np.ones(5),))
    np.testing.assert_allclose(sums[0], 5 * first[:4].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(sums[1], 5 * second[1:].mean(axis=0), rtol=1e-5)


def test_cohorts_with_messages_alike_are_reduced_together():
    """A cohort of one attacker is bounded by another; one that has no equal is not."""
    mine, yours = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[99.0]])
    other = jnp.array([[99.0, 99.0]])
    guarded = robust(method(summing()), median())
    sums, counts = served(guarded, (mine, yours, other), (np.ones(3), np.ones(1), np.ones(1)))
    assert [float(n) for n in counts] == [3, 1, 1]
    assert [x.tolist() for x in sums] == [[7.5], [2.5], [99.0, 99.0]]


def test_messages_of_other_types_are_not_alike():
    mine, yours = jnp.array([[1.0], [2.0]]), jnp.array([[9.0]], jnp.bfloat16)
    sums, _ = served(robust(method(summing()), median()), (mine, yours), (np.ones(2), np.ones(1)))
    assert [x.dtype for x in sums] == [jnp.float32, jnp.bfloat16]
    assert [x.tolist() for x in sums] == [[3.0], [9.0]]


def test_a_rule_is_given_finite_numbers_of_who_does_not_count():
    message = jnp.array([[1.0], [np.nan], [np.inf], [5.0]])
    guarded = robust(method(summing()), lambda x, mask: jnp.sum(x, axis=0))
    (sums,), (count,) = served(guarded, (message,), (np.array([1.0, 1.0, 1.0, 0.0]),))
    assert sums.tolist() == [1.0] and count == 1


RATIO = {"round[0]": Ratio(0, 1)}


def test_ratios_are_combined_as_quotients():
    """Medians of numerators and denominators would give 40 / 2; nobody says more than 12."""
    quotients, weights = np.array([10.0, 12.0, 11.0]), np.array([4.0, 1.0, 2.0])
    numerators = (quotients * weights)[:, None] * np.ones(2)
    message = ({0: numerators.astype(np.float32)}, {0: weights.astype(np.float32)})
    (sums,), _ = served(
        robust(method(summing()), median(), ratios=RATIO), (message,), (np.ones(3),)
    )
    np.testing.assert_allclose(sums[1][0], 3 * 2)
    np.testing.assert_allclose(sums[0][0] / sums[1][0], [11.0, 11.0], rtol=1e-6)


def test_who_has_no_weight_says_nothing_of_a_quotient():
    """Cluster 1 is known to two clients of four: their centre counts, and as much as they weigh."""
    ratios = {"round[0]": Ratio(0, 1, quorum=0.4)}
    weights = np.array([[2.0, 4.0], [2.0, 6.0], [2.0, 0.0], [2.0, -1.0]], np.float32)
    centres = np.array([[1.0, 10.0], [3.0, 20.0], [2.0, -7.0], [2.0, 99.0]], np.float32)
    message = ((weights * centres)[..., None], weights)
    guarded = robust(method(summing()), median(), ratios=ratios)
    (sums,), _ = served(guarded, (message,), (np.ones(4),))
    np.testing.assert_allclose(sums[1], [8.0, 10.0])
    np.testing.assert_allclose(sums[0][:, 0] / sums[1], [2.0, 15.0])
    (sums,), _ = served(guarded, ((message[0], 0 * weights),), (np.ones(4),))
    assert not sums[0].any() and not sums[1].any()


@each_rule
def test_a_quotient_that_does_not_count_changes_no_other(name):
    """Of cluster 1 two honest clients of eight speak, and two who claim it: half, and no more.

    Their median lies far from all four, who would then be those that differ in cluster 0, too.
    """
    rng = np.random.default_rng(3)
    weights = np.ones((8, 2), np.float32)
    weights[:4, 1] = 0
    centres = rng.normal(size=(8, 2, 3)).astype(np.float32)
    centres[6:, 0], centres[6:, 1] = 100, 1e3
    guarded = robust(method(summing()), RULES[name], ratios=RATIO)
    found = []
    for w in (weights, weights * np.float32([1, 0])):
        (sums,), _ = served(guarded, ((w[..., None] * centres, w),), (np.ones(8),))
        assert not sums[0][1].any() and sums[1][1] == 0
        found.append((sums[0][0], sums[1][0]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_quotient_that_overflows_says_nothing():
    """2 is the median of 1 and 3; with infinity it would be 3."""
    numerators, weights = np.float32([1, 3, 3e38]), np.float32([1, 1, 1e-3])
    guarded = robust(method(summing()), median(), ratios=RATIO)
    (sums,), _ = served(guarded, ((numerators, weights),), (np.ones(3),))
    assert [float(x) for x in sums] == [6.0, 3.0]


@pytest.mark.parametrize(("n_clients", "quorum", "heard"), [(4, 0.5, 3), (10, 0.3, 4), (5, 0.0, 1)])
def test_a_quotient_counts_where_more_than_the_quorum_speak(n_clients, quorum, heard):
    """Quotient k is that of k + 1 clients; client i says i of each."""
    says = np.arange(n_clients)[:, None] <= np.arange(n_clients)
    weights = says.astype(np.float32)
    quotients = np.arange(n_clients, dtype=np.float32)[:, None] * weights
    guarded = robust(method(summing()), median(), ratios={"round[0]": Ratio(0, 1, 0.0, quorum)})
    (sums,), _ = served(guarded, ((quotients, weights),), (np.ones(n_clients),))
    counts = np.arange(1, n_clients + 1)
    np.testing.assert_allclose(sums[1], np.where(counts >= heard, counts, 0), rtol=1e-6)
    middle = np.where(counts >= heard, counts * (counts - 1) / 2, 0)
    np.testing.assert_allclose(sums[0], middle, rtol=1e-6)


def test_a_quarter_of_hostile_clients_decides_no_quotient():
    """Two of eight claim all clusters; cluster k has k honest clients, who say 0 to 1."""
    n, hostile = 8, 2
    honest = np.arange(n - hostile)[:, None] < np.arange(n - hostile + 1)
    weights = np.concatenate([honest, np.full((hostile, n - hostile + 1), 1e6)]).astype(np.float32)
    quotients = np.linspace(0.0, 1.0, n, dtype=np.float32)[:, None] * np.ones(weights.shape[1])
    quotients[n - hostile :] = 1e3
    guarded = robust(method(summing()), median(), ratios=RATIO)
    message = (weights * quotients.astype(np.float32), weights)
    (sums,), _ = served(guarded, (message,), (np.ones(n),))
    heard = np.asarray(sums[1]) > 0
    assert heard.tolist() == [False, False, False, True, True, True, True]
    assert (np.asarray(sums[0])[heard] / np.asarray(sums[1])[heard] <= 1).all()
    assert not np.asarray(sums[0])[~heard].any()


def test_fmcscs_models_stay_within_what_honest_clients_send():
    """The attacker claims a weight of a million for a model of its own."""
    models, weights = X[:5], np.array([0.5, 1.0, 1.5, 2.0, 1e6], np.float32)
    models[4] = -300.0
    update = Update({(0,): weights[:, None] * models}, {(0,): weights})
    server = ServerState({(0,): jnp.zeros(4)}, jnp.zeros(1))
    step = functools.partial(aggregate, FMCSCConfig(2), FMCSCHyperparams(), True)
    phase = summing()._replace(server=lambda *args: step(*args))
    for name in ("median", "norm_bounding"):
        guarded = robust(method(phase), RULES[name], ratios=RATIO).round[0]
        made = jax.jit(lambda u, w, g=guarded: g.server(KEY, server, (u,), (w,))[0])
        found = made(update, jnp.ones(5)).models[0,]
        assert np.abs(found - np.median(models[:4], axis=0)).max() < 3
    plain = step(KEY, server, (jax.tree.map(lambda x: x.sum(axis=0), update),), (5.0,))[0]
    assert np.abs(plain.models[0,]).max() > 200


def test_centred_messages_are_all_the_same():
    stack = jnp.array([[1.0, 5.0], [2.0, 6.0], [90.0, -7.0]])
    guarded = robust(method(summing("stack")), median(), centred=["round[0]"])
    messages, weights = served(guarded, (stack[:2], stack[2:]), (np.ones(2), np.ones(1)))
    assert messages[0].tolist() == [[2.0, 5.0]] * 2 and messages[1].tolist() == [[2.0, 5.0]]
    assert [w.tolist() for w in weights] == [[1, 1], [1]]
    _, weights = served(guarded, (stack.at[1, 0].set(np.nan),), (np.ones(3),))
    assert weights[0].tolist() == [1, 0, 1]


def test_what_no_rule_can_bound_is_refused_unless_it_is_named():
    stack = (jnp.ones((2, 3)),)
    for phase in (summing("stack"), summing("stack", "leader"), summing("sum", "leader")):
        (guarded,) = robust(method(phase), median()).round
        with pytest.raises(ValueError, match=r"round\[0\]: its server reads single messages"):
            guarded.server(KEY, (), stack, (jnp.ones(2),))
        assert guarded.server(KEY, (), ((),), (jnp.ones(2),))[0][0] == ((),)
        (same,) = robust(method(phase), median(), unguarded=["round[0]"]).round
        assert same == phase


def test_names_and_messages_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"ratios: got 'round\[1\]'; allowed is round\[0\]"):
        robust(method(summing()), median(), ratios={"round[1]": Ratio(0, 1)})
    for ratio, said in ((Ratio(0, 1, -1.0), "least"), (Ratio(0, 1, 0.0, 1.0), "quorum")):
        with pytest.raises(ValueError, match=rf"ratios: round\[0\]: {said}: got .* is 0 or"):
            robust(method(summing()), median(), ratios={"round[0]": ratio})
    with pytest.raises(ValueError, match=r"centred: got 'round\[0\]'; allowed is none"):
        robust(method(summing()), median(), centred=["round[0]"])
    with pytest.raises(ValueError, match=r"message: is int32; only floating-point"):
        served(robust(method(summing()), median()), (jnp.array([1, 2]),), ([1, 1],))
    with pytest.raises(ValueError, match=r"ratios: got .* a message that is a tuple"):
        served(robust(method(summing()), median(), ratios=RATIO), (X,), (np.ones(10),))
    with pytest.raises(ValueError, match=r"ratios: got .* places of the 1 parts"):
        served(robust(method(summing()), median(), ratios=RATIO), ((X,),), (np.ones(10),))


# --- Whole runs -----------------------------------------------------------------------------------

C, N_CLIENTS, HOSTILE = 3, 8, (6, 7)
CONFIG = FedHKConfig(C)
UNGUARDED = ["setup[2]"]


@functools.cache
def clients():
    rng = np.random.default_rng(0)
    truth = np.arange(20) % C
    middles = [4 * rng.normal(size=(C, d)) for d in (4, 3)]
    views = [
        {v: m[truth] + rng.normal(size=(20, m.shape[1])) for v, m in enumerate(middles)}
        for _ in range(N_CLIENTS)
    ]
    return Federation.from_clients(views, [truth] * N_CLIENTS)


def guarded(algorithm, rule):
    ratios = {"setup[0]": Ratio(0, 1), "round[0]": Ratio(0, 1)}
    return robust(algorithm, rule, ratios=ratios, unguarded=UNGUARDED)


def accuracy(algorithm):
    run = jit(lambda: engine.run(algorithm, clients().without_labels(), KEY, 8).labels)
    return host.score(clients(), run())["all"]["pooled"]["acc"]


@pytest.mark.slow
def test_an_attacked_run_recovers_under_the_median_and_not_under_the_mean():
    method = e_fkmvc(CONFIG, FedHKHyperparams(tol=0.0))
    hostile = attacked(method, scaled(100.0, (0,)), HOSTILE)
    assert accuracy(guarded(hostile, median())) > 0.9
    assert accuracy(hostile) < 0.8


def test_secure_aggregation_is_refused_either_way():
    federation, method = clients().without_labels(), e_fkmvc(CONFIG)
    masked = functools.partial(
        secure_aggregation, federation=federation, key=KEY, fraction_bits=8, in_clear=UNGUARDED
    )
    for algorithm, said in (
        (guarded(masked(method), median()), "masked by secure aggregation"),
        (masked(guarded(method, median())), "which secure aggregation cannot hide"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(lambda a=algorithm: engine.run(a, federation, KEY, 1).labels)
