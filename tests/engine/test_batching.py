"""Seeds and settings as one program, on one device, several, and several processes."""

import json
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import batches
from experiments.lib.ledger import Ledger
from experiments.lib.report import flattened
from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine import batching, mesh
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host
from tests.engine.test_run import toy
from tests.helpers import on_devices


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


# --- Data ---


@pytest.mark.parametrize("dealt", [False, True])
def test_every_seed_has_the_federation_that_its_partition_makes(dealt):
    rng = np.random.default_rng(1)
    views = [rng.normal(size=(23, d)).astype(np.float32) for d in (3, 2)]
    truth = rng.integers(3, size=23) * 10
    partitions = [data.hybrid_partition(seed, 23, 2, 5, ratio=(1, 1)) for seed in (4, 5)]
    source = batching.pooled(views, truth, partitions, dealt=dealt)
    shared, by_seed = batching.place(source)
    build = jax.jit(source.build)
    for place, partition in enumerate(partitions):
        found = build(shared, jax.tree.map(lambda x, p=place: x[p], by_seed))
        expected = Federation.from_arrays(views, truth, partition=partition)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_partitions_that_are_not_alike_are_refused():
    views = [np.zeros((6, 1))]
    one = [Part((0,), np.arange(6).reshape(2, 3), np.arange(2))]
    other = [Part((0,), np.arange(6).reshape(3, 2), np.arange(3))]
    with pytest.raises(ValueError, match="partitions: one seed has"):
        batching.pooled(views, None, [one, other])
    wrong = [Part((0,), np.arange(1, 7).reshape(2, 3), np.arange(2))]
    with pytest.raises(ValueError, match=r"partition: sample_ids .* lie in 1\.\.6"):
        batching.pooled(views, None, [one, wrong])


@pytest.mark.parametrize("dealt", [False, True])
def test_views_and_labels_of_unlike_rows_are_refused(dealt):
    parts = [data.hybrid_partition(0, 6, 2, 2)]
    with pytest.raises(ValueError, match=r"same number of rows; got \[6, 7\]"):
        batching.pooled([np.zeros((6, 1)), np.zeros((7, 1))], None, parts, dealt=dealt)
    with pytest.raises(ValueError, match=r"labels must have shape \(6,\); got \(7,\)"):
        batching.pooled([np.zeros((6, 1))] * 2, np.zeros(7, int), parts, dealt=dealt)


def test_a_dealt_view_with_nan_is_refused_when_it_is_read():
    views = [np.full((4, 1), np.nan)]
    source = batching.pooled(
        views, None, [[Part((0,), np.arange(4)[None], np.arange(1))]], dealt=True
    )
    with pytest.raises(ValueError, match="views: some values are NaN"):
        batching.place(source)


def test_equal_federations_are_held_once_and_others_stacked():
    agents = [Federation.from_clients([{0: np.eye(3) * k}]) for k in (1, 1, 2)]
    once = batching.stacked(agents[:2])
    assert not jax.tree.leaves(once.by_seed)
    assert once.build(*batching.place(once)).cohorts[0].views[0].shape == (1, 3, 3)
    both = batching.stacked(agents)
    _, by_seed = batching.place(both)
    third = both.build((), jax.tree.map(lambda x: x[2], by_seed))
    assert third.cohorts[0].views[0][0, 1, 1] == 2
    assert jax.tree.leaves(batching.stacked([agents[0], agents[2], agents[0]]).by_seed)
    with pytest.raises(ValueError, match="federations: one seed has arrays of the shapes"):
        batching.stacked([agents[0], Federation.from_clients([{0: np.eye(4)}])])
    labelled = [Federation.from_clients([{0: np.eye(4)}], [np.arange(4) % k]) for k in (2, 3)]
    with pytest.raises(ValueError, match="federations: one seed has 3 classes, the first 2"):
        batching.stacked(labelled)


# --- The program ---


