"""The tables of ours that the documentation shows, made again from the rows they rest on.

    python -m experiments.reproduce --check

compares each of them with its page, finds cells whose runs have unlike settings, and ends with an
error if there is anything of that. It also lists what is missing, which is no error: rows that do
not say how they were made, and cells of the papers' tables that nobody has run here.

    python -m experiments.published

writes the tables into their pages, between marks such as `<!-- FMCSC, ablation: begin -->`. The
heads of the tables stay as they are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.fedhk.study import POOLED
from experiments.fmcsc import rows as fmcsc_rows
from experiments.fmcsc import tables as fmcsc
from experiments.leakage.uploads import forms_of_graphs
from experiments.lib import peers, peers_grid
from experiments.lib.folder import settings_of_row
from experiments.mgcd import runs as mgcd_runs
from experiments.mgcd import tables as mgcd
from experiments.robustness import __main__ as robustness
from experiments.vertcohirf import attack, trials, unsupervised
from experiments.vertcohirf import tables as vertcohirf
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.reveals import KINDS, reveals
from jaxfedmvc.data import unequal
from jaxfedmvc.files import write_text

ROOT = Path(__file__).parents[1]
FEDHK, FMCSC, MGCD, VERTCOHIRF = (
    ROOT / "experiments" / paper / "measured" for paper in ("fedhk", "fmcsc", "mgcd", "vertcohirf")
)
# As `experiments.compare` writes it, and the partitions of its sets.
SIDE_BY_SIDE = ROOT / "experiments" / "measured" / "side_by_side.csv"
SMALL_CLIENTS = SIDE_BY_SIDE.with_name("small_clients.csv")
LEAKAGE = SIDE_BY_SIDE.with_name("leakage.csv")
ROBUSTNESS = SIDE_BY_SIDE.with_name("robustness.csv")
_CELLS = {"bdgp": "1:1", "mfeat": "complete"}
# Columns of the tables of small clients: method and partition.
_SMALL = (("e_fkmvc", "complete"), ("e_fkmvc", "1:1"), ("fmcsc", "1:1"))
# Files of comparison methods' runs, and what is said of them beside the method's name.
_PEERS = {"peers.csv": "", "peers_short.csv": ", a tenth of the training"}
# How rows of the ablation begin on the page.
_ABLATION = {
    "BCD": "no consensus pre-training (BCD)",
    "ACD": "partial models not optimised (ACD)",
    "ABD": "no model contrast (ABD)",
    "ABC": "no weights (ABC)",
    "ABCD": "all (ABCD)",
    "ABD, idle": "ABD, single-view clients idle in the rounds",
    "ABD, branches": "the same, with partial models that are branches (`best`)",
}
# What figures vary, as the page says it.
_FIGURES = {
    "figure4a": "4a: rows ",
    "figure4b": "4b: clients ",
    "figure4c": "4c: epsilon ",
    "figure7": "7: beta ",
    "figure2": "2: tau_m ",
}
# Rows of FedHK's study, as its page calls them.
_FEDHK = {
    "E-FKMVC": "E-FKMVC",
    "Tucker": "FedHK-Tucker",
    "PARAFAC2 of views": "FedHK-PARAFAC2, views",
    "average (60) E=1": "averages, (60)",
    "k-means of each client": "k-means of each client",
}
# Forms of messages that were read, as the pages call them, and what an agent sends in them.
_SENT = {
    "factors": ("[MGCD](mgcd.md), factors", "a graph of the rows"),
    "nearest 10": (
        'MGCD, form "nearest 10"',
        "of each row of the graph, the ten largest positive entries",
    ),
    "response 4": (
        'MGCD, form "response 4"',
        "for each two rows, whether they are so joined: a lie with probability .018",
    ),
    "latents": ("latent vectors, as of MGCD", "a code for each row"),
    "feddmvc": ("FedDMVC", "a code and soft labels for each row"),
    "fcuif": ("FCUIF", "a code and soft labels for each row"),
    "fedmvl": ("FedMVL, exact step, mu 1e-3", "a factor for each row, behind a multiplier"),
    "label_consensus": ("consensus of labels", "ten labels for each row, of 2 to 20 clusters"),
    "vertcohirf": ("VertCoHiRF", "a label for each row, and a ranking"),
    "vertcohirf, relaxed": ("VertCoHiRF, relaxed consensus", "the same"),
    "vertcohirf, refined": (
        "the same, refined three times",
        "also the four nearest clusters of each row, three times",
    ),
}
_MADE_BY = ("command", "commit", "device", "jax", "seconds")
# Later rows also spell out defaults that earlier ones left out.
_SPELT_OUT = re.compile(r"--(?:categories|missing)=refuse ?")


class Shown(NamedTuple):
    """A table on a page.

    Attributes:
      page: Below docs/.
      mark: What it is, as in the marks `<!-- MARK: begin -->` and `<!-- MARK: end -->`.
      lines: What must stand there, made from rows.
      whole: Are the lines all that stands between the marks? Otherwise they are pieces of lines
        that stand anywhere on the page, where "*|" is whatever a line of the page has there.
    """

    page: str
    mark: str
    lines: Callable[[], list[str]]
    whole: bool = True

    @property
    def path(self) -> Path:
        """The file of the page."""
        return (ROOT / "docs" / self.page).resolve()

    @property
    def name(self) -> str:
        """Page and table, for messages."""
        return f"{self.path.relative_to(ROOT)}, {self.mark}"


class Rows(NamedTuple):
    """A file of runs.

    Attributes:
      path: Of the file.
      cell: Columns that name a cell, over whose seeds means are taken.
    """

    path: Path
    cell: tuple[str, ...]


# --- What is shown --------------------------------------------------------------------------------


def spread(mean: float, deviation: float) -> str:
    """Returns mean and deviation as pages print them, .942 +- .015; one seed has no deviation."""
    return " +- ".join(number(x) for x in (mean, deviation) if not pd.isna(x))


def of_samples(values: pd.Series) -> str:
    """Returns mean and sample deviation of values."""
    return spread(values.mean(), values.std(ddof=1))


def number(value: float) -> str:
    """Returns a score as pages print it, .942."""
    return f"{round(value, 3) + 0.0:.3f}".replace("0.", ".", 1)  # no negative zero


def table_1() -> list[str]:
    """Returns FMCSC's table 1."""
    runs = fmcsc.read_runs(FMCSC / "table1_runs.csv")
    references = fmcsc.read_lines(FMCSC / "table1_references.csv")
    table = fmcsc.short(fmcsc.table_1(runs, references))
    return fmcsc.markdown(table, "M : S").splitlines()[2:]


