"""What an honest-but-curious server learns from the messages of a run: `python -m
experiments.leakage`.

The set is dealt in two halves, participants and public samples of the same population. The messages
are those of a real run on the participants, in each form that they may travel in, as the server
decodes them; beside what they tell stands what the federation reaches with them.

    subspace: R^2 of the client's latent vectors on the message's leading singular vectors
    insiders: R^2 of features, learned from a share of participants whose features are known
    shadow: the same without any participant, from the client's public code on the public samples
    clusters: NMI and ACC of clustering ONE upload. That a server learns who belongs together is
        the protocol's purpose; labels score it and nothing else

"latents" are the vectors Z themselves, as methods upload them that fuse representations; a server's
k-means on Z of all views is then the federation. "fmcsc" sends models: nothing travels for a
sample, so nothing of the above can be asked. Asked is how much of samples the server's PROTOTYPES
tell, decoded from the cluster centres it passes on, with an oracle's assignment (beside it the
k-means centres of public samples, which tell as much without any message), and how well the
reconstruction error of a client's uploaded autoencoder tells its own samples from public ones:
MEMBERSHIP, an AUC of which 0.5 is chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from sklearn.metrics import roc_auc_score

from experiments import base, charts, vertical
from experiments.base import checked, seeds
from experiments.progress import ProgressBar, require_tqdm
from jaxfedmvc import codecs, data, engine, leakage, messages, metrics, nn, plots, scoring
from jaxfedmvc import graph as graphs_lib
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, ServerState, features, fmcsc
from jaxfedmvc.algorithms.mgcd import MGCDConfig, mgcd
from jaxfedmvc.algorithms.mgcd.affinity import clusters
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.data.partition import hybrid_partition
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)

METHODS = ("mgcd", "latents", "fmcsc")
flags.DEFINE_list("attacked", list(METHODS), "Whose messages are read.")
flags.DEFINE_list("leak_forms", None, "Forms of MGCD's message, by name; None: all of them.")
flags.DEFINE_float("leak_insiders", 0.1, "Share of participants whose features are known.")
flags.DEFINE_integer("leak_rounds", 1, "Most rounds; the first one's messages are read.", 1)
flags.DEFINE_integer("leak_neighbours", 10, "k of the graphs of neighbours.", lower_bound=1)
flags.DEFINE_integer("leak_fit_epochs", 60, "Epochs between snapshots of the inverter.", 1)
flags.DEFINE_integer("leak_pretrain_epochs", 100, "FMCSC's epochs of pre-training.", 0)

SCORES = (
    "bytes", "subspace", "chance", "insiders", "shadow", "permuted", "upload_nmi", "upload_acc",
    "nmi", "acc", "prototypes", "public_prototypes", "membership",
)  # fmt: skip
_FMCSC_CLIENTS = 4


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


def load_world(dataset: data.Dataset, seed: int) -> World:
    """Deals a set out.

    Raises:
      ValueError: No labels, one view, or no insider or nobody else.
    """
    if dataset.labels is None or len(dataset.views) < 2:
        raise ValueError(f"dataset: {dataset.name} needs labels to score with and several views")
    order = np.random.default_rng(seed).permutation(len(dataset.labels))
    n = len(order) // 2
    m = round(FLAGS.leak_insiders * n)
    if not 4 <= m < n:
        raise ValueError(
            f"leak_insiders: got {FLAGS.leak_insiders}, {m} of {n} participants; allowed are shares"
            " that make 4 or more, and not all"
        )
    halves = [[view[rows] for view in dataset.views] for rows in (order[:n], order[n : 2 * n])]
    parts = vertical_partition(n, len(dataset.views))
    labels = dataset.labels[order[:n]]
    held, public = (Federation.from_arrays(views, None, partition=parts) for views in halves)
    k = FLAGS.n_clusters or len(np.unique(dataset.labels))
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

_points = jax.jit(leakage.coordinates, static_argnums=1)
_linear_r2 = jax.jit(leakage.linear_r2)
_kmeans = jax.jit(lambda key, x, k: kmeans(key, x, k, n_init=20).labels, static_argnums=2)


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
    """
    inverter = leakage.InverterConfig(epochs=FLAGS.leak_fit_epochs)
    keys = jax.random.split(key, 6)
    points, shadow = _points(upload, rank), _points(public_upload, rank)
    x, public = world.views[view], world.public_views[view]

    def by_insiders(key: jax.Array, points: jax.Array) -> float:
        known, others = world.insiders, world.others
        return float(
            _inverted_r2(key, points[known], x[known], points[others], x[others], inverter)
        )

    scores = {
        "subspace": float(_linear_r2(latent, points)),
        "chance": float(_linear_r2(latent, jax.random.normal(keys[0], points.shape))),
        "insiders": by_insiders(keys[1], points),
        "shadow": float(_inverted_r2(keys[2], shadow, public, points, x, inverter)),
    }
    if permuted:
        scores["permuted"] = by_insiders(keys[1], jax.random.permutation(keys[3], points))
    nmi, acc = rated(world, find_clusters(keys[4], upload))
    return scores | {"upload_nmi": nmi, "upload_acc": acc}