@pytest.fixture(scope="module")
def alone():
    """Outputs of the tiny runs on one device, in one batch."""
    return on_devices.outputs(None, dealt=False)[0]


@pytest.mark.slow
def test_a_batch_is_its_runs_one_by_one_and_compiles_once(alone):
    source, traces = on_devices.source(dealt=True), []

    def counted(*arguments):
        traces.append(1)
        return batching.batched(on_devices.one_run, source.build)(*arguments)

    program = jax.jit(counted)
    placed = batching.place(source)
    for i, (scale, seed) in enumerate((x, s) for x in on_devices.SCALES for s in range(2)):
        found = program(*placed, jnp.full(1, scale), jnp.full(1, seed), jnp.full(1, seed))
        np.testing.assert_allclose(found["center"][0], alone["center"][i], rtol=1e-5)
        np.testing.assert_array_equal(found["tables"][0], alone["tables"][i])
        for a, b in zip(found["labels"], alone["labels"], strict=True):
            np.testing.assert_array_equal(a[0], b[i])
    assert len(traces) == 1
    # Seeds and scales matter, or this would compare constants.
    assert len({row.tobytes() for row in alone["center"]}) == 4


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.on_devices", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )


def printed(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])  # the collectives' library writes before it


def check(found, alone):
    np.testing.assert_allclose(found["center"], alone["center"], rtol=1e-5)
    np.testing.assert_array_equal(found["tables"], alone["tables"])
    for a, b in zip(found["labels"], alone["labels"], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_eight_devices_compute_what_one_does(alone):
    found = printed(start("sweep:2,clients:4"))
    assert found["devices"] == 8
    check(found, alone)


@pytest.mark.slow
def test_two_processes_with_their_own_clients_compute_what_one_does(alone):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start("clients:4", address, "2", str(place)) for place in (1, 0)]
    for found in map(printed, both):
        assert found["devices"] == 4
        assert found["share"] == 0.5  # of the clients' data
        check(found, alone)


@pytest.mark.parametrize("text", ["", "runs:2", "sweep:0", "sweep:2,sweep:2", "clients", "sweep:x"])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="mesh: got"):
        mesh.parse_mesh(text)


def test_a_mesh_must_fit_devices_and_clients():
    with pytest.raises(ValueError, match=r"mesh: .* takes 6 devices, and there\s+are 1"):
        mesh.make_mesh(mesh.parse_mesh("sweep:2, clients:3"))
    devices = jax.sharding.AbstractMesh((1, 2), mesh.AXES)
    clients = [{0: np.eye(2)}] * 4 + [{0: np.eye(2), 1: np.eye(2)}] * 3
    with pytest.raises(ValueError, match="clients:2 does not divide the 3 clients with the views"):
        mesh.check_mesh(devices, Federation.from_clients(clients))


# --- Batches ---


def group(make, hyperparams, n_seeds=2):
    partitions = [data.hybrid_partition(seed, 24, 1, 3) for seed in range(n_seeds)]
    rng = np.random.default_rng(2)
    x = np.repeat(np.eye(2) * 9, 12, axis=0) + rng.normal(size=(24, 2))
    truth = np.repeat([0, 1], 12)
    return batches.Group(
        [{"x": str(i)} for i in range(len(hyperparams))],
        hyperparams,
        make,
        batching.pooled([x], truth, partitions),
        batches.outline([x], partitions[0]),
        list(range(n_seeds)),
        0,
        None,
        [1.0],
        rate=rate,
    )


def cut_at(hyperparams):
    """Two clusters, cut where the first feature is log(x); compiles at once."""

    def assign(server, state, client):
        return jnp.where(client.mask, (client.views[0][:, 0] > server).astype(jnp.int32), -1)

    level = jnp.log(jnp.float32(hyperparams["x"]))
    return FederatedAlgorithm(lambda key, federation: (level, ((),)), (), (), (), assign)


