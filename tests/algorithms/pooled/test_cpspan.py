"""CPSPAN on small examples with known answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc.algorithms.pooled.cpspan import (
    CPSPANConfig,
    CPSPANHyperparams,
    alignment,
    cpspan,
    fill,
    fit,
    instance_term,
    prototype_term,
    unpaired,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import accuracy

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
TRUTH = np.arange(45) % 3
VIEWS = tuple(
    (4 * RNG.normal(size=(3, d))[TRUTH] + 0.3 * RNG.normal(size=(45, d))).astype(np.float32)
    for d in (5, 4)
)
OBSERVED = np.ones((45, 2), bool)
OBSERVED[:15, 0] = OBSERVED[15:25, 1] = OBSERVED[44] = False  # the last row is padding
SEEN = jnp.array(OBSERVED)
CONFIG = CPSPANConfig(
    3, hidden=(16,), latent_dim=3, pretrain_epochs=60, align_epochs=10, batch_size=16
)
HYPER = CPSPANHyperparams(learning_rate=0.01, align_rate=0.005, instance_weight=0.1)


@functools.cache
def program(config):
    return jax.jit(lambda views: fit(KEY, views, SEEN, config, HYPER))


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_is_not_labelled():
    found = program(CONFIG)(VIEWS)
    assert found.labels[44] == -1
    assert accuracy(TRUTH[:44], found.labels[:44], 3, 3) == 1
    assert found.embedding.shape == (45, 6) and found.trace.shape == (70,)
    assert found.trace[59] < 0.5 * found.trace[0]


@pytest.mark.ci
@pytest.mark.parametrize("value", [np.nan, 50.0])
def test_what_is_not_observed_is_never_read(value):
    other = tuple(np.where(OBSERVED[:, [v]], x, value) for v, x in enumerate(VIEWS))
    jax.tree.map(np.testing.assert_array_equal, program(CONFIG)(other), program(CONFIG)(VIEWS))


def test_alignment_sums_weighted_terms_over_pairs_of_views():
    z = RNG.normal(size=(3, 5, 2)).astype(np.float32)
    seen = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 1]], bool)
    hyper = CPSPANHyperparams(instance_weight=2.0, prototype_weight=0.5)

    @functools.partial(jax.jit, static_argnames="prototypes")
    def total(prototypes):
        config = CPSPANConfig(2, prototypes=prototypes)
        terms = [
            (instance_term(z[v], z[w], both), prototype_term(z[v], z[w], both))
            for v, w in ((0, 1), (0, 2), (1, 2))
            for both in (seen[:, v] & seen[:, w],)
        ]
        return alignment(z, seen, config, hyper), [sum(term) for term in zip(*terms, strict=True)]

    found, (instances, prototypes) = total("none")
    assert found == pytest.approx(float(2 * instances), rel=1e-5)
    found, _ = total("code")
    assert found == pytest.approx(float(2 * instances + 0.5 * prototypes), rel=1e-5)


def test_first_phase_sees_every_observed_row_and_fills_short_views_from_their_own():
    ids = np.arange(45.0)[:, None]
    rows, mask = jax.tree.map(np.asarray, jax.jit(unpaired)(KEY, (ids, ids), SEEN))
    assert int(mask.sum()) == 34 and mask[:34].all()  # 29 rows hold view 0, and 34 view 1
    for v, x in enumerate(rows):
        held, counts = np.unique(x[:34, 0], return_counts=True)
        np.testing.assert_array_equal(held, np.flatnonzero(OBSERVED[:, v]))
        assert set(counts) <= {1, 2}
    assert not np.array_equal(rows[0][:20], rows[1][:20])


def test_terms_are_means_of_squared_distances_of_cosines_from_one():
    z, other = RNG.normal(size=(2, 6, 3)).astype(np.float32)
    paired = np.array([1, 0, 1, 1, 0, 1], bool)

    def expected(a, b):
        cosines = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)[None]
        return (1 - cosines) ** 2

    rows = np.diag(expected(z[paired], other[paired])).mean()
    columns = expected(z[paired].T, other[paired].T).mean()
    for term, value in ((instance_term, rows), (prototype_term, columns)):
        both = jax.jit(jax.value_and_grad(term))
        assert both(z, other, paired)[0] == pytest.approx(value, rel=1e-5)
        nothing = both(z, other, np.zeros(6, bool))
        assert nothing[0] == 0 and not np.asarray(nothing[1]).any()


def test_a_missing_embedding_is_that_of_the_nearest_sample_in_a_view_that_both_have():
    z = np.array(
        [
            [[1.0, 0], [0, 1], [5, 5], [5, 5]],  # rows 2 and 3 lack view 0
            [[1.0, 1], [1, -1], [1, -3], [5, 5]],
            [[9.0, 9], [3, -1], [9, 9], [4, 4]],  # row 3 has view 2 alone
        ]
    )
    observed = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]], bool)
    expected = z.copy()
    expected[0, 2] = z[0, 1]  # cosine with row 1 is larger than with row 0
    expected[0, 3], expected[1, 3] = z[0, 1], z[1, 1]  # row 1 alone holds view 2 and these
    expected[2, 0] = expected[2, 2] = z[2, 1]
    np.testing.assert_array_equal(jax.jit(fill)(z, observed), expected)


def test_views_that_cannot_be_filled_are_refused():
    views = [RNG.normal(size=(8, d)) for d in (3, 2, 2)]

    def start(*kinds):
        ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
        parts = [Part(k, ids[i], np.array([i], np.int32)) for i, k in enumerate(kinds)]
        federation = Federation.from_arrays(views, partition=parts)
        jax.eval_shape(cpspan(CPSPANConfig(2)).init, KEY, federation)

    with pytest.raises(ValueError, match=r"views \(0, 1\) and lack view 2"):
        start((0, 1), (2,))
    start((0, 1), (1, 2))


@pytest.mark.parametrize(
    "settings", [{"hidden": (4, 0)}, {"pretrain_epochs": 0}, {"prototypes": "matched"}]
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CPSPANConfig(3, **settings)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="instance_weight: got -1"):
        cpspan(CONFIG, CPSPANHyperparams(instance_weight=-1.0))
