"""What a program will cost, from its trace alone: nothing is compiled and nothing runs.

FLOPs are counted equation by equation. Memory is planned as XLA's CPU compiler plans it, in four
steps on the traced program with its calls inlined:

1. Fusion. Elementwise operations and those that only move entries are computed where they are read.
   They get memory only where somebody needs a whole array (a product, a reduction, a sort, a loop,
   an output), or where an expensive one is read more than once. Reshapes never need any.
2. Updates in place. Loops update what they carry in place, scatters their operand. Where somebody
   may still read the old value by then, it is copied first. What a loop does not change, and is no
   larger than what it is made of, is computed once and kept.
3. Order. What is ready first runs first. This keeps threads busy and, unlike the order of the
   program, starts independent branches together.
4. Liveness. An array lives from the operation that writes it to the last that reads it; an
   elementwise operation may write over an operand that dies with it. A loop adds its body's peak.

Left out: holes between arrays, most scratch space within an operation, and what the compiler gains
by rewriting a program. Other devices fuse and order by rules of their own.
"""

from __future__ import annotations

import collections
import graphlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import partial_eval


class Cost(NamedTuple):
    """What one call of a program costs.

    Attributes:
      flops: Floating-point and integer operations.
      peak_bytes: What the device holds while the program runs: temporaries, inputs, outputs, and
        arrays that the function closes over.
      argument_bytes: Of the inputs that the program reads.
      output_bytes: Of the outputs.
    """

    flops: float
    peak_bytes: int
    argument_bytes: int
    output_bytes: int


def predict(function: Callable[..., Any], *arguments: Any, while_trips: float = 1) -> Cost:
    """Cost of `function(*arguments)`, which is only traced.

    FLOPs: a product of matrices 2 M N K times its batch; a reduction 1 for each entry that it
    reads; a scatter that adds 1 for each update; a sort of n entries n log2 n; an operation that
    only moves or converts entries 0; any other 1 for each entry that it writes (of eigh, svd and
    the like next to nothing, therefore). A scan, which a `fori_loop` of static length is too, is
    multiplied by its length; of a `cond` the most expensive branch counts.

    Args:
      function: What will be jitted.
      *arguments: Pytrees of arrays or of `jax.ShapeDtypeStruct`; only shapes and dtypes are read.
      while_trips: Iterations assumed of every loop whose number of iterations data decides.

    Raises:
      ValueError: `while_trips` is negative.
    """
    if while_trips < 0:
        raise ValueError(f"while_trips: got {while_trips}; allowed is 0 or more")
    closed = jax.make_jaxpr(function)(*jax.eval_shape(lambda *a: a, *arguments))
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    places = jaxpr.invars, jaxpr.outvars, jaxpr.constvars
    read, written, constants = (sum(_nbytes(v) for v in place) for place in places)
    peak = read + written + constants + _Graph(jaxpr).temporaries()
    return Cost(_flops(jaxpr, while_trips), peak, read, written)


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _nbytes(atom: Any) -> int:
    return _size(atom) * atom.aval.dtype.itemsize if hasattr(atom.aval, "dtype") else 0


# --- FLOPs ----------------------------------------------------------------------------------------

# What computes nothing, and the first kind moves nothing either.
_RELABELS = frozenset(
    "reshape squeeze copy name optimization_barrier random_wrap random_unwrap"
    " bitcast_convert_type".split()
)
_MOVES = frozenset(
    "broadcast_in_dim transpose slice dynamic_slice concatenate pad rev iota gather split"
    " convert_element_type".split()
)


def _flops(jaxpr: core.Jaxpr, while_trips: float) -> float:
    return sum(_equation_flops(equation, while_trips) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, while_trips: float) -> float:
    name, params = equation.primitive.name, equation.params
    written = float(sum(_size(v) for v in equation.outvars))
    if name == "scan":
        return params["length"] * _flops(params["jaxpr"].jaxpr, while_trips)
    if name == "while":
        body, test = (_flops(params[f"{x}_jaxpr"].jaxpr, while_trips) for x in ("body", "cond"))
        return while_trips * body + (while_trips + 1) * test
    if name == "cond":
        return max(_flops(branch.jaxpr, while_trips) for branch in params["branches"])
    if (inner := _called(equation)) is not None:
        return _flops(inner, while_trips)
    if name == "dot_general":
        summed = params["dimension_numbers"][0][0]
        return 2 * written * math.prod(equation.invars[0].aval.shape[d] for d in summed)
    if name.startswith(("reduce", "argm", "cum")):
        return float(_size(equation.invars[0]))
    if name == "sort":
        n = equation.invars[0].aval.shape[params["dimension"]]
        return _size(equation.invars[0]) * math.log2(max(n, 1))
    if name in _RELABELS | _MOVES or name in ("scatter", "dynamic_update_slice"):
        return 0.0
    if name.startswith("scatter"):
        return float(_size(equation.invars[2]))
    return written


