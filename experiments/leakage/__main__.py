"""What an honest-but-curious server learns from the messages of a run: `python -m
experiments.leakage`.

The set is dealt in two halves, participants and public samples of the same population. The messages
are those of a real run on the participants, in each form that they may travel in, as the server
decodes them; beside what they tell stands what the federation reaches with them.

    subspace: R^2 of the client's latent vectors on the message's leading singular vectors
    insiders: R^2 of features, learned from a share of participants whose features are known
    spread: the same of a graph, without training: known features spread over its edges, or over
        those between samples whose rows in it are alike
    shadow: the same without any participant, from the client's public code on the public samples
    clusters: NMI and ACC of clustering ONE upload. That a server learns who belongs together is
        the protocol's purpose; labels score it and nothing else

"latents" are the vectors Z themselves, as methods upload them that fuse representations; a server's
k-means on Z of all views is then the federation. "feddmvc", "fcuif" and "fedmvl" are real uploads
of that kind; "vertcohirf" is labels and rankings, and "label_consensus" labels, which peers see.
Centralised methods need no attack: rows travel, R^2 is 1 by construction.

"fmcsc" sends models: nothing travels for a sample, so nothing of the above can be asked. Asked is
how much of samples the server's PROTOTYPES tell, decoded from the cluster centres it passes on,
with an oracle's assignment (beside it the k-means centres of public samples, which tell as much
without any message), and how well the reconstruction error of a client's uploaded autoencoder tells
its own samples from public ones: MEMBERSHIP, an AUC of which 0.5 is chance, and CALIBRATED, the
same of the error divided by that of a model trained alike on public samples. It is a small run, on
the first three views.

"e_fkmvc" sends sums over a client's rows. Prototypes are here the means that a client's summaries
give, its sums of all rounds and what these differ by from round to round, and EXPOSED is the share
of rows that one of them has up to 1 % of the variance; a run on public samples, which takes no
message, has some so, too. It is run once more with `min_cluster_size`, by which sums over few rows
are not sent; "summed" is what summaries alone tell, as where the sums are aggregated securely.

Attacks are lower bounds: an R^2 near zero says that this attacker failed, not that none can do it.
The shadow attacker aligns messages by the order of singular values and by signs alone.

The last table says of every registered method what travels and what that tells, in a sentence:
measured here where a row above is named after it, else what the messages are by construction.

A study that was killed goes on with --resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from experiments.leakage.encodings import EncodingAttacks
from experiments.leakage.labels import LabelAttacks, ListAttacks
from experiments.leakage.models import ModelAttacks
from experiments.leakage.samples import SampleAttacks
from experiments.leakage.scenario import LeakageSettings, Scenario, check_names, deal
from experiments.leakage.sums import SumAttacks
from experiments.leakage.uploads import forms_of_graphs
from experiments.lib import charts, folder
from experiments.lib.command import JobSettings, checked
from experiments.lib.data import DataSettings, fingerprint
from experiments.lib.progress import Progress
from experiments.lib.study import Rows, parse_or_exit, write_summary
from experiments.lib.text import counted, table_lines, width_of_terminal, wrapped
from experiments.mgcd.hooks import HOOKS
from jaxfedmvc import checks, data
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.reveals import KINDS, reveals
from jaxfedmvc.algorithms.vertcohirf import choice
from jaxfedmvc.files import write_text

# Columns of the first table; the others are controls, and what is asked of models.
_MAIN = (
    "bytes",
    "subspace",
    "insiders",
    "spread",
    "shadow",
    "upload_nmi",
    "upload_acc",
    "nmi",
    "acc",
)
SCORES = (
    *_MAIN,
    "chance",
    "permuted",
    "prototypes",
    "public_prototypes",
    "membership",
    "calibrated",
    "exposed",
    "public_exposed",
)
# Rows behind a sum at least, where E-FKMVC is run with its guard.
_LEAST = 5
_FLAGS = {LeakageSettings: None, DataSettings: None, JobSettings: ("seed", "seeds")}
# `(data, seed) -> scores`.
Attack = Callable[[Scenario, int], dict[str, float]]


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study that the command line describes; that of this process if it is None."""
    study = parse_or_exit(arguments, __doc__, _FLAGS, {"seeds": "3"})
    settings, source, job = checked(lambda: [study.read(group) for group in _FLAGS])
    name = source.dataset or HOOKS.defaults(source)["dataset"]
    dataset = checked(lambda: data.load(name, source.data_dir, source.scale))
    scenarios = checked(
        lambda: {s: deal(dataset, s, source.n_clusters, settings) for s in job.all_seeds}
    )
    attacks = checked(partial(attacks_of, settings, scenarios[job.seed]))
    read = {name: fingerprint(dataset)}
    path = checked(lambda: study.open(f"leakage-{dataset.name}", read))
    rows = checked(lambda: Rows(path / "runs.csv", ("data", "form")))
    made_by = folder.made_by(["experiments.leakage", *study.given(*_FLAGS)])
    with Progress(study.folder.progress) as progress:
        names = {form: {"data": dataset.name, "form": form} for form in attacks}
        seeds = list(scenarios)
        progress.expect({form: len(rows.left(of, seeds)) for form, of in names.items()})
        for form, attack in attacks.items():
            one = partial(_row, attack, scenarios, made_by)
            rows.make(names[form], one, seeds, study.mesh, partial(progress.done, form))
    runs = pd.read_csv(path / "runs.csv")
    draw(path / "leakage.png", runs, f"{dataset.name}, {counted(job.seeds, 'seed')}")
    summary = {
        "dataset": dataset.name,
        "participants": len(scenarios[job.seed].labels),
        "seeds": job.all_seeds,
        "forms": {form: _statistics(rows) for form, rows in runs.groupby("form", sort=False)},
    }
    told = every_method(settings.algorithm)
    write_text(path / "methods.csv", told.to_csv(index=False))
    write_summary(path, summary)
    width = width_of_terminal()
    print("\n".join(report(runs, width)), end="\n\n")
    for row in told.itertuples(index=False):
        text = f"{row.method} ({row.sends}; {row.known}): {row.reveals}"
        print("\n".join(wrapped(text, width)))
    print(f"\nwritten: {path}/ (runs.csv, methods.csv, summary.json, flags.txt, leakage.png)")


