"""What the README shows must run."""

import re
from pathlib import Path

import numpy as np
from sklearn.metrics import adjusted_rand_score

README = Path(__file__).parents[1] / "README.md"


def run_example(place):
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[place]
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    return names


def test_vertical_example_finds_the_six_clusters():
    names = run_example(1)
    truth = names["data"].load("multimodal").labels
    assert adjusted_rand_score(truth, names["result"].labels[0][0]) == 1.0


def test_graph_example_clusters_quantised_factors():
    names = run_example(2)
    assert adjusted_rand_score(names["digits"].labels, names["labels"]) > 0.6


def test_library_example_runs_and_sweeps(capsys):
    names = run_example(0)
    accuracies = names["jax"].numpy.asarray(
        [float(x) for x in re.findall(r"0\.\d+", capsys.readouterr().out)]
    )
    assert accuracies.shape == (2 * 2 * 3,)
    # Far above chance after three short rounds, whatever the temperature and the seed.
    assert accuracies.min() > 0.25


def test_messages_example_clusters_under_masks_and_noise(capsys):
    names = run_example(3)
    (labels,), (truth,) = names["labels"], names["clients"].labels
    real = np.asarray(truth) >= 0
    assert adjusted_rand_score(np.asarray(truth)[real], np.asarray(labels)[real]) > 0.5
    assert "(64, 6, 12, 3)" in capsys.readouterr().out
