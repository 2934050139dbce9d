"""A set that MGCD's binaries run on in seconds."""

import numpy as np


def save_toy(folder):
    """Saves two views, of different width, of three well separated groups; returns the path."""
    rng = np.random.default_rng(0)
    labels = np.arange(45) % 3
    views = {
        f"view_{v}": (rng.normal(size=(45, d)) + 20 * np.eye(3, d)[labels]).astype(np.float32)
        for v, d in enumerate((3, 5))
    }
    np.savez(folder / "toy.npz", labels=labels, **views)
    return folder / "toy.npz"
