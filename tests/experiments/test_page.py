"""Pages: whole, small, safe, and what they show is what the files say."""

import json
import re

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("plotly", reason="plotly is not installed: the extra report")
from experiments import compare
from experiments.lib import page, plots, run_page, sweep_report
from experiments.run import main
from tests.helpers import binaries, pictures


def figures_of(path):
    text = path.read_text(encoding="utf-8")
    (told,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    return text, json.loads(told)


def test_a_page_is_one_small_file_that_asks_for_nothing_and_escapes_everything(tmp_path):
    evil = '</script><img src=x onerror="alert(1)">'
    rng = np.random.default_rng(0)
    points, numbers = rng.normal(size=(10_000, 2)), rng.integers(0, 10, 10_000)
    map_ = page.scatter(evil, points, {"clusters": numbers}, [evil] * len(points), evil)
    table = pd.DataFrame({evil: [0.5]}, index=[evil])
    page.write(tmp_path / "a.html", evil, {evil: evil}, f"run {evil}", {evil: table}, [map_])
    text, figures = figures_of(tmp_path / "a.html")
    assert "<img" not in text and text.count("</script>") == 3
    assert not re.search(r'(src|href)="?(http|//)', text)
    assert len(text) < 5e6
    assert sum(len(t["x"]) for t in figures["figure0"]["data"]) == 10_000
    page.write(tmp_path / "b.html", evil, {evil: evil}, f"run {evil}", {evil: table}, [map_])
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "a.html").read_bytes()


def test_curves_are_the_mean_of_the_seeds_with_their_sample_deviation():
    runs = np.array([[0.2, 0.4], [0.4, 0.8]])
    figure = page.lines("", {"ACC": runs}, {"rounds": np.arange(2.0), "MB": np.array([1, 3.0])}, "")
    upper, lower, mean = (trace["y"] for trace in figure.traces)
    np.testing.assert_allclose(mean, [0.3, 0.6])
    np.testing.assert_allclose(upper - mean, runs.std(axis=0, ddof=1))
    np.testing.assert_allclose(mean - lower, runs.std(axis=0, ddof=1))
    assert [view["traces"][2]["x"].tolist() for view in figure.views.values()] == [[0, 1], [1, 3]]


def test_few_whole_numbers_are_marked_one_by_one():
    x = {"rounds": np.arange(1.0, 4), "MB": np.array([0.5, 1, 1.5])}
    figure = page.lines("", {"ACC": np.ones((1, 3))}, x, "")
    ticks = [view["layout"]["xaxis"].get("dtick") for view in figure.views.values()]
    assert ticks == [1, None] and figure.layout["xaxis"]["dtick"] == 1
    many = page.lines("", {"ACC": np.ones((1, 50))}, {"rounds": np.arange(50.0)}, "")
    assert "dtick" not in many.layout["xaxis"]


@pytest.mark.parametrize(
    ("more", "told"),
    [((), ["loss"]), (("a", "b"), ["loss", "loss a", "loss b"]), (("a",), ["loss"])],
)
def test_the_loss_of_the_only_kind_of_clients_is_drawn_once(more, told):
    row = {"seed": 0, "bytes_up": 1, "bytes_down": 1, "loss": 1.0}
    row |= {f"loss_{kind}": 1.0 for kind in more}
    row |= {f"all/pooled/{metric}": 0.5 for metric in ("acc", "nmi", "ari")}
    _, losses = run_page._curves([row | {"round": r} for r in (1, 2)], "pooled")
    assert [trace["name"] for trace in losses.traces] == told


@pytest.mark.parametrize(("told", "figures"), [(0.5, 3), (float("nan"), 2)])
def test_information_is_drawn_by_round_where_it_is_a_number(told, figures):
    row = {"seed": 0, "bytes_up": 1, "bytes_down": 1, "loss": 1.0, "information": told}
    row |= {f"all/pooled/{metric}": 0.5 for metric in ("acc", "nmi", "ari")}
    drawn = run_page._curves([row | {"round": r} for r in (1, 2)], "pooled")
    assert len(drawn) == figures
    assert figures == 2 or [trace["name"] for trace in drawn[-1].traces] == ["information"]


