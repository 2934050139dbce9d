"""Transformations of messages: clipping, noise, how they chain, and what codecs do to a phase."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import ndtri
from scipy.stats import expon, kstest, laplace, norm, pearsonr

from jaxfedmvc import keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.federation import single_client
from jaxfedmvc.messages import (
    Codec,
    clipped,
    codecs,
    coded,
    gaussian_noise,
    laplace_noise,
    nbytes,
    nearest_only,
    transformed,
)
from jaxfedmvc.messages.transforms import (
    exponential_numbers,
    laplace_numbers,
    tails_and_signs,
)

KEY = jax.random.key(0)
N = 20_000
CLIENT = single_client({0: np.zeros((1, 1))})


def sending(message):
    """An exchange in which every client sends this message, and reports a draw of its own."""

    def client(key, sent, state, client):
        return state, message, jax.random.normal(key)

    return Phase(lambda server, view_ids: (), client, lambda key, server, m, w: (server, {}), "sum")


def sent_by(phase, key=KEY, client=CLIENT):
    """In one program, not one for each operation."""
    return jax.jit(phase.client)(key, (), (), client)[1]


def test_bytes_are_those_of_the_leaves():
    assert nbytes({"a": jnp.zeros((3, 2)), "b": (jnp.int32(1), jnp.zeros(4, bool))}) == 24 + 4 + 4
    assert nbytes((1, 0.5, jax.ShapeDtypeStruct((2, 3), jnp.int8))) == 4 + 4 + 6


# --- Clipping -------------------------------------------------------------------------------------


@jax.jit
def clip(message, max_norm):
    return clipped(max_norm)(KEY, message, ())


def test_clipping_a_hand_worked_case():
    message = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}  # of norm 5
    clipped_to_one = clip(message, 1.0)
    np.testing.assert_allclose(clipped_to_one["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped_to_one["b"], [[0.8]], rtol=1e-6)
    for bound in (5.0, 7.0, np.inf):
        jax.tree.map(np.testing.assert_array_equal, clip(message, bound), message)
    assert all(not x.any() for x in jax.tree.leaves(clip(message, 0.0)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_squares_of_narrow_floats_do_not_overflow(dtype):
    """Whose squares are no float16."""
    message = {"a": jnp.array([300.0, 400.0], dtype)}  # of norm 500
    found = clip(message, 10.0)["a"]
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), [6.0, 8.0], rtol=2**-7)
    np.testing.assert_array_equal(clip(message, 600.0)["a"], message["a"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_the_bound_holds_for_any_message(bad):
    message = {"a": jnp.array([bad, 1.0]), "b": jnp.array([[bad]])}
    assert all(not x.any() for x in jax.tree.leaves(clip(message, 1.0)))


def test_only_selected_leaves_count_and_are_scaled():
    message = {"a": jnp.array([3.0, 4.0]), "n": jnp.int32(7), "b": (jnp.array([100.0]),)}
    phase = transformed(sending(message), clipped(1.0, {"a": True, "n": False, "b": False}))
    result = sent_by(phase)
    np.testing.assert_allclose(result["a"], [0.6, 0.8], rtol=1e-6)
    assert result["n"] == 7 and result["b"][0][0] == 100
    with pytest.raises(ValueError, match=r"message\['n'\]: is int32"):
        sent_by(transformed(sending(message), clipped(1.0)))


def test_a_number_of_python_is_changed_as_the_scalar_that_it_travels_as():
    message = {"a": 3.0, "b": 4.0}
    found = sent_by(transformed(sending(message), clipped(1.0)))
    np.testing.assert_allclose([found["a"], found["b"]], [0.6, 0.8], rtol=1e-6)
    scalars = jax.tree.map(np.float32, message)
    noisy = (jax.jit(lambda m=m: gaussian_noise(0.1)(KEY, m, ()))() for m in (message, scalars))
    jax.tree.map(np.testing.assert_array_equal, *noisy)


# --- Noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise, name", [(gaussian_noise, "norm"), (laplace_noise, "laplace")])
def test_noise_has_its_distribution_and_scale(noise, name):
    message = {"a": jnp.full((N,), 3.0), "b": jnp.full((N // 2, 2), -1.0)}
    result = sent_by(transformed(sending(message), noise({"a": 0.5, "b": 2.0})))
    a, b = np.asarray(result["a"]) - 3, np.asarray(result["b"]).ravel() + 1
    assert kstest(a / 0.5, name).pvalue > 1e-3
    assert kstest(b / 2.0, name).pvalue > 1e-3
    assert kstest(a / 0.5 * 1.1, name).pvalue < 1e-3  # the test can tell scales apart
    assert abs(pearsonr(a, b).statistic) < 0.03  # leaves have noise of their own


def test_two_noises_of_a_chain_are_independent():
    zero = sending(jnp.zeros(N))
    once = transformed(zero, gaussian_noise(1.0))
    twice = transformed(once, gaussian_noise(1.0))
    thrice = transformed(twice, laplace_noise(1.0), clients=[0])
    draws = np.diff([np.zeros(N), *(sent_by(p) for p in (once, twice, thrice))], axis=0)
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.03
    assert kstest(np.asarray(sent_by(twice)) / np.sqrt(2), "norm").pvalue > 1e-3


def test_noise_follows_the_key_and_not_the_clients_own_draws():
    phase = transformed(sending(jnp.zeros(5)), gaussian_noise(1.0))
    np.testing.assert_array_equal(sent_by(phase), sent_by(phase))
    assert not np.any(sent_by(phase) == sent_by(phase, jax.random.key(1)))
    assert jax.jit(phase.client)(KEY, (), (), CLIENT)[2] == jax.random.normal(KEY)
    assert not np.any(sent_by(phase) == drawn_with(KEY))


@jax.jit
def drawn_with(key):
    """Five normal numbers as noise makes them of the words of a key."""
    tails, signs = tails_and_signs(jax.random.bits(key, (2, 5), jnp.uint32), jnp.float32)
    return -signs * ndtri(tails)


def test_noise_is_none_of_what_a_client_draws_by_small_numbers():
    noise = sent_by(transformed(sending(jnp.zeros(5)), gaussian_noise(1.0)))
    its_own = jax.random.fold_in(jax.random.fold_in(KEY, keys.TRANSFORM), 0)
    np.testing.assert_allclose(noise, drawn_with(its_own), rtol=1e-6)  # what would be equal
    for i in range(3):
        own = jax.random.fold_in(KEY, i)
        for key in (own, jax.random.fold_in(own, 0)):
            assert not np.any(noise == drawn_with(key))


@pytest.mark.parametrize("noise, of", [(gaussian_noise, norm), (laplace_noise, laplace)])
def test_tails_of_noise_are_whole(noise, of, monkeypatch):
    """Quantiles of the probabilities that the words say, out to 2^-65.

    By `jax.random.normal` there is no float32 beyond those of 2^-23.
    """
    high = np.uint32([2**31, 12345678, 3, 0, 0, 0])
    low = np.uint32([0, 0, 2**31, 2**31, 2**10, 0])
    upper = high * 2.0**-33 + ((low >> 1) + 0.5) * 2.0**-64
    for last_bit, sign in ((0, 1), (1, -1)):
        words = jnp.stack([high, low | np.uint32(last_bit)])
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, w=words: w)
        found = jax.jit(noise(2.0))(KEY, jnp.zeros(6), ())
        np.testing.assert_allclose(found, sign * 2 * of.isf(upper), rtol=2e-6)
    assert upper[-1] == 2.0**-65 and abs(found[-1]) > 2 * 9


def test_numbers_have_their_distributions():
    drawn = jax.jit(lambda key: (laplace_numbers(key, (N,)), exponential_numbers(key, (N,))))(KEY)
    for numbers, of in zip(drawn, (laplace, expon), strict=True):
        assert numbers.dtype == np.float32
        assert kstest(np.asarray(numbers), of.cdf).pvalue > 1e-3
        assert kstest(1.1 * np.asarray(numbers), of.cdf).pvalue < 1e-3


def test_both_ends_of_exponential_numbers_are_whole(monkeypatch):
    """Quantiles of 2^-65 from above and from below; 23 bits end at 16 above and at 0 below."""
    words = np.zeros((2, 2), np.uint32)
    words[1] = 0, 1  # the sign
    monkeypatch.setattr(jax.random, "bits", lambda *_: words)
    expected = expon.isf(2.0**-65), expon.ppf(2.0**-65)
    np.testing.assert_allclose(exponential_numbers(KEY, (2,)), expected, rtol=1e-6)
    found = laplace_numbers(KEY, (2,))
    np.testing.assert_allclose(found, [laplace.isf(2.0**-65), laplace.ppf(2.0**-65)], rtol=1e-6)


def test_clipping_comes_before_the_noise_that_is_put_after_it():
    phase = transformed(sending(jnp.full((4,), 50.0)), clipped(1.0))
    noisy = sent_by(transformed(phase, gaussian_noise(1e-3)))
    np.testing.assert_allclose(noisy, 0.5, atol=0.01)
    assert np.unique(noisy).size == 4


def test_scales_are_traced_and_zero_changes_no_bit():
    traces = []
    message = {"a": jnp.array([-0.0, np.nan, np.inf, 1e-30]), "b": jnp.ones(3)}

    @functools.partial(jax.vmap, in_axes=(0, None))
    def sweep(scale, fixed):
        traces.append(None)
        phase = transformed(sending(message), gaussian_noise({"a": scale, "b": fixed}))
        return sent_by(transformed(phase, laplace_noise(0.0)))

    result = jax.jit(sweep)(jnp.array([0.0, 1.0, 2.0]), 0.0)
    assert len(traces) == 1
    exact = np.asarray(message["a"])
    assert np.asarray(result["a"][0]).tobytes() == exact.tobytes()
    np.testing.assert_array_equal(result["b"], np.ones((3, 3)))
    np.testing.assert_allclose(result["a"][2, [0, 3]], 2 * result["a"][1, [0, 3]], rtol=1e-6)
    assert np.all(result["a"][1, [0, 3]] != 0)


def test_only_chosen_clients_are_changed():
    phase = transformed(sending(jnp.zeros(3)), gaussian_noise(1.0), clients=[4, 7])
    for i in (0, 4, 5, 7):
        client = CLIENT.replace(client_ids=jnp.int32(i))
        assert np.any(sent_by(phase, client=client)) == (i in (4, 7))


def test_a_transformed_phase_is_a_static_argument_as_others_are():
    phase = transformed(sending(jnp.ones(3)), clipped(0.0), clients=[0])
    assert not np.any(jax.jit(sent_by, static_argnums=0)(phase))


@pytest.mark.parametrize("noise", [gaussian_noise, laplace_noise])
def test_noise_in_an_integer_leaf_is_refused(noise):
    message = {"a": jnp.zeros(2), "counts": (jnp.zeros(2, jnp.int32),)}
    phase = transformed(sending(message), noise(0.0))
    with pytest.raises(ValueError, match=r"message\['counts'\]\[0\]: is int32; only floating"):
        jax.eval_shape(lambda: sent_by(phase))


@pytest.mark.parametrize("make", [clipped, gaussian_noise, laplace_noise])
@pytest.mark.parametrize("value", [-1.0, np.nan, np.ones(2), "0.5"])
def test_bad_numbers_are_named(make, value):
    with pytest.raises(ValueError, match=r"^(max_norm|scale): got"):
        make(value)


# --- Codecs ---------------------------------------------------------------------------------------


# Names and shapes change, and the two do not commute.
doubled = Codec(lambda key, m, sent: {"twice": 2 * m}, lambda wire: wire["twice"] / 2)
padded = Codec(
    lambda key, m, sent: jax.tree.map(lambda x: jnp.append(x, sent), m),
    lambda wire: jax.tree.map(lambda x: x[:-1], wire),
)
noisy = Codec(lambda key, m, sent: m + jax.random.normal(key, m.shape), lambda wire: wire)


def reporting(message):
    """As `sending`, with a server that reports what it was given."""
    phase = sending(message)._replace(reduce="stack")
    return phase._replace(server=lambda key, server, m, w: (server, {"messages": m, "weights": w}))


def test_the_server_is_given_what_the_wire_decodes_to():
    phase = coded(coded(reporting(jnp.array([1.0, 2.0])), doubled), padded)
    state, wire, info = phase.client(KEY, 7.0, "state", CLIENT)
    assert state == "state" and info == jax.random.normal(KEY)  # as without a codec
    assert wire.keys() == {"twice"}
    np.testing.assert_array_equal(wire["twice"], [2, 4, 7])
    wires = ({"twice": jnp.array([[2.0, 4.0, 7.0], [6.0, 8.0, 7.0]])}, {"twice": jnp.ones((1, 3))})
    weights = (jnp.ones(2), jnp.zeros(1))
    server, given = phase.server(KEY, "server", wires, weights)
    assert server == "server" and given["weights"] is weights
    np.testing.assert_array_equal(given["messages"][0], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(given["messages"][1], [[0.5, 0.5]])


def test_codecs_and_transformations_of_a_chain_draw_for_themselves():
    zero = reporting(jnp.zeros(N))
    once = transformed(zero, gaussian_noise(1.0))
    twice = coded(once, noisy)
    thrice = coded(twice, noisy)
    last = transformed(thrice, gaussian_noise(1.0))
    draws = np.diff([np.zeros(N), *(sent_by(p) for p in (once, twice, thrice, last))], axis=0)
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.03


def test_sums_of_encoded_messages_are_refused():
    with pytest.raises(ValueError, match=r'^reduce: got "sum"; allowed is "stack"'):
        coded(sending(jnp.ones(2)), doubled)


@pytest.mark.parametrize("change", [transformed, coded])
def test_a_whole_method_in_the_place_of_an_exchange_is_named(change):
    with pytest.raises(ValueError, match=r"^phase: got 'FederatedAlgorithm'; allowed is one exch"):
        change(FederatedAlgorithm(None, (), (), (), None), doubled)


# --- Graphs of neighbours -------------------------------------------------------------------------


def test_only_the_nearest_stay_a_hand_worked_case():
    graph = jnp.array([[3.0, -9.0, 1.0, 2.0], [0.0, -1.0, 5.0, -2.0], [jnp.nan, 4.0, 4.0, 4.0]])
    phase = transformed(sending({"graph": graph}), nearest_only(2))
    kept = sent_by(phase)["graph"]
    np.testing.assert_array_equal(kept, [[3, 0, 0, 2], [0, 0, 5, 0], [0, 4, 4, 0]])
    twice = sent_by(transformed(phase, nearest_only(2)))["graph"]
    np.testing.assert_array_equal(twice, kept)


def test_neighbours_of_the_smallest_graph_are_all_and_others_are_refused():
    graph = jnp.array([[1.0, -1.0]])
    np.testing.assert_array_equal(nearest_only(2)(KEY, graph, ()), [[1, 0]])
    with pytest.raises(ValueError, match=r"leaf of shape \(1, 2\); allowed are matrices"):
        nearest_only(3)(KEY, graph, ())
    with pytest.raises(ValueError, match=r"leaf of shape \(2,\)"):
        nearest_only(1)(KEY, graph[0], ())
    with pytest.raises(ValueError, match="int32"):
        nearest_only(1)(KEY, graph.astype(jnp.int32), ())
    with pytest.raises(ValueError, match="k: got 0; allowed is 1 or more"):
        nearest_only(0)


@pytest.mark.parametrize("value", ["1.0", None, [1.0], 1j])
@pytest.mark.parametrize(
    "make, name",
    [(clipped, "max_norm"), (gaussian_noise, "scale"), (codecs.randomised_response, "epsilon")],
)
def test_what_is_no_number_is_named(make, name, value):
    if (make, value) in ((gaussian_noise, None), (gaussian_noise, [1.0])):
        return  # pytrees: of no scales, and of one
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed is a number"):
        make(value)
