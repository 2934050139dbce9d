"""How long a compiled program takes at least, read off its own text.

XLA's account of a program, `compiled.cost_analysis()`, counts the body of a loop once, however
often it runs. Here the optimised program is walked through with the trip counts that XLA wrote into
it:

    work = work_of(jax.jit(f).lower(x).compile().as_text())
    seconds, limit = work.least_seconds(peak=67e12, bandwidth=4.8e12, launch=3e-6)

What is approximate: loops that end when their data say so are taken to run `PASSES` times; linear
algebra of a library (eigenvalues, SVD, QR) is counted by the textbook's leading term, and calls
back to the host as nothing; memory is what every kernel reads and writes, as if nothing stayed in a
cache between two kernels; kernels are launched one after the other. A program that was compiled for
a CPU tells no more than the order of magnitude for an accelerator, whose compiler fuses otherwise.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

# Reading a program's text needs neither jax nor the library, which take seconds to import.
if TYPE_CHECKING:
    from jaxfedmvc.federation import Federation

# Of loops whose end depends on the data, as `jaxfedmvc.engine.effort` has it.
PASSES = 20


class Work(NamedTuple):
    """What a program does in one run.

    Attributes:
      flops: Floating point operations.
      bytes: Read from and written to memory by all kernels.
      kernels: Launched, one after the other.
      guessed: Loops of the program that were taken to run `PASSES` times.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    guessed: float = 0.0

    def times(self, n: float) -> Work:
        """Returns the work of n runs."""
        return Work(self.flops * n, self.bytes * n, self.kernels * n, self.guessed)

    def least_seconds(
        self, *, peak: float, bandwidth: float, launch: float = 0.0
    ) -> tuple[float, str]:
        """Returns the seconds of the roofline, and which limit binds.

        Args:
          peak: FLOP/s.
          bandwidth: Bytes/s.
          launch: Seconds to launch a kernel.
        """
        limits = {
            "compute": self.flops / peak,
            "memory": self.bytes / bandwidth,
            "launches": self.kernels * launch,
        }
        name = max(limits, key=lambda limit: limits[limit])
        return limits[name], name


def added(works: Iterable[Work]) -> Work:
    """Returns the work of programs one after the other."""
    return Work(*(sum(numbers) for numbers in zip(Work(), *works, strict=True)))


def work_of(text: str, passes: int = PASSES) -> Work:
    """Returns the work of an optimised program.

    Args:
      text: `compiled.as_text()`.
      passes: Of loops whose end depends on the data.

    Raises:
      ValueError: The text has no computation to begin with.
    """
    program = _Program(text, passes)
    if program.entry not in program.computations:
        raise ValueError("text: got no ENTRY; allowed is the text of a compiled program")
    return program.cost(program.entry)


# --- The text of a compiled program ---------------------------------------------------------------

_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,]*))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Of a dot, and of a product by a GPU's library, in the settings that the compiler gives it.
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')

# What computes nothing and is no kernel, and what only moves numbers.
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id"
    " replica-id".split()
)
_MOVES = set(
    "broadcast concatenate copy copy-start dynamic-slice dynamic-update-slice gather iota pad"
    " reshape reverse slice transpose".split()
)
_SLICES = {"dynamic-slice", "gather", "slice"}
# Leading terms of a library's linear algebra, times m n min(m, n) of the largest matrix.
_LIBRARY = {
    "syev": 9.0,
    "gesdd": 20.0,
    "gesvd": 20.0,
    "geqrf": 4 / 3,
    "orgqr": 4 / 3,
    "potrf": 1 / 3,
    "getrf": 2 / 3,
    "trsm": 1.0,
    "cholesky": 1 / 3,
    "triangularSolve": 1.0,
}


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def entries(self) -> float:
        return sum(math.prod(shape) for _, shape in _arrays(self.type))

    @property
    def bytes(self) -> float:
        return sum(size * math.prod(shape) for size, shape in _arrays(self.type))

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self, *kinds: str) -> list[str]:
        """Returns the names of computations that it runs as one of `kinds`, such as "body"."""
        return [name for kind, name in _CALLED.findall(self.attributes) if kind in kinds]


_Computation = dict[str, _Instruction]


