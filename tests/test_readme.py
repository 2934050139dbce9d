"""What the README shows must run."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.ci
def test_library_example_sweeps_and_scores(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    assert [labels.shape[:2] for labels in names["labels"]] == [(2, 3)] * 4
    assert "ari" in capsys.readouterr().out
    for seed in range(3):
        found = names["score"](names["federation"], [x[0, seed] for x in names["labels"]])
        assert found["all"]["pooled"]["ari"] > 0.5
        # Nobody is left out: padding alone has no cluster.
        for labels, cohort in zip(names["labels"], names["federation"].cohorts, strict=True):
            assert np.array_equal(np.asarray(labels[0, seed]) >= 0, np.asarray(cohort.mask))
