"""MGCD, federated end to end: `python -m experiments.mgcd [--mode=...] [--server=...]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from absl import flags

from experiments import base, mgcd_runs, vertical
from experiments.base import checked, seeds
from experiments.lib import plots
from experiments.mgcd_runs import METRICS, Program, Run
from experiments.progress import ProgressBar, require_tqdm
from experiments.vertical import Agents
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, mgcd, model
from jaxfedmvc.algorithms.mgcd.method import REPORTED
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(vertical)

flags.DEFINE_enum(
    "mode",
    "robust",
    get_args(model.Mode),
    "robust: closed-form clients; literal: the paper's equations, trained by gradients.",
)
flags.DEFINE_enum("server", None, get_args(model.Server), "None: what the mode's preset says.")
flags.DEFINE_list("losses", list(model.LOSSES), "Those of r, s, cl and dd that are on.")
flags.DEFINE_bool("dual", True, "Two encoders a client, or one.")
flags.DEFINE_bool("distillation", True, "Whether the server has f_pre.")
flags.DEFINE_enum("encoder", "linear", get_args(model.Encoder), "Of the robust mode.")
flags.DEFINE_enum("contrast", "printed", get_args(model.Contrast), "Form of eq. (4).")
flags.DEFINE_enum(
    "affinity",
    None,
    get_args(model.Affinity),
    "How spectral clustering reads the graphs; None: auto for robust, mean for literal.",
)
flags.DEFINE_integer("n_neighbours", 10, "Edges a sample keeps in the affinity.")
flags.DEFINE_enum(
    "transport", "factored", ["factored", "dense"], "Graphs as factors, or as N x N numbers."
)
flags.DEFINE_list("hidden", None, "Widths of deep encoders; None: 500,500,2000.")
for _name, _help in {
    "latent_dim": "Width of Z",
    "server_hidden": "Hidden width of f_pre and f_post",
    "pretrain_epochs": "Epochs of eq. (1), before the rounds",
    "local_epochs": "Epochs of eq. (3) in a round",
    "server_epochs": "Epochs of eq. (6) in a round",
    "batch_size": "Samples of a step",
    "rank": "Of factored consistency graphs",
}.items():
    flags.DEFINE_integer(_name, None, f"{_help}; None: the mode's preset.")
flags.DEFINE_integer("rounds", None, "Most rounds; None: the mode's preset.", lower_bound=1)
flags.DEFINE_float("gamma", 100.0, "Weight of self-representation, eq. (3).")
flags.DEFINE_float("lambda", None, "Weight of diversity, eq. (6); None: the mode's preset.")
flags.DEFINE_float("tau", 0.5, "Temperature of the contrast, eq. (4).")
flags.DEFINE_float("ridge", 1.0, "Penalty of the closed form, relative to the samples.")
for _name, _help in {
    "pretrain_rate": "eq. (1)",
    "local_rate": "eq. (3)",
    "server_rate": "eq. (6)",
}.items():
    flags.DEFINE_float(_name, None, f"Adam's step size for {_help}; None: the mode's preset.")
flags.DEFINE_float("memory_limit", 8.0, "GB that graphs and networks may take.")

_STATIC = (
    "server",
    "affinity",
    "latent_dim",
    "server_hidden",
    "pretrain_epochs",
    "local_epochs",
    "server_epochs",
    "batch_size",
    "rank",
)


# Flags of numbers that runs of one program may differ in.
TRACED = (
    "gamma",
    "lambda",
    "tau",
    "ridge",
    "pretrain_rate",
    "local_rate",
    "server_rate",
)


def traced() -> tuple[str, ...]:
    """Flags of numbers that runs of one program may differ in."""
    return TRACED


def no_axis() -> set[str]:
    """Flags that cannot be swept."""
    return {"memory_limit"}


def defaults() -> None:
    """What flags say that are not given."""
    FLAGS.dataset = FLAGS.dataset or vertical.default_set()


def rounds() -> int:
    """Most rounds of a run."""
    return FLAGS.rounds or mgcd_runs.PRESETS[FLAGS.mode].rounds


def maker(n_clusters: int | None, federation: Federation) -> Callable[[MGCDHyperparams], Any]:
    """`hyperparams -> algorithm`, all else from flags.

    Raises:
      ValueError: The number of clusters is not known, or a flag's value is not allowed.
    """
    if n_clusters is None:
        raise ValueError("n_clusters: the set has no labels to count; give --n_clusters")
    return partial(mgcd, config(n_clusters))


def config(n_clusters: int) -> MGCDConfig:
    """The static configuration: the mode's preset, and the flags that are given.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    settings = dict(mgcd_runs.PRESETS[FLAGS.mode].config)
    settings |= {name: FLAGS[name].value for name in _STATIC if FLAGS[name].value is not None}
    if FLAGS.hidden is not None:
        try:
            settings["hidden"] = tuple(int(width) for width in FLAGS.hidden)
        except ValueError as error:
            raise ValueError(
                f"hidden: got {','.join(FLAGS.hidden)!r}; allowed are whole numbers with commas"
            ) from error
    return MGCDConfig(
        n_clusters,
        mode=FLAGS.mode,
        losses=tuple(FLAGS.losses),
        dual=FLAGS.dual,
        distillation=FLAGS.distillation,
        encoder=FLAGS.encoder,
        contrast=FLAGS.contrast,
        n_neighbours=FLAGS.n_neighbours,
        dense=FLAGS.transport == "dense",
        memory_limit=FLAGS.memory_limit * 1e9,
        **settings,
    )


