"""What this library reaches on the device that JAX finds: `python -m benchmarks.accelerator`.

Made for an hour, or ten minutes, with an accelerator: what matters most comes first, every result
is written as soon as it is there, and nothing is begun that does not fit the time left.

    python -m benchmarks.accelerator --minutes=9              # again: goes on where it stopped
    python -m benchmarks.accelerator --list                   # the pieces, in order
    python -m benchmarks.accelerator --only=ceilings,fmcsc
    python -m benchmarks.accelerator --predict                # all methods, without an accelerator

Every piece is a process of its own, so that its peak of memory is its own and one that fails takes
nothing with it. Results are rows of `results.csv` in --output_dir; `summary.json` has the last row
of each part. A row's status is "ok", "failed", "left out" (the device cannot do it) or "skipped",
for want of time. The next call with the same --output_dir measures what was skipped, and, if --only
names it, what failed. Times are medians of calls that are waited for, after one that warms up;
compilation is apart. A row's share is the time that the roofline allows (`benchmarks.roofline`, by
the ceilings that the first piece measured on this very device) over the time that was taken.

Of the data of the paper, MNIST-USPS, the file is used where there is one ($JAXFEDMVC_DATA,
--data_dir); else numbers of the same shapes are drawn, and no accuracy is given. --size=small,
which is the default on a CPU, goes through the same plan with scikit-learn's digits in some
minutes; its numbers say that everything works and nothing of an accelerator.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks import commands
from benchmarks.commands import BrokenError, spawned
from benchmarks.references.authors import Authors, read_authors

FLAGS = flags.FLAGS
SIZES = ("auto", "tiny", "small", "full")
flags.DEFINE_float("minutes", 9.0, "Time for all pieces together.", lower_bound=0.0)
flags.DEFINE_list("only", None, "Names of pieces, or of methods with --predict; None: all.")
flags.DEFINE_bool("list", False, "Only list the pieces.")
flags.DEFINE_enum("size", "auto", SIZES, "auto: small on a CPU, full elsewhere; tiny: for tests.")
flags.DEFINE_string("output_dir", "results/accelerator", "Where results are written.")
flags.DEFINE_bool("resume", True, "Whether to keep what --output_dir has, and to go on from there.")
flags.DEFINE_string("data_dir", None, "Where mnist_usps.npz is; see jaxfedmvc.data.load.")
flags.DEFINE_bool("predict", False, "Only predict a run of every method, on a CPU.")
flags.DEFINE_list(
    "chips",
    ["H200:67:495:989:4.8", "H100:67:495:989:3.35"],
    "To predict for: name:float32:tf32:bfloat16:memory, in TFLOP/s (dense) and TB/s.",
)
flags.DEFINE_float("launch_us", 3.0, "Microseconds of a kernel's launch.", lower_bound=0.0)

COLUMNS = (
    *("piece", "part", "status", "seconds", "unit", "compile_seconds", "rate", "rate_unit"),
    *("precision", "flops", "flops_traced", "bytes", "kernels", "roofline_seconds", "limit"),
    *("share", "predicted_MB", "peak_MB", "acc", "ratio", "goal", "data", "size", "device", "note"),
)
TEXTS = {"piece", "part", "status", "unit", "rate_unit", "precision", "limit", "goal", "data"}
TEXTS |= {"size", "device", "note"}
SEEDS = 5  # of the sweep and of accuracies
GRACE = 10.0  # seconds that a piece may be late before it is stopped

Row = dict[str, Any]

# What is measured. "full" has the papers' settings; the others only go through the motions.
PLANS: dict[str, dict[str, Any]] = {
    "full": {
        "matmul": 8192,
        "triad": 2**28,
        "samples": None,
        "fmcsc": {},  # beside the preset
        "shortened": (10, 5),  # what epochs of pre-training, and of a round, are divided by
        "taus": (0.1, 0.3, 0.5, 0.7, 1.0),  # of figure 2, for tau_m and for tau_p
        "batches": (1, 2, 4, 8, 16, 32, 64),
        "chunks": (1, 6, None),
        "fedhk": {"n": 10**6, "n_clients": 1000, "chunk": 0},
        "mgcd": 50_000,
        "mgcd_dense": 20_000,
        "mgcd_dims": (784, 784),
        "vertcohirf": 10**6,
        "tensors": (64, 4096),
        "clients": {"n": 100_000, "chunk": 5000},
        "methods": ("e_fkmvc", "fmcsc"),  # of many clients
    },
    "small": {
        "matmul": 1536,
        "triad": 2**23,
        "samples": 1200,
        "fmcsc": {
            "n_clients": 8,
            "rounds": 2,
            "hidden": (64,),
            "latent_dim": 8,
            "head_hidden": 16,
            "pretrain_epochs": 100,
            "local_epochs": 10,
            "distill_epochs": 20,
            "learning_rate": 1e-3,
            "n_init": 5,
        },
        "shortened": (10, 5),
        "taus": (0.3, 0.5),
        "batches": (1, 4),
        "chunks": (None,),
        "fedhk": {"n": 20_000, "n_clients": 100, "chunk": 8},
        "mgcd": 1000,
        "mgcd_dense": 1000,
        "mgcd_dims": (64, 64),
        "vertcohirf": 10_000,
        "tensors": (16,),
        "clients": {"n": 1000, "chunk": 250},
        "methods": ("e_fkmvc",),
    },
}
PLANS["tiny"] = PLANS["small"] | {
    "matmul": 64,
    "triad": 2**12,
    "samples": 120,
    "taus": (0.5,),
    "batches": (1,),
    "chunks": (1,),
    "fedhk": {"n": 400, "n_clients": 4, "chunk": 0},
    "mgcd": 60,
    "mgcd_dense": 60,
    "mgcd_dims": (8, 8),
    "vertcohirf": 200,
    "tensors": (2,),
    "clients": {"n": 20, "chunk": 10},
}


class Job(NamedTuple):
    """What the process of a piece must know.

    Attributes:
      name: Of the piece.
      size: A key of `PLANS`.
      seconds: It may take.
      data_dir: See `jaxfedmvc.data.load`.
      have: The parts that have been measured before, and their seconds.
      memory_gb: Of the device.
      run_mb: What one run of FMCSC takes, if known; 0 if not.
      run_seconds: As `run_mb`.
    """

    name: str
    size: str
    seconds: float
    data_dir: str | None = None
    have: dict[str, float] = {}  # noqa: RUF012 (never changed)
    memory_gb: float = 0.0
    run_mb: float = 0.0
    run_seconds: float = 0.0


class Piece(NamedTuple):
    """A piece of the plan.

    Attributes:
      name: As `--only` has it.
      what: One line for `--list`.
      needs: Seconds below which it is not begun, for small and full sizes. Compilation is most of
        the latter, which an H100 took for ceilings, fmcsc, fedhk, mgcd and vertcohirf; the others
        are guesses by these.
      rows: Measures it, and yields its rows.
      share: Of all time, that it may take at most.
    """

    name: str
    what: str
    needs: tuple[float, float]
    rows: Callable[[Job], Iterator[Row]]
    share: float = 1.0

    def seconds(self, size: str) -> float:
        """Returns the seconds below which it is not begun."""
        return 0.0 if size == "tiny" else self.needs[size == "full"]


# --- Pieces that other benchmarks measure ---------------------------------------------------------


def own(job: Job) -> Iterator[Row]:
    """Measures a piece of `benchmarks.accelerator_pieces`."""
    # What torch needs on the same device must find room beside jax's memory.
    of_jax = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if job.name == "torch" else {}
    text = json.dumps(job._asdict())
    yield from spawned("benchmarks.accelerator_pieces", text, job.seconds + GRACE, of_jax)


def by_benchmark(module: str, case: Mapping[str, Any], job: Job) -> Any:
    """Returns what another benchmark of this folder measures of a case."""
    asked = f"--measure={json.dumps(case)}"
    *_, found = spawned(f"benchmarks.{module}", asked, job.seconds + GRACE)
    return found


def fedhk(job: Job) -> Iterator[Row]:
    """Measures rounds of E-FKMVC on blobs in six views."""
    of = PLANS[job.size]["fedhk"]
    case = {"view_dims": [16, 8, 6, 4, 12, 10], "n_clusters": 10, "rounds": 3, "repeats": 5}
    case |= {"seed": 0, "cores": 0, "setup": False, "who": "ours", **of}
    found = by_benchmark("fedhk", case, job)
    yield {
        "part": f"{of['n']} samples",
        "seconds": found["seconds"],
        "unit": f"round of {of['n_clients']} clients",
        "compile_seconds": found["compile_seconds"],
        "rate": of["n"] / found["seconds"],
        "rate_unit": "samples/s",
        "data": "generated",
        "note": f"temporaries {found['temporary_MB']:.0f} MB, ARI {found['ari']:.3f}",
    }


def mgcd(job: Job) -> Iterator[Row]:
    """Measures a round of MGCD, its graph as factors, or dense where memory allows."""
    plan, dense = PLANS[job.size], job.name == "mgcd_dense"
    n = plan[job.name]
    case = {"kind": "run", "n": n, "view_dims": plan["mgcd_dims"], "server": "average", "seed": 0}
    case |= {"transport": "dense" if dense else "factored", "cores": 0}
    found = by_benchmark("mgcd", case | {"limit_gb": 0.9 * job.memory_gb}, job)
    part = f"N = {n}, {case['transport']}"
    if "refused_GB" in found:
        need, limit = found["refused_GB"], found["limit_GB"]
        note = f"{need:.0f} GB predicted, of {limit:.0f}"
        yield {"part": part, "status": "left out", "note": note}
        return
    yield {
        "part": part,
        "seconds": found["round_seconds"],
        "unit": "round",
        "compile_seconds": found["compile_seconds"],
        "predicted_MB": found["predicted_MB"],
        "acc": found["acc"],
        "data": "generated",
        "note": f"reserved {found['reserved_MB']:.0f} MB; easy clusters",
    }


def vertcohirf(job: Job) -> Iterator[Row]:
    """Measures a run of VertCoHiRF with k-means on blobs."""
    n = PLANS[job.size]["vertcohirf"]
    case = {"data": "blobs", "n": n, "method": "kmeans", "candidates": 0, "who": "ours"}
    case |= {"seed": 0, "cores": 0, "data_dir": None, "reference_gb": 0.0}
    found = by_benchmark("vertcohirf", case, job)
    yield {
        "part": f"{n} samples",
        "seconds": found["seconds"],
        "unit": f"run of {found['n_iter']} rounds",
        "compile_seconds": found["compile_seconds"],
        "rate": n / found["seconds"],
        "rate_unit": "samples/s",
        "peak_MB": found.get("device_MB"),
        "data": "generated",
        "note": f"ARI {found['ari']:.3f}",
    }


def many_clients(job: Job) -> Iterator[Row]:
    """Measures rounds of many clients whose data and states stay on the host."""
    of, until = PLANS[job.size]["clients"], time.monotonic() + job.seconds
    with tempfile.TemporaryDirectory() as folder:
        where = {"folder": f"{folder}/clients", "n": of["n"]}
        by_benchmark("scale", {"kind": "write", **where}, job)
        for method in PLANS[job.size]["methods"]:
            case = {"kind": "measure", "method": method, "shares": [0.01, 1.0], "rounds": 3}
            left = job._replace(seconds=until - time.monotonic())
            for found in by_benchmark("scale", {**case, **of, **where, "compare": True}, left):
                yield {
                    "part": f"{method}, {found['participating']} of {of['n']}",
                    "seconds": found["round_seconds"],
                    "unit": "streamed round",
                    "compile_seconds": found["first_seconds"],
                    "rate": found["participating"] / found["round_seconds"],
                    "rate_unit": "clients/s",
                    "ratio": found["device_seconds"] / found["round_seconds"],
                    "data": "generated",
                    "note": "compile: until the first round's end; ratio: data on the device",
                }


# The most important first.
PIECES = (
    Piece("ceilings", "matrix products, memory, launches: what the device can do", (10, 20), own),
    Piece("fmcsc", "a run of FMCSC with the paper's settings on MNIST-USPS", (25, 180), own),
    Piece("compile", "FMCSC compiled with less effort: how long, and its run", (5, 180), own),
    Piece("sweep", "figure 2: 25 temperatures with 5 seeds each, batched", (30, 240), own, 0.6),
    Piece("batch", "runs per second against the size of a batch", (25, 180), own, 0.4),
    Piece("precision", "float32, TF32 and bfloat16: seconds and accuracy", (30, 180), own, 0.4),
    Piece("memory", "the compiler's account of memory against the device's", (20, 150), own),
    Piece("torch", "an eager PyTorch loop over clients beside this library", (40, 150), own),
    Piece("fedhk", "E-FKMVC with 10^6 samples", (15, 20), fedhk),
    Piece("mgcd", "MGCD with 50 000 samples, graphs as factors", (15, 60), mgcd),
    Piece("mgcd_dense", "MGCD with dense graphs, where memory allows", (15, 60), mgcd),
    Piece("vertcohirf", "VertCoHiRF with 10^6 samples", (25, 60), vertcohirf),
    Piece("tensors", "batches of Tucker and PARAFAC2 decompositions", (20, 30), own),
    Piece("clients", "100 000 clients whose data stays on the host", (40, 60), many_clients),
)


# --- Results --------------------------------------------------------------------------------------


class Book:
    """The results in a folder: rows that are appended, and a summary that is replaced whole.

    Attributes:
      rows: All rows so far, those of earlier calls included; numbers are numbers.
      finished: Names of the pieces that need not be measured again.
      about: What else the summary says.
    """

    def __init__(self, folder: Path, resume: bool) -> None:
        """Opens a folder, which is made if need be.

        Raises:
          ValueError: The folder cannot be written, or its table is another's.
        """
        self.folder, self.rows, self.finished = folder, list[Row](), list[str]()
        self.about: Row = {}
        self._file, self._summary = folder / "results.csv", folder / "summary.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume and self._file.exists():
                self._read()
            else:
                self._write([])
        except OSError as error:
            raise ValueError(
                f"output_dir: got {str(folder)!r} ({error.strerror}); allowed is a folder that can"
                " be written"
            ) from None

    def _read(self) -> None:
        text = self._file.read_text()
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(whole.splitlines())
        if tuple(reader.fieldnames or COLUMNS) != COLUMNS:
            raise ValueError(
                f"output_dir: got {str(self.folder)!r}, whose results.csv has other columns;"
                " allowed is a folder of this command, or --noresume"
            )
        self.rows = [_read_row(row) for row in reader]
        if whole != text:  # a line that was not finished
            self._write(self.rows)
        if self._summary.exists():
            self.finished = json.loads(self._summary.read_text())["finished"]

    def _write(self, rows: list[Row]) -> None:
        new = self._file.with_suffix(".tmp")
        with open(new, "w", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self._file)
        self.rows = rows

    def add(self, row: Row) -> None:
        """Adds a row, and writes both files."""
        row = dict.fromkeys(COLUMNS) | {"status": "ok"} | row | self._roofline(row)
        self.rows.append(row)
        with open(self._file, "a", newline="") as out:
            csv.DictWriter(out, COLUMNS).writerow(row)
        self.save()

    def save(self) -> None:
        """Writes the summary."""
        new = self._summary.with_suffix(".tmp")
        summary = {**self.about, "finished": self.finished, "rows": self.latest()}
        new.write_text(json.dumps(summary, indent=1))
        os.replace(new, self._summary)

    def latest(self) -> list[Row]:
        """Returns the last row of every part of every piece, in the order of the plan.

        A row of no part says why a piece ended, and holds until there is another of the piece.
        """
        parts = {(row["piece"], row["part"]): row for row in self.rows}
        ends = {row["piece"]: row for row in self.rows}
        kept = [row for row in parts.values() if row["part"] or ends[row["piece"]] is row]
        order = [piece.name for piece in PIECES]
        return sorted(kept, key=lambda row: order.index(row["piece"]))

    def measured(self, piece: str) -> dict[str, Row]:
        """Returns the rows of a piece's parts that were measured."""
        rows = (row for row in self.rows if row["piece"] == piece and row["status"] == "ok")
        return {row["part"]: row for row in rows}

    def _roofline(self, row: Row) -> Row:
        """Returns the columns that compare a row with the ceilings, if these were measured."""
        ceilings = self.measured("ceilings")
        product = ceilings.get(f"matmul {row.get('precision')}")
        memory, launch = ceilings.get("memory"), ceilings.get("launch")
        if not (row.get("flops") and product and memory and launch):
            return {}
        from benchmarks.roofline import Work

        work = Work(row["flops"], row["bytes"], row["kernels"])
        least, limit = work.least_seconds(
            peak=product["rate"], bandwidth=memory["rate"], launch=launch["seconds"]
        )
        return {"roofline_seconds": least, "limit": limit, "share": least / row["seconds"]}


