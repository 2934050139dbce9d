"""Checkpoints: the same bits back, or one line that says what is wrong."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import Federation, engine
from jaxfedmvc.algorithms import FedHKConfig, FMCSCConfig, e_fkmvc, fmcsc
from jaxfedmvc.data import Part
from jaxfedmvc.engine import checkpoint

META = {"seed": 3, "none": None, "third": 1 / 3, "tiny": 5e-324, "losses": [float("inf"), 0.1]}
METHODS = {
    "fmcsc": fmcsc(FMCSCConfig(2, hidden=(3,), latent_dim=2, head_hidden=2)),
    "e_fkmvc": e_fkmvc(FedHKConfig(2)),
}


def bits(rng, shape):
    """An array with any bits, NaNs of all kinds among them; keys too."""
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(rng.integers(99))), shape.shape)
    if shape.dtype == bool:
        return rng.random(shape.shape) < 0.5
    noise = rng.bytes(int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize)
    return np.frombuffer(noise, shape.dtype).reshape(shape.shape)


@pytest.fixture(params=METHODS)
def tree(request):
    """A run's state of a method, filled with noise, and further kinds of leaves."""
    x, y = np.zeros((8, 3)), np.zeros((8, 2))
    parts = [Part((0, 1), np.arange(8, dtype=np.int32).reshape(2, 4), np.arange(2, dtype=np.int32))]
    federation = Federation.from_arrays([x, y], partition=parts)
    method = METHODS[request.param]
    shapes = jax.eval_shape(lambda key: engine.start(method, federation, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    return {
        "run": jax.tree.map(lambda shape: bits(rng, shape), shapes),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), (2, 3)),
        "half": jnp.asarray([1.5, -0.0, np.nan], jnp.bfloat16),
        "payload": np.uint32([0x7FC01234, 0xFF812345]).view(np.float32),
        "empty": (np.zeros((0, 4), np.int8), None, np.float64(0.1)),
    }


def raw(tree):
    """What must be the same: for each leaf its dtype, its shape and its bytes."""
    result = []
    for leaf in jax.tree.leaves(tree):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        result.append((str(leaf.dtype), leaf.shape, array.tobytes()))
    return result


def test_the_same_bits_come_back(tree, tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, {"old": np.zeros(3)}, {})
    (tmp_path / ".checkpoint.npz.partial").write_bytes(b"of a process that died")
    checkpoint.save(path, tree, META)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.npz"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    for like in (tree, shapes):
        found, meta = checkpoint.restore(path, like)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert raw(found) == raw(tree)
        assert meta == META
    # The keys are keys of their own kind.
    np.testing.assert_array_equal(
        jax.random.bits(found["keys"][1, 2]), jax.random.bits(tree["keys"][1, 2])
    )


def test_a_half_written_file_beside_it_is_ignored(tmp_path):
    path = tmp_path / "checkpoint.npz"
    like = np.arange(3)
    partial = tmp_path / ".checkpoint.npz.partial"
    checkpoint.save(path, like, {"round": 1})
    partial.write_bytes(path.read_bytes()[:50])
    found, meta = checkpoint.restore(path, like)
    assert raw(found) == raw(like) and meta == {"round": 1}
    checkpoint.delete(path)
    checkpoint.delete(path)
    assert not list(tmp_path.iterdir())


LIKE = {"a": np.zeros((2, 3), np.float32), "b": (np.zeros(4, np.int32), jax.random.key(0))}
MISMATCHES = {
    "a leaf that is not there": (LIKE | {"c": np.zeros(1)}, "has no leaf ['c']"),
    "a leaf too many": ({"a": LIKE["a"]}, "has a leaf too many, ['b'][0]"),
    "shape": (
        LIKE | {"a": np.zeros((3, 2), np.float32)},
        "leaf ['a'] is float32[2, 3]; wanted is float32[3, 2]",
    ),
    "dtype": (
        LIKE | {"b": (np.zeros(4, np.float32), LIKE["b"][1])},
        "leaf ['b'][0] is int32[4]; wanted is float32[4]",
    ),
    "key": (
        LIKE | {"b": (LIKE["b"][0], jax.random.key(0, impl="rbg"))},
        "leaf ['b'][1] is key<fry>[]; wanted is key<rbg>[]",
    ),
    "no key": (
        LIKE | {"b": (LIKE["b"][0], np.zeros(2, np.uint32))},
        "leaf ['b'][1] is key<fry>[]; wanted is uint32[2]",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_another_tree_is_refused(case, tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, LIKE, {})
    like, told = MISMATCHES[case]
    with pytest.raises(ValueError, match=re.escape(f"{path}: {told}")):
        checkpoint.restore(path, like)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path, cut = tmp_path / "checkpoint.npz", tmp_path / "cut.npz"
    checkpoint.save(path, LIKE, META)
    whole = path.read_bytes()
    places = np.random.default_rng(0).integers(0, len(whole), 60)
    for place in (0, 1, 4, len(whole) - 1, *places):
        cut.write_bytes(whole[:place])
        with pytest.raises(ValueError, match=re.escape(f"{cut}: no checkpoint, or a damaged one")):
            checkpoint.restore(cut, LIKE)


def test_a_byte_changed_among_the_numbers_is_refused(tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, np.full(100, 0x5A, np.uint8), {})
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"\x5a" * 100) + 50] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="a damaged one"):
        checkpoint.restore(path, np.zeros(100, np.uint8))


def test_foreign_files_are_refused(tmp_path):
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, x=np.zeros(3))
    text, array, pickled = (tmp_path / name for name in ("a.txt", "a.npy", "b.npy"))
    text.write_text("not a checkpoint\n")
    np.save(array, np.zeros(3))
    np.save(pickled, np.array([{}]), allow_pickle=True)
    for path in (foreign, text, array, pickled):
        with pytest.raises(ValueError, match=re.escape(f"{path}: no checkpoint")):
            checkpoint.restore(path, np.zeros(3))
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path / "absent.npz", np.zeros(3))


def test_what_cannot_be_kept_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, LIKE, META)
    with pytest.raises(ValueError, match=re.escape("leaf ['x'] is object")):
        checkpoint.save(path, {"x": np.array([None])}, {})
    with pytest.raises(TypeError):
        checkpoint.save(path, LIKE, {"x": object()})
    assert raw(checkpoint.restore(path, LIKE)[0]) == raw(LIKE)


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be opened")
def test_what_is_renamed_lies_on_the_disk_before_and_its_name_after(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, f=function: (events.append(n), f(*a))[1])
    checkpoint.save(tmp_path / "state.npz", {"x": np.zeros(3)}, META)
    assert events == ["fsync", "replace", "fsync"]


def test_numbers_of_python_come_back(tmp_path):
    tree = {"a": 1.5, "b": 3, "c": None}
    checkpoint.save(tmp_path / "x", tree, {})
    assert checkpoint.restore(tmp_path / "x", tree) == (tree, {})
