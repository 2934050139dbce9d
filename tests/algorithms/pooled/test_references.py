"""What benchmarks measure against computes the same as the library: NumPy and PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.references.anchor import anchor_graph, imvc_cbg_labels, simplex
from jaxfedmvc import nn
from jaxfedmvc.algorithms.pooled import imvc_cbg, mflvc, simvc
from jaxfedmvc.algorithms.pooled.networks import encode, init_networks, reconstruction_loss
from jaxfedmvc.metrics import accuracy
from tests.algorithms.fmcsc.tiny import jit  # compiles fast, runs slowly
from tests.algorithms.pooled.planted import COMPLETE, KEY, OBSERVED, TRUTH, VIEWS, K, N


@functools.cache
def fitted(anchors_per_cluster):
    config = imvc_cbg.IMVCCBGConfig(K, anchors_per_cluster, max_iter=5, n_init=4)
    hyper = imvc_cbg.IMVCCBGHyperparams(lam=0.1, tol=0.0)
    return jax.jit(lambda x, o: imvc_cbg.fit(KEY, x, o, config, hyper))(VIEWS, OBSERVED)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("anchors_per_cluster", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_numpy_fits_the_librarys_anchor_graph(dtype, anchors_per_cluster):
    views = [view.astype(dtype) for view in VIEWS]
    m = K * anchors_per_cluster
    found = anchor_graph(views, OBSERVED, K, n_anchors=m, lam=0.1, max_iter=5, tol=0.0)
    assert found.z.dtype == dtype and found.z.shape == (m, N)
    np.testing.assert_allclose(found.trace, fitted(anchors_per_cluster).trace, rtol=2e-4)


def test_numpy_finds_the_planted_clusters():
    assert accuracy(TRUTH, imvc_cbg_labels(VIEWS, COMPLETE, K), K, K) == 1


def test_projection_by_hand():
    np.testing.assert_allclose(simplex(np.array([[2.0, 0.4], [0.0, 0.4]])), [[1, 0.5], [0, 0.5]])


# --- MFLVC ----------------------------------------------------------------------------------------

DIMS, ROWS = (7, 5), 12
CONFIG = mflvc.MFLVCConfig(3, hidden=(8,), latent_dim=6, feature_dim=5, batch_size=ROWS)
HYPER = mflvc.MFLVCHyperparams(learning_rate=0.01)
X = tuple(np.random.default_rng(0).random((ROWS, d), np.float32) for d in DIMS)
CLUSTERS = np.random.default_rng(1).integers(3, size=(2, ROWS))
MASK = jnp.ones(ROWS, bool)


def first(networks, x, mask):
    seen = jnp.repeat(mask[:, None], len(x), axis=1)
    return reconstruction_loss(networks, x, encode(networks, x), seen)


def then(networks, x, mask):
    contrasts = mflvc.contrasts(networks, encode(networks, x), mask, HYPER)
    return first(networks, x, mask) + contrasts


def last(networks, x, mask):
    logits = mflvc.apply(networks.heads["label"], encode(networks, x))
    return mflvc.tuning(logits, jnp.array(CLUSTERS), mask, CONFIG)


@pytest.mark.parametrize("phase", [first, then, last], ids=lambda phase: phase.__name__)
def test_torch_makes_the_librarys_steps(phase):
    """Three steps of every phase, each with a fresh Adam, from the same parameters."""
    torch = pytest.importorskip("torch")
    from benchmarks.references import mflvc as peer

    heads = {"feature": (6, (5,)), "label": (6, (3,))}
    start = init_networks(KEY, X, CONFIG.hidden, CONFIG.latent_dim, heads)

    @jit
    def steps(networks):
        state = optax.adam(HYPER.learning_rate).init(networks)
        options = {"epochs": 3, "batch_size": ROWS, "learning_rate": HYPER.learning_rate}
        networks, _, losses = nn.fit_on(KEY, networks, state, phase, X, MASK, **options)
        return networks, losses

    trained, losses = steps(start)
    net, views = peer.load(peer.Net(CONFIG, DIMS), start), [torch.from_numpy(x) for x in X]

    def loss(views):
        z = net.encode(views)
        if phase is last:
            return peer.tuning(net, views, CLUSTERS, CONFIG)
        more = peer.contrasts(net, z, HYPER) if phase is then else 0
        return peer.reconstruction_loss(net, views, z) + more

    assert loss(views).item() == pytest.approx(float(losses[0]), rel=1e-4)
    peer.train(net, torch.optim.Adam(net.parameters(), lr=0.01), loss, views, 3, ROWS)
    expected = peer.load(peer.Net(CONFIG, DIMS), trained)
    for found, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), wanted.detach(), atol=2e-4)


def test_a_torch_run_returns_labels():
    pytest.importorskip("torch")
    from benchmarks.references.mflvc import mflvc_run

    labels = mflvc_run(
        mflvc.MFLVCConfig(
            3, (8,), 6, 5, pretrain_epochs=1, contrast_epochs=1, tune_epochs=1, n_init=1
        ),
        HYPER,
        X,
    )()
    assert labels.shape == (ROWS,) and labels.max() < 3


# --- CoMVC ----------------------------------------------------------------------------------------

CO_CONFIG = simvc.CoMVCConfig(
    3, hidden=(8,), latent_dim=6, head_hidden=5, batch_size=ROWS, epochs=2, check_every=2
)


def test_torch_makes_the_librarys_steps_of_clustering_views():
    """Three steps, from the same parameters, without what draws numbers."""
    torch = pytest.importorskip("torch")
    from benchmarks.references import comvc as peer

    hyper = simvc.CoMVCHyperparams(learning_rate=0.01, delta=0.0)
    start = simvc.start(KEY, DIMS, CO_CONFIG)

    def loss(params, x, mask):
        found = simvc.forward(params, x, mask, CO_CONFIG)
        return jnp.sum(simvc.clustering_terms(found, mask, hyper.rel_sigma))

    @jit
    def steps(params):
        state = optax.adam(0.01).init(params)
        options = {"epochs": 3, "batch_size": ROWS, "learning_rate": 0.01}
        params, _, losses = nn.fit_on(KEY, params, state, loss, X, MASK, **options)
        return params, losses

    trained, losses = steps(start)
    net, views = peer.load(peer.Net(CO_CONFIG, DIMS), start), [torch.from_numpy(x) for x in X]
    adam, found = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(3):
        adam.zero_grad()
        value = peer.loss_of(net, views, CO_CONFIG, hyper)
        value.backward()
        adam.step()
        found.append(value.item())
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    # Not the parameters: BN takes out a bias before it, so that Adam follows the rounding of zero.
    expected = simvc.forward(trained, X, MASK, CO_CONFIG)
    made = net(views)
    np.testing.assert_allclose(made.assignments.detach(), expected.assignments, atol=1e-3)
    np.testing.assert_allclose(torch.stack(made.codes).detach(), expected.codes, atol=1e-3)


def test_torch_contrasts_as_the_library():
    """Of two rows, in two clusters, whose views agree: whatever is drawn is alike."""
    torch = pytest.importorskip("torch")
    from benchmarks.references import comvc as peer

    codes = np.random.default_rng(2).random((2, 6), np.float32)
    assignments = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
    ours = simvc.contrast(KEY, jnp.stack([codes] * 2), assignments, jnp.ones(2, bool), 4, 0.5)
    tensors = [torch.from_numpy(codes)] * 2
    found = peer.Found(tensors, torch.zeros(2, 5), torch.from_numpy(assignments))
    assert peer.contrast(found, 4, 0.5).item() == pytest.approx(float(ours), rel=1e-5)


def test_a_torch_run_of_comvc_returns_labels():
    pytest.importorskip("torch")
    from benchmarks.references.comvc import comvc_run

    labels = comvc_run(CO_CONFIG, simvc.CoMVCHyperparams(), X)()
    assert labels.shape == (ROWS,) and labels.max() < 3