def rate(place, labels):
    """Scores on the host: rows above the level, of the first client."""
    return {"acc": float(np.sum(labels[0][0] == 1)), "nmi": float(place)}


class Shown:
    """What a terminal would show of a job."""

    def __init__(self):
        self.expected, self.ran, self.done_runs, self.lines = {}, [], [], []

    def expect(self, calls):
        self.expected = calls

    def compiling(self, ready, n, name):
        self.lines.append(f"compiling {ready} of {n}")

    def running(self, name):
        self.ran.append(name)

    def done(self, kind, n, waited):
        self.done_runs.append((kind, n))

    def write(self, line):
        self.lines.append(line)


FIVE = [{"x": float(i)} for i in range(60, 65)]


@pytest.mark.slow
def test_batches_are_filled_up_and_none_is_lost(tmp_path):
    """Ten runs by four: the last batch holds two of them."""
    kept = Ledger(tmp_path)
    shown = Shown()
    compiled = batches.execute([group(cut_at, FIVE)], kept, batch=4, progress=shown)
    assert compiled == 1 and shown.done_runs == [("program 0", n) for n in (4, 4, 2)]
    assert shown.expected == {"program 0": 10} and shown.lines == ["compiling 0 of 1"]
    assert shown.ran == ["program 0"] * 3
    assert [(row["x"], row["seed"]) for row in kept.rows] == [
        (str(x), str(seed)) for x in range(5) for seed in range(2)
    ]
    assert {row["status"] for row in kept.rows} == {"ok"}
    assert [row["nmi"] for row in kept.rows] == ["0.0", "1.0"] * 5
    assert {row["bytes_up"] for row in kept.rows} == {"0"}
    again = Ledger(tmp_path)
    assert again.rows == kept.rows and again.done(0) == 10 and again.sizes == {0: 4}
    assert batches.execute([group(cut_at, FIVE)], again) == 0


@pytest.mark.slow
def test_what_a_killed_job_left_is_cut_back_to_whole_batches(tmp_path):
    kept = Ledger(tmp_path)
    batches.execute([group(cut_at, FIVE)], kept, batch=5)
    whole = {name: (tmp_path / name).read_bytes() for name in ("runs.csv", "batches.csv")}
    rng = np.random.default_rng(0)
    for name, other in (("runs.csv", "batches.csv"), ("batches.csv", "runs.csv")):
        for cut in rng.integers(1, len(whole[name]), size=12):
            (tmp_path / name).write_bytes(whole[name][:cut])
            (tmp_path / other).write_bytes(whole[other])
            left = Ledger(tmp_path)
            assert left.rows == kept.rows[: left.done(0)]
            assert left.done(0) % 5 == 0 and left.done(0) == len(left.rows)


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [("runs.csv", 1, "0,1.0"), ("batches.csv", 3, "x,y,z,w"), ("batches.csv", 2, "0,1")],
)
def test_a_file_that_no_kill_leaves_so_is_named(tmp_path, name, line, text):
    kept = Ledger(tmp_path)
    kept.add(0, 1, [{"seed": 0}], 1.0)
    kept.add(0, 1, [{"seed": 1}], 1.0)
    lines = (tmp_path / name).read_text().splitlines()
    lines[line - 1] = text
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"^output_dir: line {line} of '.*{name}' is not one"):
        Ledger(tmp_path)


def test_runs_without_their_batches_are_kept(tmp_path):
    """They were dropped without a word, and made anew."""
    kept = Ledger(tmp_path)
    kept.add(0, 1, [], 0.0)
    kept.add(0, 1, [{"seed": 0}], 1.0)
    rows = (tmp_path / "runs.csv").read_bytes()
    (tmp_path / "batches.csv").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"^output_dir: '.*batches\.csv' is gone, without which"):
        Ledger(tmp_path)
    assert (tmp_path / "runs.csv").read_bytes() == rows
    (tmp_path / "elsewhere").rename(tmp_path / "batches.csv")
    assert Ledger(tmp_path).done(0) == 1


