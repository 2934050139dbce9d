"""Pictures reach the disk whole, or not at all."""

import numpy as np
import pytest
from scipy import stats
from threadpoolctl import threadpool_limits

from experiments.lib import charts, plots
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, Hierarchy

pyplot = pytest.importorskip("matplotlib.pyplot")


def assert_one_png(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[-8:-4] == b"IEND"
    assert list(path.parent.iterdir()) == [path]  # nothing half written beside it
    assert not pyplot.get_fignums()


SCORES = {"ACC": np.array([[0.4, 0.6, 0.7], [0.5, 0.5, 0.8]])}
LOSSES = {"reconstruction": np.array([[3.0, 2.0, 1.0]]), "contrast": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("scores", "losses", "references"),
    [
        (SCORES, LOSSES, {"pooled k-means": 0.6, "local k-means": 0.4, "another": 0.5}),
        ({}, LOSSES, {}),
        (SCORES, {}, {}),
        ({"ACC": np.array([[0.5]])}, {"loss": np.array([[1.0]])}, {"pooled k-means": 0.6}),
    ],
    ids=["everything", "no scores", "no losses", "one round of one seed"],
)
def test_curves_write_a_whole_png(tmp_path, scores, losses, references):
    plots.curves(tmp_path / "curves.png", scores, losses, references, "title")
    assert_one_png(tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("seeds", "title"), [(1, "a"), (2, "a\nmean; bands: one standard deviation")]
)
def test_what_bands_of_curves_are_is_said_where_there_are_any(monkeypatch, tmp_path, seeds, title):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.curves(tmp_path / "curves.png", {"ACC": np.ones((seeds, 2))}, {}, {}, "a")
    (figure,) = figures
    pyplot.close(figure)
    assert figure.get_suptitle() == title


def test_kept_rounds_are_marked_in_every_panel_and_said(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    runs = {"ACC": np.ones((1, 3))}
    plots.curves(tmp_path / "curves.png", runs, runs, {}, "a", kept=[2])
    (figure,) = figures
    pyplot.close(figure)
    assert figure.get_suptitle() == "a\nupright lines: rounds that are kept"
    assert [list(axis.lines[-1].get_xdata()) for axis in figure.axes] == [[2, 2], [2, 2]]


def test_lines_of_one_series_over_several_logarithmic_panels(tmp_path):
    points = [(10.0**i, 0.5, 0.1) for i in range(-3, 4)]
    odd = [*points[:2], (np.inf, 0.4, 0.0), (0.0, 0.4, 0.0)]
    panels = {"gamma": {"NMI": points}, "lambda": {"NMI": odd}}
    charts.lines(tmp_path / "lines.png", panels, "weight", "NMI", "title", log_x=True)
    assert_one_png(tmp_path / "lines.png")


def test_a_level_of_a_line_is_said_to_be_its_limit(monkeypatch):
    told = []
    monkeypatch.setattr(plots, "save", lambda figure, path: told.extend(figure.axes))
    own, level = [(1.0, 0.5, 0.0), (2.0, 0.6, 0.0)], [(np.inf, 0.4, 0.0)]
    panels = {"both": {"a": own + level}, "apart": {"a": own, "reference": level}}
    charts.lines("", panels, "epsilon", "ACC", "")
    assert [axis.get_xlabel() for axis in told] == ["epsilon (dashed: infinite)", "epsilon"]
    pyplot.close("all")


@pytest.mark.parametrize(("most", "labels"), [(1000, ["0.001", "1", "1000"]), (0.05, ["0.02"])])
def test_ticks_between_powers_of_ten_are_labelled_over_few_decades_only(most, labels):
    figure, axis = pyplot.subplots()
    axis.set_xscale("log")
    axis.set_xlim(0.001, most)
    plots.mark_powers(axis, [0.001, most])
    figure.canvas.draw()
    shown = [text.get_text() for text in axis.get_xticklabels()]
    plots.mark_powers(axis, [0.0, np.inf])  # nothing that such an axis could show
    assert set(labels) <= set(shown) and ("0.002" in shown) == (most < 1)
    pyplot.close(figure)


def test_titles_and_legends_stay_inside_the_picture(tmp_path, monkeypatch):
    figure, axes = pyplot.subplots(1, 2, dpi=130, layout="constrained")
    name = "e_fkmvc on a_file_with_a_name_that_" + "goes_on_" * 12
    figure.suptitle(f"{name}\nshort")
    axes[0].set_title(name)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plots.save(figure, tmp_path / "a.png")
    monkeypatch.undo()
    for title, width in ((figure.texts[0], 1.0), (axes[0].title, 0.5)):
        assert title.get_window_extent().width < width * figure.bbox.width
        assert title.get_text().replace("\n", "").replace(" ", "").startswith("e_fkmvcona_file")
    assert figure.get_suptitle().endswith("\nshort")
    pyplot.close(figure)
    assert [plots.legend_columns([k * "a"], 7.0, 4) for k in (1, 30, 90)] == [4, 2, 1]


def test_what_error_bars_and_marks_are_is_said_where_there_are_any(monkeypatch):
    told = []
    monkeypatch.setattr(plots, "save", lambda figure, path: told.append(figure.get_suptitle()))
    for mean, deviation in ((0.5, 0.0), (0.5, 0.1), (np.nan, 0.0)):
        charts.bars("", {"": {"a": {"b": (0.5, 0.0), "c": (mean, deviation)}}}, "ACC", "t")
    for deviation in (np.nan, 0.1):
        charts.lines("", {"": {"a": [(1.0, 0.5, deviation)]}}, "round", "ACC", "t")
    said = "t\nerror bars: one standard deviation"
    assert told == ["t", said, "t\nx: no value", "t", said]
    pyplot.close("all")


def test_bars_of_later_panels_are_in_the_legend_and_long_names_turned(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    bar = (0.5, 0.0)
    for name in ("set", "a set of a long name"):
        later = {f"{name} {i}": {"one": bar, "two": bar} for i in range(9)}
        charts.bars("", {"first": {"set": {"one": bar}}, "second": later}, "ACC", "t")
    for figure, rotation in zip(figures, (0, 35), strict=True):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
        assert figure.axes[1].get_xticklabels()[0].get_rotation() == rotation
    pyplot.close("all")


def test_a_single_round_is_a_whole_number(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    charts.lines("", {"": {"a": [(3.0, 0.5, 0.1)]}}, "round", "ACC", "t")
    (axis,) = figures[0].axes
    assert [tick for tick in axis.get_xticks() if abs(tick - 3) < 1] == [3]
    pyplot.close("all")


def test_curves_replace_an_older_picture(tmp_path):
    (tmp_path / "curves.png").write_bytes(b"old")
    plots.curves(tmp_path / "curves.png", SCORES, LOSSES, {}, "title")
    assert_one_png(tmp_path / "curves.png")


@pytest.mark.parametrize(("n", "max_points"), [(4, 2000), (12, 10)])
def test_embedding_writes_a_whole_png(tmp_path, n, max_points):
    rng = np.random.default_rng(0)
    colourings = {
        "class": rng.integers(-1, 3, size=n),
        "cluster": np.arange(n) % 13,  # more than the ten colours of the smaller palette
    }
    with threadpool_limits(1):  # t-SNE's idle threads starve whatever else runs
        plots.embedding(
            tmp_path / "map.png",
            rng.normal(size=(n, 5)),
            colourings,
            np.arange(n) % 2,
            ("multi-view", "partial"),
            "title",
            max_points=max_points,
        )
    assert_one_png(tmp_path / "map.png")


def test_embedding_draws_each_point_where_its_row_says(tmp_path, monkeypatch):
    # The map is replaced by the first two features, thinned to 6 of 20 points: what is scattered
    # must be rows of the input with their own marker and their own colour.
    n, drawn = 20, []

    class FirstTwo:
        def __init__(self, **_):
            pass

        def fit_transform(self, points):
            return points[:, :2]

    points = np.arange(2.0 * n).reshape(n, 2)
    values, markers = np.arange(n) % 4 - 1, np.arange(n) % 3
    monkeypatch.setattr("sklearn.manifold.TSNE", FirstTwo)
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    names = ("a", "b", "c")
    plots.embedding(tmp_path / "map.png", points, {"k": values}, markers, names, "t", 6)
    (axis,) = drawn[0].axes
    pyplot.close(drawn[0])
    palette, seen = pyplot.get_cmap("tab10"), 0
    for marker, scatter in enumerate(axis.collections):
        assert scatter.get_label() == names[marker]
        xy = np.asarray(scatter.get_offsets())
        for place, colour in zip(xy, scatter.get_facecolors(), strict=True):
            row = int(place[0]) // 2
            np.testing.assert_array_equal(place, points[row])
            assert markers[row] == marker
            grey = (0.7, 0.7, 0.7, 1.0)
            np.testing.assert_allclose(colour, palette(values[row]) if values[row] >= 0 else grey)
            seen += 1
    assert seen == 6


@pytest.mark.parametrize("values", [[0, 1, 3], [-1, 0, 2], [0, 1, 25]])
def test_embedding_names_its_colours(tmp_path, monkeypatch, values):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    first, other = np.array(values), np.array([0, 1, 2])
    given = np.eye(3), {"a": first, "b": other}, np.array([0, 1, 0]), ("all", "part"), "t"
    plots.embedding(tmp_path / "map.png", *given, named="class")
    (legend,) = drawn[0].legends
    told = [text.get_text() for text in legend.get_texts()]
    colours = [handle.get_color() for handle in legend.legend_handles]
    pyplot.close(drawn[0])
    names = ["no class" if v < 0 else f"class {v}" for v in values if max(values) < 20]
    assert told == ["all", "part", *names]  # more numbers than colours: no colour is one number's
    palette = pyplot.get_cmap("tab10")
    assert colours[2:] == ["0.7" if v < 0 else palette(v) for v in values if max(values) < 20]


@pytest.mark.parametrize("shape", [(10, 1), (2, 3), (1, 5)])
def test_embedding_draws_what_cannot_be_flattened(tmp_path, shape):
    points = np.random.default_rng(0).random(shape)
    kinds = np.zeros(len(points), int)
    plots.embedding(tmp_path / "map.png", points, {"k": kinds}, kinds, ("one",), "t")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch):
    """Figures as they would have been written."""
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    yield drawn
    pyplot.close("all")


def test_attack_bands_are_confidence_bands_of_the_mean(tmp_path, figures):
    runs = np.array([[0.0, 1.0], [1.0, 1.0], [0.5, 4.0]])
    plots.attack_bands(
        tmp_path / "a.png", [0.1, 0.4], {"many": runs, "one": runs[:1]}, "sigma", "ARI", "t"
    )
    (axis,) = figures[0].axes
    many, one = axis.lines
    assert (many.get_label(), one.get_label()) == ("many (3 seeds)", "one (1 seed)")
    assert many.get_marker() != one.get_marker() and many.get_linestyle() != one.get_linestyle()
    np.testing.assert_allclose(many.get_ydata(), [0.5, 2.0])
    np.testing.assert_allclose(one.get_ydata(), [0.0, 1.0])
    (band,) = axis.collections  # a single seed has none
    # The interval of a t-test of the mean, from another function of the same library.
    for x, values in zip((0.1, 0.4), runs.T, strict=True):
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        corners = band.get_paths()[0].vertices
        drawn = corners[np.isclose(corners[:, 0], x), 1]
        np.testing.assert_allclose((drawn.min(), drawn.max()), interval)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (0, 2)])
def test_attack_bands_refuse_other_shapes(tmp_path, shape):
    with pytest.raises(ValueError, match=r"curves\['a'\]: got shape .* \[seeds, 2\]"):
        plots.attack_bands(tmp_path / "a.png", [0, 1], {"a": np.zeros(shape)}, "x", "y", "t")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "curves", [{}, {"a": np.ones((1, 13))}, {"a": np.eye(13), "b": np.eye(13)}]
)
def test_attack_bands_write_a_whole_png(tmp_path, curves):
    plots.attack_bands(tmp_path / "bands.png", np.arange(13), curves, "x", "y", "title")
    assert_one_png(tmp_path / "bands.png")


