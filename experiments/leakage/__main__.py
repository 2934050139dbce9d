"""What an honest-but-curious server learns from the messages of a run: `python -m
experiments.leakage`.

The set is dealt in two halves, participants and public samples of the same population. The messages
are those of a real run on the participants, in each form that they may travel in, as the server
decodes them; beside what they tell stands what the federation reaches with them.

    subspace: R^2 of the client's latent vectors on the message's leading singular vectors
    insiders: R^2 of features, learned from a share of participants whose features are known
    shadow: the same without any participant, from the client's public code on the public samples
    clusters: NMI and ACC of clustering ONE upload. That a server learns who belongs together is
        the protocol's purpose; labels score it and nothing else

"latents" are the vectors Z themselves, as methods upload them that fuse representations; a server's
k-means on Z of all views is then the federation. "fmcsc" sends models: nothing travels for a
sample, so nothing of the above can be asked. Asked is how much of samples the server's PROTOTYPES
tell, decoded from the cluster centres it passes on, with an oracle's assignment (beside it the
k-means centres of public samples, which tell as much without any message), and how well the
reconstruction error of a client's uploaded autoencoder tells its own samples from public ones:
MEMBERSHIP, an AUC of which 0.5 is chance. It is a small run, on the first three views.

Attacks are lower bounds: an R^2 near zero says that this attacker failed, not that none can do it.
The shadow attacker aligns messages by the order of singular values and by signs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from absl import flags

from experiments import base, charts, vertical
from experiments.base import checked, seeds
from experiments.leakage_runs import SCORES, Graphs, Models, Options, World, forms, load_world
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from jaxfedmvc import data

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)

METHODS = ("mgcd", "latents", "fmcsc")
flags.DEFINE_list("algorithm", list(METHODS), "Whose messages are read.")
flags.DEFINE_list("leak_forms", None, "Forms of MGCD's message, by name; None: all of them.")
flags.DEFINE_float("leak_insiders", 0.1, "Share of participants whose features are known.")
flags.DEFINE_integer(
    "leak_rounds", 1, "Most rounds; MGCD's first messages are read, FMCSC's last.", 1
)
flags.DEFINE_integer("leak_neighbours", 10, "k of the graphs of neighbours.", lower_bound=1)
flags.DEFINE_integer("leak_fit_epochs", 60, "Epochs between snapshots of the inverter.", 1)
flags.DEFINE_integer("leak_pretrain_epochs", 100, "FMCSC's epochs of pre-training.", 0)


def chosen(name: str, allowed: Sequence[str]) -> list[str]:
    """The values of a list flag, all that are allowed where it is None.

    Raises:
      ValueError: There are none, or one that is not allowed.
    """
    got = list(allowed) if FLAGS[name].value is None else FLAGS[name].value
    if not got or not set(got) <= set(allowed):
        raise ValueError(f"{name}: got {','.join(got)!r}; allowed are {', '.join(allowed)}")
    return list(dict.fromkeys(got))


def check_sizes(graphs: Graphs, world: World, options: Options) -> None:
    """Raises ValueError for more clusters or neighbours than the participants allow."""
    n = len(world.labels)
    if options.neighbours >= n:
        raise ValueError(
            f"leak_neighbours: got {options.neighbours}; allowed is below {n}, the participants"
        )
    jax.eval_shape(lambda key: graphs.plain.init(key, world.participants), jax.random.key(0))


def main() -> None:
    """Runs the study that the flags describe."""
    base.use_compilation_cache()
    if FLAGS["seeds"].using_default_value:
        FLAGS.seeds = 3
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    attacked = checked(lambda: chosen("algorithm", METHODS))
    names = checked(lambda: chosen("leak_forms", tuple(forms(FLAGS.leak_neighbours))))
    FLAGS.dataset = FLAGS.dataset or vertical.default_set()
    dataset = checked(lambda: data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.scale))
    options = Options(
        FLAGS.leak_insiders,
        FLAGS.leak_rounds,
        FLAGS.leak_neighbours,
        FLAGS.leak_fit_epochs,
        FLAGS.leak_pretrain_epochs,
    )
    worlds = {
        seed: checked(lambda seed=seed: load_world(dataset, seed, FLAGS.n_clusters, options))
        for seed in seeds()
    }
    k = worlds[seeds()[0]].k
    graphs, models = checked(lambda: (Graphs(k, names, options), Models(k, options)))
    checked(lambda: check_sizes(graphs, worlds[seeds()[0]], options))
    jobs: dict[str, Callable[[World, int], dict[str, float]]] = {}
    if "mgcd" in attacked:
        # The control is made once, on the first form.
        jobs |= {n: partial(graphs.scores, n, permuted=n == names[0]) for n in names}
    if "latents" in attacked:
        jobs["latents"] = graphs.of_latents
    if "fmcsc" in attacked:
        jobs["fmcsc"] = models.scores

    folder = checked(lambda: base.make_folder(f"leakage-{dataset.name}"))
    results: dict[str, list[dict[str, float]]] = {}
    with ProgressBar(len(jobs) * len(worlds)) as bar:
        for name, job in jobs.items():
            results[name] = []
            for seed, world in worlds.items():
                scores = dict.fromkeys(SCORES, np.nan) | job(world, seed)
                results[name].append(scores)
                base.append_rows(folder / "runs.csv", [{"form": name, "seed": seed} | scores])
                bar.advance(1)
    draw(folder, results, dataset.name)
    summary = {
        "dataset": dataset.name,
        "participants": len(worlds[seeds()[0]].labels),
        "seeds": seeds(),
        "forms": {name: vertical.statistics(rows) for name, rows in results.items()},
    }
    vertical.write_summary(folder, summary)
    print("\n".join(table(results)))
    print(f"\nwritten: {folder}/ (runs.csv, summary.json, flags.txt, leakage.png)")


# --- What is shown --------------------------------------------------------------------------------

_COLUMNS = {
    "kB": "bytes",
    "subspace": "subspace",
    "insiders": "insiders",
    "shadow": "shadow",
    "1 upload NMI": "upload_nmi",
    "1 upload ACC": "upload_acc",
    "NMI": "nmi",
    "ACC": "acc",
}
_BARS = {
    "latent subspace, R^2": "subspace",
    "features by insiders, R^2": "insiders",
    "features by shadow, R^2": "shadow",
    "clusters of one upload, NMI": "upload_nmi",
    "federation, NMI": "nmi",
}
Rows = Sequence[Mapping[str, float]]


def table(results: Mapping[str, Rows]) -> list[str]:
    """Lines for the terminal: mean and deviation over seeds of what is a mean over views."""
    lines = [f"{'':12s}" + "".join(f"{title:>15s}" for title in _COLUMNS)]
    for name, rows in results.items():
        cells = "".join(f"{_cell(rows, score):>15s}" for score in _COLUMNS.values())
        lines.append(f"{name:12s}{cells}")
    lines += ["", "subspace, insiders, shadow: R^2; kB: of one message; NMI, ACC: the federation's"]
    for name, rows in results.items():
        if not np.isnan(rows[0]["permuted"]):
            lines.append(
                f"{name}: insiders with rows in disorder {_cell(rows, 'permuted')}; subspace of as"
                f" many random vectors {_cell(rows, 'chance')}"
            )
        if not np.isnan(rows[0]["membership"]):
            lines.append(
                f"{name}: '-' since nothing travels for a sample; R^2 of decoded prototypes"
                f" {_cell(rows, 'prototypes')}, of public k-means centres"
                f" {_cell(rows, 'public_prototypes')}; membership AUC {_cell(rows, 'membership')}"
            )
    return lines


def _cell(rows: Rows, score: str) -> str:
    values = [row[score] for row in rows]
    if np.isnan(values).any():
        return "-"
    if score == "bytes":
        return f"{np.mean(values) / 1e3:.0f}"
    spread = f" +- {np.std(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def draw(folder: Path, results: Mapping[str, Rows], dataset: str) -> None:
    """leakage.png; a mean below zero is drawn as zero, without a deviation."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for name, rows in results.items():
        values = {title: [row[score] for row in rows] for title, score in _BARS.items()}
        groups[name] = {
            title: (float(np.mean(v)), float(np.std(v))) if np.mean(v) > 0 else (0.0, 0.0)
            for title, v in values.items()
            if not np.isnan(v).any()
        }
    charts.bars(
        folder / "leakage.png",
        {"": groups},
        "R^2 or NMI",
        f"What a server learns from a message, {dataset}, {FLAGS.seeds} seeds",
    )


if __name__ == "__main__":
    base.launch(main)