def test_seconds_of_a_run_are_without_compilation(tmp_path):
    kept = Ledger(tmp_path)
    kept.add(0, 2, [{"seed": 0}, {"seed": 1}], 10.0, compiling=8.0)
    assert [row["seconds"] for row in kept.rows] == ["1.0", "1.0"] and kept.seconds == 10
    # A program that takes a second to compile and none to run.
    program = batches.Program(group(cut_at, FIVE))
    program._ahead[1] = SimpleNamespace(result=lambda: time.sleep(1) or "compiled")
    assert program._of_size(1) == "compiled" and program.waited >= 1
    waited = program.waited
    assert program._of_size(1) == "compiled" and program.waited == waited


def test_out_of_memory_halves_the_batch(tmp_path, monkeypatch):
    real = batches.Program.run

    def scarce(self, runs):
        if len(runs) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return real(self, runs)

    monkeypatch.setattr(batches.Program, "run", scarce)
    kept, shown = Ledger(tmp_path), Shown()
    batches.execute([group(cut_at, FIVE)], kept, batch=8, progress=shown)
    assert kept.sizes == {0: 2} and kept.done(0) == 10
    assert shown.lines[1:] == ["out of memory: going on with 2 runs at a time"]  # five before

    monkeypatch.setattr(batches.Program, "run", lambda *_: scarce(None, [0] * 3))
    none = Ledger(tmp_path / "none")
    (tmp_path / "none").mkdir()
    batches.execute([group(cut_at, FIVE)], none, batch=2, progress=Shown())
    assert {row["status"] for row in none.rows} == {"failed: RESOURCE_EXHAUSTED: Out of memory"}
    assert len(none.rows) == 10


def test_a_run_that_breaks_off_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    real = batches.Program.run

    def fragile(self, runs):
        if (3, 1) in runs:
            raise jax.errors.JaxRuntimeError("INTERNAL: a number of run (3, 1)\nis bad")
        return real(self, runs)

    monkeypatch.setattr(batches.Program, "run", fragile)
    kept = Ledger(tmp_path)
    compiled = batches.execute([group(cut_at, FIVE)], kept, batch=5, progress=Shown())
    assert compiled == 1
    failed = [row for row in kept.rows if row["status"] != "ok"]
    assert [(row["x"], row["seed"], row["acc"]) for row in failed] == [("3", "1", "nan")]
    assert failed[0]["status"] == "failed: INTERNAL: a number of run (3, 1)"
    assert len(kept.rows) == 10


def test_a_run_that_turns_nan_is_recorded_with_its_setting(tmp_path):
    made = group(cut_at, [{"x": 60.0}, {"x": -1.0}], n_seeds=1)
    kept = Ledger(tmp_path)
    batches.execute([made], kept, batch=2)
    assert [row["status"] for row in kept.rows] == ["ok", "failed: NaN in the model"]
    # Of the first client's eight samples, those of the half whose first feature is 9, not 0.
    ids = data.hybrid_partition(0, 24, 1, 3)[0].sample_ids[0]
    assert float(kept.rows[0]["acc"]) == np.sum(ids < 12) > 0
    assert kept.rows[1]["acc"] == "nan"
    assert kept.rows[1]["x"] == "1"  # its setting's name


def test_a_batch_is_planned_by_what_the_compiler_says_of_one_run(monkeypatch):
    program = batches.Program(group(cut_at, FIVE))
    memory = program.memory()
    # 24 samples of two features and their classes; each run gathers its clients' rows of them.
    ids = 2 * 3 * (8 + 1)
    assert memory.shared == 4 * (24 * 3 + ids) and memory.batch(3) == memory.shared + 3 * memory.run
    assert 4 * 24 < memory.run < 4 * 24 * 20
    assert batches.planned_batch(program, None) == 10 and program.compilations == 1
    monkeypatch.setattr(batches, "free_bytes", lambda: 4.5 / batches._SHARE * memory.run)
    assert batches.planned_batch(program, None) == 4
    monkeypatch.setattr(batches, "free_bytes", lambda: 0)
    assert batches.planned_batch(program, None) == 1
    assert batches.planned_batch(program, 7) == 5  # two batches of five, not of seven and three
    alone = batches.Program(group(cut_at, FIVE[:1], n_seeds=1))
    assert batches.planned_batch(alone, None) == 1 and alone.compilations == 0


