"""The study of Byzantine agents, from its flags to its files."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments.vertcohirf import attack
from tests.helpers import binaries

COMMON = ("--compilation_cache=", "--noprogress")


@pytest.mark.slow
def test_every_trial_and_the_picture_are_left(tmp_path):
    """Five trials in batches of three: the last one begins earlier."""
    folder = tmp_path / "attack"
    code, out, err = binaries.launch(
        attack.main,
        *COMMON,
        f"--output_dir={folder}",
        "--samples=40",
        "--trials=5",
        "--batch=3",
        "--sigmas=0.05,1",
        "--attack_max_iter=3",
        "--attacks=random_labels,inverse_ranking",
    )
    assert code == 0, err
    trials = pd.read_csv(folder / "trials.csv")
    wide = trials.pivot(index="seed", columns=["variant", "sigma"], values="ari")
    assert wide.shape == (5, 6) and wide.notna().all(axis=None)
    assert (trials["seconds"] > 0).all() and trials["commit"].notna().all()
    (command,) = set(trials["command"])
    assert command == (
        "--attack_max_iter=3 --attacks=random_labels,inverse_ranking --batch=3 --samples=40"
        " --sigmas=0.05,1.0 --trials=5"
    )
    found = json.loads((folder / "summary.json").read_text())["ari"]["0.05"]
    honest, attacked = wide["no attack", 0.05], wide["inverse_ranking", 0.05]
    np.testing.assert_allclose(found["no attack"]["mean"], honest.mean())
    difference = found["inverse_ranking"]["difference"]
    np.testing.assert_allclose(difference, (attacked - honest).mean(), atol=1e-12)
    assert (folder / "attack.png").exists()
    head, _, first, _ = out.split("paired by seed\n")[1].splitlines()[:4]
    assert head.split() == ["random_labels", "inverse_ranking"]
    assert first.split()[4] == f"{difference:+.4f}"


def test_intervals_are_students_and_differences_paired():
    scores = {attack.HONEST: np.array([[1.0], [3.0]]), "x": np.array([[0.0], [2.0]])}
    found = attack.summarise([0.1], scores)
    # 12.7 is the quantile with one degree of freedom.
    columns = ["mean", "half_width_95", "difference", "difference_half_width_95"]
    assert list(found) == columns and np.isnan(found.loc[0.1, attack.HONEST]["difference"])
    np.testing.assert_allclose(found.loc[0.1, "x"], [1, 12.7062047, -1, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--sigmas=a", "--sigmas=a: allowed is numbers"),
        ("--sigmas=0", "sigmas: got (0.0,)"),
        ("--attacks=nope", "attack: got 'nope'"),
        ("--attacker=3", "attacker: got 3"),
        ("--trials=1", "trials: got 1"),
    ],
)
def test_bad_flags_end_in_one_line_and_leave_nothing(flag, line, tmp_path):
    code, _, err = binaries.launch(attack.main, f"--output_dir={tmp_path / 'a'}", flag)
    assert code == 2 and line in err and err.count("\n") == 1
    assert not (tmp_path / "a").exists()