def test_boxes_show_medians_values_and_references(tmp_path, figures):
    groups = {"a": [0.1, 0.9, 0.4], "b": [0.5]}
    plots.boxes(tmp_path / "b.png", groups, {"local": 0.3, "pooled": 0.7}, "ARI", "t")
    (axis,) = figures[0].axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a", "b"]
    levels = [np.asarray(line.get_ydata()) for line in axis.lines]
    for level in (0.4, 0.5, 0.3, 0.7):
        assert any(len(y) == 2 and np.all(y == level) for y in levels)
    for values, scatter in zip(groups.values(), axis.collections, strict=True):
        np.testing.assert_allclose(scatter.get_offsets()[:, 1], values)
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["local: 0.3", "pooled: 0.7"]


@pytest.mark.parametrize(
    ("groups", "references"),
    [({}, {}), ({"a": [0.5]}, {}), ({"a": []}, {"local": 0.1}), ({"a": [np.nan, 0.5]}, {})],
    ids=["nothing", "one value", "no value", "not a number"],
)
def test_boxes_write_a_whole_png(tmp_path, groups, references):
    plots.boxes(tmp_path / "boxes.png", groups, references, "ARI", "title")
    assert_one_png(tmp_path / "boxes.png")


def random_hierarchy(*counts):
    """As many active samples as `counts` say before the first iteration and after each."""
    rng, n = np.random.default_rng(0), counts[0]
    parents, absorbed_at, active = np.arange(n), np.full(n, NEVER), rng.permutation(n)
    for level, count in enumerate(counts[1:]):
        medoids, rest = active[:count], active[count:]
        parents[rest], absorbed_at[rest] = rng.choice(medoids, len(rest)), level
        active = rng.permutation(medoids)
    return Hierarchy(parents, absorbed_at, active)