@pytest.mark.slow
def test_tables_become_the_scores_of_the_last_round_and_of_every_one(tmp_path):
    source = on_devices.source(dealt=True)
    shared, by_seed = batching.place(source)
    federation = source.build(shared, jax.tree.map(lambda x: x[1], by_seed))
    options = {"participation": [0.5, 0.5], "resample_participants": True}
    made = batches.Group(
        [{"scale": "a"}],
        [0.3],
        toy,
        source,
        federation,
        list(range(on_devices.SEEDS)),
        on_devices.ROUNDS,
        2,
        every_round=True,
        **options,
    )
    kept = Ledger(tmp_path)
    batches.execute([made], kept)
    row = kept.rows[1]
    run = jax.jit(lambda f, key: engine.run(toy(0.3), f, key, on_devices.ROUNDS, **options))
    found = run(federation, jax.random.key(1))
    scores = flattened(host.score(federation, found.labels, found.state.participants))
    assert row["acc"] == row["all/pooled/acc"] and -1 < float(row["silhouette"]) < 1
    for name, score in scores.items():
        np.testing.assert_allclose(float(row[name]), score, rtol=1e-6)
        by_round = [float(x) for x in row[batches.ROUNDS + name].split()]
        assert len(by_round) == on_devices.ROUNDS
        np.testing.assert_allclose(by_round[-1], score, rtol=1e-6)
    sent = [int(float(x)) for x in row["rounds/bytes"].split()]
    assert sent[-1] == int(row["bytes_up"]) + int(row["bytes_down"]) and sent[0] < sent[1]


def test_programs_compiled_ahead_are_used_and_make_the_same_rows(tmp_path, monkeypatch):
    """Four groups: no program is compiled twice, and each row is its own group's."""
    made = [group(cut_at, FIVE[i : i + 2]) for i in range(4)]
    alone = []
    for place, one in enumerate(made):
        program = batches.Program(one)
        alone += [batches.row_of(program, r, program_row(program, r)) for r in one.runs]
        assert program.compilations == 1, place
    compiled, real = [], batches.Program._compile

    def counted(self, size, data):
        compiled.append((id(self.group), size, isinstance(jax.tree.leaves(data)[0], jax.Array)))
        return real(self, size, data)

    monkeypatch.setattr(batches.Program, "_compile", counted)
    kept = Ledger(tmp_path)
    assert batches.execute(made, kept, batch=1) == 4
    assert len(set(compiled)) == len(compiled) == 4
    assert not any(placed for *_, placed in compiled)  # shapes were enough
    for row, expected in zip(kept.rows, alone, strict=True):
        assert {k: str(v) for k, v in expected.items()} == {k: str(row[k]) for k in expected}


def program_row(program, run):
    return jax.tree.map(lambda x: x[0], program.run([run]))


def test_what_cannot_be_compiled_ahead_ends_the_job_where_it_is_needed(tmp_path):
    def broken(hyperparams):
        raise ValueError("x: not allowed")

    kept = Ledger(tmp_path)
    with pytest.raises(ValueError, match="x: not allowed"):
        batches.execute([group(cut_at, FIVE[:1]), group(broken, FIVE[:1])], kept)
    assert len(kept.rows) == 2  # those of the first group


def test_fewest_runs_are_filled_in():
    sizes = [batches.chunk_sizes(10, most)[1] for most in (1, 3, 4, 9, 10, 99)]
    assert sizes == [1, 3, 4, 5, 10, 10]