def _called(equation: Any) -> core.Jaxpr | None:
    """The jaxpr of what the compiler inlines (jit, remat, a scan of length 1), or None."""
    name, params = equation.primitive.name, equation.params
    if name.startswith(("scan", "while", "cond", "reduce")) and params.get("length") != 1:
        return None
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    return getattr(inner, "jaxpr", inner)


# --- Memory ---------------------------------------------------------------------------------------

# Elementwise, but not worth computing again for a second reader.
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p log2 tanh logistic erf erf_inv erfc sqrt rsqrt cbrt pow div rem sin"
    " cos tan atan2 lgamma digamma".split()
)
# What a reduction computes of its operand by itself, if nobody else reads it.
_ARITHMETIC = frozenset("add add_any sub mul neg square max min abs broadcast_in_dim".split())
# Computed where it is read. A search for an extremum's place takes in its operand as well.
_FUSIBLE = frozenset(
    "sign floor ceil round select_n clamp eq ne lt le gt ge and or xor not is_finite shift_left"
    " shift_right_logical shift_right_arithmetic integer_pow nextafter population_count clz"
    " real imag complex argmax argmin".split()
).union(_EXPENSIVE, _ARITHMETIC, _MOVES - {"concatenate"})


class _Value:
    """An array; `writer` is None where it was there before."""

    def __init__(self, nbytes: int, writer: _Operation | None = None) -> None:
        self.nbytes = nbytes
        self.writer = writer
        self.whole = writer is None or not writer.fusible  # has memory
        self.reduced = False  # read by a reduction
        self.lasting = False  # the same in every iteration of the loop whose body this is in
        self.over: _Value | None = None  # what it is written over
        self.begins = self.ends = True  # its memory is taken, and is freed, by this computation

    def sources(self) -> Iterable[_Value]:
        """The arrays in memory that it is read or computed from."""
        return [self] if self.whole or self.writer is None else self.writer.operands

    def memory(self) -> _Value:
        """The first array that was written to the memory where this one is."""
        value = self
        while value.over is not None:
            value = value.over
        return value


_Read = _Value | None  # None is a constant that takes no memory


class _Operation:
    """One operation, with `scratch` bytes while it runs.

    `in_place` pairs what it reads with what it writes over that. `operands` are what it reads of
    memory, itself or through operations that are fused into it.
    """

    def __init__(self, name: str, reads: Sequence[_Read], nbytes: Sequence[int]) -> None:
        self.name = name
        self.fusible = name in _FUSIBLE
        self.writes = [_Value(n, self) for n in nbytes]
        self.operands: dict[_Value, None] = dict.fromkeys(v for v in reads if v is not None)
        self.in_place: list[tuple[_Value, _Value]] = []
        self.scratch = 0


