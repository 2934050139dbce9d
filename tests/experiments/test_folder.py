"""What result folders and rows say of how they were made."""

import jax

from experiments.lib import folder
from experiments.published import ROOT


def test_rows_name_no_place_of_the_machine_that_made_them():
    presets = f"{ROOT}/experiments/fmcsc/presets"
    flags = ["--dataset=digits", "--data_dir=/somewhere", f"--flagfile={presets}/best.flags"]
    said = folder.made_by(flags)
    assert said["command"] == "--dataset=digits --flagfile=experiments/fmcsc/presets/best.flags"
    assert said["jax"] == jax.__version__ and said["commit"] == folder.commit()
