"""Binaries: `python -m experiments.<name>`."""

import gc

# Imports and tracing make very many objects that stay: looking for garbage among them every 700
# objects takes a twentieth of a short job.
gc.set_threshold(100_000, 50, 50)