def _arrays(text: str) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields the bytes of an entry, and the shape, of every array of a type."""
    for kind, dims in _ARRAY.findall(text):
        bits = re.search(r"\d+", kind)
        size = int(bits[0]) / 8 if bits else float(kind == "pred")
        yield size, tuple(int(d) for d in dims.split(",") if d)


def _parsed(line: str) -> _Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    depth, end = 1, found.end()
    while depth and end < len(line):
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    arguments, attributes = line[found.end() : end - 1], line[end:]
    is_root = found["root"] is not None
    return _Instruction(
        found["name"], found["type"], found["opcode"], arguments, attributes, is_root
    )


class _Program:
    """The computations of a program by name, and what one pass through each of them costs."""

    def __init__(self, text: str, passes: int) -> None:
        self.passes, self.entry = passes, ""
        self.computations: dict[str, _Computation] = {}
        self._costs: dict[str, Work] = {}
        current: _Computation = {}
        for line in text.splitlines():
            head = None if line.startswith(" ") else _COMPUTATION.match(line)
            if head is not None:
                current = self.computations[head["name"]] = {}
                self.entry = head["name"] if head["entry"] else self.entry
            elif (instruction := _parsed(line)) is not None:
                current[instruction.name] = instruction

    def cost(self, *names: str) -> Work:
        """Returns the work of one pass through computations."""
        for name in names:
            if name not in self._costs:
                mine = self.computations.get(name, {})
                self._costs[name] = added(self._of(i, mine) for i in mine.values())
        return added(self._costs[name] for name in names)

    def _of(self, i: _Instruction, mine: _Computation) -> Work:
        if i.opcode in _FREE or i.opcode.endswith("-done"):
            return Work()
        if i.opcode == "while":
            return self._loop(i)
        if i.opcode == "conditional":
            found = ",".join(text for texts in _BRANCHES.findall(i.attributes) for text in texts)
            names = re.findall(r"[\w.\-]+", found)
            return max(map(self.cost, names), default=Work())  # that with the most operations
        called = i.called("calls", "to_apply")
        if i.opcode in ("call", "async-start"):
            inner = self.cost(*called)
            # A CPU's compiler makes one function of small loops.
            small = "xla_cpu_small_call" in i.attributes
            return Work(inner.flops, 2 * i.bytes, 1.0) if small else inner
        if i.opcode == "fusion":
            fused = self.computations.get(called[0], {})
            return Work(self._flops(fused), _fusion_bytes(i, fused, mine), 1.0)
        return Work(_flops(i, mine), _bytes(i, mine), 1.0)

    def _loop(self, i: _Instruction) -> Work:
        known = _TRIPS.search(i.attributes)
        trips = int(known[1]) if known else self.passes
        body, condition = self.cost(*i.called("body")), self.cost(*i.called("condition"))
        if "threefry" in i.attributes:
            # The rounds of the random generator are a loop on a CPU and one kernel elsewhere.
            return Work(body.flops * trips, 2 * i.bytes, 1.0)
        total = added([body.times(trips), condition.times(trips + 1)])
        return total._replace(guessed=total.guessed + (known is None))

    def _flops(self, fused: _Computation) -> float:
        """Returns the operations of a fused computation, those that it calls included."""
        total = 0.0
        for i in fused.values():
            total += _flops(i, fused)
            if i.opcode in ("call", "fusion"):
                for name in i.called("calls", "to_apply"):
                    total += self._flops(self.computations.get(name, {}))
        return total


def _flops(i: _Instruction, mine: _Computation) -> float:
    """Returns the operations of an instruction itself: one an entry, but for products and such."""
    if i.opcode in _FREE | _MOVES | {"call", "fusion"}:
        return 0.0
    inputs = [mine[name] for name in i.operands if name in mine]
    if i.opcode in ("dot", "custom-call") and (found := _CONTRACTED.search(i.attributes)):
        (_, shape), *_ = _arrays(inputs[0].type)
        contracted = math.prod(shape[int(d)] for d in re.findall(r"\d+", found[1]))
        # The first array is the product; a library's has its workspace as a second one.
        (_, out), *_ = _arrays(i.type)
        return 2.0 * math.prod(out) * contracted
    if i.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        terms = [x for name, x in _LIBRARY.items() if target and name in target[1]]
        matrices = [s for x in (i, *inputs) for _, s in _arrays(x.type) if len(s) > 1]
        of_each = [math.prod(s) * min(s[-2:]) for s in matrices]
        return sum(terms) * max(of_each, default=0.0)
    if i.opcode in ("reduce", "reduce-window") and inputs:
        return inputs[0].entries
    if i.opcode == "scatter" and inputs:
        return inputs[-1].entries  # the updates; the array that they go to may be far larger
    if i.opcode == "sort":
        return i.entries * math.log2(max(i.entries, 2.0))
    return i.entries


def _bytes(i: _Instruction, mine: _Computation) -> float:
    """Returns what an instruction outside of a fusion reads and writes."""
    inputs = [mine[name].bytes for name in i.operands if name in mine]
    if i.opcode == "custom-call" and "cublas" in i.attributes:
        # After the product comes a workspace of up to 32 MB, most of which is never touched.
        size, shape = next(_arrays(i.type))
        return sum(inputs) + size * math.prod(shape)
    if i.opcode in _SLICES:
        return 2 * i.bytes
    if i.opcode == "dynamic-update-slice":
        return 2 * inputs[1]
    if i.opcode == "scatter":
        return 3 * inputs[-1]  # the updated entries are read and written
    return sum(inputs) + i.bytes


def _fusion_bytes(i: _Instruction, fused: _Computation, mine: _Computation) -> float:
    """Returns what a fusion reads and writes; of an array that it slices or updates, the slice."""
    users: dict[str, list[_Instruction]] = {}
    for user in fused.values():
        for operand in user.operands:
            users.setdefault(operand, []).append(user)
    total = 0.0
    parameters = {int(p.arguments): p for p in fused.values() if p.opcode == "parameter"}
    for place, operand in enumerate(i.operands):
        parameter = parameters.get(place)
        if operand not in mine or parameter is None:
            continue
        whole, uses = parameter.bytes, users.get(parameter.name, [])
        while len(uses) == 1 and uses[0].opcode == "bitcast":
            parameter = uses[0]
            uses = users.get(parameter.name, [])
        first = all(u.operands.index(parameter.name) == 0 for u in uses)
        if uses and first and all(u.opcode in _SLICES for u in uses):
            total += min(whole, sum(u.bytes for u in uses))
        elif not (uses and first and all(u.opcode == "dynamic-update-slice" for u in uses)):
            total += whole  # else it is written in place
    return total + sum(_written(root, fused) for root in fused.values() if root.is_root)


def _written(i: _Instruction, fused: _Computation) -> float:
    """Returns the bytes of a fusion's result that are written anew."""
    if i.opcode == "tuple":
        return sum(_written(fused[name], fused) for name in i.operands)
    if i.opcode == "bitcast" and i.operands[0] in fused:
        return _written(fused[i.operands[0]], fused)
    if i.opcode == "dynamic-update-slice":
        return fused[i.operands[1]].bytes
    return i.bytes


