"""The peer: CoMVC as an eager PyTorch loop, as papers' code is written.

The same networks, losses and batches as `jaxfedmvc.algorithms.pooled.simvc`, PyTorch's Adam, one
start. Negatives are drawn for one ordered pair of views after the other, as in the authors' code.
Batches are slices of one permutation: a loader that collates samples one by one is slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.references.mflvc import fill
from jaxfedmvc.algorithms.pooled.simvc import CoMVCConfig, CoMVCHyperparams

EPSILON = 1e-9


class Found(NamedTuple):
    """What the network makes of B rows: z^v, hidden and A, each [B, ...]."""

    codes: list[torch.Tensor]
    hidden: torch.Tensor
    assignments: torch.Tensor


class Net(nn.Module):
    """Encoders of the views, weights of their sum, and the layers that cluster it."""

    def __init__(self, config: CoMVCConfig, dims: Sequence[int]) -> None:
        super().__init__()
        latent, hidden = config.latent_dim, config.head_hidden
        self.encoders = nn.ModuleList(self._encoder((d, *config.hidden, latent)) for d in dims)
        self.fusion = nn.Parameter(torch.full((len(dims),), 1 / len(dims)))
        self.head = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU())
        self.norm = nn.BatchNorm1d(hidden)
        self.clusters = nn.Linear(hidden, config.n_clusters)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    @staticmethod
    def _encoder(widths: Sequence[int]) -> nn.Sequential:
        """Makes linear layers with ReLU after each."""
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())))

    def forward(self, views: Sequence[torch.Tensor]) -> Found:
        """Applies the network to B rows of all views."""
        codes = [encoder(x) for encoder, x in zip(self.encoders, views, strict=True)]
        fused = (torch.stack(codes, dim=-1) * F.softmax(self.fusion, dim=0)).sum(dim=-1)
        hidden = self.norm(self.head(fused))
        return Found(codes, hidden, F.softmax(self.clusters(hidden), dim=1))


def load(net: Net, params: dict[str, Any]) -> Net:
    """Gives a network the parameters of `simvc.start`."""
    groups = [(encoder, params[f"view_{v}"]) for v, encoder in enumerate(net.encoders)]
    groups += [(net.head, params["hidden"]), ([net.clusters], params["clusters"])]
    with torch.no_grad():
        for layers, given in groups:
            fill(layers, given)
        net.norm.weight.copy_(torch.from_numpy(np.array(params["norm"]["scale"])))
        net.norm.bias.copy_(torch.from_numpy(np.array(params["norm"]["bias"])))
        net.fusion.copy_(torch.from_numpy(np.array(params["fusion"])))
    return net


# --- Terms of the loss ----------------------------------------------------------------------------


def squared_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes those of all rows of one to all rows of the other."""
    squares = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)[None]
    return (squares - 2 * a @ b.T).clamp_min(0)


def kernel(hidden: torch.Tensor, rel_sigma: float) -> torch.Tensor:
    """Computes exp(-d^2/(2 s)), s a multiple of the median d^2 and constant."""
    distances = squared_distances(hidden, hidden)
    sigma = (rel_sigma * distances.median()).detach().clamp_min(EPSILON)
    return torch.exp(-distances / (2 * sigma))


def divergence(a: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Computes 2/(c (c - 1)) sum_{k<l} n_kl / sqrt(n_kk n_ll), with n = A^T K A."""
    c = a.shape[1]
    n = a.T @ gram @ a
    own = n.diagonal()
    scale = (own[:, None] * own[None]).clamp_min(EPSILON**2).sqrt()
    return 2 / (c * (c - 1)) * (n.clamp_min(EPSILON) / scale).triu(1).sum()


def clustering_loss(found: Found, rel_sigma: float) -> torch.Tensor:
    """Adds up d(A, K), the overlap of assignments, and d(M, K)."""
    a, gram = found.assignments, kernel(found.hidden, rel_sigma)
    n = len(a)
    overlap = 2 / (n * (n - 1)) * (a @ a.T).triu(1).sum()
    corners = torch.exp(-squared_distances(a, torch.eye(a.shape[1])))
    return divergence(a, gram) + overlap + divergence(corners, gram)


def contrast(found: Found, n_negatives: int, tau: float) -> torch.Tensor:
    """Computes the mean cross-entropy of rows' views against views of other clusters' rows."""
    n_views, n = len(found.codes), len(found.assignments)
    unit = F.normalize(torch.cat(found.codes), dim=1)
    logits = unit @ unit.T / tau
    clusters = found.assignments.detach().argmax(dim=1).repeat(n_views)
    others = (clusters[:n, None] != clusters[None]).float()
    if not others.any(dim=1).all():
        return torch.zeros(())  # a single cluster: nothing can be drawn
    losses = []
    for v, w in itertools.permutations(range(n_views), 2):
        rows = logits[v * n : (v + 1) * n]
        own = rows[:, w * n : (w + 1) * n].diagonal()[:, None]
        drawn = torch.multinomial(others, n_negatives, replacement=True)
        all_of = torch.cat([own, rows.gather(1, drawn)], dim=1)
        losses.append(F.cross_entropy(all_of, torch.zeros(n, dtype=torch.long)))
    return torch.stack(losses).mean()


def loss_of(
    net: Net, views: Sequence[torch.Tensor], config: CoMVCConfig, hyper: CoMVCHyperparams
) -> torch.Tensor:
    """Computes the loss of a batch; if `delta` is zero that of SiMVC, without contrast."""
    found = net(views)
    total = clustering_loss(found, float(hyper.rel_sigma))
    if float(hyper.delta):
        n_negatives = int(config.negatives * len(views) * config.batch_size)
        least = F.softmax(net.fusion.detach(), dim=0).min()
        total = total + hyper.delta * least * contrast(found, n_negatives, float(hyper.tau))
    return total


# --- A run ----------------------------------------------------------------------------------------


def comvc_run(
    config: CoMVCConfig, hyper: CoMVCHyperparams, arrays: Sequence[np.ndarray]
) -> Callable[[], np.ndarray]:
    """Returns a run from one start, as a call that returns the chosen labels [N]."""
    views = [torch.from_numpy(np.array(x, np.float32)) for x in arrays]
    n, size = len(views[0]), config.batch_size

    def chosen(net: Net) -> tuple[float, np.ndarray]:
        """Returns d(A, K), the mean of batches by their numbers of rows, and labels of all rows."""
        with torch.no_grad():
            found = net(views)
            total = 0.0
            for start in range(0, n, size):
                a, hidden = (x[start : start + size] for x in (found.assignments, found.hidden))
                total += len(a) / n * divergence(a, kernel(hidden, float(hyper.rel_sigma))).item()
        return total, found.assignments.argmax(dim=1).numpy()

    def run() -> np.ndarray:
        net = Net(config, [x.shape[1] for x in views])
        adam = torch.optim.Adam(net.parameters(), lr=float(hyper.learning_rate))
        states = []
        for epoch in range(1, config.epochs + 1):
            order = torch.randperm(n)
            for start in range(0, n, size):
                rows = order[start : start + size]
                adam.zero_grad()
                loss_of(net, [x[rows] for x in views], config, hyper).backward()
                adam.step()
            if epoch % config.check_every == 0:
                states.append(chosen(net))
        return min(states, key=lambda state: state[0])[1]

    return run
