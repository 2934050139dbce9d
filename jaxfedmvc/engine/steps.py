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
the host, so that all of them can be kept in JAX's compilation cache. Programs are traced once
(`engine.programs`): their shapes, their bytes on the wire and what XLA compiles come of one trace.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.engine import phases
from jaxfedmvc.engine.effort import operations
from jaxfedmvc.engine.phases import Exchanged, RunState, Traffic
from jaxfedmvc.engine.programs import Noted, Program, Programs, Traced
from jaxfedmvc.engine.run import check_rounds, draw_participants, start
from jaxfedmvc.engine.traffic import total
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import in_32_bits

PyTree = Any


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


class Steps:
    """The programs of a run, compiled once for all seeds.

    Attributes:
      algorithm: The method, for what runs on the host.
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
        self._make, self._hyper = make, jax.tree.map(as_number, hyperparams)
        self._federation = federation.without_labels()
        self._shares, self._resample = participation, resample_participants
        self._chunk, self._on_call = client_chunk, on_call
        self._programs = Programs(ahead, compiled)
        self._is_abstract = False  # while shapes are walked through
        self._was_cut_off = False  # a walk that `close` ended before it was through
        # Of each stage, phase and cohort: clients that take part, and what travels. Compacting
        # methods have a program for every size; each call counts as its own program's bytes.
        self._sizes: dict[tuple[str, int, int], int] = {}
        self._exchanged: dict[tuple[str, int, int], Exchanged] = {}
        self._n_participants = 0

    @property
    def seconds(self) -> float:
        """Time that calls have waited for their programs, to be traced or compiled."""
        return self._programs.seconds

    # --- The run ----------------------------------------------------------------------------------

    def start(self, federation: Federation, key: jax.Array) -> RunState:
        """Returns the initial states and who takes part; see `engine.start`."""

        def function(hyper: PyTree, federation: Federation, key: jax.Array) -> RunState:
            return start(self._make(hyper), federation, key, participation=self._shares)

        state = self._call(Program("start", function), federation.without_labels(), key)
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
        """Makes all exchanges of round `r`, counted from 0. The memory of `state` is reused.

        Raises:
          ValueError: A round after the method's `most_rounds`.
        """
        if not self._is_abstract:  # shapes are walked where no round will be made, too
            check_rounds(self.algorithm, int(r) + 1)
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
        self._programs.walked()  # what it finds would not reach the copy
        other = copy.copy(self)
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
        for program in self._programs.traced():
            jaxpr = program.traced.jaxpr.jaxpr
            numbers = {id(jaxpr.invars[i]) for i in places}
            read = [v for eqn in jaxpr.eqns for v in eqn.invars]
            if not numbers.isdisjoint(map(id, [*read, *jaxpr.outvars])):
                stages.add(program.name.split("/")[0])
        return stages

    def is_done(self, state: RunState) -> bool:
        """Says whether further rounds would change nothing."""
        if self.algorithm.done is None:
            return False

        def function(hyper: PyTree, server: PyTree) -> jax.Array:
            return self._make(hyper).done(server)  # type: ignore[misc]

        found = self._call(Program("done", function), state.server)
        return False if self._is_abstract else bool(found)

    def goes_on(self, state: RunState, made: int, rounds: int) -> bool:
        """Says whether a run of so many rounds at most makes another one after those made.

        As `engine.run` does it asks before the first, too, whether the method is done.
        """
        return made < rounds and not self.is_done(state)

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
        if not self._programs.ahead:
            on_walked()
            return
        self._programs.walked()
        self.close()

        def end_walk(shapes: RunState) -> None:
            self._n_participants = sum(map(len, shapes.participants))
            on_walked()

        self._programs.begin(on_program)
        try:
            if until_ready:
                self._walk()
                self._programs.finish()
                on_walked()
            else:
                self._programs.walk_aside(copy.copy(self)._through_shapes, end_walk)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives up programs that are still to be traced or compiled."""
        self._was_cut_off |= self._programs.close()

    def _know_all(self) -> None:
        """Makes sure that what follows from shapes is known of all programs."""
        self._programs.walked()
        if self._was_cut_off or (self._programs.ahead and self._is_any_unknown()):
            self._walk()

    def _is_any_unknown(self) -> bool:
        """Says whether an exchange was neither made nor walked through yet."""
        known = {(stage, p) for stage, p, _ in self._sizes.copy()}
        return any(
            (stage, p) not in known
            for stage in keys.STAGES
            for p in range(len(getattr(self.algorithm, stage)))
        )

    def programs(self) -> list[Traced]:
        """Returns the programs that can be told from shapes, traced and not compiled."""
        self._walk()
        return [program for program in self._programs.traced() if program.picked is None]

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
        traced = self._programs.traced()
        return {program.name: operations(program.traced.jaxpr) for program in traced}

    def traffic(self) -> dict[str, Traffic]:
        """Returns the bytes of `setup`, of one `round` and of `finish`; see `engine.traffic`."""
        self._know_all()
        if self._is_any_unknown():  # not compiled ahead
            self._walk()
        found = {}
        for stage in keys.STAGES:
            parts = [e for (s, _, _), e in self._exchanged.items() if s == stage]
            found[stage] = total(parts, self._n_participants if self.algorithm.peers else None)
        return found

    def _walk(self) -> RunState:
        """Goes through a run of one round with shapes alone; returns those of the state."""
        self._programs.walked()
        with self._programs.waiting():
            shapes = self._through_shapes()
        self._was_cut_off = False
        return shapes

    @in_32_bits
    def _through_shapes(self) -> RunState:
        self._is_abstract = True
        try:
            key = jax.eval_shape(lambda: jax.random.key(0))
            state = shapes = self.start(self._federation, key)
            state, _ = self.setup(self._federation, key, state)
            if self.algorithm.round:
                self.is_done(state)
                state, _ = self.one_round(self._federation, key, state, 0)
            self.evaluate(self._federation, key, state, 0)
            return shapes
        finally:
            self._is_abstract = False

    # --- Programs ---------------------------------------------------------------------------------

    def _draw_program(self) -> Program:
        def function(hyper: PyTree, federation: Federation, key: jax.Array, r: jax.Array) -> Any:
            return draw_participants(federation, key, self._shares, r)

        return Program("draw", function)

    def _client_program(self, stage: str, p: int, c: int) -> Program:
        """Makes `(hyper, key, sent, states, cohort, places) -> (states, message, weight, info)`."""

        def function(
            hyper: PyTree,
            key: jax.Array,
            sent: PyTree,
            states: PyTree,
            cohort: Cohort,
            places: jax.Array,
        ) -> Noted:
            phase = getattr(self._make(hyper), stage)[p]
            with phases.named(stage, p):
                *results, message_bytes = phases.map_clients(
                    phase, key, sent, states, cohort, places, None, None
                )
            return Noted(tuple(results), (message_bytes, phases.nbytes(sent)))

        # The old states' memory serves the new ones, but where the run goes on from the old.
        donated, trains = ((), False) if stage == "finish" else ((3,), True)
        name = _client_name(stage, self._alike(stage, p, "client"), c)
        return Program(name, function, donated, trains)

    def _adding_program(self, stage: str, p: int, c: int) -> Program:
        def function(hyper: PyTree, first: PyTree, second: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, first, second)

        name = _client_name(stage, self._alike(stage, p, "client"), c)
        return Program(f"{name}/sum", function, (1,))

    def _broadcast_program(self, stage: str, p: int, c: int) -> Program:
        view_ids = self._federation.cohorts[c].view_ids

        def function(hyper: PyTree, server: PyTree) -> PyTree:
            return getattr(self._make(hyper), stage)[p].broadcast(server, view_ids)

        return Program(f"{stage}/{self._alike(stage, p, 'broadcast')}/sent{c}", function)

    def _server_program(self, stage: str, p: int) -> Program:
        """Makes `(hyper, key, server, parts) -> (server, info)`, parts of each cohort by chunks."""

        def function(
            hyper: PyTree, key: jax.Array, server: PyTree, parts: list[list[Any]]
        ) -> tuple[PyTree, PyTree]:
            phase = getattr(self._make(hyper), stage)[p]
            # A copy: calls in another thread write there, too.
            sizes = [n for (s, q, _), n in self._sizes.copy().items() if (s, q) == (stage, p)]
            whole = [
                chunks[0] if phase.reduce == "sum" else phases.joined(jnp.concatenate, chunks, n)
                for chunks, n in zip(parts, sizes, strict=True)
            ]
            messages, weights = (tuple(part[i] for part in whole) for i in range(2))
            with phases.named(stage, p):
                return phases.serve(phase, key, server, messages, weights)

        donated, trains = ((), False) if stage == "finish" else ((2,), True)
        name = _server_name(stage, self._alike(stage, p, "server"))
        return Program(name, function, donated, trains)

    def _row_program(self, which: str, c: int) -> Program:
        """Makes `(hyper, server, states, cohort, places) -> [chunk, rows, ...]`, of `which`."""

        def function(
            hyper: PyTree, server: PyTree, states: PyTree, cohort: Cohort, places: jax.Array
        ) -> jax.Array:
            rows = getattr(self._make(hyper), which)
            if which == "assign":
                rows = partial(phases.labelled, rows)
            mine = jax.tree.map(lambda x: x.at[places].get(mode="clip"), (states, cohort))
            return phases.batched(partial(rows, server), len(places))(*mine)

        return Program(f"{which}/{c}", function)

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
                found, nbytes = self._noted(program, key, sent, clients[c], cohort, mine)
                exchanged = Exchanged(len(places), *nbytes)
                if self._is_abstract:  # calls know better, whose arrays may have shrunk
                    self._exchanged.setdefault((stage, p, c), exchanged)
                else:
                    self._exchanged[stage, p, c] = exchanged
                clients[c], *part, info = found
                if phase.reduce == "sum" and chunks:
                    part = self._call(self._adding_program(stage, p, c), chunks.pop(), part)
                chunks.append(part)
                reports.append(self._on_host(info))
                self._tell(program)
            parts.append(chunks)
            infos.append(phases.joined(np.concatenate, reports, len(places)))
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
            found.append(phases.joined(np.concatenate, rows, n))
        return found

    def _chunks(self, places: np.ndarray, n_clients: int) -> np.ndarray:
        """Returns places [chunks, size]; the last is padded with a place beyond the cohort."""
        n_chunks, size = phases.chunk_sizes(len(places), self._chunk)
        missing = n_chunks * size - len(places)
        padded = np.pad(places.astype(np.int32), (0, missing), constant_values=n_clients)
        return padded.reshape(n_chunks, size)

    # --- Calling ----------------------------------------------------------------------------------

    def _call(self, program: Program, *arguments: Any) -> Any:
        """Calls a program, or only traces it where shapes are walked."""
        return self._noted(program, *arguments)[0]

    def _noted(self, program: Program, *arguments: Any) -> tuple[Any, Any]:
        """As `_call`; returns also the program's note."""
        ask = self._programs.shapes if self._is_abstract else self._programs.call
        return ask(program, self._hyper, *arguments)

    def _tell(self, program: Program) -> None:
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
    if dataclasses.is_dataclass(value):  # a leaf only where JAX does not know the class
        allowed = "numbers in a dataclass of flax.struct"
        raise checks.wrong("hyperparams", type(value).__name__, allowed)
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


_KEY_OF_PHASE = Program("key", _phase_key)


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