def in_short() -> list[str]:
    """Returns ACC of FMCSC's table 1: the paper's, that of both presets, and which reach it."""
    runs = fmcsc.read_runs(FMCSC / "table1_runs.csv")
    references = fmcsc.read_lines(FMCSC / "table1_references.csv")
    lines = []
    for (of, x), mine in fmcsc.table_1(runs, references).groupby(["set", "x"], sort=False):
        scores = mine.set_index("row")[["acc", "acc_std"]].T
        ours = {
            "`paper`": "paper, R = 5",
            "`best`": "best, R = 5",
            "`best`, ten rounds": "best, R = 10",
        }
        least = scores["published: FMCSC"]["acc"]
        reached = [name for name, row in ours.items() if scores[row]["acc"] >= least]
        shown = ("published: FMCSC", *ours.values(), "k-means, raw views pooled")
        cells = [fmcsc_rows.SETS[of], x, *(spread(*scores[row]) for row in shown)]
        lines.append(f"| {' | '.join([*cells, reached[0] if reached else 'none'])} |")
    return lines


def presets() -> list[str]:
    """Returns ACC of FMCSC's presets after five rounds, beside the paper's."""
    runs, paper = fmcsc.read_runs(FMCSC / "table1_runs.csv"), published_fmcsc()
    cells = dict(iter(runs.groupby(["set", "x", "row"])))

    def shown(*cell: str) -> str:
        if cell not in cells:
            return "0 | not measured"
        line = fmcsc.mean_line(cells[cell], "", after=5)
        return f"{line['seeds']} | {spread(line['acc'], line['acc_std'])}"

    return [
        f"| {fmcsc_rows.SETS[of]} | {x} |"
        f" {spread(*paper.loc[(of, x, 'FMCSC'), ['acc', 'acc_std']])} |"
        f" {shown(of, x, 'paper')} | {shown(of, x, 'best')} |"
        for of, x in runs[["set", "x"]].drop_duplicates().itertuples(index=False, name=None)
    ]


