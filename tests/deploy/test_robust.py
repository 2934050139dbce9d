"""Sums of a job under a rule: as in the simulation, and one client cannot move them anywhere."""

import jax
import numpy as np
import pytest

from jaxfedmvc.deploy import Server, wire
from jaxfedmvc.engine.streaming import run_streaming
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.deploy.test_equal import ordered

METHOD, SMALL = "e_fkmvc", {"n_restarts": 1}
CLIENTS = (((0, 1), {3: 8, 0: 5, 5: 6, 1: 7, 4: 6}),)
FEDERATION = common.federation("horizontal", common.parts("horizontal", CLIENTS))
RULE = {
    "rule": "median",
    "ratios": {"setup[0]": [0, 1], "round[0]": [0, 1]},
    "unguarded": ["setup[2]"],
}


def finished(folder, robust=None, liar=None):
    """Runs a job; `liar` is the client that adds to its sums in the rounds."""
    folder.mkdir()
    nodes = local.nodes_of(local.write_nodes(folder, FEDERATION, [METHOD]))
    transport = local.Local(nodes)

    def change(identity, reply):
        meta, body = wire.unpack(reply, 10**6)
        if meta.get("client") != liar or transport.place != "round" or not body:
            return reply
        lie = np.frombuffer(body, np.float32).copy()
        lie[: common.K * sum(common.DIMS["horizontal"])] += 1000  # sums of samples, before masses
        return wire.pack(meta, lie.tobytes())

    transport.change, transport.place = change, None
    job = local.job_of(METHOD, 5, small=SMALL, robust=robust)
    made = Server(job, transport, folder / "server", say=lambda line: None)
    make = made._make

    def noting(place):
        transport.place = place.stage
        make(place)

    made._make = noting
    made.run()
    return job, made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("robust") / "guarded", RULE)


@pytest.mark.slow
def test_a_guarded_job_is_the_guarded_simulation(guarded):
    job, made = guarded
    host = jax.tree.map(np.asarray, ordered(FEDERATION))
    simulated = run_streaming(job.make(5), host, jax.random.key(7), common.ROUNDS, client_chunk=1)
    jax.tree.map(np.testing.assert_array_equal, made.server, simulated.state.server)


@pytest.mark.slow
def test_one_liar_moves_a_sum_and_not_what_a_rule_makes_of_it(guarded, tmp_path):
    honest = centres(guarded[1])
    moved = {
        name: np.abs(centres(finished(tmp_path / name, rule, liar=5)[1]) - honest).max()
        for name, rule in (("sum", None), ("rule", RULE))
    }
    assert moved["sum"] > 10 * np.ptp(honest)
    assert moved["rule"] < 0.5 * np.ptp(honest)


def centres(made):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(made.server.models.fit)])


def test_a_share_that_is_nobody_is_refused(tmp_path):
    rule = RULE | {"rule": "trimmed_mean", "share": 0.19}
    told = "share: 0.19 of 5 clients, rounded down, is nobody; allowed is 0.2 or more"
    with pytest.raises(ValueError, match=told):
        finished(tmp_path / "job", rule)
    local.job_of(METHOD, 5, small=SMALL, robust=rule | {"share": 0.2}).make(5)


def test_what_a_rule_does_not_fit_is_found_before_anybody_is_asked(tmp_path):
    rule = {name: value for name, value in RULE.items() if name != "unguarded"}
    with pytest.raises(ValueError, match=r"setup\[2\]: its server reads single messages"):
        finished(tmp_path / "job", rule)
