"""What travels: sizes of messages."""

from __future__ import annotations

from typing import Any

import jax


def nbytes(tree: Any) -> int:
    """Bytes of a pytree of arrays, or of the shapes that stand for them, as sent uncompressed."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
