"""Byzantine agents of VertCoHiRF: they keep to the protocol and send false labels or rankings.

Each attack is a transformation `(key, message, state) -> message` of one of the two exchanges, for
`messages.transformed`. By property 3.4 of the paper no attack on the labels can bring together two
samples that an honest agent tells apart; an attack on the rankings only changes which member of a
cluster becomes its medoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.vertcohirf.method import VertCoHiRFState
from jaxfedmvc.algorithms.vertcohirf.rankings import ranked_ids
from jaxfedmvc.checks import wrong
from jaxfedmvc.messages import transformed

Message = dict[str, Array]


def random_labels(key: Array, message: Message, state: VertCoHiRFState) -> Message:
    """Draws labels at random from as many as the agent found."""
    labels = message["labels"]
    drawn = jax.random.randint(key, labels.shape, 0, jnp.max(labels) + 1)
    return {"labels": jnp.where(labels >= 0, drawn, -1)}


def all_one_cluster(key: Array, message: Message, state: VertCoHiRFState) -> Message:
    """Gives all samples one label, so that the agent separates none."""
    return {"labels": jnp.minimum(message["labels"], 0)}


def random_ranking(key: Array, message: Message, state: VertCoHiRFState) -> Message:
    """Puts every cluster's candidates in random order."""
    scores = jax.random.uniform(key, state.codes.shape, minval=-1.0)
    return {"ranking": ranked_ids(scores, state.codes, state.candidates, state.active)}


def inverse_ranking(key: Array, message: Message, state: VertCoHiRFState) -> Message:
    """Lists every cluster's candidates from the worst to the best."""
    ranking = message["ranking"]
    cells = jnp.sort(jnp.where(state.candidates, state.codes, len(ranking)))
    start = jnp.searchsorted(cells, cells, side="left")
    end = jnp.searchsorted(cells, cells, side="right")
    return {"ranking": ranking[start + end - 1 - jnp.arange(len(ranking))]}


# Name -> number of the exchange that is changed, and how.
ATTACKS: dict[str, tuple[int, Callable[[Array, Any, Any], Any]]] = {
    "random_ranking": (1, random_ranking),
    "inverse_ranking": (1, inverse_ranking),
    "random_labels": (0, random_labels),
    "all_one_cluster": (0, all_one_cluster),
}


def attacked(
    algorithm: FederatedAlgorithm, attack: str, agents: Sequence[int]
) -> FederatedAlgorithm:
    """Returns VertCoHiRF with some agents Byzantine.

    Args:
      algorithm: VertCoHiRF; may be attacked already, since attacks chain.
      attack: One of `ATTACKS`.
      agents: Client ids of the attackers.

    Raises:
      ValueError: Unknown attack.
    """
    if attack not in ATTACKS:
        raise wrong("attack", attack, " or ".join(ATTACKS))
    place, transform = ATTACKS[attack]
    phases = list(algorithm.round)
    phases[place] = transformed(phases[place], transform, agents)
    return algorithm._replace(round=tuple(phases))
