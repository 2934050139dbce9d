"""Binaries: `python -m experiments.<name>`."""

import gc
import os

# Imports and tracing make very many objects that stay: looking for garbage among them every 700
# objects takes a twentieth of a short job.
gc.set_threshold(100_000, 50, 50)
# Numbers have 32 bits, and a job's results are the same in everybody's shell.
os.environ["JAX_ENABLE_X64"] = "0"
# XLA calls linear algebra from threads of its own; OpenBLAS's would wait for each other there, all
# the longer the busier the machine is. Read when SciPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