def _row(
    attack: Attack, scenarios: Mapping[int, Scenario], made_by: Mapping[str, str], seed: int
) -> dict[str, Any]:
    """Returns the scores of a seed, NaN where nothing is to be asked, what they took, and how."""
    began = time.perf_counter()
    found = dict.fromkeys(SCORES, np.nan) | attack(scenarios[seed], seed)
    return found | {"seconds": round(time.perf_counter() - began, 1), **made_by}


def attacks_of(settings: LeakageSettings, scenario: Scenario) -> dict[str, Attack]:
    """Returns the attacks that are asked for, by the form of the messages that they read.

    Raises:
      ValueError: A setting is out of range for this data.
    """
    every_form = tuple(forms_of_graphs(settings.leak_neighbours))
    forms = every_form if settings.leak_forms is None else settings.leak_forms
    check_names("leak_forms", forms, every_form)
    on_samples = SampleAttacks(scenario.n_clusters, forms, settings)
    # Shapes only: whatever the algorithm itself refuses is found here.
    init = on_samples.clients_alone.init
    jax.eval_shape(lambda key: init(key, scenario.participants), jax.random.key(0))
    found: dict[str, Attack] = {}
    if "mgcd" in settings.algorithm:
        for form in dict.fromkeys(forms):
            # The control is made once, on the first form.
            found[form] = partial(on_samples.of_graphs, form, permuted=form == forms[0])
    if "latents" in settings.algorithm:
        found["latents"] = on_samples.of_latents
    if "fmcsc" in settings.algorithm:
        found["fmcsc"] = ModelAttacks(scenario.n_clusters, settings).scores
    for name in ("feddmvc", "fcuif", "fedmvl"):
        if name in settings.algorithm:
            found[name] = EncodingAttacks(name, scenario.n_clusters, settings).scores
    if "e_fkmvc" in settings.algorithm:
        _check_clients(settings, len(scenario.labels))
        name = f"e_fkmvc, {settings.leak_clients} clients"
        for guarded, least in ((name, None), (f"{name}, {_LEAST} rows", _LEAST)):
            sums = SumAttacks(scenario.n_clusters, settings, least)
            found[guarded] = partial(sums.scores, summed=False)
            found[f"{guarded}, summed"] = partial(sums.scores, summed=True)
    if "label_consensus" in settings.algorithm:
        found["label_consensus"] = ListAttacks(settings).scores
    if "vertcohirf" in settings.algorithm:
        strict, relaxed = choice.RELAXED_AGENTS
        for name, *consensus in (
            ("vertcohirf", strict, 0),
            ("vertcohirf, relaxed", relaxed, 0),
            ("vertcohirf, refined", relaxed, choice.REFINEMENTS),
        ):
            found[name] = LabelAttacks(scenario.n_clusters, settings, *consensus).scores
    return found


