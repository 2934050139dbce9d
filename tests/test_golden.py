"""Small runs of every method, recorded: labels, bytes and what clients and server report.

They change on purpose only. `JAXFEDMVC_RECORD=1 pytest tests/test_golden.py` writes them anew.
Labels and bytes must be equal. Reported numbers must be equal to the bit where the recorded
processor and versions are these (`JAXFEDMVC_EXACT=1`), and to rounding elsewhere.
"""

import functools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfedmvc import Federation, data, engine
from jaxfedmvc.algorithms import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.coreset_kmeans import CoresetKMeansConfig, coreset_kmeans
from jaxfedmvc.algorithms.distr_kmeans import DistrKMeansConfig, distr_kmeans
from jaxfedmvc.algorithms.dpfmps import DPFMPSConfig, DPFMPSP2EstConfig, dpfmps, dpfmps_p2est
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    FedHKHyperparams,
    FedHKParafac2Config,
    FedHKTuckerConfig,
    PrivacySettings,
    e_fkmvc,
    e_fkmvc_with_noise,
    fedhk_parafac2,
    fedhk_tucker,
)
from jaxfedmvc.algorithms.fmcsc import local_fmcsc
from jaxfedmvc.algorithms.label_consensus import LabelConsensusConfig, label_consensus
from jaxfedmvc.algorithms.local_kmeans import LocalKMeansConfig, local_kmeans
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, mgcd
from jaxfedmvc.algorithms.vertcohirf import (
    LocalStep,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    vertcohirf,
    vertcohirf_of_steps,
)
from jaxfedmvc.clustering.local import dbscan_method, kmeans_method, sc_srgf_method

FOLDER = Path(__file__).parent / "golden"
K = 4
SMALL = {
    "hidden": (16,),
    "latent_dim": 6,
    "head_hidden": 16,
    "pretrain_epochs": 4,
    "local_epochs": 3,
    "distill_epochs": 2,
    "batch_size": 16,
    "n_init": 3,
}
GRAPHS = {
    "latent_dim": 4,
    "server_hidden": 6,
    "server_epochs": 1,
    "batch_size": 16,
    "n_neighbours": 4,
    "n_init": 3,
}

# Name -> (topology, rounds, algorithm).
RUNS = {
    "coreset_kmeans": ("vertical", 0, lambda: coreset_kmeans(CoresetKMeansConfig(K))),
    "distr_kmeans": ("vertical", 0, lambda: distr_kmeans(DistrKMeansConfig(K))),
    "label_consensus": (
        "vertical",
        0,
        lambda: label_consensus(LabelConsensusConfig((2, 3, 4), n_init=3)),
    ),
    "dpfmps": ("vertical", 0, lambda: dpfmps(DPFMPSConfig(K, dp_epsilon=4.0))),
    "dpfmps_p2est": ("vertical", 0, lambda: dpfmps_p2est(DPFMPSP2EstConfig(K, dp_epsilon=4.0))),
    "e_fkmvc": ("partial", 3, lambda: e_fkmvc(FedHKConfig(K, n_restarts=2))),
    "e_fkmvc_personal": (
        "partial",
        2,
        lambda: e_fkmvc(
            FedHKConfig(K, personal="proximal", personal_steps=2, n_restarts=1),
            FedHKHyperparams(tau=3.0),
        ),
    ),
    "fedhk_parafac2": ("partial", 3, lambda: fedhk_parafac2(FedHKParafac2Config(K, n_restarts=1))),
    "fedhk_tucker": (
        "partial",
        3,
        lambda: fedhk_tucker(FedHKTuckerConfig(K, ranks=(2, 3, 2), n_restarts=1)),
    ),
    "private_e_fkmvc": (
        "full",
        2,
        lambda: e_fkmvc_with_noise(FedHKConfig(K), None, PrivacySettings(0.5)),
    ),
    "fmcsc": (
        "partial",
        2,
        lambda: fmcsc(FMCSCConfig(K, **SMALL), FMCSCHyperparams(learning_rate=3e-3)),
    ),
    "fmcsc_best": (
        "partial",
        2,
        lambda: fmcsc(
            FMCSCConfig(
                K,
                **SMALL,
                partial_models="branch",
                partial_rounds=False,
                centroids="federated",
                centroid_rounds=2,
                components="AB",
            ),
            FMCSCHyperparams(learning_rate=3e-3, mask_rate=0.3, upload_noise=1e-4),
        ),
    ),
    "fmcsc_leader": (
        "partial",
        2,
        lambda: fmcsc(
            FMCSCConfig(K, **SMALL, target="global", leader_epochs=2, contrast="ntxent"),
            FMCSCHyperparams(learning_rate=3e-3, upload_clip=50.0),
        ),
    ),
    "local_fmcsc": ("partial", 2, lambda: local_fmcsc(FMCSCConfig(K, **SMALL))),
    "local_kmeans": ("partial", 0, lambda: local_kmeans(LocalKMeansConfig(K))),
    "mgcd": ("vertical", 2, lambda: mgcd(MGCDConfig(K, **GRAPHS))),
    "mgcd_trained": (
        "vertical",
        2,
        lambda: mgcd(MGCDConfig(K, server="trained", affinity="each", **GRAPHS)),
    ),
    "mgcd_literal": (
        "vertical",
        2,
        lambda: mgcd(
            MGCDConfig(
                K,
                mode="literal",
                server="trained",
                affinity="mean",
                hidden=(8,),
                pretrain_epochs=2,
                local_epochs=1,
                **GRAPHS,
            ),
            MGCDHyperparams(lam=1.0),
        ),
    ),
    "vertcohirf": (
        "vertical",
        5,
        lambda: vertcohirf(
            VertCoHiRFConfig(K), VertCoHiRFHyperparams(0.7, relaxed=0.6, n_candidates=3)
        ),
    ),
    "vertcohirf_mixed": (
        "vertical",
        5,
        lambda: vertcohirf_of_steps(
            [
                LocalStep(kmeans_method(K)),
                LocalStep(dbscan_method(2.0, 3)),
                LocalStep(sc_srgf_method(K, 3, 0.5)),
            ],
            similarity="rbf",
        ),
    ),
}


