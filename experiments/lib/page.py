"""A page to look at: `report.html`, one file that opens offline in any browser.

    write(path, "fmcsc on digits", facts, command, tables, figures)

Figures are Plotly's; its program travels in the file, compressed, and is unpacked by the browser.
Without the extra `report` no page is written, and everything else is as it was.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

from jaxfedmvc.files import write_text

# Colours that can be told apart in the light and in the dark, by the colour-blind too.
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#44bb99",
    "#999933",
    "#882255",
)
NO_COLOUR = "#888888"  # of what is in no class or cluster
_SYMBOLS = ("circle", "diamond", "square", "cross", "x", "star")
_STYLE = """
:root { color-scheme: light dark; --fg: #1b1b1f; --bg: #fff; --soft: #f2f3f5; --line: #d5d7dc }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e4e5e9; --bg: #17181c; --soft: #23252b; --line: #3c3f47 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1000px; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem }
h1, h2, p.note, .facts td { overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .5rem; border-bottom: 1px solid var(--line); text-align: right }
td:first-child, th:first-child { text-align: left } .wide { overflow-x: auto }
td, tbody th { white-space: nowrap } th[colspan] { text-align: center }
.facts td { white-space: pre-line; text-align: left; vertical-align: top }
.facts td:first-child { min-width: 7rem }
pre { background: var(--soft); padding: .7rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: .3rem 0 }
button { font: inherit; padding: .15rem .7rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--soft); color: var(--fg); cursor: pointer; margin-right: .3rem }
button[aria-pressed=true] { border-color: currentColor; font-weight: 600 }
.figure { width: 100% } p.note { opacity: .8; margin: .2rem 0 }
"""
_SCRIPT = """
const packed = document.getElementById("plotly").textContent;
const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const program = document.createElement("script");
program.textContent = await new Response(unpacked).text();
document.head.append(program);
const figures = JSON.parse(document.getElementById("figures").textContent);
function draw() {
  const fg = getComputedStyle(document.documentElement).getPropertyValue("--fg").trim();
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  for (const [id, figure] of Object.entries(figures)) {
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
    const layout = { ...figure.layout, font: { color: fg }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", modebar: { bgcolor: "rgba(0,0,0,0)", color: fg },
      margin: { t: 20, r: 20, b: 20, l: 20, ...figure.layout.margin }, hovermode: "closest" };
    layout.xaxis = { ...axis, ...figure.layout.xaxis };
    layout.yaxis = { ...axis, ...figure.layout.yaxis };
    // On a map contrast is not Plotly's to choose, as it does not see through a clear colour.
    for (const trace of figure.data) if (trace.type == "heatmap") trace.textfont = { color: fg };
    Plotly.react(id, figure.data, layout, { responsive: true, displaylogo: false });
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const button of document.querySelectorAll("button[data-figure]")) {
  button.addEventListener("click", () => {
    const figure = figures[button.dataset.figure];
    const change = figure.views[button.textContent];
    figure.data.forEach((trace, i) => Object.assign(trace, change.traces[i]));
    Object.assign(figure.layout, change.layout);
    for (const other of button.parentElement.children)
      other.setAttribute("aria-pressed", other === button);
    draw();
  });
}
document.getElementById("copy")?.addEventListener("click", async (event) => {
  const text = document.getElementById("command").textContent;
  await navigator.clipboard.writeText(text);
  event.target.textContent = "copied";
});
document.body.dataset.ready = "yes";
"""


class Figure(NamedTuple):
    """A figure of a page.

    Attributes:
      heading: Above it.
      traces: As Plotly has them.
      layout: As Plotly has it; colours of text and lines are the page's.
      views: Text of a button -> what it changes: `{"traces": [one dictionary for each trace],
        "layout": {...}}`. The first one is shown at first.
      note: Below it.
    """

    heading: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    views: Mapping[str, Mapping[str, Any]] = {}
    note: str = ""


def is_installed() -> bool:
    """Tells whether pages can be written."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _packed() -> str:
    """Returns Plotly's program, packed once for all pages: that takes a quarter of a second."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def write(
    path: Path,
    title: str,
    facts: Mapping[str, Any],
    command: str,
    tables: Mapping[str, pd.DataFrame],
    figures: Sequence[Figure],
) -> None:
    """Writes a page.

    Args:
      path: Where to, .html.
      title: Of the page.
      facts: Names and values of the first table.
      command: To copy; empty: none.
      tables: By their headings.
      figures: In their order.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    rows = [
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
    ]
    parts.append(f'<div class="wide"><table class="facts">{"".join(rows)}</table></div>')
    if command:
        parts.append(
            f'<pre id="command">{html.escape(command)}</pre><button id="copy">copy</button>'
        )
    for heading, table in tables.items():
        made = table.to_html(border=0, float_format=_places, na_rep="-")
        parts.append(f'<h2>{html.escape(heading)}</h2><div class="wide">{made}</div>')
    drawn = {}
    for i, figure in enumerate(figures):
        parts.append(f"<h2>{html.escape(figure.heading)}</h2>")
        buttons = [
            f'<button data-figure="figure{i}" aria-pressed="{"false" if k else "true"}">'
            f"{html.escape(name)}</button>"
            for k, name in enumerate(figure.views)
        ]
        parts.append(f"<div>{''.join(buttons)}</div>" if buttons else "")
        # Room for what is drawn once the page is there, so that nothing moves.
        height = figure.layout.get("height", 380)
        parts.append(
            f'<div class="figure" id="figure{i}" role="figure" style="min-height: {height}px"'
            f' aria-label="{html.escape(figure.heading)}"></div>'
        )
        parts.append(f'<p class="note">{html.escape(figure.note)}</p>' if figure.note else "")
        drawn[f"figure{i}"] = {
            "data": list(figure.traces),
            "layout": figure.layout,
            "views": figure.views,
        }
    # "<" may not end the element that holds it.
    told = json.dumps(drawn, default=_as_json, allow_nan=False).replace("<", "\\u003c")
    write_text(
        path,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{html.escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f'\n<script type="application/json" id="figures">{told}</script>\n'
        f'<script type="text/plain" id="plotly">{_packed()}</script>\n'
        f'<script type="module">{_SCRIPT}</script>\n</body></html>\n',
    )


def _places(value: float) -> str:
    """Writes three places, or two digits of what these would show as nothing."""
    return f"{value:.2g}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def _as_json(value: Any) -> Any:
    """Returns what JSON knows; numbers that are not finite are gaps."""
    if isinstance(value, np.ndarray):
        return with_gaps(np.round(value, 6)) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _faint(colour: str, opacity: float = 0.2) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


# From nothing to the first colour; and one that lines can have, too.
GREYS = ((0, "#aaaaaa"), (1, COLOURS[0]))
SHADES = ((0, _faint(COLOURS[0], 0)), (1, COLOURS[0]))
# Of numbers that are none of nothing: the least is told from a gap.
RANKS = ((0, _faint(COLOURS[0], 0.15)), (1, COLOURS[0]))
_ABOVE = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}


def with_gaps(values: np.ndarray) -> list[float | None]:
    """Returns numbers [n] as JSON has them: what is not finite is a gap."""
    return [x if np.isfinite(x) else None for x in values.tolist()]


# --- Figures of runs ------------------------------------------------------------------------------


def lines(
    heading: str, values: Mapping[str, np.ndarray], x: Mapping[str, np.ndarray], y_title: str
) -> Figure:
    """Returns curves over rounds, the mean of the seeds with a band of one sample deviation.

    Args:
      heading: Of the figure.
      values: For each curve [seeds, rounds].
      x: For each way to count, its title and [rounds].
      y_title: Of the vertical axis.
    """
    traces: list[dict[str, Any]] = []
    for k, (name, runs) in enumerate(values.items()):
        colour = COLOURS[k % len(COLOURS)]
        mean = runs.mean(axis=0)
        if len(runs) > 1:
            spread = runs.std(axis=0, ddof=1)
            edge: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
            edge |= {"showlegend": False, "legendgroup": name}
            traces.append(edge | {"y": mean + spread})
            fill = {"fill": "tonexty", "fillcolor": _faint(colour)}
            traces.append(edge | {"y": mean - spread} | fill)
        shown = {"mode": "lines+markers", "line": {"color": colour}, "legendgroup": name}
        traces.append(shown | {"y": mean, "name": name})
    first = next(iter(x))
    axes: dict[str, dict[str, Any]] = {name: {"title": {"text": name}} for name in x}
    for name, places in x.items():
        if len(places) <= 12 and (places == np.round(places)).all():
            axes[name]["dtick"] = 1  # no 1.5 rounds
    views = {
        f"by {name}": {"traces": [{"x": places} for _ in traces], "layout": {"xaxis": axes[name]}}
        for name, places in x.items()
    }
    for trace in traces:
        trace["x"] = x[first]
    layout = {
        "xaxis": axes[first],
        "yaxis": {"title": {"text": y_title}},
        "legend": _ABOVE,
    }
    banded = any(len(runs) > 1 for runs in values.values())
    note = "the mean, with a band of one standard deviation" if banded else ""
    return Figure(heading, traces, layout, views if len(views) > 1 else {}, note)


def scatter(
    heading: str,
    points: np.ndarray,
    colourings: Mapping[str, np.ndarray],
    hover: Sequence[str],
    note: str,
    names: Mapping[str, np.ndarray] | None = None,
    titles: Mapping[str, Callable[[int], str]] | None = None,
) -> Figure:
    """Returns points in the plane, coloured in several ways.

    Args:
      heading: Of the figure.
      points: [n, 2].
      colourings: For each way its title and a number for each point.
      hover: What is told of each point.
      note: Below the figure.
      names: Of some ways what the legend calls each point, a number; that of its colour if none.
      titles: Of some ways what such a number is called.
    """
    traces, groups = [], []
    for way, numbers in colourings.items():
        called, title = (names or {}).get(way, numbers), (titles or {}).get(way, str)
        for name in np.unique(called):
            mine = called == name
            number = numbers[mine][0]
            groups.append(way)
            traces.append(
                {
                    "type": "scattergl" if len(points) > 5000 else "scatter",
                    "mode": "markers",
                    "x": points[mine, 0],
                    "y": points[mine, 1],
                    "name": plain(title(int(name))),
                    "text": [plain(hover[i]) for i in np.flatnonzero(mine).tolist()],
                    "hoverinfo": "text",
                    "marker": {"size": 6} | mark(int(number)),
                    "visible": way == next(iter(colourings)),
                }
            )
    views = {
        way: {"traces": [{"visible": group == way} for group in groups], "layout": {}}
        for way in colourings
    }
    hidden = {"showticklabels": False, "zeroline": False}
    layout = {"xaxis": hidden, "yaxis": hidden, "height": 560, "legend": _ABOVE}
    return Figure(heading, traces, layout, views if len(views) > 1 else {}, note)


def mark(number: int) -> dict[str, str]:
    """Returns colour and symbol of a class; the colours come again with other symbols."""
    if number < 0:
        return {"color": NO_COLOUR, "symbol": _SYMBOLS[0]}
    turn, place = divmod(number, len(COLOURS))
    return {"color": COLOURS[place], "symbol": _SYMBOLS[turn % len(_SYMBOLS)]}


def plain(text: str) -> str:
    """Returns text that Plotly shows as it is; it reads tags and entities."""
    return html.escape(text, quote=False)


def confusion(heading: str, table: np.ndarray, called: Callable[[int], str] = str) -> Figure:
    """Returns counts of classes against clusters, [classes, clusters], as a map.

    Clusters stand in the order of the classes that they are matched to.

    Args:
      heading: Of the figure.
      table: The counts.
      called: What a class is called.
    """
    classes, matched = linear_sum_assignment(-table)
    order = matched[np.argsort(classes)].tolist()
    order += [k for k in range(table.shape[1]) if k not in order]
    table, rows = table[:, order], len(table)
    trace = {
        "type": "heatmap",
        "z": [row.tolist() for row in table],
        "x": [f"cluster {k}" for k in order],
        "y": [f"class {plain(called(c))}" for c in range(rows)],
        "text": [[str(v) for v in row] for row in table],
        "texttemplate": "%{text}",
        "colorscale": SHADES,
        "showscale": False,
    }
    # Lines would go through the middle of every number.
    y_axis = {"autorange": "reversed", "showgrid": False}
    layout = {"xaxis": {"showgrid": False}, "yaxis": y_axis, "height": 120 + 34 * rows}
    return Figure(heading, [trace], layout)


def bars(
    heading: str, values: Mapping[str, float], y_title: str, note: str = "", x_title: str = ""
) -> Figure:
    """Returns a bar for each name; `x_title` says what the names are of."""
    trace: dict[str, Any] = {"type": "bar", "x": [plain(str(name)) for name in values]}
    trace["y"] = np.asarray(list(values.values()), float)
    trace["marker"] = {"color": COLOURS[0]}
    x_axis = {"type": "category", "title": {"text": x_title}, "showgrid": False}
    layout = {"yaxis": {"title": {"text": y_title}}, "xaxis": x_axis}
    return Figure(heading, [trace], layout, note=note)
