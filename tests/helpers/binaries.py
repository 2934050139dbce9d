"""Runs a binary inside the tests' process, or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest
from absl.testing import flagsaver

from experiments import base


def launch(module, *arguments):
    """Exit code, stdout and stderr of a binary with these arguments; its flags are put back."""
    saved = flagsaver.save_flag_values()
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            mock.patch.object(sys, "argv", [module.__name__, *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            base.launch(module.main)
    finally:
        flagsaver.restore_flag_values(saved)
    return left.value.code or 0, out.getvalue(), err.getvalue()


def alone(module, *arguments):
    """As `launch`, in a process of its own: binaries may have flags of the same name."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"MPLBACKEND": "agg"},
    )
    return done.returncode, done.stdout, done.stderr
