"""Summary, tables and pictures of a sweep, from runs made up by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.lib import batches, grid, hooks, plots, plots_sweep, sweep_report
from experiments.lib.settings import flags_of
from experiments.lib.text import counted
from jaxfedmvc import Federation, engine
from jaxfedmvc.algorithms import METHODS

pyplot = pytest.importorskip("matplotlib.pyplot")
NAN = math.nan
METRICS = ("acc", "nmi", "loss", "silhouette", "information")


def run(setting, seed=0, acc=NAN, status="ok", **metrics):
    return {**setting, "seed": seed, "status": status, "acc": acc, **metrics}


def summary_of(accs, losses=(), silhouettes=()):
    """A summary of settings x=a, x=b, ...; NaN is not measured, None is failed."""
    n = len(accs)
    rows = [
        run(
            {"x": "abcdefghij"[i]},
            acc=NAN if accs[i] is None else accs[i],
            status="failed: NaN" if accs[i] is None else "ok",
            loss=(losses or [NAN] * n)[i],
            silhouette=(silhouettes or [NAN] * n)[i],
        )
        for i in range(n)
    ]
    return sweep_report.summarise(rows, ["x"], METRICS)


# Summary and ranking.


def test_summary_is_mean_and_deviation_over_what_ran_and_is_finite():
    a, b = {"x": "1", "y": "2"}, {"x": "1", "y": "3"}
    rows = [
        run(b, 0, acc=0.2, loss=1.0),
        run(a, 0, acc=0.5, loss=NAN),
        run(b, 1, acc=0.4, loss=math.inf),
        run(b, 2, acc=0.9, loss=0.0, status="failed: ended early"),
        run(a, 1, acc=0.5, loss=NAN),
    ]
    summary = sweep_report.summarise(rows, ["x", "y"], ["acc", "loss", "nmi"])
    assert list(summary)[:6] == ["x", "y", "n_ok", "n_failed", "acc_mean", "acc_std"]
    first, second = summary.to_dict("records")
    assert (first["x"], first["y"], first["n_ok"], first["n_failed"]) == ("1", "3", 2, 1)
    assert first["acc_mean"] == pytest.approx(0.3)
    assert first["acc_std"] == pytest.approx(math.sqrt(0.02))  # of samples
    assert first["loss_mean"] == 1.0 and math.isnan(first["loss_std"])  # of one run
    assert (second["y"], second["n_ok"], second["n_failed"]) == ("2", 2, 0)
    assert math.isnan(second["loss_mean"]) and math.isnan(second["loss_std"])
    assert math.isnan(first["nmi_mean"])  # not a column of the runs
    as_text = [{name: str(value) for name, value in row.items()} for row in rows]  # of runs.csv
    again = sweep_report.summarise(as_text, ["x", "y"], ["acc", "loss", "nmi"])
    pd.testing.assert_frame_equal(again, summary, check_dtype=False)


def test_one_setting_without_axes_is_summarised():
    rows = [run({}, seed, acc=acc) for seed, acc in enumerate((0.2, 0.4))]
    summary = sweep_report.summarise(rows, [], ["acc"])
    assert list(summary) == ["n_ok", "n_failed", "acc_mean", "acc_std"] and len(summary) == 1
    assert sweep_report.best_lines(summary, []) == ["mean ACC of the one setting: .300 +- .141"]
    assert sweep_report.table(summary, [], ["acc"])[1].split() == ["1", ".300", "+-", ".141", "-"]


def test_the_pages_table_has_titles_and_no_empty_columns():
    summary = summary_of([0.5, None])  # of one seed each, which has no deviation
    shown = sweep_report.titled(summary, METRICS)
    assert list(shown) == ["x", "runs ended well", "runs failed", "ACC"]
    assert shown["ACC"].tolist() == pytest.approx([0.5, NAN], nan_ok=True)


def test_ranking_puts_nan_last_and_keeps_ties_in_order():
    summary = summary_of([0.5, NAN, 0.7, 0.5, None])
    assert sweep_report.ranking(summary, "acc") == [2, 0, 3, 1, 4]
    summary["loss_mean"] = summary["acc_mean"]
    assert sweep_report.ranking(summary, "loss") == [0, 3, 2, 1, 4]


# Lines for the terminal.


def test_table_is_sorted_and_tells_what_it_leaves_out():
    summary = summary_of([0.5, None, 1.0, -0.02], losses=[10.0, NAN, 0.12345, 3.0])
    lines = sweep_report.table(summary, ["x"], ["acc", "loss"])
    assert [line.split() for line in lines] == [
        ["x", "ACC", "loss", "failed"],
        ["1", "c", "1.000", "0.1235", "-"],
        ["2", "a", ".500", "10", "-"],
        ["3", "d", "-.020", "3", "-"],
        ["4", "b", "-", "-", "1", "of", "1"],
    ]
    assert len({len(line) for line in lines}) == 1
    *rest, last = sweep_report.table(summary, ["x"], ["acc", "loss"], by="loss", most=2)
    assert [line.split()[1] for line in rest] == ["ACC", "c", "d"]
    assert last == "the best 2 of 4 settings by mean loss; 2 left out"
    assert len(sweep_report.table(summary, ["x"], ["acc"], most=4)) == 5  # of 4 none is left out


def test_best_lines_tell_what_choosing_without_labels_is_worth():
    rows = [run({"x": "a", "y": "1"}, s, acc, loss=3.0) for s, acc in enumerate((0.927, 0.935))]
    rows += [
        run({"x": "b", "y": "1"}, acc=0.8, loss=1.0, silhouette=0.5),
        run({"x": "b", "y": "1"}, 1, status="failed: NaN"),
        run({"x": "c", "y": "1"}, acc=0.9, loss=2.0, silhouette=0.1),
        run({"x": "d", "y": "1"}, acc=0.5, loss=4.0, silhouette=0.2),
        run({"x": "e", "y": "1"}, status="failed: NaN"),
    ]
    summary = sweep_report.summarise(rows, ["x", "y"], METRICS)
    # By hand: ranks of ACC 4, 2, 3, 1 and of loss 3, 1, 2, 4, so rho = 1 - 6 * 12 / 60 = -.2; ranks
    # of ACC 2, 3, 1 and of silhouette 3, 1, 2, so rho = 1 - 6 * 6 / 24 = -.5.
    assert sweep_report.best_lines(summary, ["x", "y"]) == [
        "best by mean ACC (needs labels): x=a, y=1: .931 +- .006",
        "first by information (no labels): not measured in any setting",
        "first by silhouette (no labels): x=b, y=1: silhouette 0.5, ACC .800, rank 3 of 4"
        " by ACC (1 of 2 runs failed); not measured in 1 of 4 settings",
        "    Spearman's correlation with mean ACC: -.500 over 3 settings (1 would rank as ACC"
        " does)",
        "first by loss (no labels): x=b, y=1: loss 1, ACC .800, rank 3 of 4 by ACC"
        " (1 of 2 runs failed)",
        "    Spearman's correlation with mean ACC: -.200 over 4 settings (-1 would rank as ACC"
        " does)",
    ]


def test_nothing_is_first_by_a_loss_that_the_axis_is_part_of():
    rows = [run({"tau_m": t, "seed": "0"}, acc=0.5 + t, loss=t, silhouette=0.1) for t in (0.1, 0.2)]
    summary = sweep_report.summarise(rows, ["tau_m"], METRICS)
    axes = grid.parse("tau_m=0.1,0.2")
    nothing = {"loss": [], "information": []}
    assert sweep_report.axes_in("fedhk", summary, axes) == nothing
    assert sweep_report.axes_in("fmcsc", summary[:1], axes) == nothing  # one value is no choice
    part_of = sweep_report.axes_in("fmcsc", summary, axes)
    assert part_of == {"loss": ["tau_m"], "information": []}
    lines = sweep_report.best_lines(summary, ["tau_m"], part_of=part_of)
    assert lines[-1] == (
        "first by loss (no labels): none, since what it measures changes with tau_m"
    )
    assert sum("loss" in line for line in lines) == 1  # no correlation either
    assert len(lines) == 5  # of the silhouette there are both


def test_numbers_of_clusters_are_not_compared_by_information():
    rows = [run({"n_clusters": k}, acc=0.5, information=k) for k in (2, 3)]
    summary = sweep_report.summarise(rows, ["n_clusters"], METRICS)
    part_of = sweep_report.axes_in("lmvsc", summary, grid.parse("n_clusters=2,3"))
    lines = sweep_report.best_lines(summary, ["n_clusters"], part_of=part_of)
    assert lines[1] == (
        "first by information (no labels): none, since what it measures changes with n_clusters"
    )


@pytest.mark.parametrize(
    "axis", ["dataset=a,b", "n_clients=6,12", "ratio=2:1,1:2", "hybrid=1:1,1:2"]
)
def test_settings_of_other_data_are_compared_by_no_measure_of_them(axis):
    (varied,) = axes = grid.parse(axis)
    rows = [run({varied.name: v}, acc=0.5, information=0.5, loss=0.1) for v in varied.values]
    summary = sweep_report.summarise(rows, [varied.name], METRICS)
    named = [varied.name]
    assert sweep_report.axes_in("fmcsc", summary, axes) == {"loss": named, "information": named}


def test_settings_in_the_loss_are_settings_of_the_family():
    flags = {}
    for method in METHODS.values():
        mine = {*flags_of(method.config), *flags_of(method.hyperparams)}
        flags.setdefault(hooks.family_of(method), set()).update(mine, ["n_clusters"])
    for family, names in sweep_report.IN_LOSS.items():
        assert set(names) <= flags[family], family


CHANGED = {
    "e_fkmvc": {"tol": 0.1, "tau": 1, "mix": 0.5, "view_mix": 0.5, "step_size": 0.1, "quality": 1}
    | {"fuzzifier": 1.5, "alpha": 2, "beta": 2},
    "fmcsc": {"tau_m": 1, "tau_p": 1, "mask_rate": 0.6, "weight_floor": 0.1},
    "fcuif": {"guidance": 1, "imputer_rate": 1e-2, "align_rate": 1e-2, "align_weight": 1},
    "mgcd": {"gamma": 10, "lam": 1, "tau": 1, "ridge": 2, "server_rate": 1e-3},
}
NETWORKS = {"hidden": (8,), "latent_dim": 3, "pretrain_epochs": 0, "local_epochs": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_the_loss_of_models_that_stay_changes_with_these_numbers_alone(name):
    """After a round without learning, or before any: with the same models, all but the loss is."""
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(24, d)) + 3 * (np.arange(24) % 3)[:, None] for d in (4, 3)]
    static = {
        "e_fkmvc": {"choose_views": False},
        "fmcsc": NETWORKS | {"head_hidden": 4, "distill_epochs": 0, "n_init": 2},
        "fcuif": NETWORKS | {"imputer_hidden": (4,), "imputer_epochs": 0, "n_init": 2},
        "mgcd": NETWORKS | {"mode": "literal", "n_neighbours": 4, "n_init": 2},
    }[name]
    base = {
        "fmcsc": {"learning_rate": 1e-12, "mask_rate": 0.3},
        "fcuif": {"learning_rate": 1e-12},
        "mgcd": {"local_rate": 1e-12, "lam": 0.5},
    }.get(name, {})
    method = METHODS[name]
    if method.topology == "vertical":
        federation = Federation.from_agents([(range(24), view) for view in views])
    else:
        # Two clients with both views; of one view each for FMCSC, which has a loss of its own.
        mine = [{0: 0, 1: 1}, {0: 0, 1: 1}] + [{0: 0}, {1: 1}] * (name == "fmcsc")
        rows = np.array_split(np.arange(24), len(mine))
        federation = Federation.from_clients(
            [{v: views[v][r] for v in held} for held, r in zip(mine, rows, strict=True)]
        )
    config = method.config(3, **static)

    @jax.jit
    def loss(hyper):
        algorithm = method.make(config, hyper)
        result = engine.run(algorithm, federation, jax.random.key(0), 1)
        return batches.last_loss(result.info, result.n_rounds)

    def of(**changed):
        hyper = method.hyperparams(**(base | changed))
        return float(loss(jax.tree.map(jnp.float32, hyper)))

    before = of()
    found = {n for n, x in CHANGED[name].items() if of(**{n: x}) != pytest.approx(before, rel=1e-5)}
    known = set(sweep_report.IN_LOSS[hooks.family_of(method)])
    assert found == known & CHANGED[name].keys()


def test_settings_that_are_level_are_counted():
    line = sweep_report.best_lines(summary_of([0.5, 1.0, 1.0]), ["x"])[0]
    assert line.endswith("2 settings are level, of which the first is x=b: 1.000")


def test_an_axis_that_changed_nothing_is_named():
    """Where x stays, y changes no mean; a loss that is NaN everywhere says nothing of it."""
    rows = [
        {"x": x, "y": y, "seed": seed, "status": "ok", "acc": 0.1 * x + 0.01 * seed, "loss": NAN}
        for x in (1, 2)
        for y in (3, 4, 5)
        for seed in (0, 1)
    ]
    axes = [grid.Axis("x", ("1", "2")), grid.Axis("y", ("3", "4", "5"))]

    def said(rows):
        summary = sweep_report.summarise(rows, ["x", "y"], ["acc", "loss"])
        return sweep_report.idle_lines(summary, axes)

    assert said(rows) == ["y: all its values gave the same results; is it in use here?"]
    assert said([row | {"loss": row["y"]} for row in rows]) == []
    drawn = [row for row in rows if row["x"] + 2 == row["y"]]  # no two settings with the same x
    assert said(drawn) == []
    only = sweep_report.summarise(rows[:6], ["y"], ["acc"])
    assert sweep_report.idle_lines(only, axes[1:]) == [
        "y: all its values gave the same results; is it in use here?"
    ]


def test_best_lines_do_without_labels_and_without_measures():
    lines = sweep_report.best_lines(summary_of([NAN, NAN], losses=[2.0, 1.0]), ["x"])
    assert lines == [
        "best by mean ACC (needs labels): no setting has one",
        "first by information (no labels): not measured in any setting",
        "first by silhouette (no labels): not measured in any setting",
        "first by loss (no labels): x=b: loss 1",
    ]
    (line,) = sweep_report.best_lines(summary_of([None, None]), ["x"])
    assert line == "no run ended well: there is no best setting"


@pytest.mark.parametrize(
    ("losses", "why"),
    [([1.0, 2.0, NAN], "fewer than 3 settings have both"), ([2.0] * 3, "all settings are alike")],
)
def test_no_correlation_is_told(losses, why):
    lines = sweep_report.best_lines(summary_of([0.1, 0.2, 0.3], losses), ["x"])
    assert lines[-1] == f"    Spearman's correlation with mean ACC: none, {why}"


# Pictures.


@pytest.fixture
def figures(monkeypatch):
    """Figures as they would have been written."""
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    yield drawn
    pyplot.close("all")


def swept(text, score, settings=None):
    """Axes and summary of one run for each setting; a score of None is a failed run."""
    axes, rows = grid.parse(text), []
    for setting in settings or grid.combinations(axes):
        acc = score(setting)
        status = "failed: NaN" if acc is None else "ok"
        rows += [run(setting, seed, acc or NAN, status=status, nmi=acc or NAN) for seed in (0, 1)]
        rows[-1]["acc"] = (acc or NAN) + 0.02
    return axes, sweep_report.summarise(rows, [axis.name for axis in axes], METRICS)


def cells(axis):
    """Texts of a heat map [rows, columns]."""
    found = {text.get_position(): text.get_text() for text in axis.texts}
    columns, rows = len(axis.get_xticks()), len(axis.get_yticks())
    return [[found[j + 0.5, i + 0.5] for j in range(columns)] for i in range(rows)]


def names(labels):
    return [label.get_text() for label in labels]


def test_heat_map_has_the_two_longest_axes_and_the_rest_at_its_best(tmp_path, figures):
    scores = {"AB": 0.5, "BC": 0.6}

    def score(s):
        if (s["lr"], s["parts"], s["tau"]) == ("0.01", "BC", "1"):
            return None
        return scores[s["parts"]] + 0.1 * float(s["tau"]) + float(s["lr"])

    axes, summary = swept("lr=log(1e-3,1e-2,3); parts=AB,BC; tau=0,1,2; one=7", score)
    gone = {"lr": "0.001", "parts": "BC", "tau": "0"}
    summary = summary[~(summary[list(gone)] == list(gone.values())).all(axis=1)].reset_index(
        drop=True
    )
    (path,) = sweep_report.draw(tmp_path, summary, axes, "acc")
    assert path == tmp_path / "heatmap.png"
    axis = figures[0].axes[0]
    assert (axis.get_ylabel(), axis.get_xlabel()) == ("lr", "tau")
    assert names(axis.get_yticklabels()) == ["0.001", "0.00316", "0.01"]
    assert names(axis.get_xticklabels()) == ["0", "1", "2"]
    assert "parts=BC, as in the best setting" in figures[0].get_suptitle()
    lrs = (0.001, 0.00316227766017, 0.01)
    expected = np.array([[0.61 + 0.1 * tau + lr for tau in range(3)] for lr in lrs])
    expected[0, 0] = expected[2, 1] = NAN
    np.testing.assert_allclose(axis.collections[0].get_array().filled(NAN), expected)
    texts = [[f"{value:.3f}\n± 0.014" for value in row] for row in expected]
    texts[0][0], texts[2][1] = "not run", "failed"
    assert cells(axis) == texts
    frames = [patch.get_xy() for patch in axis.patches if not patch.get_fill()]
    assert frames == [pytest.approx((2.03, 2.03))]  # around the best, in the last row and column


def test_heat_map_is_bright_and_framed_where_small_is_good_and_can_be_read(tmp_path, figures):
    means = pd.DataFrame([[1.0, 2.0], [3.0, 4.0]], ["a", "b"], ["c", "d"])
    plots_sweep.heat_map(tmp_path / "h.png", means, 0 * means, "t", "loss", True)
    axis = figures[0].axes[0]
    image = axis.collections[0]
    assert image.to_rgba(1.0) == pytest.approx(pyplot.get_cmap("viridis")(1.0))
    assert [p.get_xy() for p in axis.patches] == [pytest.approx((0.03, 0.03))]
    brightness = [np.mean(pyplot.matplotlib.colors.to_rgb(t.get_color())) for t in axis.texts]
    assert brightness[0] < 0.5 < brightness[-1]  # dark on bright, bright on dark
    assert cells(axis) == [["1.000", "2.000"], ["3.000", "4.000"]]  # one seed has no deviation


def test_every_cell_of_a_heat_map_can_be_read(tmp_path, figures):
    def luminance(colour):
        rgb = np.array(pyplot.matplotlib.colors.to_rgb(colour))
        return np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ weights

    weights = np.array([0.2126, 0.7152, 0.0722])
    values = np.linspace(0, 1, 24).reshape(4, 6)
    values[1, 2] = NAN
    means = pd.DataFrame(values, list("abcd"), list("efghij"))
    plots_sweep.heat_map(tmp_path / "h.png", means, 0 * means, "t", "ACC", False)
    axis = figures[0].axes[0]
    palette, contrasts = pyplot.get_cmap("viridis"), []
    for text in axis.texts:
        j, i = map(int, text.get_position())
        if np.isfinite(values[i, j]):
            pair = luminance(text.get_color()), luminance(palette(values[i, j]))
            contrasts.append((max(pair) + 0.05) / (min(pair) + 0.05))
    assert len(contrasts) == 23 and min(contrasts) > 4


def test_lines_of_ratios_are_drawn_in_logarithms_with_all_scores(tmp_path, figures):
    def score(s):
        return None if s["lr"] == "1" else float(s["lr"])

    axes, summary = swept("lr=0.1,1,0.01; parts=AB", score)
    (path,) = sweep_report.draw(tmp_path, summary, axes, "acc")
    assert path == tmp_path / "lines.png"
    (axis,) = figures[0].axes
    assert axis.get_xscale() == "log"
    assert sorted(names(axis.get_xticklabels())) == ["0.01", "0.1", "1"]
    acc, nmi = axis.containers
    assert (acc.get_label(), nmi.get_label()) == ("ACC", "NMI")
    np.testing.assert_allclose(acc.lines[0].get_xdata(), [0.01, 0.1, 1])
    np.testing.assert_allclose(acc.lines[0].get_ydata(), [0.02, 0.11, NAN])
    np.testing.assert_allclose(nmi.lines[0].get_ydata(), [0.01, 0.1, NAN])
    segment = acc.lines[2][0].get_segments()[1]
    np.testing.assert_allclose(segment, [[0.1, 0.11 - 0.0002**0.5], [0.1, 0.11 + 0.0002**0.5]])
    assert [(t.get_text(), t.xy[0]) for t in axis.texts] == [("failed", 1.0)]


@pytest.mark.parametrize(
    ("values", "scale", "places", "labels"),
    [
        ("0.3,0.1,0.5", "linear", [0.1, 0.3, 0.5], ["0.1", "0.3", "0.5"]),
        ("lin(1,100,3)", "linear", [1.0, 50.5, 100.0], ["1", "50.5", "100"]),
        ("1,0,1e-4", "linear", [0, 1, 2], ["0", "0.0001", "1"]),  # orders apart, evenly
        ("AB,BC,A", "linear", [0, 1, 2], ["AB", "BC", "A"]),
    ],
)
def test_lines_stand_where_the_values_say(tmp_path, figures, values, scale, places, labels):
    axes, summary = swept(f"x={values}", lambda s: 0.5)
    summary["nmi_mean"] = NAN  # nothing beside ACC
    sweep_report.draw(tmp_path, summary, axes, "acc")
    (axis,) = figures[0].axes
    assert axis.get_xscale() == scale and names(axis.get_xticklabels()) == labels
    np.testing.assert_allclose(axis.containers[0].lines[0].get_xdata(), places)


def test_a_picture_says_of_how_many_seeds_its_means_are(tmp_path, figures):
    """Without those that failed: no more than a table has."""
    axes, summary = swept("x=1,2,3", lambda s: None if s["x"] == "3" else 0.5)
    assert list(summary["n_ok"] + summary["n_failed"]) == [2, 2, 2]
    sweep_report.draw(tmp_path, summary, axes, "acc")
    summary.loc[0, ["n_ok", "n_failed"]] = 1
    sweep_report.draw(tmp_path, summary, axes, "acc")
    labels = [figure.axes[0].get_ylabel().split("\n")[0] for figure in figures]
    assert labels == ["score, mean over 2 seeds", "score, mean over 1 to 2 seeds"]


def test_random_settings_are_points_in_a_panel_for_each_axis(tmp_path, figures):
    text = "lr=log(1e-4,1e-2,7); parts=AB,BC; one=1"
    settings = grid.draws(grid.parse(text), 8, seed=0)
    failing = settings[3]
    axes, summary = swept(text, lambda s: None if s == failing else float(s["lr"]), settings)
    (path,) = sweep_report.draw(tmp_path, summary, axes, "acc")
    assert path == tmp_path / "points.png"
    left, right = figures[0].axes
    assert (left.get_xlabel(), left.get_xscale()) == ("lr", "log")
    lrs = np.array([float(s["lr"]) for s in settings])
    means = np.where(np.arange(8) == 3, NAN, lrs + 0.01)
    np.testing.assert_allclose(left.containers[0].lines[0].get_xydata().T, [lrs, means])
    crosses = left.get_lines()[-1]
    assert crosses.get_xdata().tolist() == [lrs[3]] and crosses.get_label() == "failed"
    assert names(right.get_xticklabels()) == ["AB", "BC"]
    places = right.containers[0].lines[0].get_xdata()
    assert ["AB" if place == 0 else "BC" for place in places] == [s["parts"] for s in settings]


def test_the_pages_map_has_numbers_by_size_and_words_in_the_grids_order():
    _, summary = swept("batch=16,128,8; parts=BC,A", lambda s: float(s["batch"]))
    _, heat = sweep_report.figures(summary, ["batch", "parts"], ["acc"], "acc")
    (trace,) = heat.traces
    assert trace["y"] == ["8", "16", "128"] and trace["x"] == ["BC", "A"]
    np.testing.assert_allclose([row[0] for row in trace["z"]], [8, 16, 128], atol=0.02)


def test_nothing_is_drawn_of_nothing(tmp_path):
    axes, summary = swept("x=1; y=2", lambda s: 0.5)
    assert sweep_report.draw(tmp_path, summary, axes, "acc") == []
    axes, summary = swept("x=1,2", lambda s: None)
    assert sweep_report.draw(tmp_path, summary, axes, "acc") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["x=a-long-name,another-long-name,c", "x=1,2;y=3,4"])
def test_pictures_are_written_whole(tmp_path, text):
    axes, summary = swept(text, lambda s: 0.5)
    (path,) = sweep_report.draw(tmp_path, summary, axes, "acc")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[-8:-4] == b"IEND"
    assert list(tmp_path.iterdir()) == [path] and not pyplot.get_fignums()


def test_numbers_of_things_are_in_english():
    assert [counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_a_log_axis_of_drawn_values_has_few_ticks_and_all_can_be_read():
    axis = pyplot.figure().subplots()
    values = pd.Series(["0.00015", "0.0007", "0.009"])
    plots_sweep._place(axis, values, grid.Axis("learning_rate", (), "log"), 4.0)
    axis.plot(values.astype(float), [0, 1, 2])
    axis.figure.canvas.draw()
    ticks = {t.get_position()[0]: t.get_text() for t in axis.get_xticklabels()}
    shown = [text for at, text in ticks.items() if 0.00015 < at < 0.009]
    assert shown == ["0.0002", "0.0005", "0.001", "0.002", "0.005"]
    assert not any(t.get_text() for t in axis.get_xticklabels(minor=True))
    pyplot.close("all")
