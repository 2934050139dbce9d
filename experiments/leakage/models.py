"""Attacks on messages that are models: FMCSC's, of which none has a row for a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

from experiments.leakage.scenario import LeakageSettings, Scenario, public_prototypes_r2
from experiments.leakage.uploads import overheard
from jaxfedmvc import engine, nn
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import features
from jaxfedmvc.algorithms.fmcsc.server import ServerState
from jaxfedmvc.attacks import reconstruction
from jaxfedmvc.data.partition import hybrid_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.metrics import host

N_CLIENTS = 4
# Every view has a model of its own to compile and train: the first ones show what there is to show.
_N_VIEWS = 3


class ModelAttacks:
    """FMCSC on the participants, dealt out to four clients, two of them with all its views."""

    def __init__(self, n_clusters: int, settings: LeakageSettings) -> None:
        """Prepares the programs; compiles nothing yet.

        Raises:
          ValueError: A setting is out of range.
        """
        self.config = FMCSCConfig(
            n_clusters,
            hidden=(128,),
            latent_dim=10,
            head_hidden=64,
            local_epochs=10,
            distill_epochs=10,
            pretrain_epochs=settings.leak_pretrain_epochs,
            n_init=10,
        )
        self.algorithm = fmcsc(self.config, FMCSCHyperparams(learning_rate=1e-3))
        recording = self.algorithm._replace(round=tuple(map(overheard, self.algorithm.round)))
        rounds = settings.leak_rounds
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, rounds))
        self.reconstruct = jax.jit(lambda model, views: features(model, views).reconstruction)
        self.prototypes = jax.jit(lambda key, server: prototypes(key, self.config, server))

    def deal(self, scenario: Scenario, seed: int) -> tuple[Scenario, Federation]:
        """Returns the data with no more views than the run has, and its participants' clients."""
        few = scenario._replace(
            views=scenario.views[:_N_VIEWS], public_views=scenario.public_views[:_N_VIEWS]
        )
        parts = hybrid_partition(seed, len(few.labels), len(few.views), N_CLIENTS)
        return few, Federation.from_arrays(few.views, few.labels, partition=parts)

    def scores(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the federation, what its prototypes tell, and the attack on membership."""
        key, run_key, _ = jax.random.split(jax.random.key(seed), 3)
        scenario, federation = self.deal(scenario, seed)
        result = self.run(federation.without_labels(), run_key)
        decoded = self.prototypes(key, result.state.server)
        decoded_r2 = [
            float(reconstruction.best_prototype_r2(x, decoded[v]))
            for v, x in enumerate(scenario.views)
        ]
        known, outside = halved(scenario.public_views)
        _, public = self.deal(scenario._replace(views=known), seed)
        # The same key: it is the server that sends the models which training begins from.
        reference = self.run(public.without_labels(), run_key)
        messages, references = (
            [info["message"] for info in found.info["rounds"][0]["clients"]]
            for found in (result, reference)
        )
        found = host.table_scores(host.tables(federation, result.labels).sum(axis=0))
        return {
            "bytes": engine.traffic(self.algorithm, federation)["round"].up / N_CLIENTS,
            "nmi": found["nmi"],
            "acc": found["acc"],
            "prototypes": float(np.mean(decoded_r2)),
            "public_prototypes": public_prototypes_r2(scenario, seed),
            **self.memberships(federation, outside, messages, references),
        }

    def memberships(
        self,
        federation: Federation,
        outside: Sequence[np.ndarray],
        messages: Sequence[Any],
        references: Sequence[Any],
    ) -> dict[str, float]:
        """Computes how well reconstruction errors tell a client's samples from others.

        Small errors are called the client's: plain ones, and CALIBRATED ones, divided by those of
        the same client's model in a run on public samples, since some samples are easier than
        others for any model: Watson, Guo, Cormode & Sablayrolles, "On the importance of difficulty
        calibration in membership inference attacks", 2022.

        Args:
          federation: The participants, dealt out.
          outside: Samples that no run has seen, [n, D_v] of each view.
          messages: For each cohort the clients' messages, leaves [rounds, clients, ...]; the last
            round's are read.
          references: The same of the run on public samples.

        Returns:
          The mean AUC over clients and their views.
        """
        aucs: dict[str, list[float]] = {"membership": [], "calibrated": []}
        for cohort, *sent in zip(federation.cohorts, messages, references, strict=True):
            kind = cohort.view_ids
            for c in range(cohort.n_clients):
                model, reference = (last_model(message, c, kind) for message in sent)
                real = np.asarray(cohort.mask[c])
                own = {v: np.asarray(x[c])[real] for v, x in cohort.by_view().items()}
                asked = {v: np.concatenate([x, outside[v]]) for v, x in own.items()}
                errors, usual = self._errors(model, asked), self._errors(reference, asked)
                for v, x in own.items():
                    is_own = np.arange(len(asked[v])) < len(x)
                    aucs["membership"].append(roc_auc_score(is_own, -errors[v]))
                    aucs["calibrated"].append(roc_auc_score(is_own, -errors[v] / usual[v]))
        return {name: float(np.mean(values)) for name, values in aucs.items()}

    def _errors(self, model: Any, views: Mapping[int, Any]) -> dict[int, np.ndarray]:
        decoded = self.reconstruct(model, views)
        return {v: np.sum((np.asarray(decoded[v]) - x) ** 2, axis=1) for v, x in views.items()}


def last_model(sent: Any, client: int, kind: tuple[int, ...]) -> Any:
    """Returns the parameters in a client's last message: these times a weight, and the weight."""
    update = jax.tree.map(lambda x: x[-1, client], sent)
    return jax.tree.map(lambda x: x / update.weights[kind], update.models[kind])


def halved(views: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the first half of public samples to train on, each twice, and the other half.

    Twice, so that what is trained takes as many steps as on all of them.
    """
    half = len(views[0]) // 2
    twice = np.resize(np.arange(half), len(views[0]))
    return [view[twice] for view in views], [view[half:] for view in views]


def prototypes(key: jax.Array, config: FMCSCConfig, server: ServerState) -> dict[int, jax.Array]:
    """Computes what the server can decode from the centroids it passes on: for each view [K, D_v].

    A centroid lies in the space of H, which has no decoder. So latent vectors [Z^1, ..., Z^V] are
    searched from zero whose H is the centroid, and decoded with the global model of all views.
    """
    (model,) = (m for m in server.models.values() if m.view_heads)
    target = l2_normalize(server.centroids)
    kind = sorted(model.autoencoders)

    def misfit(z: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
        h = l2_normalize(nn.apply(model.joint_head, z))
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
        decoded[v] = nn.apply(model.autoencoders[v].decoder, z_v)
    return decoded