def _read_row(texts: Mapping[str, str]) -> Row:
    """Returns a row of the file as it was added: numbers as such, None for what is empty."""
    return {
        name: None if text == "" else text if name in TEXTS else float(text)
        for name, text in texts.items()
    }


# --- The plan -------------------------------------------------------------------------------------


def go(
    pieces: Sequence[Piece],
    book: Book,
    *,
    size: str,
    minutes: float,
    data_dir: str | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Measures the pieces that the book lacks, one after the other, until the time is over.

    Args:
      pieces: In this order.
      book: Receives the rows, and "memory_gb" and "device" of its `about` are of the device.
      size: A key of `PLANS`.
      minutes: For all of them.
      data_dir: See `jaxfedmvc.data.load`.
      tell: Shows a line.
    """
    until = time.monotonic() + 60 * minutes
    same = {"size": size, "device": book.about.get("device")}
    for piece in pieces:
        if piece.name in book.finished:
            tell(f"{piece.name}: measured before")
            continue
        left, need = until - time.monotonic(), piece.seconds(size)
        mine = same | {"piece": piece.name}
        if left < need:
            book.add(mine | {"status": "skipped", "note": f"{left:.0f} s left of {need:.0f} s"})
            tell(line(book.rows[-1]))
            continue
        run = book.measured("fmcsc").get("run", {})
        job = Job(
            piece.name,
            size,
            min(left, 60 * minutes * piece.share),
            data_dir,
            {part: row["seconds"] for part, row in book.measured(piece.name).items()},
            book.about.get("memory_gb", 0.0),
            run.get("predicted_MB", 0.0),
            run.get("seconds", 0.0),
        )
        began = time.monotonic()
        if _measure(piece, job, book, mine, tell):
            book.finished.append(piece.name)
        book.about.setdefault("took", {})[piece.name] = round(time.monotonic() - began, 1)
        book.save()


def _measure(piece: Piece, job: Job, book: Book, mine: Row, tell: Callable[[str], None]) -> bool:
    """Adds a piece's rows to the book; returns whether it is finished, be it by failing."""
    is_whole = True
    try:
        for row in piece.rows(job):
            book.add(mine | row)
            is_whole &= row.get("status") != "skipped"
            tell(line(book.rows[-1]))
    except Exception as error:  # whatever it is: the next piece goes on
        late = isinstance(error, BrokenError) and error.late
        reason = str(error).strip().splitlines() or [type(error).__name__]
        book.add(mine | {"status": "skipped" if late else "failed", "note": reason[0][:200]})
        tell(line(book.rows[-1]))
        return not late
    return is_whole


# --- What is shown --------------------------------------------------------------------------------

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SHOWN = (
    ("seconds", 9, "{:.3g}"),
    ("compile_seconds", 8, "{:.1f}"),
    ("share", 6, "{:.0%}"),
    ("limit", 9, "{}"),
    ("predicted_MB", 8, "{:.0f}"),
    ("peak_MB", 8, "{:.0f}"),
    ("acc", 6, "{:.3f}"),
    ("ratio", 6, "{:.3g}"),
)
_TITLES = ("seconds", "compile", "share", "limit", "MB said", "MB peak", "ACC", "ratio")


def titles() -> str:
    """Returns the head of the table."""
    cells = "".join(f"{t:>{w}s}" for t, (_, w, _) in zip(_TITLES, _SHOWN, strict=True))
    return f"{'':40s}{cells}{'rate':>17s}"


def line(row: Row) -> str:
    """Returns a line of the table."""
    name = f"{row['piece']:12s}{row.get('part') or ''}"
    if row["status"] != "ok":
        return f"{name:40s}  {row['status']}: {row['note']}"
    values = ((row.get(key), w, form) for key, w, form in _SHOWN)
    cells = "".join(f"{'' if v is None else form.format(v):>{w}s}" for v, w, form in values)
    return f"{name:40s}{cells}{_rate(row):>17s}  {row.get('goal') or ''}"


def _rate(row: Row) -> str:
    if not row.get("rate"):
        return ""
    factor, prefix = next(((f, p) for f, p in _UNITS if row["rate"] >= f), (1.0, ""))
    return f"{row['rate'] / factor:.3g} {prefix}{row['rate_unit']}"


def predictions(names: Sequence[str], folder: Path, size: str) -> None:
    """Prints and writes the predictions of methods, see `roofline.predicted`, as each is there.

    Raises:
      ValueError: A chip cannot be read.
    """
    import jax

    from benchmarks import roofline

    jax.config.update("jax_platforms", "cpu")
    chips = [roofline.chip_of(text) for text in FLAGS.chips]
    sizes = {"samples": 5000, "dim": 784, "clients": 24, "clusters": 10}
    if size in ("tiny", "small"):
        sizes = {"samples": 96, "dim": 12, "clients": 4, "clusters": 3}
    print(
        f"shapes {sizes}; {FLAGS.launch_us} us a launch; loops of unknown length {roofline.PASSES}"
    )
    columns = [f"{chip.name} {p}" for chip in chips for p in ("float32", "tf32")]
    print(
        f"{'':16s}{'GFLOP':>10s}{'GB':>10s}{'kernels':>10s}{'(apart)':>10s}{'FLOP/B':>8s}{'loops?':>7s}{'fusions':>8s}"
        + "".join(f"{name + ', s':>20s}" for name in columns)
    )
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "predictions.csv", "w", newline="") as out:
        writer = None
        for name in names:
            row = roofline.predicted(name, chips, FLAGS.launch_us * 1e-6, **sizes)
            if writer is None:
                writer = csv.DictWriter(out, list(row))
                writer.writeheader()
            writer.writerow(row)
            out.flush()
            print(
                f"{name:16s}{row['flops'] / 1e9:10.1f}{row['bytes'] / 1e9:10.1f}"
                f"{row['kernels']:10.0f}{row['kernels_apart']:10.0f}{row['intensity']:8.1f}{row['guessed']:7.0f}"
                f"{row['fusions']:8.0f}"
                + "".join(f"{row[c + ' s']:11.3g} {row[c + ' limit']:8s}" for c in columns),
                flush=True,
            )
            jax.clear_caches()  # programs take memory


