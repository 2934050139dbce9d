import chex
import jax
import numpy as np
import pytest
import tensorly as tl
from scipy.optimize import linear_sum_assignment
from tensorly.decomposition import parafac2 as tensorly_parafac2
from tensorly.parafac2_tensor import parafac2_to_slices

from jaxfedmvc.tensor.parafac2 import (
    Parafac2,
    canonical,
    from_slice,
    h_terms,
    normalised,
    parafac2,
    projection,
    q_terms,
    reconstruct,
    sweep,
    update_h,
    update_q,
    update_s,
)

K, N, J, RANK = 5, 6, 8, 3
MASK = np.arange(N)[None] < np.array([[6], [4], [3], [6], [5]])
jit_parafac2 = jax.jit(parafac2, static_argnames=("rank", "max_sweeps", "n_init", "n_inner"))
jit_sweep = jax.jit(sweep, static_argnames="n_inner")
jit_projection, jit_h_terms, jit_q_terms = map(jax.jit, (projection, h_terms, q_terms))
jit_update_h, jit_update_q, jit_update_s = map(jax.jit, (update_h, update_q, update_s))
jit_reconstruct, jit_canonical = jax.jit(reconstruct), jax.jit(canonical)
jit_from_slice = jax.jit(from_slice, static_argnums=1)


def fit(key, x, where=None, **options):
    """`parafac2` with few compilations."""
    where = np.ones(x.shape[:2], bool) if where is None else where
    options = {"max_sweeps": 1000, "tol": 1e-6, **options}
    return jit_parafac2(key, x, RANK, where=where, **options)


@pytest.fixture(autouse=True)
def numpy_backend():
    tl.set_backend("numpy")


def planted(seed=0, rank=RANK, noise=0.0, mask=None):
    """Slices of a PARAFAC2 model with noise, zero in rows of padding, and its H, Q, S."""
    rng = np.random.default_rng(seed)
    real = np.ones((K, N), bool) if mask is None else mask
    p = np.linalg.qr(rng.normal(size=(K, N, rank)) * real[:, :, None])[0]
    h, q = rng.normal(size=(rank, rank)), rng.normal(size=(J, rank))
    s = rng.uniform(0.5, 2, size=(K, rank))
    x = np.einsum("knr,rc,kc,jc->knj", p, h, s, q)
    error = rng.normal(size=x.shape) * real[:, :, None]
    x += noise * np.linalg.norm(x) / np.linalg.norm(error) * error
    return x.astype(np.float32), (h, q, s)


def start(seed=0, rank=RANK):
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(J, rank)))[0].astype(np.float32)
    p, s = np.zeros((K, N, rank), np.float32), np.ones((K, rank), np.float32)
    return Parafac2(p, np.eye(rank, dtype=np.float32), q, s)


def distance(x, form):
    return np.linalg.norm(np.float64(x) - np.float64(jit_reconstruct(form))) / np.linalg.norm(x)


def assert_valid(form, mask=None):
    """Orthonormal P, zero in the padding, and the conventions of `canonical`."""
    p, h, q, s = map(np.asarray, form)
    gram = np.einsum("knr,knt->krt", p, p)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(len(h)), gram.shape), atol=1e-5)
    if mask is not None:
        np.testing.assert_array_equal(p[~mask], 0.0)
    np.testing.assert_allclose(np.linalg.norm(h, axis=0), 1.0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(q, axis=0), 1.0, atol=1e-5)
    assert (np.take_along_axis(q, np.argmax(np.abs(q), axis=0)[None], axis=0) > 0).all()
    assert (s[0] >= 0).all() and (np.diff(np.sum(s**2, axis=0)) <= 0).all()


@pytest.mark.parametrize("kind", ["random", "planted", "ragged"])
def test_error_matches_tensorly(kind):
    mask = MASK if kind == "ragged" else np.ones((K, N), bool)
    if kind == "random":
        x = np.random.default_rng(3).normal(size=(K, N, J)).astype(np.float32)
    else:
        x, _ = planted(noise=0.1, mask=mask)
    ours = fit(jax.random.key(1), x, where=mask, tol=1e-7, n_init=6)
    slices = [slice_[real].astype(float) for slice_, real in zip(x, mask, strict=True)]
    norm, errors = np.linalg.norm(x), []
    # As many as it takes for their best: it is not always the first.
    for seed in range({"random": 4, "planted": 2, "ragged": 1}[kind]):
        init = "random" if seed else "svd"
        theirs = tensorly_parafac2(
            slices, RANK, n_iter_max=1000, init=init, tol=1e-7, random_state=seed
        )
        residuals = map(np.subtract, slices, parafac2_to_slices(theirs))
        errors.append(np.sqrt(sum(np.sum(r**2) for r in residuals)) / norm)
    np.testing.assert_allclose(ours.error, min(errors), atol=1e-4)
    np.testing.assert_allclose(ours.error, distance(x, ours.parafac2), atol=1e-6)
    assert_valid(ours.parafac2, mask)


