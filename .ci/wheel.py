"""Checks an installed jaxfedmvc: what is in it, and that a method runs."""

import subprocess
import sys
from importlib import metadata, util

import jax
import numpy as np

from jaxfedmvc import METHODS, Federation, data, engine, score

names = {file.parts[0] for file in metadata.files("jaxfedmvc")}
packages = {name for name in names if not name.endswith(".dist-info")}
assert packages == {"jaxfedmvc"}, f"the wheel holds {sorted(packages)}"
assert util.find_spec("experiments") is None
paths = {str(file) for file in metadata.files("jaxfedmvc")}
assert {"jaxfedmvc/py.typed", "jaxfedmvc/deploy/app/pyproject.toml"} <= paths

assert "site-packages" in engine.__file__, engine.__file__
rng = np.random.default_rng(0)
truth = np.arange(90) % 3
views = [3 * np.eye(3, d)[truth] + rng.normal(size=(90, d)) for d in (4, 5)]
parts = data.hybrid_partition(0, n_samples=90, n_views=2, n_clients=4, ratio=(1, 1))
federation = Federation.from_arrays(views, truth, partition=parts)
method = METHODS["e_fkmvc"]
algorithm = method.make(method.config(3), method.hyperparams())
result = jax.jit(engine.run, static_argnums=(0, 3))(algorithm, federation, jax.random.key(0), 5)
accuracy = score(federation, result.labels)["all"]["pooled"]["acc"]
assert accuracy > 0.8, accuracy
subprocess.run(
    [sys.executable, "-m", "jaxfedmvc.deploy", "--help"], check=True, stdout=subprocess.DEVNULL
)
