"""Attacks on encodings and factors: what FedDMVC, FCUIF and FedMVL send of every row.

An agent's last upload is read. Of FedDMVC and FCUIF it is encodings with soft labels beside them,
and these are the clusters that it tells. Of FedMVL it is the agent's factor behind a multiplier,
which the server follows through all messages of the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.leakage.samples import Upload, attacked, k_means_of, rated
from experiments.leakage.scenario import LeakageSettings, Scenario
from experiments.leakage.uploads import overheard
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fcuif import FCUIFConfig, FedDMVCConfig, fcuif, feddmvc
from jaxfedmvc.algorithms.fedmvl import FedMVLConfig, FedMVLHyperparams, fedmvl

# Of FedMVL: rounds as in its authors' demonstration, and a weight of orthogonality with which the
# factors find something; the demonstration's, 1e3, ends at chance.
_FACTOR_ROUNDS = 35
_MU = 1e-3


class Sent(NamedTuple):
    """What a run's agents gave to the server.

    Attributes:
      messages: Of each agent, float32 [n, m], as the server decodes it.
      latents: What each agent has computed of its rows, [n, d].
      labels: The federation's, [n].
    """

    messages: list[jax.Array]
    latents: list[jax.Array]
    labels: jax.Array


class EncodingAttacks:
    """Attacks on one of the three methods; its compiled run lives as long as the object."""

    def __init__(self, name: str, n_clusters: int, settings: LeakageSettings) -> None:
        """Prepares the method; compiles nothing yet.

        Args:
          name: feddmvc, fcuif or fedmvl.
          n_clusters: Number of clusters.
          settings: Of the study.

        Raises:
          ValueError: A setting is out of range.
        """
        self.settings = settings
        self.algorithm = _algorithm(name, n_clusters, settings)
        recording = self.algorithm._replace(round=tuple(map(overheard, self.algorithm.round)))
        rounds, self.read = settings.leak_rounds, encodings
        if name == "fedmvl":
            rounds, self.read = _FACTOR_ROUNDS, factors
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, rounds))

    def scores(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the attacks on the uploads of a run, and the run itself."""
        key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
        held = self.read(self.run(scenario.participants, key))
        public = self.read(self.run(scenario.public, public_key))
        uploads = [
            Upload(v, message.shape[1], message, other, latent)
            for v, (message, other, latent) in enumerate(
                zip(held.messages, public.messages, held.latents, strict=True)
            )
        ]
        find_clusters: Callable[[Any, Any], Any] = k_means_of(scenario, seed)
        if self.read is encodings:
            find_clusters = partial(_told, scenario.n_clusters)
        found = attacked(attack_key, scenario, uploads, find_clusters, self.settings)
        up = engine.traffic(self.algorithm, scenario.participants)["round"].up
        return found | {"bytes": up / len(uploads)} | rated(scenario.labels, held.labels)


def _algorithm(name: str, n_clusters: int, settings: LeakageSettings) -> FederatedAlgorithm:
    """Returns the method with networks small enough for minutes."""
    if name == "fedmvl":
        # The published step hardly leaves its random start: there would be little to tell.
        return fedmvl(FedMVLConfig(n_clusters, step="exact"), FedMVLHyperparams(mu=_MU))
    sizes: dict[str, Any] = {
        "hidden": (128,),
        "latent_dim": 10,
        "pretrain_epochs": settings.leak_pretrain_epochs,
        "local_epochs": 30,
        "n_init": 10,
    }
    if name == "fcuif":
        return fcuif(FCUIFConfig(n_clusters, **sizes))
    return feddmvc(FedDMVCConfig(n_clusters, **sizes))


def encodings(result: engine.RunResult) -> Sent:
    """Reads Z and P side by side, [n, d + c], out of the last round of FedDMVC or FCUIF."""
    uploads = [upload for (upload,) in map(dict.values, _heard(result, "message"))]
    last = [jax.tree.map(lambda x: x[-1, 0], upload) for upload in uploads]
    together = [jnp.concatenate([upload.z, upload.p], axis=1) for upload in last]
    return Sent(together, [upload.z for upload in last], result.labels[0][0])


def factors(result: engine.RunResult) -> Sent:
    """Works V out of all messages of FedMVL's agents, [n, c] each."""
    rounds, rho = int(result.n_rounds), FedMVLHyperparams().rho
    pulls = [message["pull"] for (message,) in map(dict.values, _heard(result, "message"))]
    consensus = [sent["consensus"] for sent in _heard(result, "sent")]
    found = [
        followed(pull[:rounds, 0], w[:rounds, 0], float(rho))
        for pull, w in zip(pulls, consensus, strict=True)
    ]
    truth = [state.factor[0] for state in result.state.clients]
    return Sent(found, truth, result.labels[0][0])


def followed(pulls: jax.Array, consensus: jax.Array, rho: float) -> jax.Array:
    """Solves Phi_t + rho V_t = pull_t, with Phi_t = Phi_(t-1) + rho (V_(t-1) - W_t) and Phi_1 = 0.

    Args:
      pulls: An agent's messages [rounds, n, c].
      consensus: W as it was sent in each round, [rounds, n, c].
      rho: As in the method.

    Returns:
      V [n, c] after the last round.
    """
    multiplier = jnp.zeros_like(pulls[0])
    factor = pulls[0] / rho
    for pull, w in zip(pulls[1:], consensus[1:], strict=True):
        multiplier = multiplier + rho * (factor - w)
        factor = (pull - multiplier) / rho
    return factor


def _heard(result: engine.RunResult, name: str) -> list[Any]:
    """Returns what was recorded of the agents under a name, leaves [rounds, 1, ...]."""
    (phase,) = result.info["rounds"]
    return [info[name] for info in phase["clients"]]


def _told(n_clusters: int, key: Any, message: jax.Array) -> jax.Array:
    """Reads the clusters off the soft labels, the last columns of a message."""
    return jnp.argmax(message[:, -n_clusters:], axis=1)