def rated(world: World, labels: jax.Array) -> tuple[float, float]:
    """NMI and ACC."""
    truth, n_classes = world.labels, int(world.labels.max()) + 1
    found = metrics.scores(truth, labels, n_classes, world.k)
    return float(found["nmi"]), float(found["acc"])


def mean_over_views(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each score."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


class Graphs:
    """MGCD's forms; compiled programs live as long as the object."""

    def __init__(self, k: int, names: Sequence[str]) -> None:
        """Compiles nothing yet.

        Args:
          k: Clusters.
          names: Of `forms`.
        """
        config = MGCDConfig(k, server="average", n_neighbours=FLAGS.leak_neighbours)
        self.plain = overheard(mgcd(config))
        whole = overheard(mgcd(dataclasses.replace(config, dense=True)))
        chosen = {name: forms(FLAGS.leak_neighbours)[name] for name in names}
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
        heard = run(served, world.participants, key, FLAGS.leak_rounds)
        public = run(alone, world.public, public_key, 1)
        rows = [
            attack(
                jax.random.fold_in(attack_key, v), world, v, heard.latents[v].shape[1] + 1,
                heard.uploads[v], public.uploads[v], heard.latents[v], self.cut, permuted,
            )
            for v in range(len(world.views))
        ]  # fmt: skip
        nmi, acc = rated(world, heard.labels)
        up = engine.traffic(served, world.participants)["round"].up
        return mean_over_views(rows) | {"bytes": up / len(rows), "nmi": nmi, "acc": acc}

    def of_latents(self, world: World, seed: int) -> dict[str, float]:
        """Of uploads of Z; the server's k-means on all of them is the federation."""
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        latents = _latents(self.plain, world.participants, key)
        public = _latents(self.plain, world.public, public_key)
        rows = [
            attack(
                jax.random.fold_in(attack_key, v), world, v, z.shape[1], z, public[v], z,
                lambda key, z: _kmeans(key, z, world.k), False,
            )
            for v, z in enumerate(latents)
        ]  # fmt: skip
        nmi, acc = rated(world, _kmeans(key, jnp.concatenate(latents, axis=1), world.k))
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
    """FMCSC on the participants, dealt out to four clients, two of them with all views."""

    def __init__(self, k: int) -> None:
        """Compiles nothing yet."""
        self.config = FMCSCConfig(
            k, hidden=(128,), latent_dim=10, head_hidden=64, local_epochs=10, distill_epochs=10,
            pretrain_epochs=FLAGS.leak_pretrain_epochs, n_init=10,
        )  # fmt: skip
        algorithm = fmcsc(self.config, FMCSCHyperparams(learning_rate=1e-3))
        (phase,) = algorithm.round

        def client(key: jax.Array, sent: Any, state: Any, client: Any) -> Any:
            state, message, info = phase.client(key, sent, state, client)
            return state, message, info | {"message": message}

        self.algorithm = algorithm
        heard = algorithm._replace(round=(phase._replace(client=client),))
        rounds = FLAGS.leak_rounds
        self.run = jax.jit(lambda federation, key: engine.run(heard, federation, key, rounds))
        self.reconstruct = jax.jit(
            lambda model, views: features(self.config, model, views).reconstruction
        )
        self.prototypes = jax.jit(lambda key, server: prototypes(key, self.config, server))

    def scores(self, world: World, seed: int) -> dict[str, float]:
        """Of one seed."""
        key, run_key, public_key = jax.random.split(jax.random.key(seed), 3)
        n, n_views = len(world.labels), len(world.views)
        parts = hybrid_partition(seed, n, n_views, _FMCSC_CLIENTS)
        federation = Federation.from_arrays(world.views, world.labels, partition=parts)
        result = self.run(federation, run_key)
        pooled = scoring.score(federation, result.labels, world.k)["all"]["pooled"]

        decoded = self.prototypes(key, result.state.server)
        told, known = [], []
        for v, x in enumerate(world.views):
            public = kmeans(public_key, world.public_views[v], world.k, n_init=10).centroids
            told.append(float(leakage.best_prototype_r2(x, decoded[v])))
            known.append(float(leakage.best_prototype_r2(x, public)))
        traffic = engine.traffic(self.algorithm, federation)["round"]
        return {
            "bytes": traffic.up / _FMCSC_CLIENTS, "nmi": float(pooled["nmi"]),
            "acc": float(pooled["acc"]), "prototypes": float(np.mean(told)),
            "public_prototypes": float(np.mean(known)),
            "membership": self.membership(world, federation, result),
        }  # fmt: skip

    def membership(self, world: World, federation: Federation, result: Any) -> float:
        """Mean over clients and their views of the AUC; a sample of small error is called own."""
        public, values = dict(enumerate(world.public_views)), []
        infos = result.info["rounds"][0]["clients"]
        for cohort, info in zip(federation.cohorts, infos, strict=True):
            kind = cohort.view_ids
            for c in range(cohort.n_clients):
                update = jax.tree.map(lambda x, c=c: x[-1, c], info["message"])
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
        key, jnp.zeros((len(target), config.latent_dim * len(kind))), misfit, target,
        jnp.ones(len(target), bool), epochs=500, batch_size=len(target), learning_rate=0.03,
    )  # fmt: skip
    decoded = {}
    for v, z_v in zip(kind, jnp.split(z, len(kind), axis=1), strict=True):
        decoder = model.autoencoders[v].decoder
        width = decoder["params"][f"Dense_{len(config.hidden)}"]["bias"].shape[0]
        decoded[v] = nn.apply_mlp(decoder, (*config.hidden[::-1], width), z_v)
    return decoded


