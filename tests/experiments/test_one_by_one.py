"""Runs one after another are those of a batch, and groups share what they have in common."""

import jax
import numpy as np
import pytest

from experiments.lib import batches, one_by_one
from experiments.lib.ledger import Ledger
from jaxfedmvc import data
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.engine import batching
from jaxfedmvc.engine.steps import Steps
from tests.engine.test_run import counter, toy
from tests.helpers import on_devices

# Of the toy the only number is how fast it learns.
RATES = [0.3, 0.6]


def group(source=None):
    """Two settings with two seeds each, of whom half take part, drawn anew every round."""
    source = source or on_devices.source(dealt=False)
    shared, by_seed = batching.place(source)
    federation = source.build(shared, jax.tree.map(lambda x: x[0], by_seed))
    return batches.Group(
        [{"rate": str(rate)} for rate in RATES],
        RATES,
        toy,
        source,
        federation,
        [4 + place for place in range(on_devices.SEEDS)],
        on_devices.ROUNDS,
        2,
        [0.5] * len(federation.cohorts),
        resample_participants=True,
        client_chunk=1,
        every_round=True,
    )


def of_one_cohort():
    """The same of eight clients with both views: half as much to compile."""
    rng, truth = np.random.default_rng(0), np.arange(64) % 2
    views = [(2 * rng.normal(size=(2, d))[truth] + rng.normal(size=(64, d))) for d in (3, 2)]
    ids = [rng.permutation(64).reshape(8, 8) for _ in range(on_devices.SEEDS)]
    partitions = [[data.Part((0, 1), mine, np.arange(8))] for mine in ids]
    return group(batching.pooled([x.astype(np.float32) for x in views], truth, partitions))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of two groups that are alike, and how many programs each of them added."""
    compiled, added = {}, []
    kept = Ledger(tmp_path_factory.mktemp("kept"))
    for n_groups in (1, 2):
        before = len(compiled)
        made = batches.execute(
            [group()] * n_groups,
            kept,
            batch=1,
            program=lambda one: one_by_one.OneByOne(one, compiled),
        )
        assert made == 1
        added.append(len(compiled) - before)
    return kept.rows, added


@pytest.mark.ci
def test_rows_are_those_of_a_batch(rows, tmp_path):
    batch = Ledger(tmp_path)
    batches.execute([group()], batch, batch=4)
    assert len(batch.rows) == 4
    for mine, expected in zip(rows[0], batch.rows, strict=False):
        assert mine.keys() == expected.keys()
        for name in expected.keys() - {"seconds", "rate", "status"}:
            found, wanted = (
                np.array([float(x) for x in row[name].split()]) for row in (mine, expected)
            )
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        assert (mine["status"], mine["rate"]) == ("ok", expected["rate"])
    assert len({row["acc"] for row in batch.rows}) > 1  # or this would compare constants


@pytest.mark.ci
def test_rows_are_of_the_round_that_is_kept(tmp_path):
    """Of which views tell most, in a batch and one after another."""
    found = []
    for name, program in (("batch", None), ("steps", one_by_one.programs())):
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name)
        keeping = of_one_cohort()._replace(rounds=4, keep_from=1)
        batches.execute([keeping], ledger, batch=4 if program is None else 1, program=program)
        found.append(ledger.rows)
    for batch, steps in zip(*found, strict=True):
        assert batch.keys() == steps.keys()
        kept = int(batch["round_kept"])
        assert 1 <= kept <= int(batch["rounds_made"]) == 4
        for name in batch.keys() - {"seconds", "rate", "status"}:
            both = (np.array([float(x) for x in row[name].split()]) for row in (batch, steps))
            np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5, err_msg=name)
        by_round = [float(x) for x in batch["rounds/all/pooled/acc"].split()]
        assert float(batch["acc"]) == pytest.approx(by_round[kept - 1])
    assert any(int(row["round_kept"]) < 4 for row in found[0])
    # Every round ends with clusters, and not the last alone.
    plain = batches.Program(of_one_cohort()).traffic(4)
    assert int(found[0][0]["bytes_up"]) > plain["bytes_up"]


@pytest.mark.ci
def test_groups_share_the_programs_that_they_have_in_common(rows):
    found, (first, second) = rows
    assert first > 3 and second == 0
    for a, b in zip(found[:4], found[4:], strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}


def test_a_group_that_cannot_be_compiled_fails_alone(tmp_path, monkeypatch):
    """Its rows say why and what would have been sent; the next group's runs are made."""
    real, bad = Steps.compile, []

    def compile_(self, *arguments, **settings):
        bad.append(self) if not bad else None
        if self is bad[0]:
            raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")
        real(self, *arguments, **settings)

    monkeypatch.setattr(Steps, "compile", compile_)
    kept = Ledger(tmp_path)
    batches.execute([group()] * 2, kept, batch=1, program=one_by_one.programs())
    assert [row["status"] == "ok" for row in kept.rows] == [False] * 4 + [True] * 4
    assert kept.rows[0]["status"] == "failed: INTERNAL: no such instruction"
    fixed = [int(row["bytes_up"]) for row in kept.rows[:4]]
    assert fixed == [min(fixed)] * 4 and 0 <= fixed[0] < int(kept.rows[4]["bytes_up"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [(MemoryError(), "MemoryError"), (MemoryError("\nno room\nfor x"), "no room")],
)
def test_a_run_that_fails_alone_says_why_in_a_line(error, reason, monkeypatch):
    """Python's own MemoryError says nothing."""
    program = batches.Program(group())

    def fail(runs):
        raise error

    monkeypatch.setattr(program, "run", fail)
    row = batches._alone(program, 1, (1, 0))
    assert (row["status"], row["rate"], row["seed"]) == (f"failed: {reason}", "0.6", 4)


@pytest.mark.ci
def test_methods_without_rounds_and_with_keys_in_their_states(tmp_path):
    """Local k-means draws from a key that each client keeps, and makes no round."""
    method = METHODS["local_kmeans"]
    config = method.config(n_clusters=2, n_init=2)
    alone = group()._replace(
        columns=[{"rate": "none"}],
        hyperparams=[method.hyperparams()],
        make=lambda hyper: method.make(config, hyper),
        rounds=0,
    )
    kept = Ledger(tmp_path)
    batches.execute([alone], kept, batch=1, program=one_by_one.programs())
    assert [row["status"] for row in kept.rows] == ["ok"] * on_devices.SEEDS
    assert all(0.4 < float(row["acc"]) <= 1 for row in kept.rows)


@pytest.mark.parametrize("end", [0, 1])
def test_a_method_that_is_done_before_its_first_round_has_no_loss(end):
    """It was the least of all, 0; nor is it a NaN by which a run has failed."""
    (count,) = counter(end).round
    method = counter(end)._replace(
        round=(count._replace(client=lambda key, sent, state, client: ((), (), {"loss": 2.0})),)
    )
    one = group()._replace(make=lambda hyper: method, n_clusters=None, every_round=False)
    found = jax.jit(batches.one_run(one))(RATES[0], jax.random.key(0), one.federation)
    assert (found["rounds"], bool(found["nan"]), np.isnan(found["loss"])) == (end, False, not end)