class _Graph:
    """A computation: a jaxpr with its calls inlined, and each loop as one operation.

    `loop`: of a loop's body, the numbers of constants and of what it carries; the rest is scanned.
    """

    def __init__(self, jaxpr: core.Jaxpr, loop: tuple[int, int] | None = None) -> None:
        self.operations: list[_Operation] = []
        self.inputs = [_Value(_nbytes(v)) for v in jaxpr.invars]
        n_constants, n_carried = loop or (0, 0)
        n_whole = len(self.inputs) if loop is None else n_constants + n_carried
        self.carried = self.inputs[n_constants:n_whole] if loop else []
        for value in self.inputs[:n_constants]:
            value.lasting = True
        scanned = self.inputs[n_whole:]
        rows = [self._add("dynamic_slice", [v], [v.nbytes]).writes[0] for v in scanned]
        outputs = self._inlined(jaxpr, [*self.inputs[:n_whole], *rows])
        # Rows are written to the stack as they are computed.
        self.outputs = outputs if loop is None else outputs[:n_carried]

    def _add(self, name: str, reads: Sequence[_Read], nbytes: Sequence[int]) -> _Operation:
        operation = _Operation(name, reads, nbytes)
        self.operations.append(operation)
        read = sum(value.nbytes for value in operation.operands)
        for value in operation.writes:
            value.lasting = all(v.lasting for v in operation.operands) and sum(nbytes) <= read
        return operation

    def _inlined(self, jaxpr: core.Jaxpr, inputs: Sequence[_Read]) -> list[_Read]:
        """Adds the operations of `jaxpr`; returns its outputs."""
        values: dict[Any, _Read] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Read:
            return None if isinstance(atom, core.Literal) else values.get(atom)

        for equation in jaxpr.eqns:
            written = self._equation(equation, [read(v) for v in equation.invars])
            values.update(zip(equation.outvars, written, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: Any, reads: list[_Read]) -> Sequence[_Read]:
        """Adds one equation; returns what it writes."""
        name, params = equation.primitive.name, equation.params
        if (inner := _called(equation)) is not None:
            return self._inlined(inner, reads[len(reads) - len(inner.invars) :])
        movable = name in ("broadcast_in_dim", "transpose", "slice", "reduce_sum", "reduce_max")
        if name in _RELABELS or (movable and _same_order(equation, reads[0])):
            return reads[: len(equation.outvars)]
        if name in ("scan", "while"):
            return self._loop(equation, reads)
        nbytes = [_nbytes(v) for v in equation.outvars]
        if name == "dot_general":
            reads = [self._laid_out(equation, side, value) for side, value in enumerate(reads)]
        operation = self._add(name, reads, nbytes)
        if name == "cond":
            branches = [_Graph(branch.jaxpr) for branch in params["branches"]]
            operation.scratch = max(branch.temporaries() for branch in branches)
        elif name in ("sort", "dynamic_update_slice") or name.startswith("scatter"):
            pairs = zip(reads, operation.writes, strict=False)
            operation.in_place = [(value, out) for value, out in pairs if value]
        elif name.startswith(("random_", "threefry", "cum")):
            # A loop mixes two words for each random one, behind copies of both.
            operation.scratch = (3 if name == "random_bits" else 1) * sum(nbytes)
        return operation.writes

    def _laid_out(self, equation: Any, side: int, value: _Read) -> _Read:
        """An operand of a product, copied unless its batch comes first, then two blocks."""
        summed, batch = (dims[side] for dims in equation.params["dimension_numbers"])
        shape = equation.invars[side].aval.shape
        kinds = [(d in summed) - (d in batch) for d, n in enumerate(shape) if n > 1]
        blocks = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
        if value is None or (len(set(blocks)) == len(blocks) and -1 not in blocks[1:]):
            return value
        return self._add("transpose", [value], [value.nbytes]).writes[0]

    def _loop(self, equation: Any, reads: list[_Read]) -> list[_Read]:
        """Adds a loop, which updates in place what it carries, and stacks that are there before."""
        params = equation.params
        if equation.primitive.name == "scan":
            n_first, n_carried = params["num_consts"], params["num_carry"]
            graphs = [body := _Graph(params["jaxpr"].jaxpr, (n_first, n_carried))]
        else:
            n_first = params["body_nconsts"] + params["cond_nconsts"]
            n_carried = len(reads) - n_first
            body = _Graph(params["body_jaxpr"].jaxpr, (params["body_nconsts"], n_carried))
            graphs = [body, _Graph(params["cond_jaxpr"].jaxpr)]
        nbytes = [_nbytes(v) for v in equation.outvars]
        starts = reads[n_first : n_first + n_carried]
        starts += [self._add("stack", [], [n]).writes[0] for n in nbytes[n_carried:]]
        operation = self._add("loop", [*reads, *starts], nbytes)
        written: list[_Read] = [*operation.writes]
        operation.scratch = max(graph.temporaries() for graph in graphs)
        for i, (start, out) in enumerate(zip(starts, operation.writes, strict=True)):
            if i < n_carried and body.outputs[i] is body.carried[i]:
                written[i] = start  # only read
            elif start is not None:
                operation.in_place.append((start, out))
        return written

    def temporaries(self) -> int:
        """Most bytes alive at once beside inputs and outputs: the four steps of the module."""
        operations = self._share(self._fuse())
        needs = {o: [v.writer for v in o.operands if v.writer] for o in operations}
        return _peak(list(graphlib.TopologicalSorter(needs).static_order()))

    def _fuse(self) -> list[_Operation]:
        """Finds which arrays need memory; returns the operations that write one."""
        readers: collections.Counter[_Value] = collections.Counter()
        for value in filter(None, self.outputs):
            value.whole = True
        for operation in reversed(self.operations):
            reduces = operation.name.startswith("reduce_")
            for value in operation.writes:
                often = readers[value] > 1
                value.whole |= often and (operation.name in _EXPENSIVE or value.reduced)
                value.whole |= value.reduced and operation.name not in _ARITHMETIC
                reduces |= value.reduced and not value.whole
            moving = not all(value.lasting for value in operation.writes)
            for value in operation.operands:
                readers[value] += 1
                value.reduced |= reduces
                value.whole |= not (operation.fusible or reduces) or (value.lasting and moving)
        for operation in self.operations:
            sources = [v.sources() for v in operation.operands]
            operation.operands = dict.fromkeys(source for found in sources for source in found)
        return [o for o in self.operations if any(value.whole for value in o.writes)]

    def _share(self, operations: list[_Operation]) -> list[_Operation]:
        """Writes updates over what they update, or over copies, which it returns as well."""
        bit = {operation: 1 << i for i, operation in enumerate(operations)}
        before: dict[_Operation, int] = {}  # what must have run before, in whatever order
        readers = collections.defaultdict(list)
        for operation in operations:
            before[operation] = 0
            for value in operation.operands:
                readers[value].append(operation)
                if value.writer is not None:
                    before[operation] |= before[value.writer] | bit[value.writer]
        copies = []

        def read_late(value: _Value, writer: _Operation) -> bool:
            return any(r is not writer and not before[writer] & bit[r] for r in readers[value])

        def copied(value: _Value) -> _Value:
            copies.append(_Operation("copy", [value], [value.nbytes]))
            return copies[-1].writes[0]

        taken = {*self.inputs, *filter(None, self.outputs)} - {*self.carried}
        for operation in operations:
            for value, out in operation.in_place:
                out.over = value
                if value in taken or read_late(value, operation):
                    out.over = copied(value)
                    operation.operands[out.over] = None
                taken.add(value)
        for value in filter(None, (*self.inputs, *self.outputs)):
            value.memory().begins = value.memory().ends = False
        for old, new in zip(self.carried, self.outputs, strict=False):
            place = new.memory() if new else old
            if place.writer is None or place.writer not in before:  # not new, or over a copy
                continue
            in_step = place.writer.fusible or old not in place.writer.operands
            if read_late(old, place.writer) or not in_step:
                copy = copied(old)
                old.ends = place.begins = True  # in between there is room for others
                for reader in readers[old]:
                    reader.operands = {copy if v is old else v: None for v in reader.operands}
        return copies + operations


def _same_order(equation: Any, value: _Read) -> bool:
    """Whether entries stay as they lie. The transpose of a product of matrices is a product."""
    source, target = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    permutation = [d for d in equation.params.get("permutation", ()) if source[d] > 1]
    product = value is not None and value.writer is not None and value.writer.name == "dot_general"
    ordered = permutation == sorted(permutation) or (product and len(source) == 2)
    return ordered and math.prod(source) == math.prod(target)


def _peak(order: list[_Operation]) -> int:
    """Most bytes alive at once beside what is there from beginning to end."""
    spans: dict[_Value, list[int]] = {}
    for i, operation in enumerate(order):
        for value in (*operation.operands, *(v for v in operation.writes if v.whole)):
            spans.setdefault(value.memory(), [i, i])[1] = i
    placed, born, dying = ([list[int]() for _ in order] for _ in range(3))
    for value, (first, last) in spans.items():
        if value.begins:
            (born if value.ends else placed)[0 if value.lasting else first].append(value.nbytes)
        if value.ends and not value.lasting:
            dying[last].append(value.nbytes)
    alive = peak = 0
    for i, operation in enumerate(order):
        if operation.fusible:
            for n in set(born[i]) & set(dying[i]):  # written over an operand
                born[i].remove(n)
                dying[i].remove(n)
        alive += sum(born[i]) + sum(placed[i])
        peak = max(peak, alive + operation.scratch)
        alive -= sum(dying[i])
    return peak
