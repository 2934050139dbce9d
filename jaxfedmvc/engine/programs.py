"""Functions that a run calls again and again, each compiled once for the shapes of its arguments.

    programs = Programs()
    found, note = programs.call(Program("start", function), federation, key)

A call traces its program, compiles it and runs it. Who knows beforehand what a run will call can
walk through it by `shapes`, which only traces, while other threads compile what was traced: `begin`
opens these, `walk_aside` lets the walk itself be made in another thread, so that the run begins
while later programs are on their way, and a call waits for its own. Programs of equal text are
compiled once, whatever they are called.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfedmvc.precision import in_32_bits

PyTree = Any

# Programs compiled at once, each in some hundred MB. More would take cores from the program that
# the run waits for, and from the run once it has begun.
_COMPILERS = 2


class Program(NamedTuple):
    """A function of a run.

    Attributes:
      name: Two programs of one name, called with the same structures and shapes, are the same.
      function: Pure; returns a pytree, or a `Noted`.
      donated: Arguments whose memory is used again.
      trains: Whether it takes long; or is soon over. See `compiler_options`.
    """

    name: str
    function: Callable[..., Any]
    donated: tuple[int, ...] = ()
    trains: bool = False


class Noted(NamedTuple):
    """What a program computes, and what is known of it once it is traced.

    Attributes:
      result: A pytree.
      note: Anything of Python's; every call returns it beside the result.
    """

    result: PyTree
    note: Any


class Traced(NamedTuple):
    """A program before it is compiled.

    Attributes:
      name: As of `Program`.
      traced: A `jax.stages.Traced`, which can be lowered and compiled.
      seconds: What tracing it took.
      options: What XLA is told; see `compiler_options`.
      picked: Places among the leaves of its arguments, where it only hands some of them on and is
        not compiled; else None.
    """

    name: str
    traced: Any
    seconds: float
    options: dict[str, Any] | None
    picked: list[int] | None


@dataclasses.dataclass(eq=False)
class _Flat:
    """A program over the leaves of its arguments, of one structure and one set of shapes.

    Programs of cohorts that compute alike differ in structures alone, such as in the names of
    views: as functions of leaves they are the same, and XLA compiles them once.
    """

    name: str
    function: Any  # jitted
    structure: Any = None  # of what is returned; known once the function is traced
    note: Any = None  # as well
    traced: Traced | None = None
    compiled: Future | None = None

    def is_ready(self) -> bool:
        """Says whether nobody need trace it any more, or see to it that it is compiled."""
        picks = self.traced is not None and self.traced.picked is not None
        return self.compiled is not None or picks


class Programs:
    """The programs of a run.

    Attributes:
      ahead: Whether programs are compiled for shapes alone. If not, as they are called.
      compiled: What was compiled, by its text.
      seconds: Time that calls have waited for their programs, to be traced or compiled.
    """

    def __init__(self, ahead: bool = True, compiled: dict[str, Future] | None = None) -> None:
        """Has no program yet; `compiled` may hold what others compiled, and receives the rest."""
        self.ahead = ahead
        self.compiled: dict[str, Future] = {} if compiled is None else compiled
        self.seconds = 0.0
        self._flat: dict[Any, _Flat] = {}  # by name, structure and shapes of the arguments
        self._compilers: ThreadPoolExecutor | None = None
        self._on_program: Callable[[int, int, str], None] = lambda i, n, name: None
        # A walk in another thread, what is told of its end, and what ends it early.
        self._walker: ThreadPoolExecutor | None = None
        self._walk: Future | None = None
        self._walker_thread: int | None = None
        self._then: Callable[[Any], None] = lambda result: None
        self._has_traced, self._stop = threading.Condition(), threading.Event()

    def __len__(self) -> int:
        return len(self._flat)

    # --- Calls ------------------------------------------------------------------------------------

    @in_32_bits
    def call(self, program: Program, *arguments: Any) -> tuple[Any, Any]:
        """Calls a program, and waits for it where it has to be traced or compiled first.

        Returns:
          What it returns, and its note; None for a program that makes none.
        """
        leaves, structure = jax.tree.flatten(arguments)
        place = _place(program, structure, leaves)
        if self._walk is not None:
            self._wait_until_traced(place, program.name)
        is_new = place not in self._flat
        flat = self._entry(place, program, structure)
        if not self.ahead:
            # The first call returns when the program is compiled and on its way, not when it ends.
            with self.waiting() if is_new else nullcontext():
                found = flat.function(*leaves)
        else:
            traced = self._traced(flat, program, leaves)
            if traced.picked is not None:
                found = [leaves[i] for i in traced.picked]
            else:
                found = self._executable(flat)(*leaves)
        return jax.tree.unflatten(flat.structure, found), flat.note

    @in_32_bits
    def shapes(self, program: Program, *arguments: Any) -> tuple[Any, Any]:
        """Traces a program, which is compiled meanwhile where `begin` has opened threads for that.

        Returns:
          As `call`, with shapes and types in the place of arrays.

        Raises:
          concurrent.futures.CancelledError: In a walk aside that has been given up.
        """
        leaves, structure = jax.tree.flatten(arguments)
        flat = self._entry(_place(program, structure, leaves), program, structure)
        traced = self._traced(flat, program, leaves)
        self._submit(flat)
        self._tell_traced()
        return jax.tree.unflatten(flat.structure, traced.traced.out_info), flat.note

    def traced(self) -> list[Traced]:
        """Returns all programs that have been traced."""
        return [flat.traced for flat in list(self._flat.values()) if flat.traced is not None]

    # --- Compilation ahead of the calls -----------------------------------------------------------

    def begin(self, on_program: Callable[[int, int, str], None]) -> None:
        """Opens threads, in which all that is traced is compiled until `close`.

        Tracing and lowering hold Python's lock; XLA compiles meanwhile without it.

        Args:
          on_program: Called as `(ready, of how many, name)`: with zeros before the program of this
            name is traced; then, while programs are waited for, with the name of one that is not
            ready.
        """
        self.close()
        self._on_program = on_program
        self._compilers = ThreadPoolExecutor(_COMPILERS)
        for flat in self._flat.values():
            self._submit(flat)

    def finish(self) -> None:
        """Waits until everything that was traced is compiled, and raises what went wrong."""
        self._wait()
        self.close()
        for flat in self._flat.values():
            if flat.compiled is not None:
                flat.compiled.result()

    def walk_aside(self, walk: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Lets another thread go through a run by `shapes`.

        Of settings that JAX keeps for each thread it takes over the default device and the default
        precision of products.

        Args:
          walk: Makes the walk.
          then: Told what it has returned, by the first call of this thread that finds it ended.
        """
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

        def aside() -> Any:
            self._walker_thread = threading.get_ident()
            with jax.default_device(device), jax.default_matmul_precision(precision):
                return walk()

        self._then = then
        self._stop.clear()
        self._walker = ThreadPoolExecutor(1)
        self._walk = self._walker.submit(aside)
        self._walk.add_done_callback(lambda walked: self._tell_traced())

    def walked(self) -> None:
        """Waits for a walk aside to end, if there is one, and raises what it raised."""
        if self._walk is None:
            return
        with self.waiting():
            found, self._walk = self._walk.result(), None
        self._then(found)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what is done within as time that calls have waited."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def close(self) -> bool:
        """Gives up what is still to be traced or compiled; says whether a walk was cut off."""
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)
            self._compilers = None
        if self._walker is None:
            return False
        self._stop.set()
        self._walker.shutdown()
        was_cut_off = self._walk is not None
        self._walker = self._walk = self._walker_thread = None
        return was_cut_off

    # --- Tracing ----------------------------------------------------------------------------------

    def _entry(self, place: Any, program: Program, structure: Any) -> _Flat:
        """Returns a program as a function of the leaves of arguments of this structure."""
        if place in self._flat:
            return self._flat[place]

        def flat(*leaves: Any) -> list[Any]:
            found = program.function(*jax.tree.unflatten(structure, leaves))
            if isinstance(found, Noted):
                found, made.note = found
            out, made.structure = jax.tree.flatten(found)
            return out

        sizes = [child.num_leaves for child in structure.children()]
        donated = [i for d in program.donated for i in range(sum(sizes[:d]), sum(sizes[: d + 1]))]
        # Unused arguments are kept, so that programs of equal text are called alike.
        made = _Flat(program.name, jax.jit(flat, donate_argnums=donated, keep_unused=True))
        self._flat[place] = made
        return made

    def _traced(self, flat: _Flat, program: Program, leaves: list[Any]) -> Traced:
        """Returns a program, traced now if it has not been."""
        is_aside = threading.get_ident() == self._walker_thread
        if is_aside and self._stop.is_set():
            raise CancelledError
        if flat.traced is None:
            if not is_aside:  # calls tell what they wait for
                self._on_program(0, 0, program.name)
            flat.traced = _trace(program, flat.function, leaves)
        return flat.traced

    def _wait_until_traced(self, place: Any, name: str) -> None:
        """Waits until a walk aside has traced a program, or everything that it will."""
        walk = self._walk
        assert walk is not None

        def is_ready() -> bool:
            return place in self._flat and self._flat[place].is_ready()

        if not is_ready():
            self._on_program(0, 0, name)
            with self.waiting(), self._has_traced:
                self._has_traced.wait_for(lambda: is_ready() or walk.done())
        if walk.done():
            self.walked()

    def _tell_traced(self) -> None:
        with self._has_traced:
            self._has_traced.notify_all()

    # --- Compiling --------------------------------------------------------------------------------

    def _submit(self, flat: _Flat) -> None:
        """Lets a traced program be compiled in another thread, if there are such threads."""
        if self._compilers is not None and flat.traced is not None and not flat.is_ready():
            flat.compiled = self._compile(flat.traced, self._compilers.submit)

    @in_32_bits
    def _compile(self, traced: Traced, submit: Callable[..., Any]) -> Future:
        """Compiles a traced program, or finds one of the same text; returns its future."""
        lowered = traced.traced.lower()
        text = lowered.as_text()
        if text not in self.compiled or _is_lost(self.compiled[text]):
            self.compiled[text] = submit(lowered.compile, traced.options)
        return self.compiled[text]

    def _executable(self, flat: _Flat) -> Callable[..., Any]:
        """Returns a traced program as XLA has made it, and waits for that."""
        assert flat.traced is not None
        if flat.compiled is None or flat.compiled.cancelled():
            with self.waiting():
                flat.compiled = self._compile(flat.traced, _at_once)
        elif not flat.compiled.done():
            self._wait(flat)
        return flat.compiled.result()

    def _wait(self, wanted: _Flat | None = None) -> None:
        """Waits for a program, or for all, and reports which of those on their way are ready."""
        while True:
            jobs = {f: f.compiled for f in list(self._flat.values()) if f.compiled is not None}
            pending = {flat: job for flat, job in jobs.items() if not job.done()}
            is_over = wanted not in pending if wanted else not pending
            name = "" if is_over else (wanted or next(iter(pending))).name
            self._on_program(len(jobs) - len(pending), len(jobs), name)
            if is_over:
                break
            with self.waiting():
                wait(pending.values(), return_when=FIRST_COMPLETED)