def blocks_of(axis):
    """For each column the blocks from top to bottom: (height, colour)."""
    columns = {}
    for patch in axis.patches:
        entry = (patch.get_y(), patch.get_height(), patch.get_facecolor())
        columns.setdefault(round(patch.get_x()), []).append(entry)
    return [[entry[1:] for entry in sorted(columns[x])] for x in sorted(columns)]


def test_a_bar_that_is_not_known_is_marked_and_one_below_zero_drawn(tmp_path, figures):
    sets = {"a": {"one": (0.5, 0.1), "other": (np.nan, 0.0)}, "b": {"one": (-0.5, 0.0)}}
    charts.bars(tmp_path / "bars.png", {"": sets}, "R^2", "title")
    (axis,) = figures[-1].axes
    assert [bar.get_height() for bar in axis.containers[1]] == [0.5, -0.5]
    (mark,) = axis.texts
    assert mark.get_text() == "x" and 0 < mark.get_position()[0] < 0.5


def test_hierarchy_draws_each_fusion(tmp_path, figures):
    # {0, 2} and {3, 5}, then {1, 2} and {4, 6}, then {3, 6}: clusters {3, 4, 5, 6} and {0, 1, 2}.
    parents = np.array([2, 1, 1, 3, 6, 3, 3, -1])
    absorbed_at = np.array([0, NEVER, 1, NEVER, 1, 0, 2, NEVER])
    hierarchy = Hierarchy(parents, absorbed_at, np.array([1, 3]))
    plots.hierarchy(tmp_path / "h.png", hierarchy, "title")
    (axis,) = figures[0].axes
    texts = [text.get_text() for text in axis.texts]
    heads = [text.split("\n") for text in texts if "\n" in text]
    assert heads == [
        ["level -1", "7 clusters"],
        ["level 0", "5 clusters"],
        ["level 1", "3 clusters"],
        ["level 2 (final)", "2 clusters"],
    ]
    beside = [text for text in texts if "\n" not in text]
    # From the top: the larger cluster first, at each level what will fuse side by side.
    assert beside[7:] == [
        "3 (2)",
        "4 (1)",
        "6 (1)",
        "2 (2)",
        "1 (1)",
        "3 (2)",
        "6 (2)",
        "1 (3)",
        "cluster 1: 3 (4)",
        "cluster 0: 1 (3)",
    ]
    assert beside[:7] == ["3 (1)", "5 (1)", "4 (1)", "6 (1)", "0 (1)", "2 (1)", "1 (1)"]
    columns = blocks_of(axis)
    sizes = [[1] * 7, [2, 1, 1, 2, 1], [2, 2, 3], [4, 3]]
    unit = columns[0][0][0]
    for column, expected in zip(columns, sizes, strict=True):
        np.testing.assert_allclose([height / unit for height, _ in column], expected)
    colours = [[colour for _, colour in column] for column in columns]
    a, b = colours[-1]
    assert a != b
    assert colours == [[a] * 4 + [b] * 3, [a] * 3 + [b] * 2, [a] * 2 + [b], [a, b]]
    assert len(axis.collections) == 7 + 5 + 3  # a band for each cluster but the final ones


