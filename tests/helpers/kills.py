"""Kills processes at random moments, again and again, until their job is done."""

import multiprocessing
import os
import random
import signal
import time
from typing import NamedTuple
from unittest import mock

# Imported once, before processes fork off; nothing here defines a binary's own flags or starts a
# backend, whose threads a fork would not survive.
PRELOAD = [
    "pytest",
    "jax",
    "jaxfedmvc.algorithms",
    "experiments.lib.charts",
    "sklearn.datasets",
    "sklearn.manifold",
    "matplotlib.pyplot",
    "tqdm",
]
_EARLY = 1.5  # seconds in which half of the kills come, counted from the process's start
_LATE = 0.1  # and the others, counted from a change of the watched file
_MOST_CHANGES = 3


class Life(NamedTuple):
    """What became of one process."""

    exit_code: int
    changes: int  # of the watched file
    seconds: float


def until_done(target, args, n_kills, seed, watch, late=_LATE):
    """Starts `target(*args)` in a process of its own until it ends by itself with exit code 0.

    Args:
      target: A function of a module, which finds out itself what earlier processes left behind.
      args: Its arguments.
      n_kills: Most processes that are killed; those that come after them are left to end.
      seed: Of the moments: half of them soon after the start, and half soon after `watch` has
        changed one to three times.
      watch: Path of the file that the job replaces as it gets on.
      late: Seconds from such a change to the kill, at most.

    Returns:
      The lives, all killed but for the last.
    """
    chance = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    lives = []
    while not lives or lives[-1].exit_code:
        before, began = _stamp(watch), time.monotonic()
        early, changes_left = chance.random() < 0.5, chance.randint(1, _MOST_CHANGES)
        wait, changes = chance.random() * (_EARLY if early else late), 0
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # for the server that forks
            process = context.Process(target=target, args=args)
            process.start()
        deadline = began + wait if early else None
        while process.is_alive():
            now = _stamp(watch)
            changes += now not in (before, None)
            before = now
            if not early and changes == changes_left and deadline is None:
                deadline = time.monotonic() + wait
            if len(lives) < n_kills and deadline is not None and time.monotonic() > deadline:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        process.join()
        lives.append(Life(process.exitcode, changes, time.monotonic() - began))
        if process.exitcode not in (0, -signal.SIGKILL):
            raise AssertionError(f"the process ended by itself with exit code {process.exitcode}")
    return lives


def _stamp(path):
    """Changes whenever the file is replaced; None while there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
