"""The authors' seconds, as a user writes them down."""

import re

import pytest

from benchmarks import accelerator
from benchmarks.references.authors import Authors, read_authors

TOLD = Authors("mnist_usps", 60.0, "A100", "training alone")


def test_a_file_is_read(tmp_path):
    file = tmp_path / "authors.toml"
    file.write_text('dataset = "mnist_usps"\nseconds = 60\ndevice = "A100"\n')
    assert read_authors(file) == TOLD._replace(note="")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('dataset = "bdgp"', "needed are dataset, device, seconds, allowed"),
        (
            'dataset = "bdgp"\nseconds = 1\ndevice = "A100"\nrounds = 5',
            "has dataset, device, rounds",
        ),
        (
            'dataset = "bdgp"\nseconds = 1\ndevice = "A100"',
            "dataset is 'bdgp'; allowed is 'mnist_usps'",
        ),
        (
            'dataset = "mnist_usps"\nseconds = 0\ndevice = "A100"',
            "seconds is 0; allowed is a number above 0",
        ),
        ("seconds: 3", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_says_how(tmp_path, text, said):
    file = tmp_path / "authors.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match="authors: .*" + re.escape(said)):
        read_authors(file)


def test_the_ratio_stands_beside_both_times_and_says_which_devices():
    said = TOLD.beside(4.0, "A100")
    assert "60.0 s on A100 (training alone); ours 4.0 s on A100: 15.0 x" in said
    assert "differ" not in said and "the devices differ" in TOLD.beside(4.0, "H200")


def test_only_a_run_at_full_size_is_set_beside_it():
    row = {"piece": "fmcsc", "part": "run", "size": "small", "status": "ok", "seconds": 5.0}
    row["device"] = "H200"
    assert "no run of ours" in accelerator.beside(TOLD, [row])
    assert "12.0 x" in accelerator.beside(TOLD, [row, row | {"size": "full"}])
