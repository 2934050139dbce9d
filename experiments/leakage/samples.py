"""Attacks on messages that have a row for each sample; MGCD's graphs, and latent vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics.cluster import contingency_matrix

from experiments.leakage.scenario import LeakageSettings, Scenario
from experiments.leakage.spreading import spread
from experiments.leakage.uploads import forms_of_graphs, in_form, record, recording
from jaxfedmvc import engine
from jaxfedmvc.algorithms.mgcd import MGCDConfig, mgcd
from jaxfedmvc.algorithms.mgcd import graph as graphs_lib
from jaxfedmvc.algorithms.mgcd.affinity import clusters
from jaxfedmvc.algorithms.mgcd.settings import ResolvedConfig
from jaxfedmvc.attacks import reconstruction
from jaxfedmvc.messages import nbytes
from jaxfedmvc.metrics import host

# A view of few samples needs many starts.
_STARTS = 20


class Upload(NamedTuple):
    """A view's message and what attacks on it are judged by.

    Attributes:
      view: Whose it is.
      rank: How many of its singular vectors are looked at.
      message: As the server decodes it.
      public_message: The one that the public samples give.
      latent: The client's latent vectors, [n, d]; None where it has none.
    """

    view: int
    rank: int
    message: Any
    public_message: Any
    latent: jax.Array | None


def attack(
    keys: jax.Array, scenario: Scenario, upload: Upload, settings: LeakageSettings, permuted: bool
) -> dict[str, float]:
    """Computes what a view's message tells of its latent vectors and features, as R^2.

    NaN of latent vectors where the client has none.

    Args:
      keys: Four or more, for everything random about it.
      scenario: The data.
      upload: The message.
      settings: Of the study.
      permuted: Whether the insiders attack is made once more with rows in disorder, as a control.
    """
    inverter = reconstruction.InverterConfig(epochs=settings.leak_fit_epochs)
    # One width for all messages of a study, as far as it reaches: one program for all of them.
    width = max(MGCDConfig(scenario.n_clusters).resolved().latent_dim + 1, upload.rank)
    points, public_points = (
        _points(message, width, upload.rank) for message in (upload.message, upload.public_message)
    )
    # Columns of zeros change no score and let the views share a program.
    n_features = max(view.shape[1] for view in scenario.views)
    x, public = (
        _widened(views[upload.view], n_features)
        for views in (scenario.views, scenario.public_views)
    )

    def by_insiders(key: jax.Array, points: jax.Array) -> float:
        known, others = scenario.insiders, scenario.others
        return float(
            _inverted_r2(key, points[known], x[known], points[others], x[others], inverter)
        )

    def of_latent(basis: Any) -> float:
        if upload.latent is None:
            return float("nan")
        return float(_linear_r2(_widened(upload.latent, width), basis))

    random = jax.random.normal(keys[0], (len(x), upload.rank))
    scores = {
        "subspace": of_latent(points),
        "chance": of_latent(_widened(random, width)),
        "insiders": by_insiders(keys[1], points),
        "shadow": float(_inverted_r2(keys[2], public_points, public, points, x, inverter)),
    }
    if permuted:
        scores["permuted"] = by_insiders(keys[1], jax.random.permutation(keys[3], points))
    return scores


class SampleAttacks:
    """Attacks on MGCD's messages in each form; compiled programs live as long as the object."""

    def __init__(self, n_clusters: int, forms: Sequence[str], settings: LeakageSettings) -> None:
        """Prepares the algorithms; compiles nothing yet.

        Args:
          n_clusters: Number of clusters.
          forms: Names, of `forms_of_graphs`.
          settings: Of the study.

        Raises:
          ValueError: A setting is out of range.
        """
        self.settings = settings
        config = MGCDConfig(n_clusters, server="average", n_neighbours=settings.leak_neighbours)
        factors, dense = (
            recording(mgcd(dataclasses.replace(config, dense=dense))) for dense in (False, True)
        )
        every_form = forms_of_graphs(settings.leak_neighbours)
        self.algorithms = {
            name: in_form(dense if every_form[name].dense else factors, every_form[name])
            for name in forms
        }
        _, self.clients_alone = in_form(factors, every_form["factors"])
        self.one_graph = dataclasses.replace(config, affinity="mean").resolved()

    def of_graphs(
        self, form: str, scenario: Scenario, seed: int, permuted: bool
    ) -> dict[str, float]:
        """Scores the attacks on MGCD's messages of one form."""
        federated, clients_alone = self.algorithms[form]
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        run = record(federated, scenario.participants, key, self.settings.leak_rounds)
        public = record(clients_alone, scenario.public, public_key)
        uploads = [
            Upload(v, z.shape[1] + 1, message, of_public, z)
            for v, (z, message, of_public) in enumerate(
                zip(run.latents, run.messages, public.messages, strict=True)
            )
        ]

        def find_clusters(key: jax.Array, graph: Any) -> jax.Array:
            return _graph_clusters(key, graph, self.one_graph)

        found = attacked(
            attack_key, scenario, uploads, find_clusters, self.settings, permuted=permuted
        )
        guessed = [self.spread_r2(scenario, v, graph) for v, graph in enumerate(run.messages)]
        up = engine.traffic(federated, scenario.participants)["round"].up
        sent = {"spread": float(np.mean(guessed)), "bytes": up / len(uploads)}
        return found | sent | rated(scenario.labels, run.labels)

    def spread_r2(self, scenario: Scenario, view: int, graph: Any) -> float:
        """Computes R^2 of a view's features, spread from the known participants over its graph."""
        x, known, others = scenario.views[view], scenario.insiders, scenario.others
        dense = np.asarray(graphs_lib.dense(graph))
        found = spread(dense, known, x[known], self.settings.leak_neighbours)
        return float(reconstruction.r2(x[others], found.features[others]))

    def of_latents(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the attacks on uploads of Z; a server's k-means on all Z is the federation."""
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        held, public = (
            record(self.clients_alone, federation, key).latents
            for federation, key in ((scenario.participants, key), (scenario.public, public_key))
        )
        uploads = [
            Upload(v, z.shape[1], z, other, z)
            for v, (z, other) in enumerate(zip(held, public, strict=True))
        ]

        find_clusters = k_means_of(scenario, seed)
        found = attacked(attack_key, scenario, uploads, find_clusters, self.settings)
        together = find_clusters(None, np.concatenate(held, axis=1))
        return found | {"bytes": nbytes(held) / len(held)} | rated(scenario.labels, together)


def attacked(
    key: jax.Array,
    scenario: Scenario,
    uploads: Sequence[Upload],
    find_clusters: Callable[[Any, Any], Any],
    settings: LeakageSettings,
    *,
    permuted: bool = False,
) -> dict[str, float]:
    """Computes the means over the views of all scores of their messages.

    Args:
      key: For everything random.
      scenario: The data.
      uploads: One of each view.
      find_clusters: `(key, message) -> labels [n]`.
      settings: Of the study.
      permuted: As in `attack`.
    """
    rows = []
    for upload in uploads:
        keys = jax.random.split(jax.random.fold_in(key, upload.view), 6)
        row = attack(keys, scenario, upload, settings, permuted)
        found = rated(scenario.labels, find_clusters(keys[4], upload.message))
        rows.append(row | {f"upload_{name}": value for name, value in found.items()})
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def k_means_of(scenario: Scenario, seed: int) -> Callable[[Any, Any], np.ndarray]:
    """Returns a k-means of rows, `(key, rows) -> labels`, that needs no key."""

    def find_clusters(key: Any, rows: Any) -> np.ndarray:
        k_means = KMeans(scenario.n_clusters, n_init=_STARTS, random_state=seed)
        return k_means.fit_predict(np.asarray(rows))

    return find_clusters


def rated(truth: np.ndarray, labels: Any) -> dict[str, float]:
    """Computes NMI and ACC of clusters [n]."""
    scores = host.table_scores(contingency_matrix(truth, np.asarray(labels)))
    return {name: scores[name] for name in ("nmi", "acc")}


def _widened(x: Any, width: int) -> np.ndarray:
    return np.pad(np.asarray(x), ((0, 0), (0, width - x.shape[1])))


# --- Programs -------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=1)
def _points(message: Any, width: int, rank: Any) -> jax.Array:
    """Returns the first `rank` coordinates and zeros for the others: one program for all views."""
    points = reconstruction.coordinates(message, width)
    return jnp.where(jnp.arange(width)[None] < rank, points, 0.0)


_linear_r2 = jax.jit(reconstruction.linear_r2)


@partial(jax.jit, static_argnames="config")
def _inverted_r2(
    key: jax.Array, points: Any, known: Any, unknown: Any, truth: Any, config: Any
) -> jax.Array:
    found = reconstruction.invert(key, points, known, unknown, config)
    return reconstruction.r2(truth, found.features)


@partial(jax.jit, static_argnames="config")
def _graph_clusters(key: jax.Array, graph: Any, config: ResolvedConfig) -> jax.Array:
    where = jnp.ones(graphs_lib.n_samples(graph), bool)
    return clusters(key, [graph], graph, where, config).labels
