"""Tables and figures of MGCD's paper, for `python -m experiments.reproduce --paper=mgcd`.

--table=2 compares methods, 3 and 4 leave out losses and parts; --figure=3 draws maps, 4 each
graph's scores by round, 5 convergence and weights. Every run is appended to runs.csv as it ends,
and --resume goes on with what that holds; so does another job that is given it as --trials_file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from experiments.lib import folder, peers, peers_grid, runner
from experiments.lib.command import JobSettings, checked
from experiments.lib.data import DataSettings, fingerprint
from experiments.lib.progress import Progress
from experiments.lib.study import check_table, parse_or_exit, write_summary
from experiments.lib.text import counted
from experiments.mgcd import tables
from experiments.mgcd.runs import ABSENT, COLUMNS, PEERS, SETS, cells, run_cells
from jaxfedmvc import data
from jaxfedmvc.files import write_text

# Over which rows of centralised methods are dealt out; they see all of them.
_CLIENTS = 12


@dataclasses.dataclass(frozen=True)
class ReproduceSettings:
    """What of the paper is made.

    Attributes:
      paper: Whose tables.
      table: Table: 2, 3 or 4.
      figure: Figure: 3 (maps), 4 (graphs by round) or 5 (convergence, weights).
      methods: Rows that are run, with ; for commas; none: all; empty: of table 2 the comparison
        methods only.
      sets: Sets of table 2; empty: all.
      peers: Of table 2: the paper's comparison methods, as --algorithm names them; none: all.
      trials_file: Runs to begin with; new ones are appended to it.
      peers_file: The same for runs of the comparison methods.
      peers_training: Share of their default epochs that deep comparison methods train for.
      peers_grid: Also run some comparison methods over the grids that their authors search; the
        best by labels gets a column of its own.
    """

    paper: Literal["mgcd"] = "mgcd"
    table: tuple[int, ...] = ()
    figure: int | None = None
    methods: tuple[str, ...] | None = None
    sets: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    trials_file: str | None = None
    peers_file: str | None = None
    peers_training: float = 1.0
    peers_grid: bool = False

    def check(self) -> None:
        """Checks what is asked for.

        Raises:
          ValueError: Not one table or figure that there is; a trials file of something else.
          OSError: That file cannot be written.
        """
        one_table = self.figure is None and self.table in ((2,), (3,), (4,))
        if not one_table and (self.table or self.figure not in (3, 4, 5)):
            got = ",".join(map(str, self.table))
            raise ValueError(
                f"table: got {got!r} and figure {self.figure}; allowed for mgcd is one of the"
                " tables 2, 3 and 4, or one of the figures 3, 4 and 5"
            )
        if not set(self.peers or ()) <= set(PEERS) or (self.peers and self.table != (2,)):
            got = ",".join(self.peers or ())
            raise ValueError(f"peers: got {got!r}; allowed for table 2 are {', '.join(PEERS)}")
        if self.methods == () and (self.table != (2,) or self.peers == ()):
            raise ValueError(
                "methods: got none; allowed is that for table 2 beside comparison methods (peers)"
            )
        peers.check_share(self.peers_training)
        check_table("trials_file", self.trials_file, COLUMNS)
        check_table("peers_file", self.peers_file, peers.COLUMNS)


_FLAGS = {ReproduceSettings: None, JobSettings: ("seed", "seeds"), DataSettings: ("data_dir",)}


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the table or the figure that the command line asks for."""
    study = parse_or_exit(arguments, __doc__, _FLAGS, {"seeds": "5"})
    asked: ReproduceSettings = checked(partial(study.read, ReproduceSettings))
    seeds = checked(partial(study.read, JobSettings)).all_seeds
    data_dir = study.read(DataSettings).data_dir
    checked(asked.check)
    table, figure = next(iter(asked.table), None), asked.figure
    wanted = checked(partial(cells, table, figure, asked.sets, asked.methods, data_dir))
    for first in (command for rows in wanted.values() for command in list(rows.values())[:1]):
        checked(partial(runner.prepare, first))
    label = f"figure{figure}" if figure else f"table{table}"
    read = {name: fingerprint(data.load(SETS[name], data_dir)) for name in wanted}
    path = checked(partial(study.open, f"reproduce-mgcd-{label}", read))
    summary: dict[str, Any] = {"paper": "mgcd", "what": label, "seeds": seeds}
    with Progress(study.folder.progress) as progress:
        if figure == 3:
            rows, seeds = wanted[tables.ABLATION_SET], seeds[:1]
            found = checked(
                partial(tables.figure_3, path / "figure3.png", rows, seeds[0], progress)
            )
            summary |= {"seeds": seeds, "acc": found}
        elif asked.methods != ():
            file = Path(asked.trials_file or path / "runs.csv")
            runs = checked(partial(run_cells, wanted, seeds, file, progress, study.mesh))
            summary["rows"] = report(table, figure, runs, len(seeds), path)
        if table == 2 and asked.peers != ():
            show_peers(asked, seeds, data_dir, path, progress)
    write_summary(path, summary)
    print(f"\nwritten: {path}/")


def show_peers(
    asked: ReproduceSettings, seeds: list[int], data_dir: str | None, path: Path, progress: Progress
) -> None:
    """Runs the comparison methods on complete data; prints their table, and writes and draws it."""
    where = () if data_dir is None else (f"--data_dir={data_dir}",)
    cells = [
        peers.cell(
            SETS[dataset],
            "1:0",
            method,
            _CLIENTS,
            where,
            peers.shortened(method, asked.peers_training),
        )
        for dataset in asked.sets or SETS
        for method in asked.peers or PEERS
    ]
    file = Path(asked.peers_file or path / "peers.csv")
    runs = checked(partial(peers.run_peers, cells, seeds, file, progress))
    titles = {name: title for title, name in SETS.items()}
    table = peers.compare(runs, tables.published_peers())
    if asked.peers_grid:
        make = partial(peers_grid.with_grids, table, cells, seeds, file, progress)
        table = checked(make)
    print(f"\n{peers.shown(table, titles).to_string(index=False)}")
    table.to_csv(path / "peers_table.csv", index=False)
    write_text(path / "peers.md", peers.markdown(table, titles, None if asked.sets else ABSENT))
    title = peers.title_of("MGCD's table 2", len(seeds), asked.peers_training)
    peers.draw(path / "peers.png", table, titles, title)


def report(
    table: int | None, figure: int | None, runs: pd.DataFrame, n_seeds: int, path: Path
) -> list[dict[str, Any]]:
    """Prints, writes and draws a table or a figure; returns its rows."""
    found = tables.summarise(runs, tables.published(table) if table else None)
    print(f"\n{tables.text(found)}")
    found.to_csv(path / "table.csv", index=False)
    if table:
        title = f"MGCD, table {table}, {counted(n_seeds, 'seed')}, beside the paper's numbers"
        tables.draw_table(path / f"table{table}.png", found, title)
    elif figure == 4:
        tables.draw_figure_4(path / "figure4.png", runs)
    else:
        tables.draw_figure_5(path, runs)
    return found.astype(object).where(found.notna(), None).to_dict("records")


if __name__ == "__main__":
    main()