def chosen(known: Sequence[str]) -> list[str]:
    """Returns the names that --only asks for, in their usual order.

    Raises:
      ValueError: A name is unknown.
    """
    asked = FLAGS.only or list(known)
    for name in asked:
        if name not in known:
            raise ValueError(f"only: got {name!r}; allowed are {', '.join(known)}")
    return [name for name in known if name in asked]


def measured(names: Sequence[str], folder: Path) -> None:
    """Measures pieces, and prints the table of all that the folder then has.

    Raises:
      ValueError: The folder is another device's or another size's, or cannot be written.
    """
    began = time.monotonic()
    authors = read_authors(FLAGS.authors) if FLAGS.authors else None
    book = Book(folder, FLAGS.resume)
    if FLAGS.only:
        failed = {row["piece"] for row in book.rows if row["status"] == "failed"}
        book.finished = [name for name in book.finished if name not in failed & set(names)]
    if set(names) - set(book.finished):
        found, size = device_of(book, FLAGS.size)
        print(f"{found['device']} ({found['platform']}), jax {found['jax']}; size {size}; {folder}")
        print(titles(), flush=True)
        go(
            [piece for piece in PIECES if piece.name in names],
            book,
            size=size,
            minutes=FLAGS.minutes - (time.monotonic() - began) / 60,
            data_dir=FLAGS.data_dir,
            tell=lambda text: print(text, flush=True),
        )
    print(f"\nall of {folder}, {time.monotonic() - began:.0f} s this time\n{titles()}")
    print("\n".join(map(line, book.latest())))
    if authors:
        print(f"\n{beside(authors, book.latest())}")


