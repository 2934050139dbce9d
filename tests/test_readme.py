"""What the README shows must run."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_library_example_runs_and_sweeps(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    accuracies = names["jax"].numpy.asarray(
        [float(x) for x in re.findall(r"0\.\d+", capsys.readouterr().out)]
    )
    assert accuracies.shape == (2 * 2 * 3,)
    # Far above chance after three short rounds, whatever the temperature and the seed.
    assert accuracies.min() > 0.25
