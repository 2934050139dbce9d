"""What `experiments.leakage` measures: real messages in their forms, and attacks on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

from jaxfedmvc import data, engine, messages, metrics, nn
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.model import ServerState, features
from jaxfedmvc.algorithms.mgcd import MGCDConfig, mgcd
from jaxfedmvc.algorithms.mgcd import graph as graphs_lib
from jaxfedmvc.algorithms.mgcd.affinity import clusters
from jaxfedmvc.attacks import reconstruction as leakage
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.data.partition import hybrid_partition
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.messages import codecs

SCORES = (
    "bytes",
    "subspace",
    "chance",
    "insiders",
    "shadow",
    "permuted",
    "upload_nmi",
    "upload_acc",
    "nmi",
    "acc",
    "prototypes",
    "public_prototypes",
    "membership",
)
_FMCSC_CLIENTS = 4
# Every view has a model of its own to compile and train: the first ones show what there is to show.
_FMCSC_VIEWS = 3


class Options(NamedTuple):
    """Of the study.

    Attributes:
      insiders: Share of participants whose features are known.
      rounds: Most rounds; the first one's messages are read.
      neighbours: k of the graphs of neighbours.
      fit_epochs: Epochs between snapshots of the inverter.
      pretrain_epochs: FMCSC's epochs of pre-training.
    """

    insiders: float = 0.1
    rounds: int = 1
    neighbours: int = 10
    fit_epochs: int = 60
    pretrain_epochs: int = 100


class World(NamedTuple):
    """The data of one seed: disjoint halves of the set, each as a vertical federation.

    Attributes:
      participants: Whose messages are read.
      public: What the shadow attacker holds.
      views: The participants' features, [n, D_v] each.
      public_views: [n, D_v] each.
      labels: Of the participants, for scores only.
      insiders: Rows of the participants whose features are known.
      others: The other rows.
      k: Number of clusters.
    """

    participants: Federation
    public: Federation
    views: list[np.ndarray]
    public_views: list[np.ndarray]
    labels: np.ndarray
    insiders: np.ndarray
    others: np.ndarray
    k: int


class Form(NamedTuple):
    """A form of MGCD's message: of graphs as arrays or factors, and what is done on the way."""

    dense: bool
    change: Callable[[Phase], Phase]


def forms(k: int) -> dict[str, Form]:
    """All forms; graphs of neighbours have `k` edges a row."""

    def nearest(phase: Phase) -> Phase:
        return messages.transformed(phase, messages.nearest_only(k))

    def response(epsilon: float) -> Form:
        codec = codecs.randomised_response(epsilon)
        return Form(True, lambda phase: messages.coded(nearest(phase), codec))

    return {
        "factors": Form(False, lambda phase: phase),
        "dense": Form(True, lambda phase: phase),
        f"top {k}": Form(True, lambda phase: messages.coded(phase, codecs.top_k_rows(k))),
        f"nearest {k}": Form(
            True, lambda phase: messages.coded(nearest(phase), codecs.top_k_rows(k))
        ),
        "8 bits": Form(True, lambda phase: messages.coded(phase, codecs.quantised(8))),
        "2 bits": Form(True, lambda phase: messages.coded(phase, codecs.quantised(2))),
        "noise 1x": Form(True, lambda phase: messages.transformed(phase, relative_noise(1.0))),
        "noise 10x": Form(True, lambda phase: messages.transformed(phase, relative_noise(10.0))),
        "response 8": response(8.0),
        "response 4": response(4.0),
    }


def relative_noise(level: float) -> messages.Transform:
    """Gaussian noise of `level` times the root mean square of a message's entries.

    A scale that follows the data is no mechanism of differential privacy.
    """

    def transform(key: jax.Array, message: jax.Array, sent: Any) -> jax.Array:
        scale = level * jnp.sqrt(jnp.mean(message**2))
        return messages.gaussian_noise(scale)(key, message, sent)

    return transform