def test_confusion_is_in_the_order_of_the_classes():
    (trace,) = page.confusion("", np.array([[0, 5, 1], [4, 0, 0]])).traces
    assert trace["z"] == [[5, 0, 1], [0, 4, 0]]
    assert trace["x"] == ["cluster 1", "cluster 0", "cluster 2"]
    assert trace["y"] == ["class 0", "class 1"]
    (trace,) = page.confusion("", np.eye(2, dtype=int), ["no", "<b>yes"].__getitem__).traces
    assert trace["y"] == ["class no", "class &lt;b&gt;yes"]


def test_names_of_classes_are_text_to_plotly_too():
    """It reads tags and entities: "age <b> 5" would lose its middle."""
    titles = {"classes": lambda c: f"{c} <i>"}
    point, colour = np.zeros((1, 2)), {"classes": np.zeros(1, int)}
    (trace,) = page.scatter("", point, colour, ["a<b>&amp;"], "", titles=titles).traces
    assert trace["name"] == "0 &lt;i&gt;" and trace["text"] == ["a&lt;b&gt;&amp;amp;"]


def test_classes_beyond_the_colours_have_symbols_of_their_own():
    marks = [tuple(page.mark(c).items()) for c in range(-1, 60)]
    assert len(set(marks)) == 61


def test_small_numbers_of_tables_are_no_zeros():
    shown = [page._places(x) for x in (0.0, 3e-6, -2e-4, 0.5, 12.3456)]
    assert shown == ["0.000", "3e-06", "-0.0002", "0.500", "12.346"]


def test_runs_that_cannot_be_drawn_are_named_and_leave_no_empty_figures(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "write", lambda *given: drawn.append(given[-1]))
    monkeypatch.setattr(compare, "table", lambda lines: lines)
    monkeypatch.setattr(compare, "shared", lambda lines: {})
    row = pd.DataFrame({"seed": 0, "round": [1, 2], "bytes_up": 1e6, "bytes_down": 1e6})
    row["all/per_client/acc"] = np.nan
    rounds = {
        "unlabelled": row.assign(**{"all/pooled/acc": np.nan}),
        "silent": row.assign(**{"all/pooled/acc": 0.2}, bytes_up=0, bytes_down=0),
        "a<b": row.assign(**{"all/pooled/acc": [0.4, 0.5]}),
    }
    lines = pd.DataFrame({"acc": [np.nan, 0.2, 0.5]}, index=list(rounds))
    compare._write_page(tmp_path, lines, rounds, [])
    compare._write_page(tmp_path, lines[:1], {"unlabelled": rounds["unlabelled"]}, [])
    (bars, curves), none = drawn
    assert none == [] and bars.traces[0]["x"] == ["silent", "a&lt;b"]
    assert [trace["name"] for trace in curves.traces] == ["a&lt;b"]
    np.testing.assert_allclose(curves.traces[0]["x"], [2, 4])
    assert curves.note.endswith(": unlabelled, silent")


