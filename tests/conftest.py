"""Strict numerics for the whole suite."""

import gc
import os
import tempfile
from importlib.metadata import version

# Known answers are known to float32: no accelerator, where products may be coarser.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs run for milliseconds here and take seconds to optimise. Processes that tests start too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Half of what is left goes into fusions' way through MLIR and into modules cut into 32 parts. The
# older way rounds otherwise: `make test-all` takes the one that users have. The next release has a
# single way, and an option that it does not know would end the process.
if version("jaxlib").startswith("0.10."):
    options = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", options)
# Workers fill the cores already: threads of linear algebra would only wait for each other, for
# seconds where one takes milliseconds.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of workers: an arena for each thread of a compiler keeps an eighth of the memory for nothing.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
# Workers, and processes that tests start, compile many of the same programs: one folder for all of
# a session, made by the first process and removed when it ends.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="jaxfedmvc-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.01"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

from tests.helpers import programs

# Tracing makes many objects that live long: looking for garbage among them took a fifth of it.
gc.set_threshold(100_000, 50, 50)
# A silently broadcast [n] against [n, 1] is the commonest wrong reduction: make it an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


_SHORT = ("clustering", "data")


def pytest_collection_modifyitems(items):
    """Folders of short files come last: no worker is left alone with a long one at the end."""
    items.sort(key=lambda item: item.path.parent.name in _SHORT)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """No module leaves more compiled programs behind than the next one has room beside."""
    with programs.one_context():
        yield
    programs.make_room()


@pytest.fixture(scope="module")
def compiled():
    """The seconds of every compilation from here on, by any program."""
    events = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def no_freed_memory():
    """Workers stay below 1.5 GB: what one test's compilers freed is not kept for the next."""
    yield
    programs.give_back()
