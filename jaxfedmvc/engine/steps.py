"""A run taken apart into programs that the host calls one by one: what long jobs are made of.

    steps = Steps(make, hyperparams, federation, client_chunk=1)
    steps.compile()
    state = steps.start(federation, key)
    state, info = steps.setup(federation, key, state)
    state, info = steps.one_round(federation, key, state, 0)
    found = steps.evaluate(federation, key, state, 0)

The same exchanges with the same keys as `engine.run`. There is one program for what a chunk of a
cohort's clients does in a phase and one for the server's part, so that the host can report progress
after each chunk, save the state after each round, and stop at any time. No program calls back to
the host, so that all of them can be kept in JAX's compilation cache. Programs are traced once:
their shapes, their bytes on the wire and what XLA compiles come of the same trace.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.engine import phases
from jaxfedmvc.engine.effort import operations
from jaxfedmvc.engine.phases import Exchanged, RunState, Traffic
from jaxfedmvc.engine.run import draw_participants, start
from jaxfedmvc.engine.traffic import total
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import in_32_bits

PyTree = Any

# Programs compiled at once, each in some hundred MB. More would take cores from the program that
# the run waits for, and from the run once it has begun.
_COMPILERS = 2


class Evaluation(NamedTuple):
    """What a run would end with after some round.

    Attributes:
      state: After `finish`.
      labels: For each cohort int32 [clients, rows], on the host.
      embedding: For each cohort [clients, rows, d], on the host; None for methods without one.
      info: Of each phase of `finish`.
    """

    state: RunState
    labels: list[np.ndarray]
    embedding: list[np.ndarray] | None
    info: list[Any]


class Traced(NamedTuple):
    """A program before it is compiled.

    Attributes:
      name: Its stage, phase and cohort, or what else it is for.
      traced: A `jax.stages.Traced`, which can be lowered and compiled.
      seconds: What tracing it took.
      options: What XLA is told; see `compiler_options`.
    """

    name: str
    traced: Any
    seconds: float
    options: dict[str, Any] | None


class _Program(NamedTuple):
    name: str
    function: Callable[..., PyTree]  # its first argument are the hyper-parameters
    donated: tuple[int, ...] = ()  # arguments whose memory is used again
    trains: bool = False  # or is soon over
    which: Any = None  # stage, phase and cohort of a client's program


@dataclasses.dataclass
class _Flat:
    """A program over the leaves of its arguments, of one structure and one set of shapes.

    Programs of cohorts that compute alike differ in structures alone, such as in the names of
    views: as functions of leaves they are the same, and XLA compiles them once.
    """

    function: Any  # jitted
    structure: Any = None  # of what is returned; known once the function is traced
    noted: Any = None  # bytes of a client's message, and of what it is sent
    picked: list[int] | None = None  # of the arguments, where it only hands some of them on
    traced: Any = None  # a `Traced`, once it is
    compiled: Future | None = None


class Steps:
    """The programs of a run, compiled once for all seeds.

    Attributes:
      algorithm: The method, for what runs on the host.
      seconds: Time that calls have waited for their programs, to be traced or compiled.
    """

    def __init__(
        self,
        make: Callable[[PyTree], FederatedAlgorithm],
        hyperparams: PyTree,
        federation: Federation,
        *,
        participation: float | Sequence[float] = 1.0,
        resample_participants: bool = False,
        client_chunk: int | None = None,
        ahead: bool = True,
        on_call: Callable[[str], None] = lambda name: None,
        compiled: dict[str, Future] | None = None,
    ) -> None:
        """Prepares the programs; nothing is traced yet.

        Args:
          make: `hyperparams -> algorithm`; its static settings are what it closes over.
          hyperparams: A pytree of numbers, which the programs take as arguments.
          federation: One that has the shapes, the masks and the client ids of all.
          participation: See `engine.start`.
          resample_participants: Whether who takes part is drawn anew every round.
          client_chunk: Clients computed by one call; None means all of a cohort.
          ahead: Whether programs are compiled for shapes alone. False for arrays laid out over a
            mesh, whose programs depend on where they lie: these are compiled as they are called.
          on_call: Called on the host with a program's name after each of its calls.
          compiled: Programs of other `Steps` by their text, which are not compiled again; receives
            those of this one.

        Raises:
          ValueError: `client_chunk` is no whole number of 1 or more.
        """
        checks.whole("client_chunk", client_chunk, 1, optional=True)
        self.algorithm = make(hyperparams)
        self.seconds = 0.0
        self._make, self._hyper = make, jax.tree.map(as_number, hyperparams)
        self._federation = federation.without_labels()
        self._shares, self._resample = participation, resample_participants
        self._chunk, self._ahead, self._on_call = client_chunk, ahead, on_call
        # By name, structure and shapes of the arguments; and what was compiled, by its text.
        self._flat: dict[Any, _Flat] = {}
        self._compiled: dict[str, Future] = {} if compiled is None else compiled
        self._compilers: ThreadPoolExecutor | None = None
        # A walk through shapes in another thread, and what its copy of this object stops at.
        self._walking: Future | None = None
        self._tracer: ThreadPoolExecutor | None = None
        self._has_traced, self._stop = threading.Condition(), threading.Event()
        self._stop_walker: Callable[[], None] = lambda: None
        self._on_walked: Callable[[], None] = lambda: None
        self._was_cut_off = False  # a walk that `close` ended before it was through
        self._is_abstract = False
        self._on_program: Callable[[int, int, str], None] = lambda i, n, name: None
        # Of each stage, phase and cohort: clients that take part, and what travels. Compacting
        # methods have a program for every size; each call counts as its own program's bytes.
        self._sizes: dict[tuple[str, int, int], int] = {}
        self._exchanged: dict[tuple[str, int, int], Exchanged] = {}
        self._noted: tuple[int, int] | None = None

    # --- The run ----------------------------------------------------------------------------------

    def start(self, federation: Federation, key: jax.Array) -> RunState:
        """Returns the initial states and who takes part; see `engine.start`."""

        def function(hyper: PyTree, federation: Federation, key: jax.Array) -> RunState:
            return start(self._make(hyper), federation, key, participation=self._shares)

        state = self._call(_Program("start", function), federation.without_labels(), key)
        state = state._replace(participants=self._on_host(state.participants))
        self._n_participants = sum(map(len, state.participants))
        return state

    def setup(
        self, federation: Federation, key: jax.Array, state: RunState
    ) -> tuple[RunState, list[Any]]:
        """Makes the exchanges before the first round; returns the state and each phase's info."""
        return self._stage("setup", federation, key, state, 0)

    def one_round(
        self, federation: Federation, key: jax.Array, state: RunState, r: int
    ) -> tuple[RunState, list[Any]]:
        """Makes all exchanges of round `r`, counted from 0. The memory of `state` is reused."""
        if self._resample:
            clients = federation.without_labels()
            drawn = self._call(self._draw_program(), clients, key, np.int32(r))
            state = state._replace(participants=self._on_host(drawn))
        return self._stage("round", federation, key, state, r)

    def evaluate(
        self, federation: Federation, key: jax.Array, state: RunState, r: int
    ) -> Evaluation:
        """Makes `finish` as after round `r` and clusters all rows; `state` may go on from there."""
        state, info = self._stage("finish", federation, key, state, r)
        labels = self._over_clients("assign", federation, state)
        embedding = None
        if self.algorithm.embed is not None:
            embedding = self._over_clients("embed", federation, state)
        return Evaluation(state, labels, embedding, info)

    def with_numbers(self, hyperparams: PyTree) -> Steps:
        """Returns the same programs for other hyper-parameters; what is compiled is shared.

        Args:
          hyperparams: Of the same structure and types.
        """
        self._walked()  # a copy has no walk of its own to wait for
        other = copy.copy(self)
        other._compilers = other._tracer = None
        other._hyper = jax.tree.map(as_number, hyperparams)
        return other

    @in_32_bits
    def stages_that_read(self, name: str) -> set[str]:
        """Returns the stages, of the programs walked, whose results depend on a hyper-parameter.

        Those are `setup`, `round`, `finish`, and `start`, `done`, `assign` and `embed`.

        Args:
          name: Of the field that holds it.
        """
        self._walk()
        leaves = jax.tree_util.tree_leaves_with_path(self._hyper)
        names = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in leaves]
        places = [i for i, found in enumerate(names) if found == name]
        stages = set()
        for flat in self._flat.values():
            jaxpr = flat.traced.traced.jaxpr.jaxpr
            numbers = {id(jaxpr.invars[i]) for i in places}
            read = [v for eqn in jaxpr.eqns for v in eqn.invars]
            if not numbers.isdisjoint(map(id, [*read, *jaxpr.outvars])):
                stages.add(flat.traced.name.split("/")[0])
        return stages

    def is_done(self, state: RunState) -> bool:
        """Says whether further rounds would change nothing."""
        if self.algorithm.done is None:
            return False

        def function(hyper: PyTree, server: PyTree) -> jax.Array:
            return self._make(hyper).done(server)  # type: ignore[misc]

        found = self._call(_Program("done", function), state.server)
        return False if self._is_abstract else bool(found)

    def goes_on(self, state: RunState, made: int, rounds: int) -> bool:
        """Says whether a run of so many rounds at most makes another one after those made.

        Before the first a method is not asked whether it is done.
        """
        return made < rounds and not (made and self.is_done(state))

    @in_32_bits
    def compacted(self, state: RunState) -> RunState:
        """Returns the same state in smaller arrays, where the method can; else as it is."""
        if self.algorithm.compact is None:
            return state
        return state._replace(server=self.algorithm.compact(state.server))

    # --- Compilation, and what follows from shapes ------------------------------------------------

    def state_shapes(self) -> RunState:
        """Returns shapes and types of a run's state; walks through the run where nobody has yet."""
        return self._walk()

    def compile(
        self,
        on_program: Callable[[int, int, str], None] = lambda i, n, name: None,
        *,
        until_ready: bool = True,
        on_walked: Callable[[], None] = lambda: None,
    ) -> None:
        """Traces all programs of a run that can be told from shapes, and compiles them meanwhile.

        Args:
          on_program: Called as `(ready, of how many, name)`: with zeros before the program of this
            name is traced; then, while programs are waited for, with the name of one that is not
            ready.
          until_ready: Whether to return only when all are compiled. If not, other threads trace and
            compile them, a call waits for its own program, and the run begins while later ones are
            on their way; see `close`. Of settings that JAX keeps for each thread they take over the
            default device and the default precision of products.
          on_walked: Called by the first call after all are traced, when `calls`, `efforts` and
            `traffic` need not wait any more.
        """
        if not self._ahead:
            on_walked()
            return
        self._walked()
        self.close()
        self._on_program = on_program
        # Tracing and lowering hold Python's lock; XLA compiles meanwhile without it.
        self._compilers = ThreadPoolExecutor(_COMPILERS)
        try:
            for flat in self._flat.values():
                self._submit(flat, self._compilers)
            if until_ready:
                self._walk()
                self._wait()
                self.close()
                for flat in self._flat.values():
                    if flat.compiled is not None:
                        flat.compiled.result()
                on_walked()
            else:
                self._on_walked = on_walked
                self._walk_aside()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives up programs that are still to be traced or compiled."""
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)
            self._compilers = None
        if self._tracer is not None:
            self._stop_walker()
            self._tracer.shutdown()
            self._was_cut_off = self._walking is not None
            self._tracer = self._walking = None

    def _walk_aside(self) -> None:
        """Begins a walk through shapes in another thread, as a copy that shares the programs."""
        walker = copy.copy(self)
        walker._stop = threading.Event()
        self._stop_walker = walker._stop.set
        walker._on_program = lambda i, n, name: None  # calls tell what they wait for
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

        def walk() -> RunState:
            with jax.default_device(device), jax.default_matmul_precision(precision):
                return walker._walk()

        self._tracer = ThreadPoolExecutor(1)
        self._walking = self._tracer.submit(walk)
        self._walking.add_done_callback(lambda walked: self._tell_traced())

    def _walked(self) -> None:
        """Waits for a walk in another thread to end, if there is one, and raises what it raised."""
        if self._walking is None:
            return
        began = time.perf_counter()
        shapes, self._walking = self._walking.result(), None
        self.seconds += time.perf_counter() - began
        self._n_participants = sum(map(len, shapes.participants))
        self._on_walked()

    def _know_all(self) -> None:
        """Makes sure that what follows from shapes is known of all programs, if of any."""
        self._walked()
        if self._was_cut_off:
            self._walk()

    def _wait_until_traced(self, place: Any, name: str) -> None:
        """Waits until another thread has traced a program, or everything that it will."""
        began, walking = time.perf_counter(), self._walking
        assert walking is not None

        def is_traced() -> bool:
            flat = self._flat.get(place)
            return flat is not None and (flat.compiled is not None or flat.picked is not None)

        if not is_traced():
            self._on_program(0, 0, name)
            with self._has_traced:
                self._has_traced.wait_for(lambda: is_traced() or walking.done())
        self.seconds += time.perf_counter() - began
        if walking.done():
            self._walked()

    def _tell_traced(self) -> None:
        with self._has_traced:
            self._has_traced.notify_all()

    def _submit(self, flat: _Flat, compilers: ThreadPoolExecutor) -> None:
        """Lets a traced program be compiled in another thread."""
        if flat.compiled is None and flat.picked is None and flat.traced is not None:
            flat.compiled = self._compile(flat, compilers.submit)

    def _wait(self, wanted: _Flat | None = None) -> None:
        """Waits for a program, or for all, and reports which of those on their way are ready."""
        began = time.perf_counter()
        while True:
            jobs = [(f, f.compiled) for f in list(self._flat.values()) if f.compiled is not None]
            pending = [(flat, job) for flat, job in jobs if not job.done()]
            is_over = all(flat is not wanted for flat, _ in pending) if wanted else not pending
            name = "" if is_over else (wanted or pending[0][0]).traced.name
            self._on_program(len(jobs) - len(pending), len(jobs), name)
            if is_over:
                break
            wait([job for _, job in pending], return_when=FIRST_COMPLETED)
        self.seconds += time.perf_counter() - began

    @in_32_bits
    def _compile(self, flat: _Flat, submit: Callable[..., Any]) -> Future:
        """Compiles a traced program, or finds one of the same text; returns its future."""
        lowered = flat.traced.traced.lower()
        text = lowered.as_text()
        if text not in self._compiled or _is_lost(self._compiled[text]):
            self._compiled[text] = submit(lowered.compile, flat.traced.options)
        return self._compiled[text]

    def programs(self) -> list[Traced]:
        """Returns the programs that can be told from shapes, traced and not compiled."""
        self._walk()
        return [f.traced for f in self._flat.values() if f.traced and f.picked is None]

    def calls(self) -> dict[str, Counter[str]]:
        """Counts the calls of each program in each stage, of those that `on_call` is told of."""
        self._know_all()
        counts: dict[str, Counter[str]] = {stage: Counter() for stage in keys.STAGES}
        servers = set()
        for (stage, p, c), n in self._sizes.items():
            clients = _client_name(stage, self._alike(stage, p, "client"), c)
            counts[stage][clients] += phases.chunk_sizes(n, self._chunk)[0]
            servers.add((stage, p))
        for stage, p in servers:
            counts[stage][_server_name(stage, self._alike(stage, p, "server"))] += 1
        return counts

    def efforts(self) -> dict[str, float]:
        """Returns the rough number of operations of each program of shapes that were walked."""
        self._know_all()
        traced = [flat.traced for flat in self._flat.values() if flat.traced is not None]
        return {program.name: operations(program.traced.jaxpr) for program in traced}

    def traffic(self) -> dict[str, Traffic]:
        """Returns the bytes of `setup`, of one `round` and of `finish`; see `engine.traffic`."""
        self._know_all()
        found = {}
        for stage in keys.STAGES:
            parts = [e for (s, _, _), e in self._exchanged.items() if s == stage]
            found[stage] = total(parts, self._n_participants if self.algorithm.peers else None)
        return found

    @in_32_bits
    def _walk(self) -> RunState:
        """Goes through a run of one round with shapes alone; returns those of the state."""
        self._walked()
        began = time.perf_counter()
        self._is_abstract = True
        try:
            key = jax.eval_shape(lambda: jax.random.key(0))
            state = shapes = self.start(self._federation, key)
            state, _ = self.setup(self._federation, key, state)
            if self.algorithm.round:
                self.is_done(state)
                state, _ = self.one_round(self._federation, key, state, 0)
            self.evaluate(self._federation, key, state, 0)
            self._was_cut_off = False
            return shapes
        finally:
            self._is_abstract = False
            self.seconds += time.perf_counter() - began

    # --- Programs ---------------------------------------------------------------------------------

    def _draw_program(self) -> _Program:
        def function(hyper: PyTree, federation: Federation, key: jax.Array, r: jax.Array) -> Any:
            return draw_participants(federation, key, self._shares, r)

        return _Program("draw", function)

    def _client_program(self, stage: str, p: int, c: int) -> _Program:
        """`(hyper, key, sent, states, cohort, places) -> (states, message, weight, info)`."""

        def function(
            hyper: PyTree,
            key: jax.Array,
            sent: PyTree,
            states: PyTree,
            cohort: Cohort,
            places: jax.Array,
        ) -> tuple:
            phase = getattr(self._make(hyper), stage)[p]
            with phases.named(stage, p):
                *results, message_bytes = phases.map_clients(
                    phase, key, sent, states, cohort, places, None, None
                )
            self._noted = message_bytes, phases.nbytes(sent)
            return tuple(results)

        # The old states' memory serves the new ones, but where the run goes on from the old.
        donated, trains = ((), False) if stage == "finish" else ((3,), True)
        name = _client_name(stage, self._alike(stage, p, "client"), c)
        return _Program(name, function, donated, trains, (stage, p, c))

    def _adding_program(self, stage: str, p: int, c: int) -> _Program:
        def function(hyper: PyTree, first: PyTree, second: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, first, second)

        name = _client_name(stage, self._alike(stage, p, "client"), c)
        return _Program(f"{name}/sum", function, (1,))

    def _broadcast_program(self, stage: str, p: int, c: int) -> _Program:
        view_ids = self._federation.cohorts[c].view_ids

        def function(hyper: PyTree, server: PyTree) -> PyTree:
            return getattr(self._make(hyper), stage)[p].broadcast(server, view_ids)

        return _Program(f"{stage}/{self._alike(stage, p, 'broadcast')}/sent{c}", function)

    def _server_program(self, stage: str, p: int) -> _Program:
        """`(hyper, key, server, parts) -> (server, info)`, parts of each cohort by chunks."""

        def function(
            hyper: PyTree, key: jax.Array, server: PyTree, parts: list[list[Any]]
        ) -> tuple[PyTree, PyTree]:
            phase = getattr(self._make(hyper), stage)[p]
            # A copy: calls in another thread write there, too.
            sizes = [n for (s, q, _), n in self._sizes.copy().items() if (s, q) == (stage, p)]
            whole = [
                chunks[0] if phase.reduce == "sum" else _joined(jnp.concatenate, chunks, n)
                for chunks, n in zip(parts, sizes, strict=True)
            ]
            messages, weights = (tuple(part[i] for part in whole) for i in range(2))
            with phases.named(stage, p):
                return phases.serve(phase, key, server, messages, weights)

        donated, trains = ((), False) if stage == "finish" else ((2,), True)
        name = _server_name(stage, self._alike(stage, p, "server"))
        return _Program(name, function, donated, trains)

    def _row_program(self, which: str, c: int) -> _Program:
        """`(hyper, server, states, cohort, places) -> [chunk, rows, ...]`, `assign` or `embed`."""

        def function(
            hyper: PyTree, server: PyTree, states: PyTree, cohort: Cohort, places: jax.Array
        ) -> jax.Array:
            rows = getattr(self._make(hyper), which)
            mine = jax.tree.map(lambda x: x.at[places].get(mode="clip"), (states, cohort))
            return phases.batched(partial(rows, server), len(places))(*mine)

        return _Program(f"{which}/{c}", function)

    def _alike(self, stage: str, p: int, part: str) -> int:
        """Returns the first phase of the stage with the same `part`, whose program can serve both.

        A server that is given every message counts the clients of its own phase. A leader's
        program is everyone's where clients are computed one by one.
        """
        every = getattr(self.algorithm, stage)
        mine = every[p]
        if part == "server" and mine.reduce != "sum":
            return p
        any_who = part != "server" and self._chunk == 1

        def is_alike(other: Phase) -> bool:
            same = getattr(other, part) is getattr(mine, part) and other.reduce == mine.reduce
            return same and (any_who or other.who == mine.who)

        return next(q for q, other in enumerate(every) if is_alike(other))

    # --- Walking over phases and chunks -----------------------------------------------------------

    def _stage(
        self, stage: str, federation: Federation, key: jax.Array, state: RunState, r: int
    ) -> tuple[RunState, list[Any]]:
        infos = []
        for p, phase in enumerate(getattr(self.algorithm, stage)):
            state, info = self._phase(stage, p, phase, federation, key, state, np.int32(r))
            infos.append(info)
        return state, infos

    def _phase(
        self,
        stage: str,
        p: int,
        phase: Phase,
        federation: Federation,
        key: jax.Array,
        state: RunState,
        r: np.int32,
    ) -> tuple[RunState, Any]:
        clients, parts, infos = list(state.clients), [], []
        key = self._call(_KEY_OF_PHASE, key, np.int32(keys.STAGES[stage]), r, np.int32(p))
        for c, places in _taking_part(phase, federation, state.participants):
            self._sizes[stage, p, c] = len(places)
            program, cohort = self._client_program(stage, p, c), federation.cohorts[c]
            sent = self._call(self._broadcast_program(stage, p, c), state.server)
            chunks: list[Any] = []
            reports = []
            for mine in self._chunks(places, cohort.n_clients):
                clients[c], *part, info = self._call(program, key, sent, clients[c], cohort, mine)
                if phase.reduce == "sum" and chunks:
                    part = self._call(self._adding_program(stage, p, c), chunks.pop(), part)
                chunks.append(part)
                reports.append(self._on_host(info))
                self._tell(program)
            parts.append(chunks)
            infos.append(_joined(np.concatenate, reports, len(places)))
        program = self._server_program(stage, p)
        server, info = self._call(program, key, state.server, parts)
        self._tell(program)
        state = RunState(server, tuple(clients), state.participants)
        return state, {"clients": tuple(infos), "server": self._on_host(info)}

    def _over_clients(self, which: str, federation: Federation, state: RunState) -> list[Any]:
        found = []
        for c, (cohort, states) in enumerate(zip(federation.cohorts, state.clients, strict=True)):
            program, n = self._row_program(which, c), cohort.n_clients
            rows = [
                self._on_host(self._call(program, state.server, states, cohort, mine))
                for mine in self._chunks(np.arange(n), n)
            ]
            found.append(_joined(np.concatenate, rows, n))
        return found

    def _chunks(self, places: np.ndarray, n_clients: int) -> np.ndarray:
        """Returns places [chunks, size]; the last is padded with a place beyond the cohort."""
        n_chunks, size = phases.chunk_sizes(len(places), self._chunk)
        missing = n_chunks * size - len(places)
        padded = np.pad(places.astype(np.int32), (0, missing), constant_values=n_clients)
        return padded.reshape(n_chunks, size)

    # --- Calling ----------------------------------------------------------------------------------

    @in_32_bits
    def _call(self, program: _Program, *arguments: Any) -> Any:
        """Calls a program, or only traces it where shapes are walked."""
        leaves, structure = jax.tree.flatten((self._hyper, *arguments))
        place = program.name, structure, tuple((np.shape(x), str(x.dtype)) for x in leaves)
        if self._walking is not None:
            self._wait_until_traced(place, program.name)
        if place not in self._flat:
            self._flat[place] = self._flattened(program, structure)
        flat = self._flat[place]
        if self._is_abstract or (self._ahead and flat.traced is None):
            self._trace(program, flat, leaves)
        if self._is_abstract:
            found = flat.traced.traced.out_info
        elif not self._ahead:
            found = flat.function(*leaves)
        elif flat.picked is not None:
            found = [leaves[i] for i in flat.picked]
        else:
            if flat.compiled is None or flat.compiled.cancelled():
                began = time.perf_counter()
                flat.compiled = self._compile(flat, _at_once)
                self.seconds += time.perf_counter() - began
            elif not flat.compiled.done():
                self._wait(flat)
            found = flat.compiled.result()(*leaves)
        if flat.noted is not None:
            self._exchanged[program.which] = Exchanged(self._sizes[program.which], *flat.noted)
        return jax.tree.unflatten(flat.structure, found)

    def _flattened(self, program: _Program, structure: Any) -> _Flat:
        """Returns a program as a function of the leaves of arguments of this structure."""

        def flat(*leaves: Any) -> list[Any]:
            self._noted = None
            found = program.function(*jax.tree.unflatten(structure, leaves))
            out, made.structure = jax.tree.flatten(found)
            made.noted = self._noted
            return out

        sizes = [child.num_leaves for child in structure.children()]
        donated = [i for d in program.donated for i in range(sum(sizes[:d]), sum(sizes[: d + 1]))]
        # Unused arguments are kept, so that programs of equal text are called alike.
        made = _Flat(jax.jit(flat, donate_argnums=donated, keep_unused=True))
        return made

    def _trace(self, program: _Program, flat: _Flat, leaves: list[Any]) -> None:
        if self._stop.is_set():
            raise CancelledError
        if flat.traced is None:
            self._on_program(0, 0, program.name)
            began = time.perf_counter()
            traced = flat.function.trace(*leaves)
            seconds, options = time.perf_counter() - began, compiler_options(program.trains)
            flat.traced = Traced(program.name, traced, seconds, options)
            jaxpr = traced.jaxpr.jaxpr
            if not jaxpr.eqns and all(v in jaxpr.invars for v in jaxpr.outvars):
                flat.picked = [jaxpr.invars.index(v) for v in jaxpr.outvars]
            if self._is_abstract and self._compilers is not None:
                self._submit(flat, self._compilers)
            self._tell_traced()

    def _tell(self, program: _Program) -> None:
        if not self._is_abstract:
            self._on_call(program.name)

    def _on_host(self, tree: PyTree) -> PyTree:
        if self._is_abstract:  # zeros that take no memory
            return jax.tree.map(lambda s: np.broadcast_to(np.zeros((), s.dtype), s.shape), tree)
        return jax.device_get(tree)


def as_number(value: Any) -> np.ndarray:
    """Returns a hyper-parameter as an array; whole numbers stay whole."""
    if isinstance(value, np.ndarray | jax.Array):
        return np.asarray(value)
    return np.asarray(value, np.int32 if isinstance(value, int | np.integer) else np.float32)


def _client_name(stage: str, p: int, c: int) -> str:
    return f"{stage}/{p}/clients{c}"


def _server_name(stage: str, p: int) -> str:
    return f"{stage}/{p}/server"


def _phase_key(
    hyper: PyTree, key: jax.Array, stage: jax.Array, r: jax.Array, p: jax.Array
) -> jax.Array:
    """Returns the key of a phase, as `engine.run` derives it."""
    return keys.of_phase(key, stage, r, p)


_KEY_OF_PHASE = _Program("key", _phase_key)


def _taking_part(
    phase: Phase, federation: Federation, participants: tuple[Any, ...]
) -> list[tuple[int, np.ndarray]]:
    """As `phases.taking_part`, on the host."""
    if phase.who == "everyone":
        return [(c, np.asarray(places)) for c, places in enumerate(participants)]
    c = phases.leading_cohort(federation)
    places = np.asarray(participants[c])
    ids = np.asarray(federation.cohorts[c].client_ids)[places]
    return [(c, places[np.argmin(ids)][None])]


def _joined(concatenate: Callable[..., Any], chunks: Sequence[PyTree], n: int) -> PyTree:
    """Returns the first n rows of the chunks one after another."""
    return jax.tree.map(lambda *xs: concatenate(xs)[:n], *chunks)


def _is_lost(job: Future) -> bool:
    """Whether a job was given up or failed, here or with who shares its program."""
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

    Args:
      trains: Whether the program is of the rounds or of what comes before them.
    """
    if jax.default_backend() != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return None
    if not trains:
        return {"xla_backend_optimization_level": 0}
    return {"xla_backend_optimization_level": 1} | _if_known(_NO_COPIES)


# Copy insertion that looks at loops as a whole.
_NO_COPIES = "xla_cpu_copy_insertion_use_region_analysis"


@cache
def _if_known(option: str) -> dict[str, Any]:
    """Returns an option of XLA switched on; nothing if this version does not have it."""
    try:
        jax.jit(lambda: 0).lower().compile({option: True})
    except jax.errors.JaxRuntimeError:
        return {}
    return {option: True}