# --- The job --------------------------------------------------------------------------------------


def load_dataset() -> data.Dataset:
    """The set of the flag; without it Mfeat where the data folder has it, else digits."""
    if FLAGS.dataset is None:
        try:
            dataset = data.load("Mfeat", FLAGS.data_dir, FLAGS.scale)
            FLAGS.dataset = "Mfeat"
            return dataset
        except (OSError, ValueError):
            FLAGS.dataset = "digits"
    return data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.scale)


def chosen(name: str, allowed: Sequence[str]) -> list[str]:
    """The values of a list flag, all that are allowed where it is None.

    Raises:
      ValueError: There are none, or one that is not allowed.
    """
    got = list(allowed) if FLAGS[name].value is None else FLAGS[name].value
    if not got or not set(got) <= set(allowed):
        raise ValueError(f"{name}: got {','.join(got)!r}; allowed are {', '.join(allowed)}")
    return list(dict.fromkeys(got))


def main() -> None:
    """Runs the study that the flags describe."""
    base.use_compilation_cache()
    if FLAGS["seeds"].using_default_value:
        FLAGS.seeds = 3
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    attacked = checked(lambda: chosen("attacked", METHODS))
    names = checked(lambda: chosen("leak_forms", tuple(forms(FLAGS.leak_neighbours))))
    dataset = checked(load_dataset)
    worlds = {seed: checked(lambda seed=seed: load_world(dataset, seed)) for seed in seeds()}
    k = worlds[seeds()[0]].k
    graphs, models = checked(lambda: (Graphs(k, names), Models(k)))
    jobs: dict[str, Callable[[World, int], dict[str, float]]] = {}
    if "mgcd" in attacked:
        # The control is made once, on the first form.
        jobs |= {n: partial(graphs.scores, n, permuted=n == names[0]) for n in names}
    if "latents" in attacked:
        jobs["latents"] = graphs.of_latents
    if "fmcsc" in attacked:
        jobs["fmcsc"] = models.scores

    folder = checked(lambda: base.make_folder(f"leakage-{dataset.name}"))
    results: dict[str, list[dict[str, float]]] = {}
    with ProgressBar(len(jobs) * len(worlds)) as bar:
        for name, job in jobs.items():
            results[name] = []
            for seed, world in worlds.items():
                scores = dict.fromkeys(SCORES, np.nan) | job(world, seed)
                results[name].append(scores)
                base.append_rows(folder / "runs.csv", [{"form": name, "seed": seed} | scores])
                bar.advance(1)
    draw(folder, results, dataset.name)
    summary = {
        "dataset": dataset.name, "participants": len(worlds[seeds()[0]].labels), "seeds": seeds(),
        "forms": {name: vertical.statistics(rows) for name, rows in results.items()},
    }  # fmt: skip
    vertical.write_summary(folder, summary)
    print("\n".join(table(results)))
    print(f"\nwritten: {folder}/ (runs.csv, summary.json, flags.txt, leakage.png)")


