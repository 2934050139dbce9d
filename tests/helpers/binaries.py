"""Runs a binary inside the tests' process, or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys


def launch(main, *arguments):
    """Exit code, stdout and stderr of a binary's `main` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as left:
            code = left.code or 0
    return code, out.getvalue(), err.getvalue()


def alone(module, *arguments):
    """As `launch` of a module's name, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"MPLBACKEND": "agg"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