def beside(authors: Authors, rows: Sequence[Row]) -> str:
    """Returns the authors' seconds beside ours of a run at full size, if there is one."""
    for row in rows:
        if (row["piece"], row["part"], row["size"], row["status"]) == (
            "fmcsc",
            "run",
            "full",
            "ok",
        ):
            return authors.beside(row["seconds"], row["device"])
    return "the authors' program: there is no run of ours at full size to set beside it"


def device_of(book: Book, size: str) -> tuple[Row, str]:
    """Finds out what jax finds, and notes it in the book's `about`.

    Args:
      book: Of the results.
      size: As `--size` has it.

    Returns:
      The row of the piece "device", and the size that "auto" stands for.

    Raises:
      ValueError: Jax finds no device, or the book is of another device or size.
    """
    try:
        (found,) = own(Job("device", "tiny", 120.0))
    except BrokenError as error:
        raise ValueError(f"jax finds no device: {error}") from None
    if size == "auto":
        size = "small" if found["platform"] == "cpu" else "full"
    for row in book.rows[:1]:
        if (row["device"], row["size"]) != (found["device"], size):
            raise ValueError(
                f"output_dir: got {str(book.folder)!r}, with results of {row['device']}, size"
                f" {row['size']}; allowed is another folder for {found['device']}, size {size}"
            )
    del found["part"], found["status"]
    book.about |= {**found, "size": size, "command": sys.argv}
    return found, size


def main() -> None:
    """Measures, lists or predicts; see the module's docstring."""
    try:
        if FLAGS.list:
            for piece in PIECES:
                small, full = piece.needs
                print(f"{piece.name:12s}{small:4.0f} s small,{full:4.0f} s full: {piece.what}")
        elif FLAGS.predict:
            from jaxfedmvc.algorithms import METHODS

            predictions(chosen(sorted(METHODS)), Path(FLAGS.output_dir), FLAGS.size)
        else:
            measured(chosen([piece.name for piece in PIECES]), Path(FLAGS.output_dir))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    commands.run(main)