# --- What is shown --------------------------------------------------------------------------------

_COLUMNS = {
    "kB": "bytes", "subspace": "subspace", "insiders": "insiders", "shadow": "shadow",
    "1 upload NMI": "upload_nmi", "1 upload ACC": "upload_acc", "NMI": "nmi", "ACC": "acc",
}  # fmt: skip
_BARS = {
    "latent subspace, R^2": "subspace", "features by insiders, R^2": "insiders",
    "features by shadow, R^2": "shadow", "clusters of one upload, NMI": "upload_nmi",
    "federation, NMI": "nmi",
}  # fmt: skip
Rows = Sequence[Mapping[str, float]]


def table(results: Mapping[str, Rows]) -> list[str]:
    """Lines for the terminal: mean and deviation over seeds of what is a mean over views."""
    lines = [f"{'':12s}" + "".join(f"{title:>15s}" for title in _COLUMNS)]
    for name, rows in results.items():
        cells = "".join(f"{_cell(rows, score):>15s}" for score in _COLUMNS.values())
        lines.append(f"{name:12s}{cells}")
    lines += ["", "subspace, insiders, shadow: R^2; kB: of one message; NMI, ACC: the federation's"]
    for name, rows in results.items():
        if not np.isnan(rows[0]["permuted"]):
            lines.append(
                f"{name}: insiders with rows in disorder {_cell(rows, 'permuted')}; subspace of as"
                f" many random vectors {_cell(rows, 'chance')}"
            )
        if not np.isnan(rows[0]["membership"]):
            lines.append(
                f"{name}: '-' since nothing travels for a sample; R^2 of decoded prototypes"
                f" {_cell(rows, 'prototypes')}, of public k-means centres"
                f" {_cell(rows, 'public_prototypes')}; membership AUC {_cell(rows, 'membership')}"
            )
    return lines


def _cell(rows: Rows, score: str) -> str:
    values = [row[score] for row in rows]
    if np.isnan(values).any():
        return "-"
    if score == "bytes":
        return f"{np.mean(values) / 1e3:.0f}"
    spread = f" +- {np.std(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def draw(folder: Path, results: Mapping[str, Rows], dataset: str) -> None:
    """leakage.png; what is below zero is drawn as zero."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for name, rows in results.items():
        values = {title: [row[score] for row in rows] for title, score in _BARS.items()}
        groups[name] = {
            title: (max(float(np.mean(v)), 0.0), float(np.std(v)))
            for title, v in values.items()
            if not np.isnan(v).any()
        }
    charts.bars(
        folder / "leakage.png", {"": groups}, "R^2 or NMI",
        f"What a server learns from a message, {dataset}, {FLAGS.seeds} seeds",
    )  # fmt: skip


if __name__ == "__main__":
    base.launch(main)