def test_numbers_that_are_not_finite_are_gaps():
    assert page._as_json(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    with pytest.raises(TypeError, match="set is no JSON"):
        page._as_json({1})


def test_axes_of_a_sweep_are_logarithms_numbers_or_words():
    summary = pd.DataFrame(
        {"a": [1e-3, 1e-3, 1.0, 1.0], "b": ["x", "y"] * 2, "acc_mean": [0.1, 0.2, 0.3, np.nan]}
    )
    summary["n_ok"] = [2, 2, 1, 0]
    every, heat = sweep_report.figures(summary, ["a", "b"], ["acc"], "acc")
    logs, words, acc = every.traces[0]["dimensions"]
    np.testing.assert_allclose(logs["values"], [-3, -3, 0])
    assert logs["ticktext"] == ["0.001", "1"] and words["ticktext"] == ["x", "y"]
    np.testing.assert_allclose(acc["values"], [0.1, 0.2, 0.3])
    assert heat.traces[0]["z"] == [[0.1, 0.2], [0.3, None]]
    (told,) = heat.layout["annotations"]
    assert (told["x"], told["y"], told["text"]) == (1, 1, "failed")
    assert every.note.endswith("; without ACC, and so without a line: 1 of 4 settings")
    assert acc["label"] == "ACC" and heat.heading == "ACC"


def test_drawn_settings_get_no_map_that_is_mostly_empty():
    drawn = pd.DataFrame(
        {"a": [1.25, 1.41, 1.37, 1.02], "b": [0.5, 0.1, 0.3, 0.9], "acc_mean": [0.1, 0.2, 0.3, 0.4]}
    )
    (every,) = sweep_report.figures(drawn, ["a", "b"], ["acc"], "acc")
    assert every.heading == "All settings"


@pytest.mark.parametrize("values", [[0.0, 1e-3, 1.0], [1000.0, 1150.0, 1200.0]])
def test_an_axis_with_zero_or_of_numbers_of_one_size_is_no_logarithm(values):
    summary = pd.DataFrame({"a": values, "acc_mean": [0.1, 0.2, 0.3]})
    (every,) = sweep_report.figures(summary, ["a"], ["acc"], "acc")
    np.testing.assert_array_equal(every.traces[0]["dimensions"][0]["values"], values)


def test_an_axis_of_one_number_has_no_other_and_one_of_many_few_ticks():
    """Plotly makes up a range around a single number, such as an accuracy above 1."""
    rates = 10 ** np.random.default_rng(0).uniform(-3.5, 0.5, 40)
    summary = pd.DataFrame({"a": rates, "acc_mean": 0.95})
    (every,) = sweep_report.figures(summary, ["a"], ["acc"], "acc")
    logs, acc = every.traces[0]["dimensions"]
    assert logs["ticktext"] == ["0.001", "0.01", "0.1", "1"]
    np.testing.assert_allclose(logs["tickvals"], [-3, -2, -1, 0])
    assert acc["ticktext"] == ["0.95"] and not every.traces[0]["line"]["showscale"]


def test_the_same_points_are_thinned_out_for_every_picture():
    np.testing.assert_array_equal(plots.thinned(5, 9), np.arange(5))
    kept = plots.thinned(100, 10)
    assert len(kept) == 10 and (np.diff(kept) > 0).all()


@pytest.fixture(scope="module")
@pictures.unpainted()
def folders(tmp_path_factory):
    """Two runs of a method that compiles fast, on data with a name that must be escaped."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    views = {f"view_{v}": np.eye(3, 4)[labels] + 0.1 * rng.normal(size=(48, 4)) for v in range(2)}
    np.savez(folder / "a<b.npz", labels=labels, **views)
    given = (f"--dataset={folder / 'a<b.npz'}", "--ratio=1:0", "--n_clients=2", "--noprogress")
    for name, method in (("one", "lmvsc"), ("two", "local_kmeans")):
        out = binaries.launch(
            main, f"--algorithm={method}", *given, "--seeds=2", f"--output_dir={folder / name}"
        )
        assert out[0] == 0, out[2]
    return folder


def test_curves_of_seeds_that_end_at_different_rounds_go_to_the_last(monkeypatch):
    drawn = {}
    monkeypatch.setattr(page, "lines", lambda heading, values, x, label: drawn.update({heading: x}))
    rows = [
        {"seed": s, "round": r, "bytes_up": 1e6, "bytes_down": 1e6, "loss": 0.5}
        | {f"all/pooled/{metric}": 0.5 for metric in ("acc", "nmi", "ari", "purity")}
        for s, rounds in ((0, 2), (1, 4))
        for r in range(1, rounds + 1)
    ]
    run_page._curves(rows, "pooled")
    x = drawn["Scores by round: pooled labels, one matching"]
    np.testing.assert_array_equal(x["rounds"], [1, 2, 3, 4])
    np.testing.assert_array_equal(x["MB of the rounds, both ways"], [2, 4, 5, 6])


@pytest.mark.ci
def test_a_run_leaves_a_page(folders):
    text, figures = figures_of(folders / "one" / "report.html")
    assert "lmvsc on a&lt;b" in text and "a<b" not in text
    assert "<td>rounds</td><td>0 of at most 0</td>" in text
    assert "--algorithm=lmvsc" in text and "--output_dir" not in text
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    whose = ["Classes and clusters, seed 1", "ACC of every client, seed 1"]
    ways = ("pooled labels, one matching", "mean over clients, each matched")
    tables = [f"Scores: {way}, mean over the seeds" for way in ways]
    assert headings == [*tables, "Representation", *whose]
    # Clients that exchange nothing are scored as is fair to them, too.
    groups = json.loads((folders / "one" / "summary.json").read_text())["groups"]
    cells = re.findall(r"<th>no collaboration</th>\s*<td>(\S+)", text)
    alone = groups["no collaboration"]["all"]
    assert cells == [f"{alone[way]['acc']['mean']:.3f}" for way in ("pooled", "per_client")]
    assert figures["figure2"]["layout"]["xaxis"]["title"]["text"] == "client"
    points = figures["figure0"]
    assert list(points["views"]) == ["clusters", "classes"]
    shown = [trace for trace in points["data"] if trace["visible"]]
    assert sum(len(trace["x"]) for trace in shown) == 48
    assert sum(map(sum, figures["figure1"]["data"][0]["z"])) == 48


@pytest.mark.ci
def test_runs_side_by_side(folders, capsys):
    compare.FLAGS(["compare", f"--to={folders / 'both'}"])
    compare.main(["compare", str(folders / "one"), str(folders / "two")])
    out = capsys.readouterr().out
    lines = pd.read_csv(folders / "both" / "comparison.csv", index_col="folder")
    for name in ("one", "two"):
        summary = json.loads((folders / name / "summary.json").read_text())
        values = summary["metrics"]["acc"]["per_seed"]
        np.testing.assert_allclose(lines["acc"][name], np.mean(values))
        np.testing.assert_allclose(lines["acc_std"][name], np.std(values, ddof=1))
        each = summary["groups"][summary["algorithm"]]["all"]["per_client"]["acc"]["mean"]
        assert lines["acc_each_matched"][name] == pytest.approx(each) and f"{each:.3f}" in out
        assert lines["clusters"][name] == 3
    runs = pd.read_csv(folders / "both" / "runs.csv")
    for name, mine in runs.groupby("folder"):
        summary = json.loads((folders / name / "summary.json").read_text())
        assert list(mine["seed"]) == summary["seeds"]
        np.testing.assert_allclose(mine["acc"], summary["metrics"]["acc"]["per_seed"])
        internal = summary["groups"][summary["algorithm"]]["internal"]
        shared = summary["algorithm"] != "local_kmeans"  # whose agents share no clusters
        told = internal["information"]["per_seed"] if shared else np.nan
        np.testing.assert_allclose(mine["information"], told)
        for way in ("up", "down"):
            beside = summary["bytes_setup"][way] + summary["bytes_finish"][way]
            sent = np.array(summary["bytes_rounds"][way]) + beside
            np.testing.assert_allclose(mine[f"mb_{way}"], sent / 1e6)
    assert lines["mb_up"]["two"] == 0 and "local_kmeans" in out
    summary["bytes_choice"] = {"up": 3_000_000, "down": 0}
    assert compare.line_of(summary)["mb_up"] == 3
    # A seed that ends earlier than others sends less.
    sent = {"up": [1e6 * seed for seed in summary["seeds"]], "down": [0] * len(summary["seeds"])}
    uneven = compare.runs_of(summary | {"bytes_rounds": sent})
    assert len(uneven) > 1 and list(uneven["mb_up"]) == [3 + seed for seed in summary["seeds"]]
    given = summary | {"command": ["--views=a=x,y; b=z"]}
    assert compare.line_of(given)["command"] == "'--views=a=x,y; b=z'"
    assert summary["n_samples"] == 48 and not compare.warnings(lines)
    noted = summary | {"data": [*summary["data"], "view 1 is the same in all rows: leave it out"]}
    assert compare.line_of(noted)["views"] == compare.line_of(summary)["views"] != ""
    other = summary | {"n_samples": 47, "data": ["view 0: 9 features", *summary["data"][1:]]}
    of_both = pd.DataFrame(
        [compare.line_of(s) | {"content": "a", "dealt": ""} for s in (summary, other)]
    )
    told = compare.warnings(of_both)
    assert len(told) == 2
    of_both["content"] = ["a", "b"]
    name = summary["dataset"]
    assert compare.warnings(of_both)[2] == f"the contents of {name} differ: a, b"
    assert told[0] == "the numbers of samples differ: 48, 47" and "the views differ: " in told[1]
    many = [f"view {v}: 5 features" for v in range(9)]
    of_both = pd.DataFrame(
        [
            compare.line_of(summary | {"data": notes}) | {"content": "a", "dealt": ""}
            for notes in (many, [*many[:4], "view 4: 6"])
        ]
    )
    assert compare.warnings(of_both) == [
        "the views differ: view 4: 5 features; view 5: 5 features; view 6: 5 features; ... (5) | "
        "view 4: 6"
    ]
    assert (folders / "both" / "comparison.html").exists()
    assert "data of all runs: a<b\n" in out and "seeds of all runs: 2\n" in out
    assert not {"data", "clients", "seeds"} & set(compare.table(lines))
    assert {"data", "clients", "seeds"} <= set(compare.table(lines[:1]))
    other = lines.assign(data=["a", "b"])
    assert "data" in compare.table(other) and set(compare.shared(other)) == {"clients", "seeds"}
    with pytest.raises(SystemExit):
        compare.main(["compare", str(folders / "one")])
    assert "to: " in (err := capsys.readouterr().err) and "holds a comparison already" in err


@pytest.mark.ci
def test_comparisons_get_folders_of_their_own(folders, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    compare.FLAGS(["compare"])
    compare.FLAGS.to = None
    for _ in range(2):
        compare.main(["compare", str(folders / "one")])
    assert capsys.readouterr().out.count("written: results/compare-") == 2
    assert len(list(tmp_path.glob("results/compare-*/comparison.csv"))) == 2


@pytest.mark.ci
def test_what_cannot_be_compared_is_said(folders, capsys):
    compare.FLAGS(["compare", f"--to={folders / 'none'}"])
    twice = [str(folders / "one")] * 2
    told = (([], "one or more"), ([str(folders)], "has no summary.json"), (twice, "folder once"))
    for given, text in told:
        with pytest.raises(SystemExit):
            compare.main(["compare", *given])
        assert text in capsys.readouterr().err
    (folders / "sweep").mkdir(exist_ok=True)
    (folders / "sweep" / "summary.json").write_text("{}")
    with pytest.raises(SystemExit):
        compare.main(["compare", str(folders / "sweep")])
    assert "has no rounds.csv; allowed are folders of experiments.run" in capsys.readouterr().err
    summary = (folders / "one" / "summary.json").read_text()
    (folders / "sweep" / "summary.json").write_text(summary)
    (folders / "sweep" / "rounds.csv").write_text("seed,round\n0,1\n")
    (folders / "file").write_text("")
    compare.FLAGS(["compare", f"--to={folders / 'file'}"])
    for name, text in (("sweep", "sweep: is no folder of a run"), ("one", "error: to: cannot")):
        with pytest.raises(SystemExit):
            compare.main(["compare", str(folders / name)])
        assert text in capsys.readouterr().err
    lines = pd.DataFrame(
        {"data": ["a", "b"], "samples": 9, "views": "", "clients": 2, "clusters": [3, 4]}
        | {"seeds": 1, "device": "cpu", "content": ["c", "d"]}
        | {"first_seed": 0, "failed": 0, "dealt": ""}
    )
    told = ["the data differ: a, b", "the numbers of clusters differ: 3, 4"]
    assert compare.warnings(lines) == told


def test_runs_whose_clients_hold_other_samples_are_told_apart():
    """Neither the number of clients nor that of seeds differs, and yet no client is alike."""
    flags = ["--n_clients=4", "--partial_views=1", "--scale_by=all", "--participation=1.0"]
    ours, theirs = (
        compare.dealt([*flags, *more, "--noresample_participants"])
        for more in (["--ratio=1:1"], ["--ratio=1:0", "--dirichlet=0.5"])
    )
    same = {"data": "a", "samples": 9, "views": "", "clients": 4, "clusters": 3, "seeds": 3}
    same |= {"device": "cpu", "content": "c"}
    lines = pd.DataFrame(
        {"first_seed": [0, 5], "failed": [0, 1], "dealt": [ours, theirs], **same},
        index=["one", "two"],
    )
    assert compare.warnings(lines) == [
        "the seeds differ, and so who holds what; the first are: 0, 5",
        "clients hold their samples otherwise: "
        "ratio=1:1; dirichlet=none | ratio=1:0; dirichlet=0.5",
        "two: 1 of 3 seeds failed, and scores that lack one have no mean",
    ]
    agents = compare.dealt(["--split=views", "--agents=3", "--noresample_participants"])
    assert agents.startswith("split=views; ") and "ratio" not in agents and "agents" not in agents