# --- Predictions of all methods -------------------------------------------------------------------

# What methods do on an accelerator unless they are told otherwise, and, in the same order, what one
# by one means.
SIDE_BY_SIDE = {"stack_views": (True, False), "runs_at_once": (20, 1)}


class Chip(NamedTuple):
    """An accelerator as its maker describes it.

    Attributes:
      name: For tables.
      peaks: FLOP/s of matrix products by precision: "float32", "tf32", "bfloat16".
      bandwidth: Bytes/s of its memory.
    """

    name: str
    peaks: dict[str, float]
    bandwidth: float


def chip_of(text: str) -> Chip:
    """Reads a chip as "name:float32:tf32:bfloat16:memory", in TFLOP/s, dense, and TB/s.

    Raises:
      ValueError: There are not four positive numbers after the name.
    """
    name, *numbers = text.split(":")
    try:
        float32, tf32, bfloat16, memory = (float(x) * 1e12 for x in numbers)
        if min(float32, tf32, bfloat16, memory) <= 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"chips: got {text!r}; allowed is name:float32:tf32:bfloat16:memory, in TFLOP/s and"
            " TB/s, above 0"
        ) from None
    return Chip(name, {"float32": float32, "tf32": tf32, "bfloat16": bfloat16}, memory)


def federations_of(
    name: str, views: Sequence[Any], labels: Any, clients: int, seed: int = 0
) -> list[Federation]:
    """Returns federations that a method may accept; the first is preferred.

    Args:
      name: Of the method. A vertical one gets an agent for each view; others get clients, half of
        them with all views, or all of them.
      views: [N, D_v] each.
      labels: [N], or None.
      clients: Of a horizontal federation.
      seed: Of its partition.
    """
    import numpy as np

    from jaxfedmvc import data
    from jaxfedmvc.algorithms import METHODS
    from jaxfedmvc.federation import Federation

    n = len(views[0])
    if METHODS[name].topology == "vertical":
        return [Federation.from_agents([(np.arange(n), view) for view in views], labels)]
    partitions = [
        data.hybrid_partition(seed, n, len(views), clients, ratio=ratio)
        for ratio in ((1, 1), (1, 0))
    ]
    return [Federation.from_arrays(views, labels, partition=parts) for parts in partitions]


