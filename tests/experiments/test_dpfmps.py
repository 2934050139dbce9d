"""What a run of DPFMPS says of its privacy."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.dpfmps.hooks import HOOKS


@pytest.mark.parametrize(("n_seeds", "name"), [(1, "privacy.json"), (2, "privacy_seed3.json")])
def test_every_seed_says_what_it_spent(tmp_path, n_seeds, name):
    server = SimpleNamespace(spent=(np.float32(4), np.float32(0.03125)))
    result = SimpleNamespace(seed=3, server=server)
    (line,) = HOOKS.after_seed(tmp_path, result, n_seeds)
    assert line.startswith("seed 3: differential privacy of a row, epsilon 4, delta 0.031 ")
    told = json.loads((tmp_path / name).read_text())
    assert (told["epsilon"], told["delta"]) == (4.0, 0.03125) and told["not_covered"]
    server.spent = (np.float32(math.inf), np.float32(0))  # no noise, and no privacy
    assert not list(HOOKS.after_seed(tmp_path / "nowhere", result, n_seeds))