@functools.cache
def federation(kind):
    """Sixty blobs in three views: six agents' or clients' worth, some of them partial."""
    rng = np.random.default_rng(0)
    truth = np.arange(60) % K
    views = [2 * rng.normal(size=(K, d))[truth] + rng.normal(size=(60, d)) for d in (5, 4, 3)]
    if kind == "vertical":
        return Federation.from_agents([(range(60), view) for view in views], truth)
    parts = data.hybrid_partition(
        0, n_samples=60, n_views=3, n_clients=6, ratio=(1, 1) if kind == "partial" else (1, 0)
    )
    return Federation.from_arrays(views, truth, partition=parts)


def outcome(name):
    """What is recorded of one run."""
    kind, rounds, make = RUNS[name]
    algorithm, clients = make(), federation(kind)
    run = jax.jit(lambda f, key: engine.run(algorithm, f, key, rounds))
    result = jax.device_get(run(clients, jax.random.key(3)))
    told = jax.tree.leaves_with_path(result.info)
    return {
        "labels": [np.asarray(x).tolist() for x in result.labels],
        "n_rounds": int(result.n_rounds),
        "bytes": {s: list(t) for s, t in engine.traffic(algorithm, clients).items()},
        "info": {
            jax.tree_util.keystr(path): np.asarray(x, np.float64).ravel().tolist()
            for path, x in told
            if np.size(x) <= 64 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        },
    }


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_is_the_same_with_64_bits(name):
    narrow = outcome(name)
    with jax.enable_x64(True):
        assert outcome(name) == narrow


@pytest.mark.skipif("JAXFEDMVC_RECORD" not in os.environ, reason="JAXFEDMVC_RECORD is not set")
@pytest.mark.parametrize("name", sorted(RUNS))
def test_record(name):
    (FOLDER / f"{name}.json").write_text(json.dumps(outcome(name)) + "\n")


# Labels and bytes of each method's default are compared in tests/algorithms/test_common.py too.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_is_as_it_was(name):
    found, before = outcome(name), recorded(name)
    for part in ("labels", "n_rounds", "bytes"):
        assert found[part] == before[part], part
    assert found["info"].keys() == before["info"].keys()
    for place, values in before["info"].items():
        if "JAXFEDMVC_EXACT" in os.environ:
            np.testing.assert_array_equal(found["info"][place], values, err_msg=place)
        else:
            np.testing.assert_allclose(
                found["info"][place], values, rtol=2e-3, atol=1e-4, err_msg=place
            )
