"""What `import jaxfedmvc` brings with it, little that is not its own; and what binaries set."""

import os
import subprocess
import sys

import pytest

SLOW = ("sklearn", "pandas", "matplotlib", "scipy.stats", "scipy.optimize", "flwr", "torch")


def test_what_is_slow_to_import_waits_until_it_is_used():
    code = f"import sys, jaxfedmvc; print([m for m in {SLOW} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "[]"


@pytest.mark.parametrize("users", [None, "3"])
def test_binaries_keep_linear_algebra_to_one_thread_unless_told(users):
    code = "import experiments, os; print(os.environ['OPENBLAS_NUM_THREADS'])"
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    if users is not None:
        environment["OPENBLAS_NUM_THREADS"] = users
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == (users or "1")
