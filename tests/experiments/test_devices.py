"""Runs of a study on several devices at once."""

import json
import subprocess
import sys

import jax
import pytest

from experiments.lib import devices, study
from experiments.lib.command import JobSettings
from jaxfedmvc.engine import mesh

# Four sums, and where each was computed; the second device waits for the first to have begun.
_ON_TWO_DEVICES = """
import json, threading
import jax, jax.numpy as jnp
from experiments.lib.devices import each
from jaxfedmvc.engine.mesh import make_mesh

jax.config.update("jax_num_cpu_devices", 2)
both = threading.Barrier(2)
shared = jnp.arange(3)  # made before any device is chosen

def run(i):
    if i < 2:
        both.wait(timeout=60)
    total = jax.jit(jnp.sum)(shared + i)
    return int(total), next(iter(total.devices())).id

print(json.dumps(list(each(run, range(4), make_mesh({"sweep": 2})))))
"""


def test_runs_take_free_devices_at_once_and_come_in_order():
    """The barrier would break were they made one after another."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_TWO_DEVICES], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [total for total, _ in found] == [3, 6, 9, 12]
    assert {device for _, device in found[:2]} == {0, 1}


@pytest.mark.parametrize("laid_out", [False, True])
def test_what_a_run_raises_is_raised(laid_out):
    """With and without a mesh, after the items before it."""
    one = mesh.make_mesh({"sweep": 1}) if laid_out else None
    found = devices.each(lambda i: 6 // i, [3, 2, 0], one)
    assert [next(found), next(found)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(found)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--mesh=clients:2", "mesh: got 'clients:2'; allowed here is sweep:n"),
        ("--mesh=rows:2", "mesh: got 'rows:2'; allowed are sweep:m"),
    ],
)
def test_a_study_refuses_other_meshes(flag, words, capsys):
    """In one line, before anything is computed."""
    with pytest.raises(SystemExit):
        study.parse_or_exit([flag], "", {JobSettings: ("seed",)})
    assert words in capsys.readouterr().err
    assert jax.config.jax_num_cpu_devices <= 1
