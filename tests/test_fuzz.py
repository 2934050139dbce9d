"""Damaged files and messages end in one clear line, or in a right result.

`make fuzz` tries a thousand of each kind (JAXFEDMVC_FUZZ), `make test` a few.
"""

import contextlib
import functools
import os

import jax
import numpy as np
import pytest
from absl import flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.lib.command import parse
from jaxfedmvc import data
from jaxfedmvc.deploy import Job, Node, wire
from jaxfedmvc.deploy.holding import load
from jaxfedmvc.deploy.job import read_toml
from jaxfedmvc.deploy.plan import versions
from jaxfedmvc.engine import checkpoint
from tests.deploy import local

N = int(os.environ.get("JAXFEDMVC_FUZZ", "15"))
fuzzed = settings(
    max_examples=N,
    deadline=None,
    derandomize=N < 100,  # always the same few, but anew every night
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VIEWS = {0: np.arange(12.0).reshape(6, 2), 1: np.arange(6.0)[:, None] ** 2}


@st.composite
def damages(draw):
    """A function that damages bytes: flips, cuts, and pieces that are put in or twice."""
    flips = draw(
        st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4)
    )
    cut = draw(st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)))
    piece = draw(st.none() | st.tuples(st.floats(0, 1), st.binary(max_size=8)))

    def damage(content):
        changed = bytearray(content)
        for place, mask in flips:
            if changed:
                changed[int(place * len(changed))] ^= mask
        if cut is not None:
            a, b = sorted(int(x * len(changed)) for x in cut)
            del changed[a:b]
        if piece is not None:
            at = int(piece[0] * len(changed))
            changed[at:at] = piece[1]
        return bytes(changed)

    return damage


def right_or_one_line(read):
    """Calls it; an error is one of bad input, and says so in a line that can be read."""
    try:
        return read()
    except (ValueError, OSError) as error:
        text = str(error)
        assert text and len(text.splitlines()) <= 3 and len(text) < 2000, text
    except flags.Error as error:
        raise AssertionError(f"not told as bad input: {error!r}") from error
    return None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One good file of each kind."""
    folder = tmp_path_factory.mktemp("good")
    local.write_node(folder, 0, VIEWS, ["e_fkmvc"], labels=np.arange(6) % 2)
    np.savez(folder / "set.npz", **{f"view_{v}": x for v, x in VIEWS.items()}, labels=np.arange(6))
    rows = "\n".join(f"{i},{a},{b}" for i, (a, b) in enumerate(VIEWS[0]))
    (folder / "table.csv").write_text(f"c,a,b\n{rows}\n")
    (folder / "t.csv").write_text(f"id,a,b\n{rows}\n")
    (folder / "table.toml").write_text(
        'client=0\ndata="t.csv"\nids="id"\n[agrees]\nmethods=["e_fkmvc"]\n'
    )
    (folder / "job.toml").write_text(
        'name="a"\nmethod="e_fkmvc"\nclients=2\nrounds=1\n[settings]\nn_clusters=2\nalpha=2.0\n'
    )
    (folder / "run.flags").write_text(
        "--algorithm=e_fkmvc\n--n_clusters=2\n--alpha=2.5\n--seeds=2\n"
    )
    checkpoint.save(folder / "state.npz", TREE, {"made": 3})
    return folder


TREE = {"a": np.arange(6.0), "b": (np.ones(2, bool), np.int32(4))}


def node_of(path, folder):
    return load(path)


def set_of(path, folder):
    return data.load(str(path))


def state_of(path, folder):
    return checkpoint.restore(path, TREE)


def flags_of(path, folder):
    return parse([f"--flagfile={path}"])


def job_of(path, folder):
    return Job.from_json(read_toml(path))


# MATLAB files are left out: SciPy's own reader ends the process with some damaged ones.
READERS = {
    "data0.npz": lambda path, folder: node_of(folder / "node0.toml", folder),
    "node0.toml": node_of,
    "t.csv": lambda path, folder: node_of(folder / "table.toml", folder),
    "set.npz": set_of,
    "table.csv": set_of,
    "state.npz": state_of,
    "run.flags": flags_of,
    "job.toml": job_of,
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_in_one_line(name, files, tmp_path):
    content = (files / name).read_bytes()
    for file in files.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / name
    assert READERS[name](path, tmp_path) is not None

    @fuzzed
    @given(damages())
    def damaged(damage):
        path.write_bytes(damage(content))
        right_or_one_line(functools.partial(READERS[name], path, tmp_path))

    damaged()


def test_a_damaged_message_is_answered(files):
    node = Node(files / "node0.toml")
    job = Job("a", "e_fkmvc", 2, {"n_clusters": 2})
    told = {"settings": job.to_json(), "versions": versions()}
    requests = [
        wire.pack({"kind": kind, "job": "a", "exchange": 1, **told}, b"1234")
        for kind in ("hello", "join", "keys", "exchange", "assign", "inform")
    ]

    @fuzzed
    @given(st.sampled_from(requests), damages())
    def damaged(request, damage):
        meta, _ = wire.unpack(node.handle(damage(request)))
        assert "error" in meta or "card" in meta
        assert meta.get("error") != "internal"

    damaged()


def test_a_damaged_body_is_refused_or_has_its_shapes():
    like = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, bool)}
    body = wire.encode(like)

    @fuzzed
    @given(damages())
    def damaged(damage):
        with contextlib.suppress(wire.Refused):
            found = wire.decode(damage(body), like, "it", finite=True)
            jax.tree.map(lambda x, y: x.shape == y.shape and x.dtype == y.dtype, found, like)

    damaged()