def test_hierarchy_gathers_small_clusters_and_skips_levels(tmp_path, figures):
    hierarchy = random_hierarchy(400, 150, 100, 90, 80, 70, 40, 30, 20)
    plots.hierarchy(tmp_path / "h.png", hierarchy, "title", max_nodes=6)
    (axis,) = figures[0].axes
    texts = [text.get_text() for text in axis.texts]
    assert "levels 3 to\n4 left out" in texts
    columns = blocks_of(axis)
    total = sum(height for height, _ in columns[0])
    for column in columns:
        np.testing.assert_allclose(sum(height for height, _ in column), total)
        assert len(column) <= 11  # five alone, and what remains of five colours and grey
    assert len(columns) == 6 and len(columns[-1]) == 6
    final = sorted(hierarchy.summary()[-1].sizes)
    assert f"15 others ({sum(final[:15])} samples)" in texts
    np.testing.assert_allclose([h * 400 / total for h, _ in columns[-1][:5]], final[:-6:-1])
    # Samples of a colour are as many at each level.
    for colour in {colour for _, colour in columns[-1]}:
        shares = [sum(h for h, c in column if c == colour) for column in columns]
        np.testing.assert_allclose(shares, shares[0])


@pytest.mark.parametrize("max_nodes", [14, 40])
def test_hierarchy_writes_no_text_over_another(tmp_path, figures, max_nodes):
    hierarchy = random_hierarchy(1000, 300, 90, 60, 35)
    plots.hierarchy(tmp_path / "h.png", hierarchy, "title", max_nodes)
    figures[0].draw_without_rendering()
    boxes = [text.get_window_extent() for text in figures[0].axes[0].texts]
    assert len(boxes) > 4 * max_nodes
    page = figures[0].bbox
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        for other in boxes[:i]:
            assert not box.overlaps(other)


