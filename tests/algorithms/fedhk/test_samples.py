"""FedHK-PARAFAC2 on samples: its exchanges against sweeps over slices at one place, and scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk.parafac2 import fedhk_parafac2
from jaxfedmvc.algorithms.fedhk.samples import scores
from jaxfedmvc.algorithms.fedhk.settings import FedHKParafac2Config
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.tensor import parafac2 as pf

C, R, WIDTHS, ROWS = 3, 2, (3, 2), (6, 4, 6)
D, S, N = sum(WIDTHS), len(WIDTHS), len(ROWS)
ALGORITHM = fedhk_parafac2(FedHKParafac2Config(C, rank=R, placement="samples", n_restarts=1))
# Sums, squares and summaries; then five sweeps of two exchanges each, and the factors once more.
SUMMARIES, SWEEPS = 2, slice(3, 13)
ORIGINS = {0: np.float32([0.5, -1.0, 0.2]), 1: np.float32([2.0, 0.3])}
VARIANCES = {0: np.float32(4.0), 1: np.float32(0.25)}


def federation():
    """Three clients of all views; padding is NaN."""
    x = [np.random.default_rng(d).normal(size=(sum(ROWS), d)).astype(np.float32) for d in WIDTHS]
    ids = np.full((N, max(ROWS)), -1)
    ends = np.cumsum(ROWS)
    for row, n, end in zip(ids, ROWS, ends, strict=True):
        row[:n] = np.arange(end - n, end)
    fed = Federation.from_arrays(x, partition=[Part((0, 1), ids, np.arange(N))])
    (cohort,) = fed.cohorts
    views = tuple(jnp.where(cohort.mask[..., None], x, jnp.nan) for x in cohort.views)
    return fed.replace(cohorts=(cohort.replace(views=views),))


@pytest.fixture(scope="module")
def begun():
    """Data, server and clients with scales of the views, and factors at random."""
    rng = np.random.default_rng(0)
    fed = federation()
    server, (clients,) = jax.jit(ALGORITHM.init)(jax.random.key(0), fed)

    def scaled(raw, *axis):
        scales = {
            v: x._replace(
                origin=np.broadcast_to(ORIGINS[v], (*axis, WIDTHS[v])),
                variance=np.broadcast_to(VARIANCES[v], axis),
            )
            for v, x in raw.scales.items()
        }
        return dataclasses.replace(raw, scales=scales) if axis else raw._replace(scales=scales)

    h, q, s = (rng.normal(size=x).astype(np.float32) for x in ((R, R), (D, R), (N, R)))
    server = server._replace(raw=scaled(server.raw), h=h, q=q)
    return fed, server, dataclasses.replace(clients, raw=scaled(clients.raw, N), scales=s)


def test_two_exchanges_are_a_sweep_over_the_clients_samples(begun):
    fed, server, clients = begun
    (cohort,) = fed.cohorts

    @jax.jit
    def exchanges(server, clients):
        key = jax.random.key(0)
        for phase in ALGORITHM.setup[SWEEPS][:2]:
            many = jax.vmap(phase.client, (None, None, 0, 0))
            clients, messages, _ = many(key, phase.broadcast(server, (0, 1)), clients, cohort)
            total = jax.tree.map(lambda x: x.sum(axis=0), messages)
            server, _ = phase.server(key, server, (total,), (jnp.float32(N),))
        return pf.normalised(server.h, server.q), clients.scales

    (h, q, scale), s = exchanges(server, clients)
    mask = np.asarray(cohort.mask)
    slices = np.concatenate(
        [
            (np.asarray(x) - ORIGINS[v]) / np.sqrt(VARIANCES[v])
            for v, x in zip(cohort.view_ids, cohort.views, strict=True)
        ],
        axis=2,
    )
    slices = np.where(mask[..., None], slices, 0.0)
    form = pf.Parafac2(jnp.zeros((N, max(ROWS), R)), server.h, server.q, clients.scales)
    expected = jax.jit(pf.sweep)(slices, form, where=mask)
    np.testing.assert_allclose(h, expected.h, atol=1e-4)
    np.testing.assert_allclose(q, expected.q, atol=1e-4)
    np.testing.assert_allclose(s * scale[None], expected.s, rtol=1e-3, atol=1e-4)


def test_first_directions_are_those_of_the_clients_summaries(begun):
    """As often as these count, and each view over its own deviation in them."""
    _, server, _ = begun
    rng = np.random.default_rng(1)
    means = rng.normal(size=(N, 2 * C, D)).astype(np.float32)
    counts = rng.integers(0, 9, (N, 2 * C)).astype(np.float32)
    serve = ALGORITHM.setup[SUMMARIES].server
    found = jax.jit(
        lambda message: serve(jax.random.key(0), server, (message,), (jnp.ones(N),))[0].q
    )((means, counts))
    rows, counts = means.reshape(-1, D), counts.ravel()
    parts = np.split(rows, [WIDTHS[0]], axis=1)
    totals = [np.sum(x**2 * counts[:, None]) / counts.sum() for x in parts]
    rows = np.concatenate([x / np.sqrt(t) for x, t in zip(parts, totals, strict=True)], axis=1)
    _, _, right = np.linalg.svd(rows * np.sqrt(counts)[:, None])
    np.testing.assert_allclose(np.abs(np.sum(found * right[:R].T, axis=0)), 1.0, atol=1e-4)


def test_clients_are_sent_the_factors_before_each_exchange_and_once_more():
    one = 4 * N * R
    setup = ALGORITHM.setup[SWEEPS.start : SWEEPS.stop + 1]
    traffic = engine.traffic(ALGORITHM._replace(setup=setup), federation())["setup"]
    # H and Q, then H: five times. Sums of Y Q diag(s) and s s^T, and of Y^T H diag(s).
    assert traffic.down == one * (5 * (R + D + R) + R + D)
    assert traffic.up == one * 5 * (R + R + D)


def test_scores_are_of_three_passes():
    rng = np.random.default_rng(0)
    x, h, q = (rng.normal(size=size) for size in ((6, D), (R, R), (D, R)))
    x[4:] = 0
    s, gram = np.ones(R), (h.T @ h) * (q.T @ q)

    def projection():
        left, _, right = np.linalg.svd(x[:4] @ q @ np.diag(s) @ h.T, full_matrices=False)
        return left @ right

    for _ in range(3):
        s = np.linalg.solve(gram, np.diag(h.T @ projection().T @ x[:4] @ q))
    found = jax.jit(scores)(*map(np.float32, (x, h, q)), np.arange(6) < 4)
    np.testing.assert_allclose(found[:4], projection() @ h * s, rtol=1e-3, atol=1e-3)
    assert (np.asarray(found)[4:] == 0).all()