def test_one_start_and_one_inner_sweep_follow_tensorly():
    x, _ = planted(noise=0.1)
    ours = fit(None, x, max_sweeps=7, tol=-1.0, n_inner=1)
    theirs = tensorly_parafac2(
        x.astype(float),
        RANK,
        n_iter_max=7,
        init="svd",
        tol=0,
        n_iter_parafac=1,
        linesearch=False,
        random_state=0,
    )
    fitted = np.stack(parafac2_to_slices(theirs))
    np.testing.assert_allclose(jit_reconstruct(ours.parafac2), fitted, atol=1e-3)
    assert ours.n_sweeps == 7


@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "ragged"])
def test_recovers_a_planted_model(mask):
    x, (h, q, s) = planted(seed=3, mask=mask)
    result = fit(None, x, where=mask, tol=0.0)
    assert result.error < 1e-4
    form = result.parafac2

    def cosines(a, b):
        a, b = np.asarray(a), np.asarray(b)
        return (a / np.linalg.norm(a, axis=0)).T @ (b / np.linalg.norm(b, axis=0))

    congruence = np.abs(cosines(q, form.q) * cosines(s, form.s))
    found = linear_sum_assignment(-congruence)[1]
    assert (congruence[np.arange(RANK), found] > 0.99).all()
    # H is known up to a rotation only, and so by the angles of its columns.
    angles = np.abs(cosines(form.h, form.h))[np.ix_(found, found)]
    np.testing.assert_allclose(angles, np.abs(cosines(h, h)), atol=1e-2)


def test_order_of_rows_does_not_matter():
    x, _ = planted(noise=0.2)
    orders = np.argsort(np.random.default_rng(0).uniform(size=(K, N)), axis=1)
    permuted = np.take_along_axis(x, orders[:, :, None], axis=1)
    one, other = fit(None, x), fit(None, permuted)
    np.testing.assert_allclose(one.error, other.error, atol=1e-5)
    expected = np.take_along_axis(
        np.asarray(jit_reconstruct(one.parafac2)), orders[:, :, None], axis=1
    )
    np.testing.assert_allclose(jit_reconstruct(other.parafac2), expected, atol=1e-2)


def test_padding_changes_nothing():
    x, _ = planted(noise=0.2, mask=MASK)
    padded = np.concatenate(
        [np.where(MASK[:, :, None], x, np.nan), np.full((K, 4, J), 1e6)], axis=1
    )
    where = np.concatenate([MASK, np.zeros((K, 4), bool)], axis=1)
    plain, masked = fit(None, x, where=MASK), fit(None, padded.astype(np.float32), where=where)
    masked = jax.device_get(masked)
    np.testing.assert_allclose(plain.error, masked.error, atol=1e-5)
    chex.assert_trees_all_close(masked.parafac2[1:], plain.parafac2[1:], atol=1e-2)
    np.testing.assert_allclose(
        masked.parafac2.projections[:, :N], plain.parafac2.projections, atol=1e-2
    )
    np.testing.assert_array_equal(masked.parafac2.projections[:, N:], 0.0)


@pytest.mark.parametrize("real", [[0, 1, 2, 3, 4, 5], [0, 1, 2], [1, 3, 5]])
@pytest.mark.parametrize("n_zero", [0, 1, 2, 3])
def test_projection_lies_in_the_real_rows_whatever_the_rank(real, n_zero):
    rng = np.random.default_rng(n_zero)
    where = np.isin(np.arange(N), real)
    x = (rng.normal(size=(N, J)) * where[:, None]).astype(np.float32)
    form, s = start(), np.float32(np.arange(RANK) < RANK - n_zero)
    h = rng.normal(size=(RANK, RANK)).astype(np.float32)
    p = np.asarray(jit_projection(x, h, form.q, s, where=where))
    np.testing.assert_array_equal(p[~where], 0.0)
    np.testing.assert_allclose(p.T @ p, np.eye(RANK), atol=1e-5)
    # The largest trace is the sum of singular values.
    product = np.float64(x) @ np.float64(form.q) * np.float64(s) @ np.float64(h).T
    best = np.linalg.svd(product, compute_uv=False).sum()
    np.testing.assert_allclose(np.sum(p * product), best, rtol=1e-5, atol=1e-6)


