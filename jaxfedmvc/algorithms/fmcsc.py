"""FMCSC: federated multi-view clustering by synergistic contrast, in the paper's order.

Chen et al., "Bridging Gaps: Federated Multi-View Clustering in Heterogeneous Hybrid Views",
NeurIPS 2024. Equation numbers are the paper's.

Some clients hold all views, the others a part of them (in the paper: one). A "kind" is a subset of
views, written as the tuple of view ids; there is one global model for each kind: f_g for all views,
f_g^v for view v alone, and one more for every other subset that some client holds. Partial clients
with several views are treated as the paper treats single-view ones, which generalises to them
without a new term: z of eq. (7) is then each of their views' low-level feature in turn, averaged.

Where this departs from the paper's text or from its published code, BUILD_NOTES.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxfedmvc import losses, nn
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.clustering import kmeans, predict
from jaxfedmvc.federation import Cohort, Federation

PyTree = Any
Kind = tuple[int, ...]
Views = Mapping[int, jax.Array]
_NOISE = 2**29  # folded into a client's key: the number of no epoch


@dataclass(frozen=True)
class FMCSCConfig:
    """What changes shapes, loop lengths or the program; the defaults are the paper's (D.2).

    Attributes:
      n_clusters: K.
      hidden: Widths of the encoder's hidden layers; the decoder mirrors them.
      latent_dim: d_v = d, the width of Z^v, H^v and H. One number, since eq. (7) compares them.
      head_hidden: Hidden width of the heads H^v and H.
      pretrain_epochs: Epochs of reconstruction before the rounds.
      leader_epochs: Epochs for which one multi-view client then trains all global models, with eq.
        (8) and (6), before the first round: all clients begin from one common space of H and not
        from random heads. 0: off, as in the paper, whose consensus is on autoencoders alone.
      local_epochs: E, epochs of a round.
      distill_epochs: Epochs of eq. (6) in a round.
      batch_size: Rows of a step.
      contrast: "paper" for eq. (5) as printed, "ntxent" for the form of the published code.
      components: Letters that are switched on. A: consensus pre-training (without it every client
        pre-trains from a start of its own). B: multi-view clients optimise the partial global
        models, eq. (6). C: model contrast, eq. (7), on models that partial clients keep (without
        it they restart from the global model and only reconstruct). D: mutual-information
        weights (without it a plain average).
      n_bins: Bins of the mutual information's histogram.
      n_init: k-means++ restarts of the client whose centroids are passed on.
      partial_rounds: Whether partial clients train and send their models in the rounds. If not,
        they pre-train at most, and receive the models in the end: C, eq. (7), is without effect.
      partial_models: What the global models for one view are. "distilled": those that multi-view
        clients fit by eq. (6), as in the paper. "branch": f_g's own branch for the view, E^v, D^v
        and H^v, which eq. (5) has drawn to H as f_g was trained: nothing more is trained or sent,
        and partial clients train nothing, before the rounds or in them. Their rows move
        centroids, if these are federated, and no model.
      target: Of eq. (6). "own": H of the client's own f_m, as printed. "global": H of the round's
        new f_g, in an exchange of its own after f_m are averaged: what is averaged then was fitted
        to one space by all clients.
      centroids: "leader": one client's centroids are what all others start from, as in the paper.
        "federated": every client sends centroids and sizes of a k-means of its own, the server
        clusters these, and Lloyd's steps follow, for which clients send the sum and the number of
        their rows of H in each cluster. Rows go to the nearest of the common centroids.
      centroid_rounds: Lloyd's steps of federated k-means.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 20
    head_hidden: int = 256
    pretrain_epochs: int = 250
    local_epochs: int = 25
    distill_epochs: int = 50
    batch_size: int = 256
    contrast: str = "paper"
    components: str = "ABCD"
    n_bins: int = 10
    n_init: int = 100
    leader_epochs: int = 0
    partial_rounds: bool = True
    partial_models: str = "distilled"
    target: str = "own"
    centroids: str = "leader"
    centroid_rounds: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        for name in (
            "n_clusters", "latent_dim", "head_hidden", "batch_size", "n_bins", "n_init",
            "centroid_rounds",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 1 or more")
        for name in ("pretrain_epochs", "leader_epochs", "local_epochs", "distill_epochs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 0 or more")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden: got {self.hidden}; allowed are widths of 1 or more")
        if self.contrast not in ("paper", "ntxent"):
            raise ValueError(f"contrast: got {self.contrast!r}; allowed is 'paper' or 'ntxent'")
        if self.target not in ("own", "global"):
            raise ValueError(f"target: got {self.target!r}; allowed is 'own' or 'global'")
        if self.partial_models not in ("distilled", "branch"):
            raise ValueError(
                f"partial_models: got {self.partial_models!r}; allowed is 'distilled' or 'branch'"
            )
        if self.partial_models == "branch" and self.partial_rounds:
            raise ValueError(
                "partial_rounds: got True; allowed is False with partial_models='branch', where"
                " nothing that partial clients could send is used"
            )
        if self.centroids not in ("leader", "federated"):
            raise ValueError(
                f"centroids: got {self.centroids!r}; allowed is 'leader' or 'federated'"
            )
        if not set(self.components) <= set("ABCD"):
            raise ValueError(f"components: got {self.components!r}; allowed are letters of 'ABCD'")


@struct.dataclass
class FMCSCHyperparams:
    """Numbers that may be swept: every leaf may be traced or batched.

    Attributes:
      learning_rate: Adam's step size.
      tau_m: Temperature of the feature contrast, eq. (5).
      tau_p: Temperature of the model contrast, eq. (7).
      weight_floor: Least mutual-information weight of a model, in bits, before normalisation.
        The difference of section 3.4 can be negative, and a weight cannot.
      mask_rate: Share of the features that are set to zero, drawn anew in every step, before a
        multi-view client's models see them in eq. (5) and (6); what they reconstruct is whole.
        None: off.
      upload_noise: Scale b of Laplace noise on every parameter that a client sends. None: off.
      upload_clip: C, largest L1 norm of a client's update, sent minus received, over all its
        models; what is longer is scaled down, and models are then averaged plainly, since weights
        would tell of the data without noise. None: off. A client's whole data changes an upload by
        2 C in L1 at most: T uploads are (2 C T / b)-differentially private for clients, the
        centroids apart.
    """

    learning_rate: jax.Array | float = 3e-4
    tau_m: jax.Array | float = 0.5
    tau_p: jax.Array | float = 0.5
    weight_floor: jax.Array | float = 1e-3
    mask_rate: jax.Array | float | None = None
    upload_noise: jax.Array | float | None = None
    upload_clip: jax.Array | float | None = None


class Autoencoder(NamedTuple):
    """Parameters of one view's encoder E^v and decoder D^v."""

    encoder: PyTree
    decoder: PyTree


class Model(NamedTuple):
    """Parameters of a model of one kind.

    Attributes:
      autoencoders: E^v and D^v of each view of the kind.
      view_heads: H^v of each view, on models for all views; empty on partial models, where no loss
        would train them.
      joint_head: H, from the concatenated Z.
    """

    autoencoders: dict[int, Autoencoder]
    view_heads: dict[int, PyTree]
    joint_head: PyTree


class Features(NamedTuple):
    """Outputs of a model: [rows, d] each; `reconstruction` [rows, D_v]."""

    reconstruction: dict[int, jax.Array]
    z: dict[int, jax.Array]
    h_views: dict[int, jax.Array]
    h: jax.Array


class Kept(NamedTuple):
    """What a client keeps, with federated centroids: its model, and H of its rows [rows, d]."""

    model: PyTree
    h: jax.Array


class ServerState(NamedTuple):
    """The global models, f_g and f_g^v, by kind, and the centroids that are passed on [K, d]."""

    models: dict[Kind, Model]
    centroids: jax.Array


class Update(NamedTuple):
    """A client's message of a round: everything is a sum's summand, eq. (10).

    Attributes:
      models: For each kind that the client trained, its parameters TIMES the weight.
      weights: For each of these kinds the weight, a scalar.
    """

    models: dict[Kind, Model]
    weights: dict[Kind, jax.Array]


# --- The model, section 3.2 and eq. (3) -----------------------------------------------------------


def init_autoencoder(key: jax.Array, config: FMCSCConfig, view_dim: int) -> Autoencoder:
    """Fresh parameters for one view."""
    key_encoder, key_decoder = jax.random.split(key)
    return Autoencoder(
        nn.init_mlp(key_encoder, view_dim, (*config.hidden, config.latent_dim)),
        nn.init_mlp(key_decoder, config.latent_dim, (*config.hidden[::-1], view_dim)),
    )


def init_model(
    key: jax.Array, config: FMCSCConfig, view_dims: tuple[int, ...], kind: Kind
) -> Model:
    """Fresh parameters of a model of this kind; `view_dims` are those of the federation."""
    head = (config.head_hidden, config.latent_dim)
    keys = {v: jax.random.split(jax.random.fold_in(key, v)) for v in kind}
    is_full = len(kind) == len(view_dims)
    key_joint = jax.random.fold_in(key, len(view_dims))
    return Model(
        {v: init_autoencoder(keys[v][0], config, view_dims[v]) for v in kind},
        {v: nn.init_mlp(keys[v][1], config.latent_dim, head) for v in kind if is_full},
        nn.init_mlp(key_joint, config.latent_dim * len(kind), head),
    )


def features(config: FMCSCConfig, model: Model, views: Views) -> Features:
    """Z^v, reconstruction, H^v and H = H([Z^1, ..., Z^V]), eq. (3), with unit rows of H.

    Args:
      config: Widths.
      model: Parameters.
      views: [rows, D_v] of every view of the model.
    """
    head = (config.head_hidden, config.latent_dim)
    z, reconstruction = {}, {}
    for v, params in model.autoencoders.items():
        z[v] = nn.apply_mlp(params.encoder, (*config.hidden, config.latent_dim), views[v])
        widths = (*config.hidden[::-1], views[v].shape[-1])
        reconstruction[v] = nn.apply_mlp(params.decoder, widths, z[v])
    joint = jnp.concatenate([z[v] for v in sorted(z)], axis=-1)
    return Features(
        reconstruction,
        z,
        h_views={v: nn.apply_mlp(params, head, z[v]) for v, params in model.view_heads.items()},
        h=losses.l2_normalize(nn.apply_mlp(model.joint_head, head, joint)),
    )


def branch(model: Model, view: int) -> Model:
    """The part of a model for all views that needs one view alone: its H is H^v, with unit rows.

    Eq. (5) draws H and H^v of the same sample together, so that H^v stands in for H.
    """
    return Model({view: model.autoencoders[view]}, {}, model.view_heads[view])


# --- Losses, eq. (1) to (8) -----------------------------------------------------------------------


def reconstruction_loss(
    reconstruction: Mapping[int, jax.Array], views: Views, mask: jax.Array
) -> jax.Array:
    """Eq. (1), (2): the sum over views of the mean squared error."""
    return sum(
        (losses.mean_squared_error(r, views[v], mask) for v, r in reconstruction.items()),
        start=jnp.zeros(()),
    )


def view_contrasts(
    config: FMCSCConfig, tau_m: jax.Array | float, out: Features, mask: jax.Array
) -> list[jax.Array]:
    """Eq. (5) for each view: H against H^v of the same rows."""
    contrast = losses.feature_contrast if config.contrast == "paper" else losses.ntxent
    return [contrast(out.h, h_view, mask, tau_m) for h_view in out.h_views.values()]


def partial_contrast(
    tau_p: jax.Array | float, out: Features, h_global: jax.Array, mask: jax.Array
) -> jax.Array:
    """Eq. (7), averaged over the client's views."""
    contrast = [losses.model_contrast(out.h, h_global, z, mask, tau_p) for z in out.z.values()]
    return sum(contrast, start=jnp.zeros(())) / len(contrast)


def multi_view_loss(
    config: FMCSCConfig,
    tau_m: jax.Array | float,
    model: Model,
    views: Views,
    mask: jax.Array,
    seen: Views | None = None,
) -> jax.Array:
    """Eq. (8) on a client with all views: eq. (1) plus eq. (5).

    `seen` is what the model is given, if that is not the views themselves.
    """
    out = features(config, model, views if seen is None else seen)
    reconstruction = reconstruction_loss(out.reconstruction, views, mask)
    return sum(view_contrasts(config, tau_m, out, mask), start=reconstruction)


def partial_view_loss(
    config: FMCSCConfig,
    tau_p: jax.Array | float,
    model: Model,
    views: Views,
    h_global: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Eq. (8) on a partial client: eq. (2) plus eq. (7)."""
    out = features(config, model, views)
    contrast = partial_contrast(tau_p, out, h_global, mask)
    return reconstruction_loss(out.reconstruction, views, mask) + contrast


def distillation_loss(
    config: FMCSCConfig,
    models: Mapping[Kind, Model],
    views: Views,
    h_joint: jax.Array,
    mask: jax.Array,
    seen: Views | None = None,
) -> jax.Array:
    """Eq. (6): H of every partial model towards the client's joint H, which is a constant.

    Reconstruction is added, so that the decoders stay those of their encoders. `seen`: as above.
    """
    total = jnp.zeros(())
    for model in models.values():
        out = features(config, model, views if seen is None else seen)
        total += losses.mean_squared_error(out.h, h_joint, mask)
        total += reconstruction_loss(out.reconstruction, views, mask)
    return total


def hide_features(key: jax.Array, views: Views, rate: jax.Array | float) -> Views:
    """Sets this share of the entries of [rows, D_v] to zero, each by itself.

    A row's draws follow from its place and not from how many rows there are.
    """

    def kept(v: int, x: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, v)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(own, jnp.arange(x.shape[0]))
        return jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys)

    return {v: x * kept(v, x) for v, x in views.items()}


# --- Weights, section 3.4 -------------------------------------------------------------------------


def multi_view_weight(config: FMCSCConfig, out: Features, mask: jax.Array) -> jax.Array:
    """Weight of f_m: sum over views of I(H, H^v), in bits."""
    shared = [
        losses.mutual_information(out.h, h_view, mask, config.n_bins)
        for h_view in out.h_views.values()
    ]
    return sum(shared, start=jnp.zeros(()))


def partial_view_weight(
    config: FMCSCConfig, out: Features, h_global: jax.Array, mask: jax.Array
) -> jax.Array:
    """Weight of f_p and of f_m^v: I(H, H_g) - I(H, Z^v), the latter averaged over views."""
    own = [losses.mutual_information(out.h, z, mask, config.n_bins) for z in out.z.values()]
    return losses.mutual_information(out.h, h_global, mask, config.n_bins) - sum(own) / len(own)


# --- The algorithm --------------------------------------------------------------------------------


def fmcsc(config: FMCSCConfig, hyperparams: FMCSCHyperparams | None = None) -> FederatedAlgorithm:
    """FMCSC, algorithm 1, as a `FederatedAlgorithm`.

    Server state: `ServerState`. Client state: a partial client's own `Model`, which it keeps from
    round to round; nothing on a client with all views, which starts every round from f_g, nor
    where partial models are branches. With federated centroids that is the model of a `Kept`.

    `init` raises ValueError where no client holds all views, a client has fewer samples than
    clusters, or partial models are branches and a partial client holds several views; `assign`
    and `embed` where there is no global model for the client's subset of views.
    """
    hyper = FMCSCHyperparams() if hyperparams is None else hyperparams
    has = {letter: letter in config.components for letter in "ABCD"}
    # Without B nothing is done for partial models.
    branched = has["B"] and config.partial_models == "branch"

    def init(key: jax.Array, federation: Federation) -> tuple[ServerState, tuple[PyTree, ...]]:
        full = tuple(range(federation.n_views))
        held = {cohort.view_ids for cohort in federation.cohorts}
        if full not in held:
            raise ValueError(
                f"federation: no client holds all {federation.n_views} views; FMCSC needs one at"
                " least, to learn what the views have in common"
            )
        several = [kind for kind in sorted(held) if 1 < len(kind) < federation.n_views]
        if branched and several:
            raise ValueError(
                f"partial_models: got 'branch' with a client that holds views {several[0]}, and"
                " f_g has a branch for each view and for all; allowed is 'distilled'"
            )
        federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
        models = {
            kind: init_model(key, config, federation.view_dims, kind)
            for kind in held | {(v,) for v in full}
        }
        clients = tuple(
            kept(
                ()
                if cohort.view_ids == full or branched
                else jax.tree.map(
                    lambda x, n=cohort.n_clients: jnp.broadcast_to(x, (n, *x.shape)),
                    models[cohort.view_ids],
                ),
                jnp.zeros((*cohort.mask.shape, config.latent_dim)),
            )
            for cohort in federation.cohorts
        )
        return ServerState(models, jnp.zeros((config.n_clusters, config.latent_dim))), clients

    def fit(
        key: jax.Array,
        params: PyTree,
        loss: Any,
        rows: PyTree,
        mask: jax.Array,
        epochs: int,
        keyed: bool = False,
    ) -> tuple[PyTree, jax.Array]:
        return nn.fit(
            key, params, loss, rows, mask, epochs=epochs, batch_size=config.batch_size,
            learning_rate=hyper.learning_rate, keyed=keyed,
        )  # fmt: skip

    fit_masked = partial(fit, keyed=hyper.mask_rate is not None)

    def seen(views: Views, *key: jax.Array) -> Views | None:
        """What models are given instead of the views, with the key of a step of `fit_masked`."""
        if hyper.mask_rate is None:
            return None
        return hide_features(key[0], views, hyper.mask_rate)

    def kept(model: PyTree, h: jax.Array) -> PyTree:
        return Kept(model, h) if config.centroids == "federated" else model

    def model_of(state: PyTree) -> PyTree:
        return state.model if isinstance(state, Kept) else state

    def with_model(state: PyTree, model: Model) -> PyTree:
        return state._replace(model=model) if isinstance(state, Kept) else model

    def released(key: jax.Array, trained: PyTree, received: PyTree) -> PyTree:
        """What of the parameters leaves the client."""
        update = jax.tree.map(jnp.subtract, trained, received)
        if hyper.upload_clip is not None:
            norm = sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(update))
            share = jnp.minimum(1.0, hyper.upload_clip / jnp.maximum(norm, 1e-12))
            trained = jax.tree.map(lambda x, u: x + share * u, received, update)
        if hyper.upload_noise is None:
            return trained
        leaves, tree = jax.tree.flatten(trained)
        noisy = [
            x + hyper.upload_noise * jax.random.laplace(jax.random.fold_in(key, i), x.shape)
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, noisy)

    def updated(server: ServerState, models: dict[Kind, Model]) -> ServerState:
        """The server with these global models; partial models follow f_g if they are branches."""
        if branched:
            (full,) = (kind for kind, model in models.items() if model.view_heads)
            models = {**{(v,): branch(models[full], v) for v in full}, full: models[full]}
        return server._replace(models=models)

    # Setup: (consensus) pre-training, section 3.2.

    def send_model(server: ServerState, view_ids: Kind) -> Model:
        return server.models[view_ids]

    def send_start(server: ServerState, view_ids: Kind) -> Model | tuple[()]:
        """Nothing to partial clients where branches of f_g stand for what they would train."""
        return () if branched and not _is_full(view_ids, server) else send_model(server, view_ids)

    def pretrain(
        key: jax.Array, sent: Model | tuple[()], state: PyTree, client: Cohort
    ) -> tuple[PyTree, dict[int, Autoencoder], dict[str, jax.Array]]:
        """Eq. (1), (2); the message is the client's autoencoders and nothing else."""
        if not sent:
            return state, {}, {}
        start = sent.autoencoders
        key_start, key_fit = jax.random.split(key)
        key_noise = jax.random.fold_in(key, _NOISE)
        if not has["A"]:
            start = {
                v: init_autoencoder(jax.random.fold_in(key_start, v), config, x.shape[-1])
                for v, x in client.by_view().items()
            }

        def loss(autoencoders: dict[int, Autoencoder], views: Views, mask: jax.Array) -> jax.Array:
            model = sent._replace(autoencoders=autoencoders)
            out = features(config, model, views).reconstruction
            return reconstruction_loss(out, views, mask)

        trained, history = fit(
            key_fit, start, loss, client.by_view(), client.mask, config.pretrain_epochs
        )
        if model_of(state):  # a partial client, which keeps its model
            state = with_model(state, sent._replace(autoencoders=trained))
        trained = released(key_noise, trained, sent.autoencoders)
        return state, trained, {"loss": history[-1:].sum()}

    def average_autoencoders(
        key: jax.Array, server: ServerState, messages: tuple, counts: tuple
    ) -> tuple[ServerState, dict]:
        """Every global model takes the mean autoencoders of the clients that hold its views.

        As in eq. (10), multi-view clients count for the partial models too.
        """
        models = {}
        for kind, model in server.models.items():
            parts = [
                ({v: message[v] for v in kind}, count)
                for message, count in zip(messages, counts, strict=True)
                if set(kind) <= set(message)
            ]
            models[kind] = model._replace(autoencoders=_average(parts, model.autoencoders))
        return updated(server, models), {}

    def pretrain_phase(who: Any) -> Phase:
        return Phase(send_start, pretrain, average_autoencoders, reduce="sum", who=who)

    # What clients with all views train, in the rounds and before.

    def train_own(
        key: jax.Array, model: Model, client: Cohort, epochs: int
    ) -> tuple[Model, Features, jax.Array]:
        """Eq. (8); also what the trained model makes of the rows."""
        views = client.by_view()

        def loss(model: Model, views: Views, mask: jax.Array, *key: jax.Array) -> jax.Array:
            return multi_view_loss(config, hyper.tau_m, model, views, mask, seen(views, *key))

        own, history = fit_masked(key, model, loss, views, client.mask, epochs)
        return own, features(config, own, views), history

    def train_copies(
        key: jax.Array, models: dict[Kind, Model], target: jax.Array, client: Cohort, epochs: int
    ) -> tuple[dict[Kind, Model], jax.Array]:
        """Eq. (6)."""

        def loss(
            models: dict[Kind, Model],
            rows: tuple[Views, jax.Array],
            mask: jax.Array,
            *key: jax.Array,
        ) -> jax.Array:
            return distillation_loss(config, models, *rows, mask, seen(rows[0], *key))

        rows = client.by_view(), jax.lax.stop_gradient(target)
        return fit_masked(key, models, loss, rows, client.mask, epochs)

    def send_all(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        return server.models

    def lead(
        key: jax.Array, sent: dict[Kind, Model], state: PyTree, client: Cohort
    ) -> tuple[PyTree, dict[Kind, Model], dict[str, jax.Array]]:
        """All models, the partial ones from the encoders of the model of all views."""
        key_own, key_copies = jax.random.split(key)
        full = client.view_ids
        own, out, history = train_own(key_own, sent[full], client, config.leader_epochs)
        starts = {
            kind: model._replace(autoencoders={v: own.autoencoders[v] for v in kind})
            for kind, model in sent.items()
            if kind != full
        }
        copies = starts
        if starts:
            copies, _ = train_copies(key_copies, starts, out.h, client, config.leader_epochs)
        models = released(jax.random.fold_in(key, _NOISE), {full: own, **copies}, sent)
        return state, models, {"loss": history[-1:].sum()}

    def adopt(
        key: jax.Array, server: ServerState, messages: tuple, weights: tuple
    ) -> tuple[ServerState, dict]:
        models = jax.tree.map(lambda x: x[0], messages[0])
        return updated(server, {**server.models, **models}), {}

    # Rounds: sections 3.3 and 3.4.

    def send_models(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        """A multi-view client receives every global model that it will train, others their own."""
        is_full = _is_full(view_ids, server)
        if not (is_full or config.partial_rounds):
            return {}
        return {k: m for k, m in server.models.items() if (has["B"] and is_full) or k == view_ids}

    def send_own(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        return {view_ids: server.models[view_ids]} if _is_full(view_ids, server) else {}

    def local_training(
        key: jax.Array,
        sent: dict[Kind, Model],
        state: PyTree,
        client: Cohort,
        parts: tuple[str, ...] = ("own", "copies"),
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        """What a client does with what it was sent; clients with all views these parts of it."""
        if not sent:
            return state, Update({}, {}), {}
        if not sent[client.view_ids].view_heads:
            return train_partial_view(key, sent, state, client)
        return train_multi_view(key, sent, state, client, parts)

    def train_multi_view(
        key: jax.Array,
        sent: dict[Kind, Model],
        state: PyTree,
        client: Cohort,
        parts: tuple[str, ...],
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        views, mask = client.by_view(), client.mask
        key_own, key_copies = jax.random.split(key)
        key_noise = jax.random.fold_in(key, _NOISE)
        trained: dict[Kind, Model] = {}
        bits: dict[Kind, jax.Array] = {}
        info: dict[str, jax.Array] = {}
        target = features(config, sent[client.view_ids], views).h
        if "own" in parts:
            own, out, history = train_own(
                key_own, sent[client.view_ids], client, config.local_epochs
            )
            trained[client.view_ids], target = own, out.h
            bits[client.view_ids] = info["weight"] = multi_view_weight(config, out, mask)
            info["loss"] = history[-1:].sum()
            info["reconstruction"] = reconstruction_loss(out.reconstruction, views, mask)
            contrasts = view_contrasts(config, hyper.tau_m, out, mask)
            info["contrast"] = sum(contrasts, start=jnp.zeros(()))
        received = {kind: m for kind, m in sent.items() if kind != client.view_ids}
        if "copies" in parts and received:
            copies, history = train_copies(
                key_copies, received, target, client, config.distill_epochs
            )
            info["distillation"] = history[-1:].sum()
            for kind, copy in copies.items():
                h_global = features(config, received[kind], views).h
                copied = features(config, copy, views)
                trained[kind] = copy
                bits[kind] = partial_view_weight(config, copied, h_global, mask)
        return state, upload(key_noise, trained, sent, bits), info

    def train_partial_view(
        key: jax.Array, sent: dict[Kind, Model], state: PyTree, client: Cohort
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        views, mask = client.by_view(), client.mask
        received = sent[client.view_ids]
        h_global = features(config, received, views).h

        def loss(model: Model, rows: tuple[Views, jax.Array], mask: jax.Array) -> jax.Array:
            if has["C"]:
                return partial_view_loss(config, hyper.tau_p, model, *rows, mask)
            out = features(config, model, rows[0])
            return reconstruction_loss(out.reconstruction, rows[0], mask)

        own, history = fit(
            key,
            model_of(state) if has["C"] else received,
            loss,
            (views, h_global),
            mask,
            config.local_epochs,
        )
        out = features(config, own, views)
        bits = partial_view_weight(config, out, h_global, mask)
        info = {
            "loss": history[-1:].sum(),
            "reconstruction": reconstruction_loss(out.reconstruction, views, mask),
            "contrast": partial_contrast(hyper.tau_p, out, h_global, mask) * has["C"],
            "weight": bits,
        }
        key_noise, mine = jax.random.fold_in(key, _NOISE), client.view_ids
        message = upload(key_noise, {mine: own}, sent, {mine: bits})
        return with_model(state, own), message, info

    def upload(
        key: jax.Array,
        models: dict[Kind, Model],
        sent: dict[Kind, Model],
        bits: dict[Kind, jax.Array],
    ) -> Update:
        models = released(key, models, {kind: sent[kind] for kind in models})
        weighted = has["D"] and hyper.upload_clip is None
        weights = {
            kind: jnp.maximum(b, hyper.weight_floor) if weighted else jnp.ones(())
            for kind, b in bits.items()
        }
        scaled = {
            kind: jax.tree.map(lambda x, w=weights[kind]: w * x, model)
            for kind, model in models.items()
        }
        return Update(scaled, weights)

    def aggregate(
        key: jax.Array, server: ServerState, messages: tuple[Update, ...], counts: tuple
    ) -> tuple[ServerState, dict]:
        """Eq. (10), for each kind of model; a kind that nobody sent stays as it was."""
        models = {
            kind: _average(
                [(m.models[kind], m.weights[kind]) for m in messages if kind in m.models], model
            )
            for kind, model in server.models.items()
        }
        return updated(server, models), {}

    # Finish: clustering, eq. (12). One client's centroids give every client the same numbering;
    # or all clients' do.

    def seed_centroids(
        key: jax.Array, sent: Model, state: PyTree, client: Cohort
    ) -> tuple[PyTree, jax.Array, dict]:
        h = features(config, sent, client.by_view()).h
        found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init)
        return state, found.centroids, {"inertia": found.inertia}

    def pass_centroids(
        key: jax.Array, server: ServerState, messages: tuple, weights: tuple
    ) -> tuple[ServerState, dict]:
        return server._replace(centroids=messages[0][0]), {}

    def send_result(server: ServerState, view_ids: Kind) -> tuple[Model, jax.Array]:
        """What a client clusters its rows with, in `assign`."""
        return server.models[view_ids], server.centroids

    def receive(
        key: jax.Array, sent: PyTree, state: PyTree, client: Cohort
    ) -> tuple[PyTree, tuple[()], dict]:
        return state, (), {}

    def send_centroids(server: ServerState, view_ids: Kind) -> jax.Array:
        return server.centroids

    def own_centroids(
        key: jax.Array, sent: Model, state: Kept, client: Cohort
    ) -> tuple[Kept, tuple[jax.Array, jax.Array], dict]:
        """The client's own centroids [K, d] and their numbers of rows [K]."""
        h = features(config, sent, client.by_view()).h
        found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init)
        sizes = jnp.sum(jax.nn.one_hot(found.labels, config.n_clusters), axis=0)  # -1: padding
        return state._replace(h=h), (found.centroids, sizes), {"inertia": found.inertia}

    def cluster_centroids(
        key: jax.Array, server: ServerState, messages: tuple, weights: tuple
    ) -> tuple[ServerState, dict]:
        """k-means of all clients' centroids, each as often as it has rows."""
        centroids = jnp.concatenate([c.reshape(-1, config.latent_dim) for c, _ in messages])
        sizes = jnp.concatenate(
            [(n * w[:, None]).ravel() for (_, n), w in zip(messages, weights, strict=True)]
        )
        found = kmeans(
            key, centroids, config.n_clusters, where=sizes > 0, weights=sizes, n_init=config.n_init
        )
        return server._replace(centroids=found.centroids), {}

    def tally(
        key: jax.Array, centroids: jax.Array, state: Kept, client: Cohort
    ) -> tuple[Kept, tuple[jax.Array, jax.Array], dict]:
        """Sum [K, d] and number [K] of the client's rows of H nearest to each centroid."""
        nearest = jax.nn.one_hot(predict(state.h, centroids), config.n_clusters)
        nearest *= client.mask[:, None]
        return state, (nearest.T @ state.h, jnp.sum(nearest, axis=0)), {}

    def move_centroids(
        key: jax.Array, server: ServerState, messages: tuple, counts: tuple
    ) -> tuple[ServerState, dict]:
        """Means of all clients' rows; a cluster without rows stays where it is."""
        sums, sizes = (sum(parts) for parts in zip(*messages, strict=True))
        means = sums / jnp.maximum(sizes, 1.0)[:, None]
        return server._replace(centroids=jnp.where(sizes[:, None] > 0, means, server.centroids)), {}

    def keep(
        key: jax.Array, server: ServerState, messages: tuple, counts: tuple
    ) -> tuple[ServerState, dict]:
        return server, {}

    def embed(server: ServerState, state: PyTree, client: Cohort) -> jax.Array:
        if client.view_ids not in server.models:
            raise ValueError(
                f"client: holds views {client.view_ids}; there are global models for"
                f" {sorted(server.models)}. Drop a view, or train with such a client"
            )
        return features(config, server.models[client.view_ids], client.by_view()).h

    def assign(server: ServerState, state: PyTree, client: Cohort) -> jax.Array:
        """k-means on the client's own H, from the centroids that were passed on.

        With federated centroids the nearest of them.
        """
        h = embed(server, state, client)
        if config.centroids == "federated":
            return jnp.where(client.mask, predict(h, server.centroids), -1)
        return kmeans(
            None, h, config.n_clusters, where=client.mask, centroids=server.centroids
        ).labels

    finish: tuple[Phase, ...]
    if config.centroids == "leader":
        finish = (
            Phase(send_model, seed_centroids, pass_centroids, who="leader"),
            Phase(send_result, receive, keep, reduce="sum"),
        )
    else:
        finish = (
            Phase(send_model, own_centroids, cluster_centroids),
            *(Phase(send_centroids, tally, move_centroids, reduce="sum"),) * config.centroid_rounds,
            Phase(send_centroids, receive, keep, reduce="sum"),
        )
    setup: tuple[Phase, ...] = (pretrain_phase("everyone"),)
    if has["A"]:
        setup = (pretrain_phase("leader"), *setup)
        if config.leader_epochs:
            sent = send_own if branched else send_all
            setup = (*setup, Phase(sent, lead, adopt, who="leader"))
    rounds: tuple[Phase, ...] = (Phase(send_models, local_training, aggregate, reduce="sum"),)
    own_only = partial(local_training, parts=("own",))
    if branched:
        rounds = (Phase(send_own, own_only, aggregate, reduce="sum"),)
    elif config.target == "global" and has["B"]:
        the_others = partial(local_training, parts=("copies",))
        rounds = (
            Phase(send_own, own_only, aggregate, reduce="sum"),
            Phase(send_models, the_others, aggregate, reduce="sum"),
        )
    return FederatedAlgorithm(
        init=init,
        setup=setup,
        round=rounds,
        finish=finish,
        assign=assign,
        embed=embed,
    )


def _is_full(kind: Kind, server: ServerState) -> bool:
    return bool(server.models[kind].view_heads)


def _average(parts: list[tuple[PyTree, jax.Array]], otherwise: PyTree) -> PyTree:
    """Sum of the sums over the sum of the weights; `otherwise` where no weight came."""
    if not parts:
        return otherwise
    weight = sum((w for _, w in parts), start=jnp.zeros(()))
    safe = jnp.where(weight > 0, weight, 1.0)

    def mean(old: jax.Array, *sums: jax.Array) -> jax.Array:
        return jnp.where(weight > 0, sum(sums[1:], start=sums[0]) / safe, old)

    return jax.tree.map(mean, otherwise, *(s for s, _ in parts))