def hyperparams() -> MGCDHyperparams:
    """The numbers that may be swept: the mode's preset, and the flags that are given.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    values = dict(mgcd_runs.PRESETS[FLAGS.mode].hyperparams)
    values |= {"gamma": FLAGS.gamma, "tau": FLAGS.tau, "ridge": FLAGS.ridge}
    if FLAGS["lambda"].value is not None:
        values["lam"] = FLAGS["lambda"].value
    rates = ("pretrain_rate", "local_rate", "server_rate")
    values |= {name: FLAGS[name].value for name in rates if FLAGS[name].value is not None}
    for name, value in values.items():
        shown = "lambda" if name == "lam" else name
        least_is_zero = name in ("gamma", "lam")
        if not (0 <= value < np.inf if least_is_zero else 0 < value < np.inf):
            allowed = "0 or more" if least_is_zero else "above 0"
            raise ValueError(f"{shown}: got {value}; allowed is a finite number {allowed}")
    return MGCDHyperparams(**values)


def main() -> None:
    """Runs the job that the flags describe."""
    defaults()
    base.use_compilation_cache()
    # The seed is of the run: all agents' samples are the same for all seeds, but for split sets.
    everyone = checked(lambda: [vertical.agents_of_flags(seed) for seed in seeds()])
    k = vertical.n_classes(everyone[0])
    if k is None:
        base.fail(ValueError("n_clusters: the set has no labels to count; give --n_clusters"))
    settings, numbers = checked(lambda: config(k)), checked(hyperparams)
    hidden = everyone[0].federation.without_labels()
    checked(lambda: jax.eval_shape(lambda key: mgcd(settings).init(key, hidden), jax.random.key(0)))
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    stem = Path(FLAGS.dataset).stem.lower()
    folder = checked(lambda: base.make_folder(f"mgcd-{FLAGS.mode}-{stem}"))
    program = Program(settings)
    traffic = program.traffic(hidden)
    rows: dict[str, list[dict[str, float]]] = {}
    runs: list[Run] = []
    with ProgressBar((rounds() + 1) * len(everyone)) as bar:
        bar.write(everyone[0].federation.describe())
        bar.write(header())
        for seed, agents in zip(seeds(), everyone, strict=True):
            if runs:  # only the last one's graphs are drawn
                runs[-1] = runs[-1]._replace(state=None)
            runs.append(
                checked(
                    lambda seed=seed, agents=agents: one_seed(
                        program, agents, seed, rounds(), numbers, traffic, folder, bar
                    )
                )
            )
            last = runs[-1].rounds[-1]
            bar.advance(rounds() - len(runs[-1].rounds))
            final = {"mgcd": mgcd_runs.scores(agents.labels, runs[-1].labels)}
            final |= {
                f"mgcd, {name} graph, last round": {m: last[f"{name}/{m}"] for m in METRICS}
                for name in REPORTED
            }
            if agents.labels is not None:
                final |= mgcd_runs.references(agents.views, agents.labels, k, seed)
            for name, scores in final.items():
                rows.setdefault(name, []).append(scores)
            base.append_rows(
                folder / "labels.csv",
                [
                    {"seed": seed, "row": int(row), "cluster": int(label)}
                    for row, label in zip(agents.rows, runs[-1].labels, strict=True)
                ],
            )
            bar.advance(1)
    vertical.write_summary(
        folder,
        {
            "algorithm": "mgcd",
            "mode": FLAGS.mode,
            "dataset": stem,
            "n_agents": len(agents.views),
            "n_samples": len(agents.views[0]),
            "n_clusters": k,
            "seeds": seeds(),
            "rounds_made": [len(run.rounds) for run in runs],
            "metrics": vertical.statistics(rows["mgcd"]),
            "rows": {name: vertical.statistics(scores) for name, scores in rows.items()},
            "bytes": {stage: {"up": t.up, "down": t.down} for stage, t in traffic.items()},
            "seconds": [run.seconds for run in runs],
        },
    )
    print(f"\nmean over {len(seeds())} seed{'s' * (len(seeds()) > 1)}")
    for line in vertical.table(rows, METRICS, margin=38):
        print(line)
    of_round = f"{traffic['round'].up / 1e6:.2f} MB up, {traffic['round'].down / 1e6:.2f} MB down"
    print(f"\na round, all clients: {of_round}")
    title = f"MGCD ({FLAGS.mode}) on {stem}"
    mgcd_runs.draw(folder, runs[-1], agents.labels, f"{title}, seed {seeds()[-1]}")
    mgcd_runs.draw_rounds(folder / "curves.png", runs, rows, f"{title}, {len(runs)} seed(s)")
    seconds = sum(run.seconds for run in runs)
    print(f"{seconds:.1f} s with compilation; written: {folder}/")


def header() -> str:
    """The head of the rounds' table."""
    names = "".join(f"| {name:^13s}" for name in REPORTED)
    return (
        f"\n{'':10s}{'client':>9s}{'server':>9s}{'separa-':>8s} {names}|  MB, all clients\n"
        f"{'seed round':10s}{'loss':>9s}{'loss':>9s}{'tion':>8s} "
        + "|    ACC    NMI" * len(REPORTED)
        + "|      up    down"
    )


def one_seed(
    program: Program,
    agents: Agents,
    seed: int,
    rounds: int,
    numbers: MGCDHyperparams,
    traffic: dict[str, Any],
    folder: Path,
    bar: ProgressBar,
) -> Run:
    """Runs one seed, tells of each round, and appends it to rounds.csv."""
    moved = traffic["round"]

    def tell(row: dict[str, Any]) -> None:
        row |= {"bytes_up": moved.up, "bytes_down": moved.down}
        base.append_rows(folder / "rounds.csv", [row])
        cells = "".join(
            f"| {_number(row[f'{name}/acc'])} {_number(row[f'{name}/nmi'])}" for name in REPORTED
        )
        bar.write(
            f"{row['seed']:4d} {row['round']:5d}{row['client_loss']:9.3f}"
            f"{_number(row['server_loss'], 9)}{row['separation']:8.3f} {cells}|"
            f"{moved.up / 1e6:8.2f}{moved.down / 1e6:8.2f}"
        )
        bar.advance(1)

    return program.run(agents.federation, agents.labels, seed, rounds, numbers, tell)


def _number(value: float | None, width: int = 6) -> str:
    return f"{'-' if value is None else format(value, '.3f'):>{width}s}"


if __name__ == "__main__":
    base.launch(main)
