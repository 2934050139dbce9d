"""A deployed run is the simulated one, to the bit."""

import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.deploy import Server
from jaxfedmvc.engine.streaming import run_streaming
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.helpers import programs

# Arrays shrink between rounds; or states hold keys, so that the simulation is one program, whose
# sums are rounded elsewhere.
LABELS_ALONE = ("vertcohirf", "local_kmeans")


@pytest.mark.slow  # `.ci/run` has three of them in `test_processes`
@pytest.mark.parametrize("name", local.DEPLOYED)
def test_a_deployed_run_is_the_simulation(name, tmp_path):
    lab = common.Lab(name)
    federation = lab.federation
    n = federation.n_clients
    job = local.job_of(name, n)
    transport = local.Local(local.nodes_of(local.write_nodes(tmp_path, federation, [name])))
    server = Server(job, transport, tmp_path / "server", say=lambda line: None)
    summary = server.run()

    algorithm = job.make(n)
    host = jax.tree.map(np.asarray, ordered(federation))
    simulated = simulate(algorithm, host)
    if name not in LABELS_ALONE:
        same = jax.tree.map(as_numbers, (server.server, simulated.state.server))
        jax.tree.map(np.testing.assert_array_equal, *same)
        count = engine.traffic(algorithm, host)
        times = {"setup": 1, "round": int(simulated.n_rounds), "finish": 1}
        for way in ("up", "down"):
            expected = sum(n * getattr(count[stage], way) for stage, n in times.items())
            assert summary[f"bytes_{way}"] == expected
    assert summary["rounds"] == (int(simulated.n_rounds) if algorithm.round else 0)
    for cohort, labels in zip(host.cohorts, simulated.labels, strict=True):
        for k, client in enumerate(cohort.client_ids.tolist()):
            file = tmp_path / f"state{client}" / "job" / "labels.csv"
            rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=int, ndmin=2)
            np.testing.assert_array_equal(rows[:, 1], np.asarray(labels)[k][cohort.mask[k]])
    programs.make_room()


def simulate(algorithm, host):
    try:
        return run_streaming(algorithm, host, jax.random.key(7), common.ROUNDS, client_chunk=1)
    except ValueError:  # client states with keys
        run = jax.jit(lambda f, k: engine.run(algorithm, f, k, common.ROUNDS, client_chunk=1))
        return run(host, jax.random.key(7))


def as_numbers(x):
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def ordered(federation):
    """The cohorts and clients in a plan's order, padded to the longest client."""
    cohorts = []
    for c in sorted(federation.cohorts, key=lambda c: (-len(c.view_ids), c.view_ids)):
        order = np.argsort(np.asarray(c.client_ids))
        rows = int(np.asarray(c.mask).sum(axis=1).max())
        cut = c.replace(
            views=tuple(x[:, :rows] for x in c.views),
            mask=c.mask[:, :rows],
            sample_ids=c.sample_ids[:, :rows],
        )
        cohorts.append(jax.tree.map(lambda x, o=order: x[o], cut))
    return federation.replace(cohorts=tuple(cohorts), labels=None)
