"""Strict numerics for the whole suite."""

import os

# One test process shares two cores with nothing else; the flag must be set before jax starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# A silently broadcast [n] against [n, 1] is the commonest wrong reduction: make it an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