def _check_clients(settings: LeakageSettings, n: int) -> None:
    """Raises ValueError where a client of E-FKMVC would have too few rows."""
    if settings.leak_clients * _LEAST > n:
        allowed = f"{n // _LEAST} or fewer, so that each has {_LEAST} of {n} participants"
        raise checks.wrong("leak_clients", settings.leak_clients, allowed)


# --- What is shown --------------------------------------------------------------------------------

_BARS = {
    "latent subspace, R^2": "subspace",
    "features by insiders, R^2": "insiders",
    "the same by spreading, R^2": "spread",
    "features by shadow, R^2": "shadow",
    "clusters of one upload, NMI": "upload_nmi",
    "federation, NMI": "nmi",
}

# Of the second table.
_NOTES = (
    "chance: subspace of as many random vectors; permuted: insiders with rows in disorder",
    "prototypes: R^2 of decoded centroids or of means that are sent; public_prototypes: of k-means"
    " centres of public samples, or of a public run",
    "membership, calibrated: AUC",
    "exposed: share of rows near a mean that is sent; public_exposed: near one of a public run",
)


def report(runs: pd.DataFrame, width: int | None = None) -> Iterator[str]:
    """Yields lines for a terminal of this width: means and deviations over seeds, of view means."""
    cells = {
        form: {score: _cell(rows[score]) for score in SCORES}
        for form, rows in runs.groupby("form", sort=False)
    }
    table = pd.DataFrame(cells).T
    yield from table_lines(table[list(_MAIN)], width)
    yield "subspace to shadow: R^2; bytes: of one message; nmi, acc: the federation's\n"
    others = table.drop(columns=list(_MAIN))
    yield from table_lines(others[(others != "-").any(axis=1)], width)
    for text in _NOTES:
        yield from wrapped(text, width)


def every_method(measured: Container[str]) -> pd.DataFrame:
    """Returns what each registered method sends and what that reveals, what tells least first.

    Args:
      measured: Methods whose messages the study has attacked.
    """
    told = {name: reveals(name, method) for name, method in METHODS.items()}
    order = sorted(told, key=lambda name: (list(KINDS).index(told[name].kind), name))
    return pd.DataFrame(
        {
            "method": order,
            "sends": [KINDS[told[name].kind] for name in order],
            "known": ["measured" if name in measured else "by construction" for name in order],
            "reveals": [told[name].text for name in order],
        }
    )


def _cell(values: pd.Series) -> str:
    if values.isna().any():
        return "-"
    if values.name == "bytes":
        return f"{values.mean():.0f}"
    spread = f" +- {_deviation(values):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}"


def _deviation(values: pd.Series) -> float:
    """Computes the sample deviation over seeds; of a single seed 0."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _statistics(rows: pd.DataFrame) -> dict[str, Any]:
    """Returns mean, sample deviation over seeds and every seed's value of each score."""
    return {
        name: {"mean": values.mean(), "std": _deviation(values), "per_seed": list(values)}
        for name, values in rows[list(SCORES)].dropna(axis="columns").items()
    }


def draw(path: Path, runs: pd.DataFrame, title: str) -> None:
    """Draws bars of each form, down to -1; what was not asked of it is marked."""
    groups = {
        str(form): {
            bar: (max(rows[score].mean(), -1.0), _deviation(rows[score]))
            if rows[score].notna().all()
            else (np.nan, 0.0)
            for bar, score in _BARS.items()
        }
        for form, rows in runs.groupby("form", sort=False)
    }
    charts.bars(
        path,
        {"": groups},
        "R^2 (-1 or more) or NMI",
        f"What a server learns from a message, {title}",
    )


if __name__ == "__main__":
    main()
