"""Folders that another process has."""

import subprocess
import sys
from contextlib import contextmanager

_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder):
    """Another process has the folder while the block runs."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _HOLD, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        yield
