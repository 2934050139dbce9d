"""Codecs: what is decoded, how often, and how many bytes it took."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binomtest, norm

from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages import coded, nbytes
from jaxfedmvc.messages.codecs import quantised, randomised_response, top_k_rows

KEY = jax.random.key(0)
BITS = (1, 2, 4, 8)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs of this file are compiled for a run or two of a few numbers."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.partial(jax.jit, static_argnums=0)
def through(codec, message, key=KEY):
    """What the server makes of a message; compiled once for each codec and shape."""
    return codec.decode(codec.encode(key, message, ()))


ROUNDED = {bits: quantised(bits) for bits in BITS}


def wire_bytes(codec, message):
    return nbytes(jax.eval_shape(lambda m: codec.encode(KEY, m, ()), message))


def assert_mean(draws, expected, sigma, level=1e-3):
    """z-test of the mean over the leading axis, for all entries together (Bonferroni)."""
    z = np.abs(draws.mean(axis=0, dtype=np.float64) - expected) / (sigma / len(draws) ** 0.5)
    assert z.max() < norm.isf(level / 2 / z.size)


# --- The largest entries of rows ------------------------------------------------------------------


def test_top_k_keeps_a_hand_worked_case():
    x = jnp.array([[1.0, -5.0, 3.0, 0.0], [2.0, -2.0, 2.0, 2.0], [0.0, 0.0, 0.0, -0.5]])
    kept = [[0, -5, 3, 0], [2, -2, 0, 0], [0, 0, 0, -0.5]]  # of ties the lowest columns
    np.testing.assert_array_equal(through(top_k_rows(2), {"graph": x})["graph"], kept)
    (wire,) = jax.jit(top_k_rows(2).encode)(KEY, x, ()).leaves
    np.testing.assert_array_equal(wire.index, [[1, 2], [0, 1], [3, 0]])
    assert wire.index.dtype == jnp.int32 and wire_bytes(top_k_rows(2), x) == 3 * 2 * (4 + 4)


def test_top_k_of_all_columns_is_exact_and_nan_is_the_largest():
    x = normal(5, 7)
    np.testing.assert_array_equal(through(top_k_rows(7), x), x)
    x[1, [2, 4]] = [np.nan, -np.inf]
    kept = np.asarray(through(top_k_rows(2), x))
    assert np.isnan(kept[1, 2]) and kept[1, 4] == -np.inf and np.count_nonzero(kept[1]) == 2
    np.testing.assert_array_equal(np.delete(kept, 1, 0), through(top_k_rows(2), np.delete(x, 1, 0)))


def test_top_k_keeps_types_and_passes_what_is_no_floating_leaf():
    message = {"graph": jnp.ones((3, 4), jnp.bfloat16), "n": jnp.int32(7)}
    result = through(top_k_rows(1), message)
    assert result["graph"].dtype == jnp.bfloat16 and result["n"] == 7
    assert wire_bytes(top_k_rows(1), message) == 3 * (4 + 2) + 4


def test_top_k_names_what_it_cannot_send():
    with pytest.raises(ValueError, match=r"^k: got 0; allowed is 1 or more"):
        top_k_rows(0)
    with pytest.raises(ValueError, match=r"^k: got 5; .* at most 4, the columns of message\['g'\]"):
        wire_bytes(top_k_rows(5), {"g": jnp.ones((3, 4))})
    with pytest.raises(
        ValueError, match=r"^message\['v'\]: got shape \(3,\); allowed are matrices"
    ):
        wire_bytes(top_k_rows(1), {"g": jnp.ones((3, 4)), "v": jnp.ones(3)})


# --- Few bits -------------------------------------------------------------------------------------


@functools.cache
def many(bits):
    """`(keys, x) -> [keys, *x.shape]`, compiled once for each shape."""
    return jax.jit(jax.vmap(lambda key, x: through(ROUNDED[bits], x, key), (0, None)))


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_unbiased_and_less_than_a_step(bits):
    x = normal(3, 11) * np.float32([[1e-3], [1.0], [1e4]]) + np.float32([[0.0], [5.0], [-1e3]])
    draws = np.asarray(many(bits)(jax.random.split(KEY, 4000), x))
    step = (np.ptp(x, axis=1, keepdims=True) / (2**bits - 1)).astype(np.float64)
    rounding = 1e-6 * np.abs(x).max(axis=1, keepdims=True)
    assert np.all(np.abs(draws - x) < step + rounding)
    part = (x - x.min(axis=1, keepdims=True)) / step % 1  # of a step, above the point below
    between = np.minimum(part, 1 - part) > 1e-3
    sigma = step * np.sqrt(part * (1 - part))
    assert_mean(draws[:, between], x[between], sigma[between])
    np.testing.assert_allclose(draws.std(axis=0) / step, sigma / step, atol=0.03)
    # Two points at most, next to each other, so that nothing is added but the rounding.
    assert all(len(np.unique(column)) <= 2 for column in draws.reshape(4000, -1).T)


@pytest.mark.parametrize("bits", BITS)
def test_points_of_the_grid_and_rows_of_one_value_are_exact(bits):
    levels = 2**bits - 1
    grid = np.random.default_rng(0).permutation(np.resize(np.arange(levels + 1), 300))
    x = np.stack([-3 + 0.25 * grid, np.full(300, np.float32(1 / 3)), np.zeros(300), 8.0 * grid])
    np.testing.assert_array_equal(through(ROUNDED[bits], np.float32(x)), np.float32(x))


@pytest.mark.parametrize("bits", BITS)
def test_bytes_of_few_bits(bits):
    message = {"m": jnp.ones((3, 11)), "v": jnp.ones(5), "s": jnp.ones(()), "n": jnp.ones(2, int)}
    packed = 3 * -(-11 * bits // 8) + -(-5 * bits // 8) + 1
    assert wire_bytes(quantised(bits), message) == packed + (3 + 1 + 1) * 8 + message["n"].nbytes


def test_any_shape_and_type_comes_back():
    message = {
        "deep": normal(2, 3, 5),
        "scalar": jnp.float32(0.1),
        "half": jnp.array([1.0, 2.0], jnp.bfloat16),
        "none": jnp.zeros((0, 3)),
        "no columns": jnp.zeros((3, 0)),
        "index": jnp.array([3, 300]),
    }
    result = through(ROUNDED[8], message)
    for name, x in message.items():
        assert (result[name].shape, result[name].dtype) == (x.shape, x.dtype)
    np.testing.assert_allclose(result["deep"], message["deep"], atol=0.02)
    for name in ("scalar", "half", "none", "no columns", "index"):
        np.testing.assert_array_equal(result[name], message[name])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_row_that_is_not_finite_is_lost_and_no_other(bad):
    x = normal(4, 11)
    x[2, 5], x[2, 6] = bad, -1e38
    result = np.asarray(many(4)(KEY[None], x)[0])
    assert np.isnan(result[2]).all()
    good = np.asarray(many(4)(KEY[None], normal(4, 11))[0])
    np.testing.assert_array_equal(np.delete(result, 2, 0), np.delete(good, 2, 0))


def test_rounding_follows_the_key_the_leaf_and_the_row():
    row = np.tile(normal(1, 50), (3, 1))
    both = through(ROUNDED[1], {"a": row, "b": row})
    assert len(np.unique(np.concatenate([both["a"], both["b"]]), axis=0)) == 6
    np.testing.assert_array_equal(through(ROUNDED[1], {"a": row})["a"], both["a"])
    assert np.any(through(ROUNDED[1], {"a": row}, jax.random.key(1))["a"] != both["a"])
    longer = np.concatenate([row, np.full((2, 50), np.nan, np.float32)])
    np.testing.assert_array_equal(through(ROUNDED[1], {"a": longer})["a"][:3], both["a"])


@pytest.mark.parametrize("bits", [0, 3, 16, 4.0, True])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"^bits: got {bits}; allowed is 1, 2, 4 or 8"):
        quantised(bits)


# --- Edges that may be lies -----------------------------------------------------------------------

N = 13
GRAPH = np.where(np.random.default_rng(1).random((N, N)) < 0.4, normal(N, N) + 1, 0)
EDGES = (GRAPH > 0) & ~np.eye(N, dtype=bool)
OFF = ~np.eye(N, dtype=bool)
REPEATS = 3000


@jax.jit
def respond(keys, epsilon, graph):
    """Estimates [keys, n, n]."""
    return jax.vmap(lambda key: through(randomised_response(epsilon), graph, key))(keys)


@functools.cache
def responses(epsilon):
    return np.asarray(respond(jax.random.split(KEY, REPEATS), epsilon, GRAPH))


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_bits_are_lies_as_often_as_warner_says_and_estimates_are_unbiased(epsilon):
    q = 1 / (1 + np.exp(epsilon))
    draws = responses(epsilon)
    lies = (draws > 0) != EDGES
    for among in (EDGES, OFF & ~EDGES):
        assert binomtest(int(lies[:, among].sum()), REPEATS * int(among.sum()), q).pvalue > 1e-3
    values = np.unique(draws[:, OFF])
    np.testing.assert_allclose(values, np.array([-q, 1 - q]) / (1 - 2 * q), rtol=1e-5)
    assert_mean(draws[:, OFF], EDGES[OFF], np.sqrt(q * (1 - q)) / (1 - 2 * q))
    assert not draws[:, ~OFF].any()


def test_lies_are_independent():
    lies = ((responses(0.5) > 0) != EDGES)[:, OFF]
    correlations = np.corrcoef(lies.T)[np.triu_indices(lies.shape[1], 1)]
    assert np.abs(correlations).max() < norm.isf(1e-3 / correlations.size) / REPEATS**0.5


def test_one_edge_changes_one_bit_and_its_odds_by_no_more_than_e_to_the_epsilon():
    # What is drawn does not depend on the graph, so the ratio of likelihoods of two graphs is that
    # of the bits in which they differ.
    codec, epsilon = randomised_response(1.0), 1.0
    other = np.where(np.arange(N * N).reshape(N, N) == 2 * N + 7, 1.0 - EDGES, EDGES)
    encode = jax.jit(lambda g: codec.encode(KEY, g, ()).leaves[0])
    a, b = (np.unpackbits(encode(g), axis=1, bitorder="little") for g in (EDGES, other != 0))
    assert np.sum(a != b) == 1 and a[2, 7] != b[2, 7]
    assert not a[:, :N][~OFF].any() and not a[:, N:].any()  # nor is anything told beside edges
    told = responses(epsilon) > 0
    for told_so in (told, ~told):
        if_edge, if_none = (told_so[:, among].mean() for among in (EDGES, OFF & ~EDGES))
        np.testing.assert_allclose(abs(np.log(if_edge / if_none)), epsilon, rtol=0.03)


def test_infinite_epsilon_sends_the_plain_edges():
    assert np.array_equal(respond(KEY[None], np.inf, GRAPH)[0], EDGES)
    graph = np.where(OFF, GRAPH, np.nan)
    for same in (GRAPH, EDGES, graph, EDGES.astype(np.int32)):
        result = through(randomised_response(np.inf), {"graph": same})["graph"]
        assert result.dtype == jnp.float32 and np.array_equal(result, EDGES)
    assert wire_bytes(randomised_response(1.0), {"graph": GRAPH}) == N * 2


def test_samples_that_are_appended_change_no_bit_of_the_others():
    # More rows than are drawn at a time.
    padded = np.pad(GRAPH, (0, 260 - N), constant_values=np.nan)
    few, more = (through(randomised_response(1.0), (GRAPH, x)) for x in (GRAPH, padded))
    np.testing.assert_array_equal(few[1], more[1][:N, :N])
    assert np.any(few[0] != few[1])  # each leaf has lies of its own


def test_epsilon_is_traced_and_a_loop_gives_the_same():
    traces = []

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def sweep(key, epsilon, graph):
        traces.append(None)
        return through(randomised_response(epsilon), graph, key)

    epsilons = np.array([0.1, 2.0, np.inf], np.float32)
    graphs = np.stack([GRAPH, GRAPH.T, EDGES])
    result = sweep(KEY, epsilons, graphs)
    sweep(KEY, epsilons + 1, graphs)
    assert len(traces) == 1
    for epsilon, graph, row in zip(epsilons, graphs, result, strict=True):
        np.testing.assert_allclose(row, respond(KEY[None], epsilon, graph)[0], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.nan, np.ones(2), "4"])
def test_epsilon_that_tells_nothing_is_refused(epsilon):
    with pytest.raises(ValueError, match=r"^epsilon: got .*; allowed is a number above zero"):
        randomised_response(epsilon)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (2, 3, 3)])
def test_only_adjacencies_are_sent_as_edges(shape):
    with pytest.raises(ValueError, match=r"^message\['g'\]: got shape .* adjacencies \[n, n\]"):
        wire_bytes(randomised_response(1.0), {"g": jnp.ones(shape)})


# --- In a federation ------------------------------------------------------------------------------

CLIENTS = [{0: normal(6, 2, seed=s)} for s in range(3)] + [{1: normal(6, 3)}]
PLAIN = np.stack([x @ x.T for client in CLIENTS for x in client.values()])
FEDERATION = Federation.from_clients(CLIENTS)


def gram(codecs):
    """Every client sends the products of its rows; the server keeps what it received."""

    def client(key, sent, state, client):
        x = client.views[0]
        return state, {"gram": x @ x.T}, {}

    def keep(key, server, messages, weights):
        return jnp.concatenate([m["gram"] for m in messages]), {}

    phase = Phase(lambda server, view_ids: (), client, keep)
    for codec in codecs:
        phase = coded(phase, codec)
    return FederatedAlgorithm(
        init=lambda key, f: (jnp.zeros((4, 6, 6)), tuple(() for _ in f.cohorts)),
        setup=(),
        round=(phase,),
        finish=(),
        assign=lambda server, state, client: jnp.zeros(client.mask.shape, jnp.int32),
    )


def received(codecs, **options):
    run = jax.jit(lambda f, key: engine.run(gram(codecs), f, key, 1, **options))
    return run(FEDERATION, KEY).state.server


@pytest.mark.parametrize(
    "codecs, message_bytes",
    [
        ((), 36 * 4),
        ((top_k_rows(2),), 6 * 2 * (4 + 4)),
        ((quantised(4),), 6 * (3 + 8)),
        ((top_k_rows(2), quantised(4)), 6 * (2 * 4 + 1 + 8)),
        # The least and the step of the rows are vectors of 6, with grids of their own.
        ((quantised(8), quantised(8)), 6 * 6 + 2 * (6 + 8)),
        ((top_k_rows(3), top_k_rows(2)), 6 * (3 * 4 + 2 * (4 + 4))),
    ],
)
def test_the_bytes_that_are_counted_are_those_of_the_wire(codecs, message_bytes):
    traffic = engine.traffic(gram(codecs), FEDERATION)["round"]
    assert traffic.up == 4 * message_bytes and traffic.down == 0  # 4 clients


@pytest.mark.slow
def test_a_chain_is_decoded_from_its_end():
    largest = np.abs(PLAIN) >= np.sort(np.abs(PLAIN), axis=-1)[..., -2:-1]
    twice = received((top_k_rows(3), top_k_rows(2)), client_chunk=1)
    np.testing.assert_allclose(twice, PLAIN * largest, rtol=1e-5, atol=1e-6)
    # Of two values both are points of the grid. The last codec has grids of the grids themselves.
    chain = received((top_k_rows(2), quantised(1), quantised(8)))
    np.testing.assert_allclose(chain, PLAIN * largest, atol=0.02 * np.ptp(PLAIN))


@pytest.mark.slow
def test_clients_round_for_themselves_and_in_any_chunk():
    codecs = (randomised_response(0.5),)
    all_at_once = received(codecs)
    np.testing.assert_array_equal(all_at_once, received(codecs, client_chunk=2))
    lies = (np.asarray(all_at_once) > 0) != ((PLAIN > 0) & ~np.eye(6, dtype=bool))
    assert len(np.unique(lies.reshape(4, -1), axis=0)) == 4