def _place(program: Program, structure: Any, leaves: list[Any]) -> Any:
    return program.name, structure, tuple((np.shape(x), str(x.dtype)) for x in leaves)


def _trace(program: Program, function: Any, leaves: list[Any]) -> Traced:
    began = time.perf_counter()
    traced = function.trace(*leaves)
    seconds, options = time.perf_counter() - began, compiler_options(program.trains)
    jaxpr, picked = traced.jaxpr.jaxpr, None
    if not jaxpr.eqns and all(v in jaxpr.invars for v in jaxpr.outvars):
        picked = [jaxpr.invars.index(v) for v in jaxpr.outvars]
    return Traced(program.name, traced, seconds, options, picked)


def _is_lost(job: Future) -> bool:
    """Says whether a job was given up or failed, here or with who shares its program."""
    return job.done() and (job.cancelled() or job.exception() is not None)


def _at_once(function: Callable[..., Any], *arguments: Any) -> Future:
    """Calls a function now; its result as a future."""
    done: Future = Future()
    done.set_result(function(*arguments))
    return done


def compiler_options(trains: bool = True) -> dict[str, Any] | None:
    """Returns what XLA is told for programs that should be ready soon; None for nothing.

    On a CPU most of compilation is LLVM's. Its first level takes a seventh less than the third, the
    default, for programs of training that run as fast. Whatever is soon over runs unoptimised:
    products are a library's all the same, and the rest takes half the time to compile. In training,
    looking at a loop as a whole spares copies of the weights in every step.

    On a GPU most of it is a search for the fastest kernel of each product: 150 s for FMCSC, where
    cuBLAS's own choice took 18 and ran as fast. So nothing is searched, unless `XLA_FLAGS` names
    one of these options: then it decides.

    Args:
      trains: Whether the program is of the rounds or of what comes before them.
    """
    if jax.config.read("jax_disable_most_optimizations"):
        return None
    if jax.default_backend() == "gpu":
        return _of_gpu(os.environ.get("XLA_FLAGS", ""))
    if jax.default_backend() != "cpu":
        return None
    if not trains:
        return {"xla_backend_optimization_level": 0}
    return {"xla_backend_optimization_level": 1} | _if_known(_NO_COPIES)


# Copy insertion that looks at loops as a whole.
_NO_COPIES = "xla_cpu_copy_insertion_use_region_analysis"

# Products of XLA's own kernels are only as good as the search for their tiles: without it FMCSC's
# run takes four times as long. So they go with it.
_NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@cache
def _of_gpu(flags: str) -> dict[str, Any] | None:
    """Returns what XLA is told on a GPU: nothing (None) if a user's flags name an option."""
    if any(option in flags for option in _NO_SEARCH):
        return None
    return _NO_SEARCH if all(_if_known(*option) for option in _NO_SEARCH.items()) else None


@cache
def _if_known(option: str, value: Any = True) -> dict[str, Any]:
    """Returns an option of XLA with its value; nothing if this version does not have it."""
    try:
        jax.jit(lambda: 0).lower().compile({option: value})
    except jax.errors.JaxRuntimeError:
        return {}
    return {option: value}