def first_accepted(
    name: str, federations: Sequence[Federation], attempt: Callable[[Federation], Any]
) -> tuple[int, Any]:
    """Returns the place of the first federation that a method accepts, and what the attempt gave.

    Raises:
      ValueError: It accepts none.
    """
    refused = None
    for place, federation in enumerate(federations):
        try:
            return place, attempt(federation)
        except ValueError as error:
            refused = error
    raise ValueError(f"{name}: {refused}")


def has_stacks(name: str) -> bool:
    """Returns whether a method puts networks or runs side by side on an accelerator."""
    from jaxfedmvc.algorithms import METHODS

    return any(hasattr(METHODS[name].config, setting) for setting in SIDE_BY_SIDE)


def traced_run(
    name: str, *, samples: int, dim: int, clients: int, clusters: int, stacked: bool = True
) -> Any:
    """Traces a whole run of a method with the settings that it has on an accelerator by default.

    Args:
      name: Of the method.
      samples: Of all clients, or of an agent.
      dim: Features of each of two views.
      clients: See `federations_of`.
      clusters: K.
      stacked: Whether networks or runs are put side by side, where a method does so.

    Raises:
      ValueError: The method accepts neither federation.
    """
    import jax
    import numpy as np

    from jaxfedmvc import engine
    from jaxfedmvc.algorithms import METHODS
    from jaxfedmvc.algorithms.registry import configured

    method = METHODS[name]
    of_the_run = {"n_clusters": clusters, "n_clients": clients, "rounds": method.rounds}
    own = {
        setting: choices[not stacked]
        for setting, choices in SIDE_BY_SIDE.items()
        if hasattr(method.config, setting)
    }
    algorithm = method.make(*configured(method, own, of_the_run))
    rng = np.random.default_rng(0)
    views = [rng.random((samples, dim), np.float32) for _ in range(2)]
    run = jax.jit(lambda f, key: engine.run(algorithm, f, key, max(1, method.rounds)).labels)
    federations = federations_of(name, views, None, clients)
    return first_accepted(name, federations, lambda f: run.trace(f, jax.random.key(0)))[1]


def quickly_compiled(traced: Any) -> Any:
    """Compiles for a CPU; the optimised program is the same whatever code is made of it."""
    return traced.lower().compile(
        {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    )


def predicted(name: str, chips: Sequence[Chip], launch: float, **sizes: Any) -> dict[str, Any]:
    """Predicts the least seconds of a run of a method; nothing runs.

    The program is lowered for CUDA, which shows that it can be, and compiled for the CPU, which jax
    must be told to use; the optimised program is what is counted.

    Args:
      name: Of the method.
      chips: To predict for.
      launch: Seconds to launch a kernel.
      sizes: See `traced_run`.

    Returns:
      A row: FLOPs, bytes, kernels and guessed loops; kernels where no networks or runs are side by
      side; lines of StableHLO for CUDA, and instructions and fusions of the CPU's program; XLA's
      own count, each loop's body once; for each chip and precision the seconds, and what binds.

    Raises:
      ValueError: See `traced_run`.
    """
    began = time.perf_counter()
    traced = traced_run(name, **sizes)
    for_cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    compiled = quickly_compiled(traced)
    text = compiled.as_text()
    work, once = work_of(text), compiled.cost_analysis()
    apart = work.kernels
    if has_stacks(name):
        apart = work_of(
            quickly_compiled(traced_run(name, **sizes, stacked=False)).as_text()
        ).kernels
    row: dict[str, float | str] = {"method": name, **work._asdict(), "kernels_apart": apart}
    row |= {
        "intensity": work.flops / max(work.bytes, 1.0),
        "flops_once": once["flops"],
        "bytes_once": once["bytes accessed"],
        "cuda_lines": for_cuda.count("\n"),
        "instructions": text.count(" = "),
        "fusions": text.count(" fusion("),
        "host_calls": len(re.findall(r'custom_call_target="[^"]*python', text)),
    }
    for chip in chips:
        for precision in ("float32", "tf32"):
            seconds, limit = work.least_seconds(
                peak=chip.peaks[precision], bandwidth=chip.bandwidth, launch=launch
            )
            row[f"{chip.name} {precision} s"] = seconds
            row[f"{chip.name} {precision} limit"] = limit
    return row | {"seconds": time.perf_counter() - began}
