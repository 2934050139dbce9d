"""What a report says of rounds, bytes, losses and clusters, by hand."""

import csv
import json

import numpy as np
import pytest
from sklearn.cluster import KMeans

from experiments.lib import plots, references
from experiments.lib.command import parse
from experiments.lib.data import Problem
from experiments.lib.hooks import SeedResult
from experiments.lib.report import Report, _count_cell, _mean_cell, losses_of
from jaxfedmvc import Federation
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine import Traffic
from jaxfedmvc.metrics.information import information

# Five rows of two views; client 1 holds both views of three, and client 0 one view of two.
PARTS = [
    Part((0, 1), np.array([[4, 0, 2]], np.int32), np.array([1], np.int32)),
    Part((0,), np.array([[3, 1, -1]], np.int32), np.array([0], np.int32)),
]
ROWS = np.array(["a", "b", "c", "d", "e"])


def problem(parts, **more):
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(5, 2)) for _ in range(2)]
    return Problem(Federation.from_arrays(views, partition=parts), views, None, ROWS, **more)


def report_of(path, data, *flags):
    command = parse(["--dataset=toy.npz", "--n_clusters=2", *flags])
    return Report(command, path, data, "title")


def result(data, labels, seed=3):
    return SeedResult(seed, data, None, labels, None, [])


def words(line):
    return line.replace("|", " ").split()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    ("values", "with_deviation", "shown"),
    [
        ([0.25, 0.75], True, "0.500 +- 0.354"),  # the root of an eighth
        ([0.25, 0.75], False, "0.500"),
        ([0.25], True, "0.250"),
        ([0.25, np.nan], True, "-"),
    ],
)
def test_a_cell_is_mean_and_sample_deviation(values, with_deviation, shown):
    assert _mean_cell(values, with_deviation) == shown


def test_numbers_of_clusters_have_no_places_that_say_nothing():
    given = ([3.0], [45.0, 45.0], [44.0, 46.0], [3.0, np.nan])
    assert list(map(_count_cell, given)) == ["3", "45", "45.0 +- 1.4", "-"]


def test_losses_are_those_of_each_kind_of_client_and_of_all():
    """Of two phases the later one counts, where it says something."""
    federation = problem(PARTS).federation
    first, second = {"loss": np.array([9.0])}, {"loss": np.array([1.0])}
    info = [{"clients": [first, second]}, {"clients": [{"loss": np.array([4.0])}, {}]}]
    found = losses_of(info, federation)
    assert found == {"loss": 2.5, "loss_multi_view": 4.0, "loss_partial_view": 1.0}
    assert losses_of([{"clients": [{}, second]}], federation) == {
        "loss": 1.0,
        "loss_partial_view": 1.0,
    }
    assert losses_of([{"clients": [{}, {}]}], federation) == {}


def test_labels_name_clients_and_what_their_rows_are_called(tmp_path):
    data = problem(PARTS)
    report = report_of(tmp_path, data, "--algorithm=e_fkmvc")
    report.add_labels(result(data, [np.array([[0, 1, 0]]), np.array([[1, -1, 7]])]))
    report.add_labels(result(data, [np.array([[1, 1, 1]]), np.array([[0, 0, 7]])], seed=4))
    header, *rows = rows_of(tmp_path / "labels.csv")
    assert header == ["seed", "client", "row", "cluster"]
    assert rows[:5] == [
        line.split() for line in ("3 1 e 0", "3 1 a 1", "3 1 c 0", "3 0 d 1", "3 0 b -1")
    ]
    assert [row[0] for row in rows[5:]] == ["4"] * 5


def test_agents_have_a_column_each_by_their_numbers(tmp_path):
    """Cohorts are in the order of their views; rows that repeat a sample have its clusters."""
    ids = np.arange(5, dtype=np.int32)[None]
    parts = [Part((v,), ids, np.array([1 - v], np.int32)) for v in (0, 1)]
    data = problem(parts, repeats=(np.array(["f"]), np.array([2])))
    report = report_of(tmp_path, data, "--algorithm=vertcohirf")
    report.add_labels(result(data, [np.array([[0, 0, 1, 1, 0]]), np.array([[5, 6, 7, 8, 9]])]))
    header, *rows = rows_of(tmp_path / "labels.csv")
    assert header == ["seed", "id", "row", "agent_0", "agent_1"]
    lines = ("3 0 a 5 0", "3 1 b 6 0", "3 2 c 7 1", "3 3 d 8 1", "3 4 e 9 0", "3 2 f 7 1")
    assert rows == [line.split() for line in lines]