def ablation() -> list[str]:
    """Returns FMCSC's ablation on each set, beside the paper's."""
    runs = fmcsc.read_runs(FMCSC / "table2_runs.csv")
    paper = fmcsc.published("table2.csv", ["components_kept"])
    accuracies = runs["all/pooled/acc"].astype(float).groupby([runs["set"], runs["x"]])
    found = accuracies.apply(of_samples)
    lines = []
    for letters, title in _ABLATION.items():
        cells = [title]
        for of in runs["set"].unique():
            theirs = paper.loc[of]["acc"]
            cells += [
                found.get((of, letters), "not run"),
                number(theirs[letters]) if letters in theirs else "-",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def participation() -> list[str]:
    """Returns ACC of FMCSC's table 3: clients that take part, and those that do not."""
    paper = fmcsc.published("table3.csv", ["participation_rate", "client_type"])["acc"]
    names = {title: of for of, title in fmcsc_rows.SETS.items()}
    lines = []
    for line in _varied("table3", "", ("participating", "non_participating")):
        title, share = line.strip("| ").split(" | ")[:2]
        theirs = (
            number(paper[names[title], share, kind])
            for kind in ("participating", "non-participating")
        )
        lines.append(f"{line} {' | '.join(theirs)} |")
    return lines


def _seconds(value: float) -> str:
    """Formats seconds; a dash where none were kept."""
    return "-" if pd.isna(value) else f"{value:.{0 if value >= 10 else 1}f}"


def costs() -> list[str]:
    """Returns parameters, megabytes and seconds of FMCSC's table 5, beside the paper's."""
    runs = pd.read_csv(FMCSC / "table5_runs.csv")

    def millions(sizes: object) -> str:
        """Of "2675615 to 4348286", 2.7M to 4.3M; equal ones once."""
        found = dict.fromkeys(f"{int(n) / 1e6:.1f}M" for n in str(sizes).split(" to "))
        return " to ".join(found)

    return [
        f"| {fmcsc_rows.SETS[line.set]} | `{line.row}` | {millions(line.parameters_single)} |"
        f" {millions(line.parameters_multi)} | {line.paper_parameters} | {line.megabytes:.0f} |"
        f" {_seconds(line.seconds)} | {line.paper_seconds_rtx3090:.0f} |"
        for line in runs.itertuples()
    ]


def figures() -> list[str]:
    """Returns ACC of what FMCSC's figures 2, 4a to 4c and 7 vary, by kind of client."""
    groups = ("all", "multi_view", "partial_view")
    return [line for name, what in _FIGURES.items() for line in _varied(name, what, groups)]


def losses() -> list[str]:
    """Returns the losses of FMCSC's figure 6 after the first and the last round."""
    runs = pd.read_csv(FMCSC / "figure6_losses.csv")
    lines = []
    for (of, kind), mine in runs.groupby(["set", "kind"], sort=False):
        ends = [mine[mine["round"] == r] for r in (1, mine["round"].max())]
        values = (of_samples(end[name]) for name in ("reconstruction", "contrast") for end in ends)
        lines.append(f"| {fmcsc_rows.SETS[of]} | {kind} | {len(ends[0])} | {' | '.join(values)} |")
    return lines


def _varied(name: str, what: str, groups: Sequence[str]) -> list[str]:
    """Returns a line for each value that is varied; a column for each group of clients."""
    runs = fmcsc.read_runs(FMCSC / f"{name}_runs.csv")
    return [
        f"| {fmcsc_rows.SETS[of]} | {what}{x.split()[0]}{row.removeprefix('best')} | {len(mine)} | "
        + " | ".join(of_samples(mine[f"{g}/pooled/acc"].astype(float)) for g in groups)
        + " |"
        for (of, x, row), mine in runs.groupby(["set", "x", "row"], sort=False)
    ]


def variants() -> list[str]:
    """Returns rounds, ACC, NMI and megabytes of FMCSC's variants."""
    runs = pd.read_csv(FMCSC / "variants.csv")
    runs["megabytes"] = (runs["bytes_up"] + runs["bytes_down"]) / 1e6
    lines = []
    for (of, row), mine in runs.groupby(["set", "row"], sort=False):
        rounds = " to ".join(str(n) for n in sorted({mine["rounds"].min(), mine["rounds"].max()}))
        sent = mine["megabytes"].mean()
        lines.append(
            f"| {fmcsc_rows.SETS.get(of, of)}: {row} | {rounds if rounds != '0' else '-'} |"
            f" {len(mine)} | {of_samples(mine['acc'])} | {of_samples(mine['nmi'])} |"
            f" {'-' if pd.isna(sent) else f'{sent:.0f}'} |"
        )
    return lines


def taught() -> list[str]:
    """Returns ACC by kind of client, and megabytes, of FMCSC's variants that say it."""
    runs = pd.read_csv(FMCSC / "variants.csv").dropna(subset="acc_partial_view")
    lines = []
    for (of, row), mine in runs.groupby(["set", "row"], sort=False):
        sent = (mine["bytes_up"] + mine["bytes_down"]).mean() / 1e6
        scores = (of_samples(mine[c]) for c in ("acc", "acc_multi_view", "acc_partial_view"))
        lines.append(
            f"| {fmcsc_rows.SETS.get(of, of)}: {row} | {mine['rounds'].max()} | {len(mine)} |"
            f" {' | '.join(scores)} | {sent:.0f} |"
        )
    return lines


def headlines() -> list[str]:
    """Returns what the first tables of README and results say, where there are rows of it."""
    best, theirs = _after_five("best"), published_fmcsc().loc[("mnist_usps", "1:1", "FMCSC")]
    paper = spread(theirs["acc"], theirs["acc_std"])
    ends = pd.read_csv(MGCD / "table2_runs.csv").dropna(subset="acc")
    robust = ends.query("set == 'Mfeat' and row == 'MGCD, robust, average'")["acc"]
    sums, tucker = (_skewed_mfeat(method) for method in ("E-FKMVC", "Tucker"))
    modalities = _two_modalities("VertCoHiRF")
    return [
        f"FMCSC*|, five seeds | {spread(best['acc'], best['acc_std'])} | {paper} |",
        f"E-FKMVC*|, five seeds | {of_samples(sums['all/pooled/ari'])} |",
        f"FedHK-Tucker*|the same*|| {of_samples(tucker['all/pooled/ari'])} |",
        f"VertCoHiRF*|, five runs | {of_samples(modalities[['ari_0', 'ari_1']].min(axis=1))} | 1 |",
        f"MGCD*|, five seeds | {of_samples(robust)} |"
        f" {number(mgcd.published_peers()['acc'][('mfeat', 'complete', 'MGCD')])} |",
    ]


def headlines_of_readme() -> list[str]:
    """Returns what README's first table says beyond the one of the results."""
    ari = of_samples(_two_modalities("Distr.KMeans")["ari_0"])
    paper = _after_five("paper")
    return [
        f"(`paper`, three seeds: {spread(paper['acc'], paper['acc_std'])})",
        f"ARI of Distr.KMeans, two modalities, five runs | {ari} |",
    ]


def headlines_of_results() -> list[str]:
    """Returns what the first table of the results says beyond the README's."""
    ours = _after_five("paper")
    sums, tucker = (
        mine["bytes_up"].sum() + mine["bytes_down"].sum()
        for mine in map(_skewed_mfeat, ("E-FKMVC", "Tucker"))
    )
    return [
        f"FMCSC, preset `paper`*|, three seeds | {spread(ours['acc'], ours['acc_std'])} |",
        f"at {100 * tucker / sums:.0f} % of the bytes |",
    ]


def _two_modalities(method: str) -> pd.DataFrame:
    return pd.read_csv(VERTCOHIRF / "table1_runs.csv").query("method == @method")


def _after_five(preset: str) -> fmcsc.Line:
    runs = fmcsc.read_runs(FMCSC / "table1_runs.csv")
    mine = runs.query("set == 'mnist_usps' and x == '1:1' and row == @preset")
    return fmcsc.mean_line(mine, preset, after=5)


def _skewed_mfeat(method: str) -> pd.DataFrame:
    runs = pd.read_csv(FEDHK / "methods_runs.csv")
    return runs.query("set == 'mfeat' and clients == 'skewed' and method == @method")


def small_clients() -> list[str]:
    """Returns ACC where clients have few rows each, beside k-means on all rows."""
    titles = fmcsc_rows.SETS | mgcd_titles() | {"scene15": "Scene15"}
    return [
        f"| {titles.get(of, of)} | {rows} | {' | '.join(_with_few_rows(of, rows, _SMALL))} |"
        for of in ("digits", "mfeat", "bdgp", "scene15")
        for rows in (10, 20, 50)
    ]


def small_generated() -> list[str]:
    """Returns the same of generated sets, with rows a client, clusters and views of each."""
    runs = pd.read_csv(SMALL_CLIENTS)
    sets = dict.fromkeys(of for of in runs["data"] if of.startswith("unequal_"))
    lines = []
    for of in sets:
        data = unequal(int(of.removeprefix("unequal_")))
        assert data.labels is not None
        rows = runs.loc[runs["data"] == of, "rows"].iloc[0]
        shape = f"{rows} | {data.labels.max() + 1} | {len(data.views)}"
        cells = _with_few_rows(of, rows, (*_SMALL, ("mgcd", "views")))
        lines.append(f"| `{of}` | {shape} | {' | '.join(cells)} |")
    return lines


def _with_few_rows(of: str, rows: int, columns: Sequence[tuple[str, str]]) -> list[str]:
    """Returns mean ACC of each method and kind of partition, and of k-means on all rows."""
    runs = pd.read_csv(SMALL_CLIENTS).query("data == @of and rows == @rows")
    means = runs.groupby(["method", "kinds"])["acc"].mean()
    shown = [number(means[column]) if column in means else "not run" for column in columns]
    return [*shown, number(runs["kmeans_acc"].mean())]


def mgcd_table(name: str) -> list[str]:
    """Returns ACC, NMI and ARI of runs of MGCD by set and row, after their last rounds."""
    runs = pd.read_csv(MGCD / f"{name}_runs.csv").dropna(subset="acc")  # each run's last round
    return [
        f"| {of} | {row} | {len(mine)} | "
        + " | ".join(of_samples(mine[metric]) for metric in ("acc", "nmi", "ari"))
        + " |"
        for (of, row), mine in runs.groupby(["set", "row"], sort=False)
    ]


def fedhk_methods() -> list[str]:
    """Returns ARI of FedHK's methods, clients alike / skewed, a column for each set."""
    runs = pd.read_csv(FEDHK / "methods_runs.csv")
    cells = runs.groupby(["method", "set", "clients"])["all/pooled/ari"].apply(of_samples)
    pooled = " | ".join(cells[POOLED, of, "pooled"] for of in runs["set"].unique())
    return [
        f"| {title} | "
        + " | ".join(
            f"{cells[method, of, 'alike']} / {cells[method, of, 'skewed']}"
            for of in runs["set"].unique()
        )
        + " |"
        for method, title in _FEDHK.items()
    ] + [f"| k-means of all samples in one place | {pooled} |"]


def compared(
    path: Path,
    paper: pd.DataFrame,
    titles: dict[str, str],
    absent: dict[str, str] | None = None,
) -> list[str]:
    """Returns the lines of comparison methods, with the best of their grids if a file has it.

    Those of a set and a partition stand together, by ACC.
    """
    table, grid = peers.compare(peers.read_peers(path), paper), peers_grid.beside(path)
    if grid.exists():
        table = peers_grid.with_best(table, peers_grid.best_of_grid(peers.read_peers(grid)))
    places = {name: pd.factorize(table[name])[0] for name in ("set", "x")}
    places["acc"] = -table["acc"].to_numpy()
    table = table.iloc[pd.DataFrame(places).sort_values([*places], kind="stable").index]
    return [line for line in peers.markdown(table, titles, absent).splitlines()[2:] if line]


def vertcohirf_table_1() -> list[str]:
    """Returns VertCoHiRF's table 1: ARI of agents 0 and 1, and what the paper prints."""
    runs, paper = pd.read_csv(VERTCOHIRF / "table1_runs.csv"), vertcohirf.published_table_1()
    lines = []
    for method, mine in runs.groupby("method", sort=False):
        ours = ", ".join(of_samples(mine[f"ari_{agent}"]) for agent in (0, 1))
        theirs = ", ".join(number(x) for x in paper.loc[method])
        lines.append(f"| {method} | {ours} | {theirs} |")
    return lines


def vertcohirf_real_sets() -> list[str]:
    """Returns ARI and silhouette of VertCoHiRF's tables 5 to 16, beside the paper's."""
    chosen = trials.read_trials(VERTCOHIRF / "tables5_16_trials.csv")
    lines = []
    for of in chosen["dataset"].unique():
        tried = chosen[chosen["dataset"] == of].groupby("method")["tried"].max()
        ari, silhouette = (
            vertcohirf.table(of, metric, chosen).set_index("method") for metric in trials.OBJECTIVES
        )
        for method, line in ari.iterrows():
            other = silhouette.loc[method]
            cells = [
                of,
                method,
                str(tried[method]),
                str(line["seeds"]),
                spread(line["tuned_mean"], line["tuned_std"]),
                _or_dash(line["paper_mean"], line["paper_std"]),
                spread(line["unsupervised_mean"], line["unsupervised_std"]),
                spread(other["tuned_mean"], other["tuned_std"]),
                _or_dash(other["paper_mean"], other["paper_std"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def vertcohirf_attack() -> list[str]:
    """Returns mean ARI under attack, and the paired differences, with 95 % intervals."""
    runs = pd.read_csv(VERTCOHIRF / "attack_trials.csv")
    sigmas = runs["sigma"].unique().tolist()
    scores = {
        name: mine.pivot(index="seed", columns="sigma", values="ari")[sigmas].to_numpy()
        for name, mine in runs.groupby("variant", sort=False)
    }
    found = attack.summarise(sigmas, scores)
    lines = []
    for sigma in sigmas:
        cells = [f"{sigma:g}".removeprefix("0")]
        for name in scores:
            line = found.loc[(sigma, name)]
            cells.append(spread(line["mean"], line["half_width_95"]))
            if name != attack.HONEST:
                mean, half = line["difference"], line["difference_half_width_95"]
                cells.append(f"{'-' if mean < 0 else '+'}{spread(abs(mean), half)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def hostile(method: str) -> list[str]:
    """Returns ACC of a method under each attack, by the share of hostile clients and the rule."""
    table = robustness.markdown(robustness.summarised(pd.read_csv(ROBUSTNESS)), method)
    return table.partition("\n\n")[0].splitlines()[2:]


def _or_dash(mean: float, deviation: float) -> str:
    return "-" if pd.isna(mean) else spread(mean, deviation)


def chosen_without_labels(name: str) -> list[str]:
    """Returns a table of VertCoHiRF with settings that are chosen without labels."""
    runs = unsupervised.read(VERTCOHIRF / name)
    text = unsupervised.shown(unsupervised.summary(runs)).partition("\n\n")[0]
    return text.splitlines()[2:]


def side_by_side() -> list[str]:
    """Returns all methods on two partitions, the most accurate first, with what they send."""
    runs = pd.read_csv(SIDE_BY_SIDE).rename(columns={"data": "set"})
    runs["megabytes"] = runs["mb_up"] + runs["mb_down"]
    groups = runs.groupby(["set", "method"], as_index=False)
    ours = groups[["acc", "nmi", "megabytes", "seconds"]].mean()
    ours[["acc_std", "nmi_std"]] = groups[["acc", "nmi"]].std(ddof=1)[["acc", "nmi"]]
    ours = ours.assign(seeds=groups.size()["size"], x=ours["set"].map(_CELLS), said="")
    have = set(ours[["set", "method"]].itertuples(index=False, name=None))
    tables, names = [ours], {title: name for name, title in peers.TITLES.items()}
    for measured, (name, said) in itertools.product((FMCSC, MGCD), _PEERS.items()):
        found = peers.compare(peers.read_peers(measured / name), published_fmcsc())
        found = found.replace({"method": names}).assign(said=said)
        keys = found[["set", "method", "x"]].itertuples(index=False, name=None)
        other = [(of, m) not in have and x == _CELLS.get(of) for of, m, x in keys]
        tables.append(found[other].query("seeds > 0"))
    table = pd.concat(tables).sort_values(["set", "acc"], ascending=[True, False])
    titles = fmcsc_rows.SETS | mgcd_titles()
    return [
        f"| {titles[line.set]} {line.x} | `{line.method}`{line.said} |"
        f" {METHODS[line.method].topology} |"
        f" {line.seeds} | {spread(line.acc, line.acc_std)} |"
        f" {spread(line.nmi, line.nmi_std)} | {line.megabytes:.3g} |"
        f" {_seconds(line.seconds)} |"
        f" {KINDS[reveals(line.method, METHODS[line.method]).kind]} |"
        for line in table.itertuples()
    ]


def leakage() -> list[str]:
    """Returns what a server reads in the uploads of methods that send something of each row."""
    forms = _leakage_by_form()
    return [
        f"| {title} | {sends} | {_told(forms[form], *_READ)} |"
        for form, (title, sends) in _SENT.items()
    ]


def leakage_of_graphs() -> list[str]:
    """Returns what is read in MGCD's messages in each form, the latent space included."""
    forms = _leakage_by_form()
    return [
        f"| {form} | {_told(forms[form], 'subspace', *_READ)} |"
        for form in (*forms_of_graphs(10), "latents")
    ]


def leakage_of_models() -> list[str]:
    """Returns what is read in FMCSC's models."""
    asked = ("prototypes", "public_prototypes", "membership", "calibrated")
    return [f"| FMCSC | {_told(_leakage_by_form()['fmcsc'], *asked)} |"]


def leakage_of_sums() -> list[str]:
    """Returns what is read in E-FKMVC's sums, by number of clients."""
    asked = ("prototypes", "public_prototypes", "exposed", "public_exposed")
    lines = []
    for form, mine in _leakage_by_form().items():
        method, *details = form.split(", ")
        if method == "e_fkmvc":
            read = "summaries" if "summed" in details else "summaries, sums"
            guard = "5" if "5 rows" in details else "off"
            clients = details[0].removesuffix(" clients")
            lines.append(f"| {clients} | {guard} | {read} | {_told(mine, *asked)} |")
    return lines


# Scores of messages that have something of each row.
_READ = ("insiders", "spread", "shadow", "upload_nmi")


def _leakage_by_form() -> dict[str, pd.DataFrame]:
    return {str(form): mine for form, mine in pd.read_csv(LEAKAGE).groupby("form", sort=False)}


def _told(mine: pd.DataFrame, *scores: str) -> str:
    """Returns cells: kilobytes, scores, and NMI and ACC of the federation."""
    shown = [of_samples(mine[score]) if mine[score].notna().all() else "-" for score in scores]
    reached = " / ".join(of_samples(mine[score]) for score in ("nmi", "acc"))
    return " | ".join([f"{mine['bytes'].mean() / 1000:.0f}", *shown, reached])


def published_fmcsc() -> pd.DataFrame:
    """Returns the paper's table 1 by set, ratio and method."""
    return fmcsc.published("table1.csv", ["ratio_multi_single", "method"])


def mgcd_titles() -> dict[str, str]:
    """Returns the paper's names of sets."""
    return {name: title for title, name in mgcd_runs.SETS.items()}


SHOWN = (
    Shown("../README.md", "first table", headlines, whole=False),
    Shown("../README.md", "first table, the rest", headlines_of_readme, whole=False),
    Shown("results.md", "first table", headlines, whole=False),
    Shown("results.md", "first table, the rest", headlines_of_results, whole=False),
    Shown("results.md", "FMCSC, in short", in_short),
    Shown("results.md", "results", table_1),
    Shown("results.md", "FMCSC, ablation", ablation),
    Shown("results.md", "FMCSC, table 3", participation),
    Shown("results.md", "FMCSC, figures", figures),
    Shown("results.md", "FMCSC, figure 6", losses),
    Shown("results.md", "FMCSC, table 5", costs),
    Shown("methods/fmcsc.md", "FMCSC, presets", presets),
    Shown("methods/fmcsc.md", "FMCSC, taught", taught),
    Shown("notebook/fmcsc-table1.md", "FMCSC, variants", variants),
    Shown(
        "methods/comparison.md",
        "comparison methods, FMCSC's table 1",
        lambda: compared(
            FMCSC / "peers.csv", published_fmcsc(), fmcsc_rows.SETS, fmcsc_rows.ABSENT
        ),
    ),
    Shown(
        "methods/comparison.md",
        "comparison methods, MGCD's table 2",
        lambda: compared(
            MGCD / "peers.csv", mgcd.published_peers(), mgcd_titles(), mgcd_runs.ABSENT
        ),
    ),
    Shown(
        "methods/comparison.md",
        "a tenth of the training, FMCSC's table 1",
        lambda: compared(FMCSC / "peers_short.csv", published_fmcsc(), fmcsc_rows.SETS),
    ),
    Shown(
        "methods/comparison.md",
        "a tenth of the training, MGCD's table 2",
        lambda: compared(MGCD / "peers_short.csv", mgcd.published_peers(), mgcd_titles()),
    ),
    Shown("methods/comparison.md", "side by side", side_by_side),
    Shown("methods/comparison.md", "uploads", leakage),
    Shown("methods/comparison.md", "uploads, sums", leakage_of_sums),
    Shown("notebook/leakage.md", "uploads, graphs", leakage_of_graphs),
    Shown("notebook/leakage.md", "uploads, models", leakage_of_models),
    Shown("how-to/choose-a-method.md", "small clients", small_clients),
    Shown("how-to/choose-a-method.md", "small generated sets", small_generated),
    Shown("methods/fedhk.md", "FedHK's methods", fedhk_methods),
    Shown("methods/mgcd.md", "MGCD, table 2", lambda: mgcd_table("table2")),
    Shown("notebook/mgcd.md", "MGCD, table 3", lambda: mgcd_table("table3")),
    Shown("notebook/mgcd.md", "MGCD, table 4", lambda: mgcd_table("table4")),
    Shown("notebook/mgcd.md", "MGCD, figure 5", lambda: mgcd_table("figure5")),
    Shown(
        "methods/vertcohirf.md",
        "VertCoHiRF without labels",
        lambda: chosen_without_labels("unsupervised.csv"),
    ),
    Shown(
        "methods/vertcohirf.md",
        "VertCoHiRF without labels, generated sets",
        lambda: chosen_without_labels("unsupervised_generated.csv"),
    ),
    Shown("methods/vertcohirf.md", "VertCoHiRF, table 1", vertcohirf_table_1),
    Shown("methods/vertcohirf.md", "VertCoHiRF, tables 5 to 16", vertcohirf_real_sets),
    Shown("notebook/vertcohirf.md", "VertCoHiRF, attack", vertcohirf_attack),
    *(
        Shown("notebook/robustness.md", f"hostile clients, {method}", partial(hostile, method))
        for method in ("e_fkmvc", "private_e_fkmvc", "fmcsc", "mgcd", "vertcohirf")
    ),
)
ROWS = (
    Rows(FMCSC / "table1_runs.csv", ("set", "x", "row")),
    Rows(FMCSC / "table2_runs.csv", ("set", "x", "row")),
    *(
        Rows(FMCSC / f"{name}_runs.csv", ("set", "x", "row"))
        for name in ("table3", "figurebytes", *_FIGURES)
    ),
    Rows(FMCSC / "figure6_losses.csv", ("set", "row", "kind", "round")),
    Rows(FMCSC / "table5_runs.csv", ("set", "row")),
    Rows(FMCSC / "variants.csv", ("set", "row")),
    Rows(FMCSC / "peers.csv", ("set", "x", "method")),
    Rows(FMCSC / "peers_short.csv", ("set", "x", "method")),
    Rows(FMCSC / "peers_grid.csv", ("set", "x", "method", "command")),
    Rows(MGCD / "peers.csv", ("set", "x", "method")),
    Rows(MGCD / "peers_short.csv", ("set", "x", "method")),
    Rows(MGCD / "peers_grid.csv", ("set", "x", "method", "command")),
    Rows(FEDHK / "methods_runs.csv", ("set", "clients", "method")),
    *(
        Rows(MGCD / f"{name}_runs.csv", ("set", "row"))
        for name in ("table2", "table3", "table4", "figure5")
    ),
    Rows(VERTCOHIRF / "unsupervised.csv", ("set",)),
    Rows(VERTCOHIRF / "unsupervised_generated.csv", ("set",)),
    Rows(VERTCOHIRF / "table1_runs.csv", ("method",)),
    Rows(VERTCOHIRF / "attack_trials.csv", ("sigma", "variant")),
    Rows(VERTCOHIRF / "tables5_16_trials.csv", ("dataset", "method", "chosen_by")),
    Rows(FMCSC / "temperatures.csv", ("tau_m", "tau_p")),
    Rows(SIDE_BY_SIDE, ("data", "method")),
    Rows(SMALL_CLIENTS, ("data", "rows", "kinds", "method")),
    Rows(LEAKAGE, ("data", "form")),
    Rows(ROBUSTNESS, ("method", "clients", "attack", "share", "rule")),
)


# --- What is found --------------------------------------------------------------------------------


def absent(shown: Shown) -> Iterator[str]:
    """Yields what a page should show of a table and does not, and what it shows beside that."""
    page, wanted = shown.path.read_text(encoding="utf-8"), shown.lines()
    if not shown.whole:
        for line in wanted:
            if not re.search(".*".join(map(re.escape, line.split("*|"))), page):
                yield f"{shown.name}: the rows give {line!r}"
        return
    there = around(page, shown.mark)[1].splitlines()
    for what, ours, others in (("give", wanted, there), ("do not give", there, wanted)):
        for line in ours:
            if line not in others:
                yield f"{shown.name}: the rows {what} {line[:300]!r}"
    if there != wanted and sorted(there) == sorted(wanted):
        yield f"{shown.name}: the rows give another order"


def around(page: str, mark: str) -> tuple[str, str, str]:
    """Returns a page up to the head of a marked table, the table without head, and the rest.

    Raises:
      ValueError: The page has no such marks with a table between them.
    """
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    place = re.search(rf"{re.escape(begin)}\n+\|.*\n\|[-|]+\n()[^<]*(?={re.escape(end)})", page)
    if place is None:
        raise ValueError(f"no table between {begin} and {end}")
    return page[: place.start(1)], page[place.start(1) : place.end()], page[place.end() :]


def write() -> None:
    """Writes the tables into their pages."""
    for shown in SHOWN:
        if shown.whole:
            before, _, after = around(shown.path.read_text(encoding="utf-8"), shown.mark)
            write_text(shown.path, before + "\n".join(shown.lines()) + "\n" + after)


def mixed(rows: Rows) -> Iterator[str]:
    """Yields the cells of a file whose runs have unlike settings, or failed, or occur twice.

    Means would leave a run that failed out, and the number of seeds beside them count it.
    """
    runs = pd.read_csv(rows.path, dtype=str)
    for cell, mine in runs.groupby(list(rows.cell), sort=False):
        name = f"{rows.path.relative_to(ROOT)}, {', '.join(cell)}"
        if mine["seed"].duplicated().any():
            yield f"{name}: a seed occurs twice"
        status = mine["status"] if "status" in mine else pd.Series(dtype=str)
        # A method that refuses a cell has no mean, and the page says why.
        if failed := (~status.fillna("").str.match("ok$|refused: ")).sum():
            yield f"{name}: {failed} of {len(mine)} runs failed"
        if "command" in mine:
            commands = mine["command"].str.replace(_SPELT_OUT, "", regex=True)
            commands = commands.map(settings_of_row, na_action="ignore")
            if commands.nunique() > 1:
                yield f"{name}: unlike settings: {'; '.join(sorted(set(commands)))}"


def unsaid(rows: Rows) -> Iterator[str]:
    """Yields how many rows of a file do not say how they were made."""
    runs = pd.read_csv(rows.path, dtype=str)
    empty = runs.reindex(columns=list(_MADE_BY)).isna()
    lacking = [name for name in _MADE_BY if empty[name].any()]
    if lacking:
        n = f"{empty.any(axis=1).sum()} of {len(runs)}"
        yield f"{rows.path.relative_to(ROOT)}: rows without {', '.join(lacking)} ({n})"


def missing() -> Iterator[str]:
    """Yields the rows of the papers' tables of comparison methods that nobody has run here.

    Those that were run with a share of their training only are named apart.
    """
    for measured, paper in ((FMCSC, published_fmcsc()), (MGCD, mgcd.published_peers())):
        whole, short = (_cells_of(measured / name) for name in _PEERS)
        lacking: dict[tuple[str, str], list[str]] = {}
        for of, x, method in paper.index:
            if method not in ("FMCSC", "MGCD") and (of, x, method) not in whole:
                found = f"{method} (a tenth was run)" if (of, x, method) in short else method
                lacking.setdefault((of, x), []).append(found)
        for (of, x), methods in lacking.items():
            path = (measured / "peers.csv").relative_to(ROOT)
            yield f"{path}, {of} {x}: no whole run of {', '.join(methods)}"


def _cells_of(path: Path) -> set[tuple[str, str, str]]:
    """Returns the cells of a table of comparison methods: set, partition, the paper's name."""
    runs = peers.read_peers(path)
    titles = runs["method"].map(lambda name: peers.TITLES.get(name, name))
    return set(zip(runs["set"], runs["x"], titles, strict=True))


def check() -> int:
    """Prints what is found; returns the number of errors."""
    wrong = [line for shown in SHOWN for line in absent(shown)]
    wrong += [line for rows in ROWS for line in mixed(rows)]
    left = [line for rows in ROWS for line in unsaid(rows)] + list(missing())
    print(f"{len(SHOWN)} tables, {len(ROWS)} files of rows: {len(wrong)} errors")
    print("\n".join(f"  {line}" for line in wrong) + "\n" * bool(wrong), end="")
    print(f"missing, which is no error: {len(left)}")
    print("\n".join(f"  {line}" for line in left))
    return len(wrong)


if __name__ == "__main__":
    write()