def test_steps_solve_their_least_squares():
    x, _ = planted(noise=0.3)
    form = jax.device_get(jit_sweep(x, start()))
    p, h, q, s = (np.float64(leaf) for leaf in form)
    y = np.einsum("knr,knj->krj", p, x)

    def solve(columns, target):  # columns [unknowns, ...], target [...]
        return np.linalg.lstsq(columns.reshape(len(columns), -1).T, target.ravel(), rcond=None)[0]

    terms = jax.device_get([jit_h_terms(np.float32(y[k]), form.q, form.s[k]) for k in range(K)])
    sums = tuple(sum(term) for term in zip(*terms, strict=True))
    rows = [solve(np.einsum("kc,jc->ckj", s, q), y[:, r]) for r in range(RANK)]
    np.testing.assert_allclose(jit_update_h(sums, form.q, form.h), rows, atol=2e-3)
    terms = [jit_q_terms(np.float32(y[k]), form.h, form.s[k]) for k in range(K)]
    total = sum(jax.device_get(terms))
    rows = [solve(np.einsum("rc,kc->ckr", h, s), y[:, :, j]) for j in range(J)]
    np.testing.assert_allclose(jit_update_q(total, sums[1], form.h, form.q), rows, atol=2e-3)
    best = solve(np.einsum("rc,jc->crj", h, q), y[0])
    np.testing.assert_allclose(
        jit_update_s(np.float32(y[0]), form.h, form.q, form.s[0]), best, atol=2e-3
    )


def test_sweep_is_the_steps_at_different_places():
    x, _ = planted(noise=0.3)
    form = jax.device_get(jit_sweep(x, start()))
    h, q, s = form.h, form.q, list(form.s)
    p = jax.device_get([jit_projection(x[k], h, q, s[k]) for k in range(K)])
    y = [p[k].T @ x[k] for k in range(K)]
    s = [jit_update_s(y[k], h, q, s[k]) for k in range(K)]
    terms = jax.device_get([jit_h_terms(y[k], q, s[k]) for k in range(K)])
    products, squares = map(sum, zip(*terms, strict=True))
    h = jit_update_h((products, squares), q, h)
    terms = jax.device_get([jit_q_terms(y[k], h, s[k]) for k in range(K)])
    q = jit_update_q(sum(terms), squares, h, q)
    h, q, scale = jax.device_get(jax.jit(normalised)(h, q))
    expected = Parafac2(np.stack(p), h, q, np.stack(s) * scale[None])
    swept = jit_sweep(x, form)
    chex.assert_trees_all_close(swept, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_error_never_increases(noise):
    # Also with more components than the data has.
    for seed in range(6):
        x, _ = planted(seed, rank=1 + seed % 3, noise=noise)
        form, errors = start(seed), []
        for _ in range(40):
            form = jit_sweep(x, form)
            errors.append(distance(x, form) ** 2)
        assert (np.diff(errors) <= 2e-7).all()
        assert errors[-1] < errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("true_rank", [1, 3])
def test_from_slice_is_exact_where_it_can_be(true_rank):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, true_rank)) @ rng.normal(size=(true_rank, J))
    x[MASK[1] == 0] = 0
    form = jit_from_slice(x, RANK, where=MASK[1])
    np.testing.assert_allclose(np.asarray(jit_reconstruct(form))[0], x, atol=1e-5)
    assert_valid(form, MASK[1][None])
    # Of a slice of higher rank, the truncated SVD.
    x = rng.normal(size=(N, J))
    left, scales, right = np.linalg.svd(x)
    best = (left[:, :RANK] * scales[:RANK]) @ right[:RANK]
    found = np.asarray(jit_reconstruct(jit_from_slice(x, RANK)))
    np.testing.assert_allclose(found[0], best, atol=1e-5)