def test_rounds_and_bytes_are_each_seeds_own(tmp_path, monkeypatch):
    """Rounds get smaller, and the first seed makes one more; the last lines tell the longest."""
    data = problem(PARTS)
    report = report_of(tmp_path, data, "--algorithm=e_fkmvc", "--seeds=2", "--rounds=5")
    monkeypatch.setattr(report, "_draw", lambda *told: None)
    sent = {0: (3_000_000, 2_000_000, 1_000_000), 1: (3_000_000, 2_000_000)}
    report.rows = [
        {"seed": seed, "round": r, "bytes_up": n, "bytes_down": 2 * n}
        for seed, mine in sent.items()
        for r, n in enumerate(mine, start=1)
    ]
    report.references = [
        {"e_fkmvc": {"internal": {"information": s, "silhouette": s, "clusters": 2.0}}}
        for s in (0.25, 0.75)
    ]
    traffic = {
        "setup": Traffic(10_000_000, 20_000_000),
        "round": Traffic(7, 7),
        "finish": Traffic(100_000_000, 200_000_000),
    }
    last = result(data, [np.array([[0, 1, 0]]), np.array([[1, 0, 7]])])
    lines = "\n".join(report.finish(last, traffic, {"n_clusters": 2}))
    assert "ended by itself after 3 of at most 5 rounds" not in lines
    assert "ended by itself after 2 to 3 of at most 5 rounds" in lines
    assert "information (no labels): e_fkmvc 0.500 +- 0.354\n" in lines
    assert "a view tells most of the clusters of seed 1: 0.750\n" in lines
    assert (
        "the longest run of 3 rounds, all clients: 116.000 MB up, 232.000 MB down"
        " (30.000 before and 300.000 after the rounds, both ways)"
    ) in lines
    assert "rows of each cluster, seed 3: 3, 2" in lines and "0.500 +- 0.354" in lines
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {
        "rounds_made": [3, 2],
        "bytes_rounds": {"up": [6_000_000, 5_000_000], "down": [12_000_000, 10_000_000]},
        "bytes_per_round": {"up": 2_000_000, "down": 4_000_000},
        "bytes_setup": {"up": 10_000_000, "down": 20_000_000},
        "bytes_finish": {"up": 100_000_000, "down": 200_000_000},
        "seeds": [0, 1],
        "n_samples": 5,
    }
    assert {name: summary[name] for name in expected} == expected
    found = summary["groups"]["e_fkmvc"]["internal"]["silhouette"]
    assert (found["mean"], found["per_seed"]) == (0.5, [0.25, 0.75])
    assert found["std"] == pytest.approx(np.sqrt(0.125))


def test_a_round_of_several_kinds_of_clients_takes_lines_of_a_narrow_terminal(tmp_path):
    report = report_of(tmp_path, problem(PARTS), "--algorithm=fmcsc")
    report.groups = ["all", "multi_view", "partial_view"]
    row = {"seed": 0, "round": 7, "loss": 0.25, "bytes_up": 2e6, "bytes_down": 3e6}
    metrics = [(g, m) for g in report.groups for m in ("acc", "nmi", "ari", "purity")]
    row |= {f"{g}/pooled/{m}": i / 100 for i, (g, m) in enumerate(metrics)} | {"agreement": 0.5}
    whole, (line,) = list(report.header(row)), report.lines(row)
    assert len(whole) == 2 and len(line) > 118
    report.width = 80
    heads, lines = list(report.header(row)), list(report.lines(row))
    assert (len(heads), len(lines)) == (4, 2) and max(map(len, heads + lines)) <= 80
    assert words(" ".join(lines)) == words(line)
    assert words(" ".join(heads[1::2])) == words(whole[1])
    for head, part in zip(heads[1::2], lines, strict=True):  # numbers stand below their names
        bars = ([i for i, c in enumerate(text) if c == "|"] for text in (head, part))
        assert len(set(map(tuple, bars))) == 1