@pytest.mark.parametrize(
    ("counts", "max_nodes"),
    [
        ((1,), 14),
        ((9,), 14),
        ((150,), 14),
        ((50, 1), 14),
        ((60, 20, 8, 4), 14),
        ((300, 200, 100), 2),
        ((60, 59), 40),
    ],
    ids=["one sample", "no fusion", "many alone", "one cluster", "three levels", "two", "forty"],
)
def test_hierarchy_writes_a_whole_png(tmp_path, counts, max_nodes):
    plots.hierarchy(tmp_path / "h.png", random_hierarchy(*counts), "title", max_nodes)
    assert_one_png(tmp_path / "h.png")


@pytest.mark.parametrize("max_nodes", [1, 41])
def test_hierarchy_refuses_more_blocks_than_can_be_read(tmp_path, max_nodes):
    with pytest.raises(ValueError, match="max_nodes: got"):
        plots.hierarchy(tmp_path / "h.png", random_hierarchy(3), "title", max_nodes)


def test_points_that_do_not_differ_are_at_one_place():
    """t-SNE from a start of NaN ends the process."""
    flat = plots._flattened(np.ones((12, 5), np.float32))
    assert flat.shape == (12, 2) and np.ptp(flat, axis=0).max() == 0


def test_a_mark_in_place_of_the_first_bar_is_inside_the_axes(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    sets = {"one": {"a": (np.nan, np.nan), "b": (0.5, 0.1), "c": (0.7, 0.1)}}
    charts.bars(tmp_path / "bars.png", {"": sets}, "R^2", "title")
    (axis,) = drawn[0].axes
    (mark,) = axis.texts
    left, right = axis.get_xlim()
    assert left < mark.get_position()[0] < right
    pyplot.close(drawn[0])
