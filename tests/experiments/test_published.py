"""What the documentation shows of our tables is what the rows give."""

import pandas as pd
import pytest

from experiments import published, reproduce
from tests.helpers import binaries


def test_every_table_is_that_of_its_rows():
    code, out, err = binaries.launch(reproduce.main, "--check")
    assert code == 0, out + err
    assert "12 tables, 15 files of rows: 0 errors" in out
    assert "table1_runs.csv: rows without command" in out and "no run of" in out


def test_what_vertcohirf_reaches_without_labels_is_said_as_measured():
    runs = published.unsupervised.read(published.VERTCOHIRF / "unsupervised.csv")
    table = published.unsupervised.summary(runs)
    mean, best = ((table["ari"] >= table[name]).sum() for name in ("local_mean", "local_best"))
    page = (published.ROOT / "docs/methods/vertcohirf.md").read_text()
    assert f"on {mean} of {len(table)} sets, at or above the best agent on {best}" in page


def test_a_page_that_shows_another_number_is_named():
    shown = published.SHOWN[1]._replace(lines=lambda: ["| no weights (ABC) | .999 +- .015 |"])
    (said,) = published.absent(shown)
    assert "docs/results.md, FMCSC, ablation" in said and ".999" in said
    shown = shown._replace(
        lines=lambda: ["| no weights (ABC) |*| .854 |", "| no weights (ABC) |*| .855 |"]
    )
    assert [".855" in line for line in published.absent(shown)] == [True]


@pytest.mark.parametrize(
    ("commands", "seeds", "said"),
    [
        (("--seed=0 --tau=1", "--tau=1 --seed=1 --seeds=1"), "01", None),
        (("--seed=0 --tau=1", "--seed=1 --tau=2"), "01", "unlike settings: --tau=1; --tau=2"),
        (("--tau=1", "--tau=1"), "00", "a seed occurs twice"),
    ],
)
def test_a_cell_has_one_setting_and_each_seed_once(commands, seeds, said, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    path = tmp_path / "runs.csv"
    pd.DataFrame({"set": "a", "seed": list(seeds), "command": commands}).to_csv(path, index=False)
    found = list(published.mixed(published.Rows(path, ("set",))))
    assert found == ([] if said is None else [f"runs.csv, a: {said}"])