def test_canonical_form_of_scaled_flipped_and_permuted_factors():
    x, _ = planted(noise=0.2)
    form = jax.device_get(fit(None, x).parafac2)
    order, signs = np.array([2, 0, 1]), np.float32([[1.0, -1.0, -1.0]])
    p, h, q, s = form
    other = Parafac2(p, -2 * h[:, order], 0.5 * q[:, order] * signs, -s[:, order] * signs)
    np.testing.assert_allclose(jit_reconstruct(other), jit_reconstruct(form), atol=1e-5)
    chex.assert_trees_all_close(jit_canonical(other), form, atol=1e-5)
    # Another unit of the data is one of the scales.
    scaled = jax.device_get(fit(None, 1e3 * x).parafac2)
    chex.assert_trees_all_close(scaled._replace(s=scaled.s / 1e3), form, rtol=1e-2, atol=1e-2)


def test_best_start_is_kept():
    x = np.random.default_rng(5).normal(size=(K, N, J)).astype(np.float32)
    one, more = fit(None, x), fit(jax.random.key(0), x, n_init=6)
    assert more.error <= one.error + 1e-5
    np.testing.assert_allclose(more.error, distance(x, more.parafac2), atol=1e-6)


@pytest.mark.slow
def test_vmap_equals_loop():
    x = np.stack([planted(seed, noise=0.3)[0] for seed in range(3)])
    batched = jax.jit(jax.vmap(lambda x: parafac2(None, x, RANK, max_sweeps=1000)))(x)
    batched = jax.device_get(batched)
    for i in range(3):
        alone = fit(None, x[i])
        np.testing.assert_allclose(batched.error[i], alone.error, atol=1e-5)
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], batched.parafac2)
        expected = jit_reconstruct(alone.parafac2)
        np.testing.assert_allclose(jit_reconstruct(mine), expected, atol=1e-2)


def test_same_key_gives_same_bits_and_traces_once():
    chex.clear_trace_counter()
    traced = jax.jit(
        chex.assert_max_traces(
            lambda key, x, where, tol: parafac2(key, x, RANK, where=where, tol=tol), n=1
        )
    )
    x, _ = planted(noise=0.3)
    key = jax.random.key(0)
    chex.assert_trees_all_equal(traced(key, x, MASK, 1e-6), traced(key, x, MASK, 1e-6))
    traced(jax.random.key(1), x + 1, np.ones((K, N), bool), 1e-3)


def test_zeros_stay_finite():
    x = np.zeros((K, N, J), np.float32)
    result = fit(None, x)
    chex.assert_tree_all_finite((result, jit_from_slice(x[0], RANK)))
    assert result.error == 0
    np.testing.assert_array_equal(jit_reconstruct(result.parafac2), x)
    # One slice of zeros beside others: its scales vanish, and its P is orthonormal all the same.
    x, _ = planted(noise=0.2)
    x[2] = 0
    result = fit(None, x)
    chex.assert_tree_all_finite(result)
    assert_valid(result.parafac2)
    np.testing.assert_allclose(np.asarray(jit_reconstruct(result.parafac2))[2], 0.0, atol=1e-4)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: parafac2(None, x, 0), "rank"),
        (lambda x: parafac2(None, x, 7), "rank"),
        (lambda x: parafac2(None, x.transpose(0, 2, 1), 7), "rank"),
        (lambda x: parafac2(None, x, 2.5), "rank"),
        (lambda x: parafac2(None, x, 2, tol=float("nan")), "tol"),
        (lambda x: parafac2(None, x[0], 2), "slices"),
        (lambda x: parafac2(None, x, 2, where=MASK[0]), "where"),
        (lambda x: parafac2(None, x, 4, where=MASK), "where"),
        (lambda x: parafac2(None, x, 2, max_sweeps=0), "max_sweeps"),
        (lambda x: parafac2(None, x, 2, n_init=0), "n_init"),
        (lambda x: parafac2(None, x, 2, n_inner=0), "n_inner"),
        (lambda x: parafac2(None, x, 2, n_init=2), "key"),
        (lambda x: from_slice(x[0], 7), "rank"),
        (lambda x: from_slice(x, 2), "x"),
        (lambda x: from_slice(x[0], 2, where=MASK), "where"),
    ],
)
def test_bad_input(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        call(planted()[0])


@pytest.mark.parametrize("size", [2.0**-50, 2.0**33, 2.0**60])
def test_the_size_of_the_slices_changes_only_the_scales(size):
    """Squares of squares of 2^33 are no float32; powers of two round nothing."""
    x, _ = planted(noise=0.3)
    (one, error, n_sweeps), large = fit(None, x), fit(None, size * x)
    assert float(large.error) == float(error) and int(large.n_sweeps) == int(n_sweeps)
    chex.assert_trees_all_equal(large.parafac2, one._replace(s=size * one.s))