def load_world(dataset: data.Dataset, seed: int, n_clusters: int | None, options: Options) -> World:
    """Deals a set out.

    Raises:
      ValueError: No labels, one view, or no insider or nobody else.
    """
    if dataset.labels is None or len(dataset.views) < 2:
        raise ValueError(f"dataset: {dataset.name} needs labels to score with and several views")
    order = np.random.default_rng(seed).permutation(len(dataset.labels))
    n = len(order) // 2
    m = round(options.insiders * n)
    if not 4 <= m < n:
        raise ValueError(
            f"leak_insiders: got {options.insiders}, {m} of {n} participants; allowed are shares"
            " that make 4 or more, and not all"
        )
    halves = [[view[rows] for view in dataset.views] for rows in (order[:n], order[n : 2 * n])]
    parts = vertical_partition(n, len(dataset.views))
    labels = dataset.labels[order[:n]]
    held, public = (Federation.from_arrays(views, None, partition=parts) for views in halves)
    k = n_clusters or len(np.unique(dataset.labels))
    return World(held, public, *halves, labels, np.arange(m), np.arange(m, n), k)


# --- Real messages --------------------------------------------------------------------------------


def overheard(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """MGCD with its phases compiled one by one, and a server whose info holds what it was sent."""
    (prepare,), (exchange,) = algorithm.setup, algorithm.round

    def server(key: jax.Array, state: Any, sent: Any, weights: Any) -> Any:
        state, info = exchange.server(key, state, sent, weights)
        return state, info | {"messages": sent}

    return algorithm._replace(
        setup=(prepare._replace(client=jax.jit(prepare.client)),),
        round=(exchange._replace(server=jax.jit(server)),),
    )


def changed(
    algorithm: FederatedAlgorithm, form: Form
) -> tuple[FederatedAlgorithm, FederatedAlgorithm]:
    """An overheard algorithm with messages of this form, and the same with a server that only
    listens, as one who runs the public code of clients would have it.

    The forms share the compiled server, and the two algorithms the compiled clients.
    """

    def listen(key: jax.Array, state: Any, sent: Any, weights: Any) -> Any:
        return state, {"messages": sent}

    (phase,) = algorithm.round
    client = jax.jit(form.change(phase).client)
    served, alone = (
        algorithm._replace(round=(form.change(p)._replace(client=client),))
        for p in (phase, phase._replace(server=listen))
    )
    return served, alone


class Heard(NamedTuple):
    """A run: each client's message of the first round, its latent vectors, and the clusters."""

    uploads: list[Any]
    latents: list[jax.Array]
    labels: jax.Array


def run(
    algorithm: FederatedAlgorithm, federation: Federation, key: jax.Array, rounds: int
) -> Heard:
    """A run of MGCD, stage by stage."""
    state = engine.start(algorithm, federation, key)
    state, _ = engine.setup(algorithm, federation, key, state)
    heard = []
    for r in range(rounds):
        state, info = engine.one_round(algorithm, federation, key, state, r)
        heard.append(info[0]["server"]["messages"])
        if algorithm.done(state.server):  # type: ignore[misc]
            break
    state, _ = engine.finish(algorithm, federation, key, state, len(heard) - 1)
    labels = engine.assign(algorithm, federation, state)[0][0]
    uploads = [jax.tree.map(lambda x: x[0], message) for message in heard[0]]
    return Heard(uploads, [s.latent[0] for s in state.clients], labels)


# --- Attacks on messages about samples ------------------------------------------------------------


@partial(jax.jit, static_argnums=1)
def _points(upload: Any, width: int, rank: Any) -> jax.Array:
    """The first `rank` coordinates, zero columns behind them: one program for all views."""
    points = leakage.coordinates(upload, width)
    return jnp.where(jnp.arange(width)[None] < rank, points, 0.0)


_linear_r2 = jax.jit(leakage.linear_r2)
_kmeans = jax.jit(partial(kmeans, n_init=20), static_argnums=2)
_scores = jax.jit(metrics.scores, static_argnums=(2, 3))


@partial(jax.jit, static_argnames="config")
def _inverted_r2(
    key: jax.Array, points: Any, known: Any, unknown: Any, truth: Any, config: Any
) -> jax.Array:
    found = leakage.invert(key, points, known, unknown, config)
    return leakage.r2(truth, found.features)


@partial(jax.jit, static_argnames="config")
def _graph_clusters(key: jax.Array, graph: Any, config: MGCDConfig) -> jax.Array:
    where = jnp.ones(graphs_lib.n_samples(graph), bool)
    return clusters(key, [graph], graph, where, config).labels


def attack(
    key: jax.Array,
    world: World,
    view: int,
    rank: int,
    upload: Any,
    public_upload: Any,
    latent: jax.Array,
    find_clusters: Callable[[jax.Array, Any], jax.Array],
    permuted: bool,
    fit_epochs: int,
) -> dict[str, float]:
    """The scores of one view's message.

    Args:
      key: Of everything random about it.
      world: The data.
      view: Whose message.
      rank: How many singular vectors are looked at.
      upload: The message.
      public_upload: The message that the public samples give.
      latent: The client's Z.
      find_clusters: `(key, upload) -> labels`.
      permuted: Whether the insiders attack is made once more with rows in disorder, as a control.
      fit_epochs: Of the inverter.
    """
    inverter = leakage.InverterConfig(epochs=fit_epochs)
    keys = jax.random.split(key, 6)
    width = MGCDConfig(world.k).latent_dim + 1
    points, shadow = (_points(sent, width, rank) for sent in (upload, public_upload))
    # Columns of zeros change no score and let the views share a program.
    n_features = max(view.shape[1] for view in world.views)
    x, public = (_widened(views[view], n_features) for views in (world.views, world.public_views))
    latent = _widened(latent, width)

    def by_insiders(key: jax.Array, points: jax.Array) -> float:
        known, others = world.insiders, world.others
        return float(
            _inverted_r2(key, points[known], x[known], points[others], x[others], inverter)
        )

    random = jax.random.normal(keys[0], (len(x), rank))
    scores = {
        "subspace": float(_linear_r2(latent, points)),
        "chance": float(_linear_r2(latent, _widened(random, width))),
        "insiders": by_insiders(keys[1], points),
        "shadow": float(_inverted_r2(keys[2], shadow, public, points, x, inverter)),
    }
    if permuted:
        scores["permuted"] = by_insiders(keys[1], jax.random.permutation(keys[3], points))
    nmi, acc = rated(world.labels, find_clusters(keys[4], upload), world.k)
    return scores | {"upload_nmi": nmi, "upload_acc": acc}


def _widened(x: Any, width: int) -> np.ndarray:
    return np.pad(np.asarray(x), ((0, 0), (0, width - x.shape[1])))


def rated(truth: np.ndarray, labels: Any, k: int) -> tuple[float, float]:
    """NMI and ACC of k clusters."""
    found = _scores(truth, labels, int(truth.max()) + 1, k)
    return float(found["nmi"]), float(found["acc"])


def mean_over_views(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each score."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


class Graphs:
    """MGCD's forms; compiled programs live as long as the object."""

    def __init__(self, k: int, names: Sequence[str], options: Options) -> None:
        """Compiles nothing yet.

        Args:
          k: Clusters.
          names: Of `forms`.
          options: Of the study.
        """
        self.options = options
        config = MGCDConfig(k, server="average", n_neighbours=options.neighbours)
        self.plain = overheard(mgcd(config))
        whole = overheard(mgcd(dataclasses.replace(config, dense=True)))
        chosen = {name: forms(options.neighbours)[name] for name in names}
        self.pairs = {
            name: changed(whole if form.dense else self.plain, form)
            for name, form in chosen.items()
        }
        one = dataclasses.replace(config, affinity="mean")
        self.cut = lambda key, graph: _graph_clusters(key, graph, one)

    def scores(self, name: str, world: World, seed: int, permuted: bool) -> dict[str, float]:
        """Of one form and seed."""
        served, alone = self.pairs[name]
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        heard = run(served, world.participants, key, self.options.rounds)
        public = run(alone, world.public, public_key, 1)
        rows = [
            attack(
                jax.random.fold_in(attack_key, v),
                world,
                v,
                heard.latents[v].shape[1] + 1,
                heard.uploads[v],
                public.uploads[v],
                heard.latents[v],
                self.cut,
                permuted,
                self.options.fit_epochs,
            )
            for v in range(len(world.views))
        ]
        nmi, acc = rated(world.labels, heard.labels, world.k)
        up = engine.traffic(served, world.participants)["round"].up
        return mean_over_views(rows) | {"bytes": up / len(rows), "nmi": nmi, "acc": acc}

    def of_latents(self, world: World, seed: int) -> dict[str, float]:
        """Of uploads of Z; the server's k-means on all of them is the federation."""
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        latents = _latents(self.plain, world.participants, key)
        public = _latents(self.plain, world.public, public_key)
        rows = [
            attack(
                jax.random.fold_in(attack_key, v),
                world,
                v,
                z.shape[1],
                z,
                public[v],
                z,
                lambda key, z: _kmeans(key, z, world.k).labels,
                False,
                self.options.fit_epochs,
            )
            for v, z in enumerate(latents)
        ]
        together = _kmeans(key, jnp.concatenate(latents, axis=1), world.k).labels
        nmi, acc = rated(world.labels, together, world.k)
        sent = messages.nbytes(latents) / len(latents)
        return mean_over_views(rows) | {"bytes": sent, "nmi": nmi, "acc": acc}


def _latents(
    algorithm: FederatedAlgorithm, federation: Federation, key: jax.Array
) -> list[jax.Array]:
    """Z of each client, after the setup."""
    state = engine.start(algorithm, federation, key)
    state, _ = engine.setup(algorithm, federation, key, state)
    return [s.latent[0] for s in state.clients]


# --- Attacks on models ----------------------------------------------------------------------------


class Models:
    """FMCSC on the participants, dealt out to four clients, two of them with all its views."""

    def __init__(self, k: int, options: Options) -> None:
        """Compiles nothing yet."""
        self.config = FMCSCConfig(
            k,
            hidden=(128,),
            latent_dim=10,
            head_hidden=64,
            local_epochs=10,
            distill_epochs=10,
            pretrain_epochs=options.pretrain_epochs,
            n_init=10,
        )
        algorithm = fmcsc(self.config, FMCSCHyperparams(learning_rate=1e-3))
        (phase,) = algorithm.round

        def client(key: jax.Array, sent: Any, state: Any, client: Any) -> Any:
            state, message, info = phase.client(key, sent, state, client)
            return state, message, info | {"message": message}

        self.algorithm = algorithm
        heard = algorithm._replace(round=(phase._replace(client=client),))
        rounds = options.rounds
        self.run = jax.jit(lambda federation, key: engine.run(heard, federation, key, rounds))
        self.reconstruct = jax.jit(
            lambda model, views: features(self.config, model, views).reconstruction
        )
        self.prototypes = jax.jit(lambda key, server: prototypes(key, self.config, server))

    def deal(self, world: World, seed: int) -> tuple[World, Federation]:
        """The world with no more views than the run has, and its participants' federation."""
        few = world._replace(
            views=world.views[:_FMCSC_VIEWS], public_views=world.public_views[:_FMCSC_VIEWS]
        )
        parts = hybrid_partition(seed, len(few.labels), len(few.views), _FMCSC_CLIENTS)
        return few, Federation.from_arrays(few.views, few.labels, partition=parts)

    def scores(self, world: World, seed: int) -> dict[str, float]:
        """Of one seed."""
        key, run_key, public_key = jax.random.split(jax.random.key(seed), 3)
        world, federation = self.deal(world, seed)
        result = self.run(federation.without_labels(), run_key)
        decoded = self.prototypes(key, result.state.server)
        told, known = [], []
        n_features = max(view.shape[1] for view in world.views)
        for v, x in enumerate(world.views):
            public = _widened(world.public_views[v], n_features)
            centres = _kmeans(public_key, public, world.k).centroids[:, : x.shape[1]]
            told.append(float(leakage.best_prototype_r2(x, decoded[v])))
            known.append(float(leakage.best_prototype_r2(x, centres)))
        updates = [info["message"] for info in result.info["rounds"][0]["clients"]]
        nmi, acc = rated(*_pooled(federation, result.labels), world.k)
        traffic = engine.traffic(self.algorithm, federation)["round"]
        return {
            "bytes": traffic.up / _FMCSC_CLIENTS,
            "nmi": nmi,
            "acc": acc,
            "prototypes": float(np.mean(told)),
            "public_prototypes": float(np.mean(known)),
            "membership": self.membership(world, federation, updates),
        }

    def membership(self, world: World, federation: Federation, updates: Sequence[Any]) -> float:
        """Mean over clients and their views of the AUC; a sample of small error is called own.

        Args:
          world: The data.
          federation: Its participants, dealt out.
          updates: For each cohort the clients' messages, leaves [rounds, clients, ...]; the last
            round's are read.
        """
        public, values = dict(enumerate(world.public_views)), []
        for cohort, sent in zip(federation.cohorts, updates, strict=True):
            kind = cohort.view_ids
            for c in range(cohort.n_clients):
                update = jax.tree.map(lambda x, c=c: x[-1, c], sent)
                # A message is the parameters times a weight, and the weight.
                weight = update.weights[kind]
                model = jax.tree.map(lambda x, w=weight: x / w, update.models[kind])
                real = np.asarray(cohort.mask[c])
                own = {v: np.asarray(x[c])[real] for v, x in cohort.by_view().items()}
                own_errors = self._errors(model, own)
                other_errors = self._errors(model, {v: public[v] for v in kind})
                for v in kind:
                    errors = np.concatenate([own_errors[v], other_errors[v]])
                    is_own = np.arange(len(errors)) < len(own_errors[v])
                    values.append(roc_auc_score(is_own, -errors))
        return float(np.mean(values))

    def _errors(self, model: Any, views: Mapping[int, Any]) -> dict[int, np.ndarray]:
        decoded = self.reconstruct(model, views)
        return {v: np.sum((np.asarray(decoded[v]) - x) ** 2, axis=1) for v, x in views.items()}


def _pooled(federation: Federation, found: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Classes and clusters of the real rows of all clients."""
    real = [np.asarray(cohort.mask) for cohort in federation.cohorts]
    truth, labels = (
        np.concatenate([np.asarray(rows)[m] for rows, m in zip(of, real, strict=True)])
        for of in (federation.labels, found)
    )
    return truth, labels


def prototypes(key: jax.Array, config: FMCSCConfig, server: ServerState) -> dict[int, jax.Array]:
    """What the server can decode from the centroids it passes on: for each view [K, D_v].

    A centroid lies in the space of H, which has no decoder. So latent vectors [Z^1, ..., Z^V] are
    searched from zero whose H is the centroid, and decoded with the global model of all views.
    """
    (model,) = (m for m in server.models.values() if m.view_heads)
    target = l2_normalize(server.centroids)
    head = (config.head_hidden, config.latent_dim)
    kind = sorted(model.autoencoders)

    def misfit(z: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
        h = l2_normalize(nn.apply_mlp(model.joint_head, head, z))
        return jnp.mean(jnp.sum((h - target) ** 2, axis=1))

    z, _ = nn.fit(
        key,
        jnp.zeros((len(target), config.latent_dim * len(kind))),
        misfit,
        target,
        jnp.ones(len(target), bool),
        epochs=500,
        batch_size=len(target),
        learning_rate=0.03,
    )
    decoded = {}
    for v, z_v in zip(kind, jnp.split(z, len(kind), axis=1), strict=True):
        decoder = model.autoencoders[v].decoder
        width = decoder["params"][f"Dense_{len(config.hidden)}"]["bias"].shape[0]
        decoded[v] = nn.apply_mlp(decoder, (*config.hidden[::-1], width), z_v)
    return decoded
