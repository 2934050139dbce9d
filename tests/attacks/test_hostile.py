"""Hostile clients: what each attack sends, and that nobody else's messages change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.attacks.hostile import (
    attacked,
    claimed,
    little_is_enough,
    permuted_rows,
    scaled,
    sign_flip,
)
from jaxfedmvc.federation import single_client

KEY = jax.random.key(0)
MATRIX = np.arange(12.0).reshape(4, 3)


def exchange(reduce="sum"):
    """Client i sends (i + matrix, i); the server returns what it gets."""

    def client(key, sent, state, client):
        i = client.client_ids.astype(jnp.float32)
        return state, (i + jnp.asarray(MATRIX, jnp.float32), i), {}

    def server(key, state, messages, weights):
        return (messages, weights), {}

    return Phase(lambda state, ids: (), client, server, reduce)


def client(i):
    return single_client({0: np.zeros((1, 1))}).replace(client_ids=jnp.int32(i))


def sent_by(phase, i):
    return phase.client(KEY, (), (), client(i))[1]


def test_only_the_attackers_messages_change_and_only_in_the_parts_named():
    phase = sign_flip([0])(exchange(), [2, -1])
    matrix, number = sent_by(phase, 2)
    np.testing.assert_array_equal(matrix, -(2 + MATRIX))
    assert number == 2
    np.testing.assert_array_equal(sent_by(phase, 3)[0], 3 + MATRIX)
    matrix, number = sent_by(scaled(10.0)(exchange(), [2]), 2)
    np.testing.assert_array_equal(matrix, 10 * (2 + MATRIX))
    assert number == 20


def test_rows_are_permuted_alike_and_whole():
    matrix, number = sent_by(permuted_rows()(exchange(), [0]), 0)
    order = np.argsort(np.asarray(matrix)[:, 0])
    np.testing.assert_array_equal(np.asarray(matrix)[order], MATRIX)
    assert order.tolist() != [0, 1, 2, 3] and number == 0


def test_rows_are_those_of_the_last_axis_but_one_and_stay_beside_their_numbers():
    def client(key, sent, state, client):
        return state, (jnp.arange(40).reshape(2, 10, 2), jnp.arange(10)), {}

    stacks, numbers = sent_by(permuted_rows()(exchange()._replace(client=client), [0]), 0)
    assert sorted(numbers.tolist()) == list(range(10)) != numbers.tolist()
    np.testing.assert_array_equal(stacks, np.arange(40).reshape(2, 10, 2)[:, numbers])


def test_a_claim_is_a_quotient_of_great_weight():
    phase = claimed(7.0, 100.0)(exchange(), [2])
    matrix, weight = sent_by(phase, 2)
    np.testing.assert_array_equal(matrix, np.full((4, 3), 700.0))
    assert weight == 100 and sent_by(phase, 1)[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["stack", "sum"])
def test_colluders_send_their_mean_less_their_deviation(reduce):
    phase = little_is_enough(1.5, [0])(exchange(reduce), [1, 3])
    sent = [sent_by(phase, i) for i in range(4)]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *sent)
    (messages,), (weights,) = phase.server(KEY, (), (stack,), (jnp.ones(4).at[0].set(0),))[0]
    forged = 2 + MATRIX - 1.5  # of 1 + MATRIX and 3 + MATRIX
    if reduce == "stack":
        np.testing.assert_allclose(messages[0], [MATRIX, forged, 2 + MATRIX, forged])
        np.testing.assert_array_equal(messages[1], [0, 1, 2, 3])
    else:
        np.testing.assert_allclose(messages[0], 2 * forged + 2 + MATRIX)
        assert messages[1] == 6 and weights == 3


def test_one_colluder_knows_no_deviation_and_nobody_is_no_client():
    for clients, expected in (([1], [1.0, 2.0]), ([-1], [1.0, 2.0])):
        phase = little_is_enough(1.5)(exchange("stack"), clients)
        stack = jax.tree.map(lambda *x: jnp.stack(x), *(sent_by(phase, i) for i in (1, 2)))
        (messages,), _ = phase.server(KEY, (), (stack,), (jnp.ones(2),))[0]
        np.testing.assert_array_equal(messages[1], expected)


def test_attackers_may_be_traced():
    send = jax.jit(lambda clients: sent_by(sign_flip([1])(exchange(), clients), 2)[1])
    assert send(jnp.array([2, -1])) == -2 and send(jnp.array([-1, -1])) == 2


@pytest.mark.slow
def test_phases_are_named():
    method = FederatedAlgorithm(None, (exchange(),), (exchange(), exchange()), (exchange(),), None)
    found = attacked(method, sign_flip(), [0])
    assert (found.setup, found.finish) == (method.setup, method.finish)
    assert all(sent_by(phase, 0)[0][0, 1] == -1 for phase in found.round)
    found = attacked(method, sign_flip(), [0], ["setup[0]"])
    assert sent_by(found.setup[0], 0)[0][0, 1] == -1 and found.round == method.round
    with pytest.raises(ValueError, match=r"phases: got 'round\[2\]'; allowed is setup\[0\], round"):
        attacked(method, sign_flip(), [0], ["round[2]"])
    with pytest.raises(ValueError, match=r"parts: got \(2,\); allowed is places in the message"):
        sent_by(sign_flip([2])(exchange(), [0]), 0)
