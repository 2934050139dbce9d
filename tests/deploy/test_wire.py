"""Envelopes and bodies: what was sent comes back, and nothing else passes."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc.deploy import wire
from jaxfedmvc.deploy.wire import Refused

TREE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": (np.array([True, False]), np.int32(-4), np.uint8(7)),
    "empty": np.zeros((0, 3), np.float32),
    "half": jnp.asarray([1.5, -2.0], jnp.bfloat16),
}


def test_a_tree_comes_back_to_the_bit():
    back = wire.decode(wire.encode(TREE), TREE, "it")
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, np.asarray(y))


def test_bytes_are_those_of_the_leaves():
    assert len(wire.encode(TREE)) == wire.size(TREE) == 24 + 2 + 4 + 1 + 0 + 4
    assert wire.encode(np.float32(1)) == struct.pack("<f", 1)


def test_typed_keys_travel_as_numbers():
    key = jax.random.split(jax.random.key(3), 2)
    back = wire.decode(wire.encode(key), key, "keys")
    assert (jax.random.key_data(back) == jax.random.key_data(key)).all()


def test_an_envelope_comes_back():
    assert wire.unpack(wire.pack({"kind": "x", "n": [1]}, b"abc")) == (
        {"kind": "x", "n": [1]},
        b"abc",
    )


def test_what_no_receiver_takes_is_not_packed():
    room = wire._MOST_META - len('{"x": ""}')
    assert wire.unpack(wire.pack({"x": "a" * room}))[0]["x"] == "a" * room
    with pytest.raises(ValueError, match="meta: got '1048577 bytes'; allowed is 1048576 or less"):
        wire.pack({"x": "a" * (room + 1)})


GOOD = wire.pack({"kind": "hello"}, b"1234")


def test_a_body_may_be_as_long_as_is_allowed():
    assert wire.unpack(GOOD, most=4)[1] == b"1234"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (GOOD[:5], "malformed"),
        (GOOD[:12], "malformed"),
        (b"XXXX" + GOOD[4:], "malformed"),
        (GOOD[:4] + b"\x02" + GOOD[5:], "version"),
        (GOOD[:4] + b"\x00" + GOOD[5:], "version"),
        (wire._HEAD.pack(b"JFMV", 1, 2**20 + 1) + b"{" + b" " * 2**20 + b"}", "malformed"),
        (wire._HEAD.pack(b"JFMV", 1, 2**31) + b"{}", "malformed"),
        (wire._HEAD.pack(b"JFMV", 1, 2) + b"[]", "malformed"),
        (wire._HEAD.pack(b"JFMV", 1, 1) + b"\xff", "malformed"),
        (wire._HEAD.pack(b"JFMV", 1, 60_000) + b"[" * 60_000, "malformed"),
        (GOOD + b"5", "oversized"),
    ],
)
def test_what_is_no_envelope_is_refused(data, code):
    with pytest.raises(Refused) as refusal:
        wire.unpack(data, most=4)
    assert refusal.value.code == code


@pytest.mark.parametrize(
    ("body", "like", "code"),
    [
        (b"123", np.float32(0), "wrong_size"),
        (b"12345", np.float32(0), "wrong_size"),
        (wire.encode(np.zeros(3, np.float32)), np.zeros((2, 2), np.float32), "wrong_size"),
        (wire.encode(np.float32(np.nan)), np.float32(0), "not_finite"),
        (wire.encode(np.float32(np.inf)), np.float32(0), "not_finite"),
        (wire.encode(np.float32(-np.inf)), np.float32(0), "not_finite"),
        (wire.encode(jnp.bfloat16(np.inf)), jnp.bfloat16(0), "not_finite"),
        (b"\x02", np.bool_(True), "malformed"),
    ],
)
def test_what_was_not_expected_is_refused(body, like, code):
    with pytest.raises(Refused, match="the message") as refusal:
        wire.decode(body, like, "the message", finite=True)
    assert refusal.value.code == code


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_be_refused(data):
    for text in (data, GOOD[: len(data)] + data, wire._HEAD.pack(b"JFMV", 1, len(data)) + data):
        try:
            meta, _ = wire.unpack(text, most=100)
        except Refused:
            continue
        assert isinstance(meta, dict)
