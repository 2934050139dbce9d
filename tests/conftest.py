"""Strict numerics for the whole suite."""

import os

# Known answers are known to float32: no accelerator, where products may be coarser.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# A silently broadcast [n] against [n, 1] is the commonest wrong reduction: make it an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
