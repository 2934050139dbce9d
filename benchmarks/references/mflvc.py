"""The peer: MFLVC as an eager PyTorch loop, as papers' code is written.

The same networks, losses, phases and batches as `jaxfedmvc.algorithms.pooled.mflvc`, one Adam of
PyTorch through all phases, k-means of scikit-learn, names of clusters matched by SciPy. Batches are
slices of one permutation: a loader that collates samples one by one, as authors have it, is slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from benchmarks.references.anchor import k_means
from jaxfedmvc.algorithms.pooled.mflvc import MFLVCConfig, MFLVCHyperparams
from jaxfedmvc.algorithms.pooled.networks import Networks
from jaxfedmvc.nn import apart

Views = Sequence[torch.Tensor]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Net(nn.Module):
    """Autoencoders of the views, and the two heads that they share."""

    def __init__(self, config: MFLVCConfig, dims: Sequence[int]) -> None:
        super().__init__()
        latent = config.latent_dim
        self.encoders = nn.ModuleList(mlp((d, *config.hidden, latent)) for d in dims)
        self.decoders = nn.ModuleList(mlp((latent, *config.hidden[::-1], d)) for d in dims)
        self.feature = nn.Linear(latent, config.feature_dim)
        self.label = nn.Linear(latent, config.n_clusters)

    def encode(self, views: Views) -> list[torch.Tensor]:
        """Z^v of each view."""
        return [encoder(x) for encoder, x in zip(self.encoders, views, strict=True)]

    def features(self, z: torch.Tensor) -> torch.Tensor:
        """H^v, with unit rows."""
        return F.normalize(self.feature(z), dim=1)

    def assignments(self, z: torch.Tensor) -> torch.Tensor:
        """Q^v."""
        return F.softmax(self.label(z), dim=1)


def fill(layers: Iterable[nn.Module], params: dict[str, Any]) -> None:
    """Copies the weights of one of the library's networks into the linear layers of these."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for i, layer in enumerate(linear):
        dense = params["params"][f"Dense_{i}"]
        layer.weight.copy_(torch.from_numpy(np.array(dense["kernel"]).T))
        layer.bias.copy_(torch.from_numpy(np.array(dense["bias"])))


def load(net: Net, networks: Networks) -> Net:
    """Gives a network the parameters of the library's."""
    encoders, decoders = apart(networks.encoders), apart(networks.decoders)
    pairs = [(encoder, encoders[v]) for v, encoder in enumerate(net.encoders)]
    pairs += [(decoder, decoders[v]) for v, decoder in enumerate(net.decoders)]
    pairs += [(nn.Sequential(getattr(net, name)), networks.heads[name]) for name in networks.heads]
    with torch.no_grad():
        for module, params in pairs:
            fill(module, params)
    return net


# --- Losses ---------------------------------------------------------------------------------------


def reconstruction_loss(net: Net, views: Views, z: Views) -> torch.Tensor:
    """The sum over views of the mean squared error."""
    pairs = zip(net.decoders, z, views, strict=True)
    return sum(F.mse_loss(decoder(part), x) for decoder, part, x in pairs)


def ntxent(a: torch.Tensor, b: torch.Tensor, tau: float) -> torch.Tensor:
    """NT-Xent of two views' rows: all others are in an anchor's denominator."""
    both = torch.cat([a, b])
    similarity = both @ both.T / tau
    n = len(a)
    positive = torch.cat([similarity.diagonal(n), similarity.diagonal(-n)])
    others = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return (torch.logsumexp(others, dim=1) - positive).mean()


def unevenness(q: torch.Tensor) -> torch.Tensor:
    """Log c less the entropy of the mean assignment."""
    p = q.mean(dim=0)
    p = p / p.sum()
    return math.log(q.shape[1]) + (p * torch.log(p + 1e-12)).sum()


def contrasts(net: Net, z: Views, hyper: MFLVCHyperparams) -> torch.Tensor:
    """What the second phase adds, of all pairs of views."""
    h, q = [net.features(part) for part in z], [net.assignments(part) for part in z]
    total = torch.zeros(())
    for v, w in itertools.combinations(range(len(z)), 2):
        total = total + ntxent(h[v], h[w], float(hyper.tau_feature))
        columns = (F.normalize(q[i].T, dim=1) for i in (v, w))
        total = total + ntxent(*columns, float(hyper.tau_label))
        total = total + unevenness(q[v]) + unevenness(q[w])
    return total


def tuning(net: Net, views: Views, clusters: np.ndarray, config: MFLVCConfig) -> torch.Tensor:
    """The cross-entropy of q to each view's clusters [V, N] under their best names."""
    total = torch.zeros(())
    for z, found in zip(net.encode(views), clusters, strict=True):
        logits = net.label(z)
        q = F.softmax(logits, dim=1)
        shared = np.zeros((config.n_clusters,) * 2)
        np.add.at(shared, (found, q.argmax(dim=1).numpy()), 1)
        named = linear_sum_assignment(-shared)[1][found]
        target = torch.from_numpy(named)
        total = total + F.cross_entropy(q if config.softmax_twice else logits, target)
    return total


# --- A run ----------------------------------------------------------------------------------------


def train(
    net: Net,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Views], torch.Tensor],
    views: Views,
    epochs: int,
    batch_size: int,
) -> None:
    """Makes epochs of shuffled batches; all rows in one batch keep their order."""
    n = len(views[0])
    for _ in range(epochs):
        order = torch.randperm(n) if batch_size < n else torch.arange(n)
        for start in range(0, n, batch_size):
            rows = order[start : start + batch_size]
            optimizer.zero_grad()
            loss([x[rows] for x in views]).backward()
            optimizer.step()


def mflvc_run(
    config: MFLVCConfig, hyper: MFLVCHyperparams, arrays: Sequence[np.ndarray]
) -> Callable[[], Any]:
    """Returns a whole run from fresh networks, as a call that returns labels [N]."""
    views = [torch.from_numpy(np.array(x, np.float32)) for x in arrays]

    def first(net: Net, views: Views) -> torch.Tensor:
        return reconstruction_loss(net, views, net.encode(views))

    def then(net: Net, views: Views) -> torch.Tensor:
        z = net.encode(views)
        return reconstruction_loss(net, views, z) + contrasts(net, z, hyper)

    def clusters_of(net: Net) -> np.ndarray:
        found = []
        with torch.no_grad():
            for z in net.encode(views):
                h = net.features(z).numpy()
                low, span = h.min(axis=0), np.ptp(h, axis=0)
                scaled = (h - low) / np.where(span > 0, span, 1)
                found.append(k_means(scaled, config.n_clusters, config.n_init))
        return np.stack(found)

    def run() -> np.ndarray:
        net = Net(config, [x.shape[1] for x in views])
        adam = torch.optim.Adam(net.parameters(), lr=float(hyper.learning_rate))
        size = config.batch_size
        train(net, adam, lambda rows: first(net, rows), views, config.pretrain_epochs, size)
        train(net, adam, lambda rows: then(net, rows), views, config.contrast_epochs, size)
        clusters = clusters_of(net)
        last, n = config.tune_epochs, len(views[0])
        train(net, adam, lambda rows: tuning(net, rows, clusters, config), views, last, n)
        with torch.no_grad():
            q = torch.stack([net.assignments(z) for z in net.encode(views)])
        return q.mean(dim=0).argmax(dim=1).numpy()

    return run