def test_levels_of_curves_match_clients_that_exchange_nothing_each_for_itself(
    tmp_path, monkeypatch
):
    """And the seed that ends first stays where it is."""
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda *given: drawn.append(given))
    data = problem(PARTS)
    report = report_of(tmp_path, data, "--algorithm=e_fkmvc", "--seeds=2")
    report.is_scored, report.groups = True, ["all"]
    for seed, accs in enumerate(((0.3, 0.4, 0.5), (0.6, 0.7))):
        for r, acc in enumerate(accs, start=1):
            scores = {"all/pooled/acc": acc, "all/pooled/nmi": acc / 2, "loss": 1 - acc}
            report.rows.append({"seed": seed, "round": r, **scores, "information": acc})
    for shift in (0, 0.1):
        apart = {"pooled": {"acc": 0.1 + shift}, "per_client": {"acc": 0.8 + shift}}
        whole = {"pooled": {"acc": 0.6 + shift}, "per_client": {"acc": 0.9 + shift}}
        report.references.append(
            {references.ALONE: {"all": apart}, references.POOLED: {"all": whole}}
        )
    report._draw_curves([2, 1])
    ((_, scores, losses, levels, _, kept),) = drawn
    np.testing.assert_allclose(scores["ACC, all clients"], [[0.3, 0.4, 0.5], [0.6, 0.7, 0.7]])
    np.testing.assert_allclose(losses["loss"], [[0.7, 0.6, 0.5], [0.4, 0.3, 0.3]])
    np.testing.assert_allclose(losses["information (nats)"], scores["ACC, all clients"])
    assert kept == [2, 1]
    assert levels == pytest.approx(
        {"ACC, no collaboration, each matched": 0.85, "ACC, pooled k-means": 0.65}
    )


def test_clients_with_one_cluster_have_no_silhouette_and_rows_in_none_are_no_cluster():
    """The first client has two pairs, the second one cluster, and a row that is in none."""
    pairs, single = np.array([[0.0], [1.0], [9.0], [10.0]]), np.array([[0.0], [1.0], [5.0]])
    federation = Federation.from_clients([{0: pairs}, {0: single}])
    of_pairs = references.silhouette(pairs, np.array([0, 0, 1, 1]))
    assert of_pairs == pytest.approx(np.mean([8.5 / 9.5, 7.5 / 8.5]))
    alone = np.array([[[0, 0, 1, 1], [2, 2, 2, -1]], [[0, 0, 1, 1], [2, -1, -1, -1]]])
    found = references.internal_scores(federation, [alone[0]])
    told = float(information(federation, [alone[0]], 3))
    assert found == pytest.approx({"information": told, "silhouette": of_pairs, "clusters": 1.5})
    assert references.internal_scores(federation, [alone[1]])["clusters"] == 1.5
    found = references.internal_scores(federation, [np.array([[0, 0, 1, -1], [2, 2, 2, -1]])])
    assert found["silhouette"] == pytest.approx(np.mean([8 / 9, 7 / 8, 0]))
    nowhere = references.internal_scores(federation, [np.full((2, 4), -1)])
    assert np.isnan(list(nowhere.values())).all()  # 0 clusters would count in a mean
    for labels in ([0, 0, 0], [0, 1, 2]):
        assert np.isnan(references.silhouette(single, np.array(labels)))


def test_references_are_k_means_of_scikit_learn_with_the_runs_seed():
    data = problem(PARTS)
    held = [np.asarray(cohort.mask[0]) for cohort in data.federation.cohorts]
    own = [np.concatenate([v[[4, 0, 2]] for v in data.views], axis=1), data.views[0][[3, 1]]]
    embedding = [np.arange(3.0)[None, :, None] ** 2, np.array([[[5.0], [1.5], [99.0]]])]

    def by_sklearn(x, seed):
        x = np.asarray(x, np.float32)
        return KMeans(2, n_init=10, random_state=seed).fit_predict(x).tolist()

    names = references.ALONE, references.POOLED, references.POOLED_EMBEDDING
    seen = {name: set() for name in names}
    for seed in range(6):
        found = references.references(data, 2, seed, embedding)
        shown = {
            name: [labels[0][mask].tolist() for labels, mask in zip(mine, held, strict=True)]
            for name, mine in found.items()
        }
        assert all(mine[1][0, 2] == -1 for mine in found.values())  # padding is in no cluster
        assert shown[references.ALONE] == [by_sklearn(x, seed) for x in own]
        pooled = by_sklearn(np.concatenate(data.views, axis=1), seed)
        assert shown[references.POOLED] == [[pooled[i] for i in ids] for ids in ([4, 0, 2], [3, 1])]
        rows = by_sklearn([[0.0], [1.0], [4.0], [5.0], [1.5]], seed)
        assert shown[references.POOLED_EMBEDDING] == [rows[:3], rows[3:]]
        for name in seen:
            seen[name].add(str(shown[name]))
    assert min(map(len, seen.values())) > 1  # or any seed would do
    rows = np.random.default_rng(0).normal(size=(80, 2)).astype(np.float32)
    one, ten = (KMeans(9, n_init=n, random_state=0).fit_predict(rows) for n in (1, 10))
    assert (one != ten).any()
    np.testing.assert_array_equal(references.k_means(rows, 9, 0), ten)
