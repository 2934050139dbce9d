"""The peer: FMCSC's pre-training and round as an eager PyTorch loop, as papers' code is written.

The same networks, losses, epochs and one Adam for each client; plain averages instead of weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from jaxfedmvc.algorithms.fmcsc import FMCSCConfig
from jaxfedmvc.federation import Federation


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Net(nn.Module):
    """Autoencoders, view heads (full models only) and joint head of one kind."""

    def __init__(self, config: FMCSCConfig, dims: dict[int, int], full: bool) -> None:
        super().__init__()
        d, head = config.latent_dim, config.head_hidden
        self.encoders = nn.ModuleDict(
            {str(v): mlp((w, *config.hidden, d)) for v, w in dims.items()}
        )
        self.decoders = nn.ModuleDict(
            {str(v): mlp((d, *config.hidden[::-1], w)) for v, w in dims.items()}
        )
        self.heads = nn.ModuleDict({str(v): mlp((d, head, d)) for v in dims if full})
        self.joint = mlp((d * len(dims), head, d))

    def autoencode(self, views: dict[int, torch.Tensor]) -> Any:
        """Z and reconstructions, which is all that pre-training needs."""
        z = {v: self.encoders[str(v)](views[v]) for v in views if str(v) in self.encoders}
        return z, {v: self.decoders[str(v)](z[v]) for v in z}

    def forward(self, views: dict[int, torch.Tensor]) -> Any:
        """Reconstructions, Z, H^v and H."""
        z, reconstruction = self.autoencode(views)
        h_views = {v: self.heads[str(v)](z[v]) for v in z if str(v) in self.heads}
        h = F.normalize(self.joint(torch.cat([z[v] for v in z], dim=1)), dim=1)
        return reconstruction, z, h_views, h


def reconstruction_loss(reconstruction: Any, views: Any) -> torch.Tensor:
    """Eq. (1), (2)."""
    return sum(F.mse_loss(reconstruction[v], views[v]) for v in reconstruction)


def feature_contrast(h: torch.Tensor, h_view: torch.Tensor) -> torch.Tensor:
    """Eq. (5), one view."""
    similarity = h @ F.normalize(h_view, dim=1).T / 0.5
    off = similarity.masked_fill(torch.eye(len(h), dtype=torch.bool, device=h.device), -torch.inf)
    return (torch.logsumexp(off, dim=1) - similarity.diagonal()).mean()


def model_contrast(h: torch.Tensor, h_global: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Eq. (7)."""
    positive = F.cosine_similarity(h, h_global) / 0.5
    negative = F.cosine_similarity(h, z) / 0.5
    return F.softplus(negative - positive).mean()


def torch_loop(config: FMCSCConfig, federation: Federation) -> dict[str, Callable[[], Any]]:
    """Pre-training of all clients, and one round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True  # as jax's default precision does
    dims = dict(enumerate(federation.view_dims))
    kinds = [cohort.view_ids for cohort in federation.cohorts]

    def fresh(kind: tuple[int, ...]) -> Net:
        return Net(config, {v: dims[v] for v in kind}, len(kind) == len(dims)).to(device)

    def copy_of(model: Net, kind: tuple[int, ...]) -> Net:
        twin = fresh(kind)
        twin.load_state_dict(model.state_dict())
        return twin

    def to_torch(x: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(x)).to(device)

    clients = [
        (cohort.view_ids, {v: to_torch(x[i]) for v, x in cohort.by_view().items()})
        for cohort in federation.cohorts
        for i in range(cohort.n_clients)
    ]
    server = {kind: fresh(kind) for kind in kinds}

    def train(parameters: Any, loss: Callable[[], torch.Tensor], epochs: int) -> None:
        optimizer = torch.optim.Adam(parameters, lr=3e-4)
        for _ in range(epochs):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    def average(trained: list[tuple[Any, Net]]) -> None:
        for kind in kinds:
            states = [m.state_dict() for k, m in trained if k == kind]
            {name: sum(s[name] for s in states) / len(states) for name in states[0]}
        if device == "cuda":
            torch.cuda.synchronize()

    def pretrain() -> None:
        trained = []
        for kind, views in clients:
            model = copy_of(server[kind], kind)
            train(
                model.parameters(),
                lambda m=model, v=views: reconstruction_loss(m.autoencode(v)[1], v),
                config.pretrain_epochs,
            )
            trained.append((kind, model))
        average(trained)

    def multi_view(model: Net, views: Any) -> torch.Tensor:
        reconstruction, _, h_views, h = model(views)
        contrast = sum(feature_contrast(h, h_view) for h_view in h_views.values())
        return reconstruction_loss(reconstruction, views) + contrast

    def partial_view(model: Net, views: Any, h_global: torch.Tensor) -> torch.Tensor:
        reconstruction, z, _, h = model(views)
        contrast = sum(model_contrast(h, h_global, z[v]) for v in z)
        return reconstruction_loss(reconstruction, views) + contrast

    def distillation(models: Any, views: Any, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for model in models:
            reconstruction, _, _, h = model(views)
            total = total + F.mse_loss(h, target) + reconstruction_loss(reconstruction, views)
        return total

    def one_round() -> None:
        trained = []
        for kind, views in clients:
            model = copy_of(server[kind], kind)
            if len(kind) == len(dims):
                train(
                    model.parameters(),
                    lambda m=model, v=views: multi_view(m, v),
                    config.local_epochs,
                )
                with torch.no_grad():
                    target = model(views)[3]
                copies = {k: copy_of(server[k], k) for k in kinds if k != kind}
                train(
                    [p for m in copies.values() for p in m.parameters()],
                    lambda ms=copies, v=views, t=target: distillation(ms.values(), v, t),
                    config.distill_epochs,
                )
                trained += copies.items()
            else:
                with torch.no_grad():
                    h_global = server[kind](views)[3]
                train(
                    model.parameters(),
                    lambda m=model, v=views, h=h_global: partial_view(m, v, h),
                    config.local_epochs,
                )
            trained.append((kind, model))
        average(trained)

    return {"pretrain": pretrain, "round": one_round}
