"""Runs federated algorithms: `run` as one pure program, and other ways to walk through the same.

`run` jits and vmaps. `run_compacting` shrinks arrays between rounds, `run_streaming` (in
`engine.streaming`) keeps data on the host and sends it to the device by chunks of clients.
"""

from jaxfedmvc.engine.compacting import run_compacting
from jaxfedmvc.engine.phases import RunState, Traffic
from jaxfedmvc.engine.run import (
    RunResult,
    assign,
    draw_participants,
    embed,
    finish,
    one_round,
    run,
    setup,
    start,
)
from jaxfedmvc.engine.traffic import traffic

__all__ = [
    "RunResult",
    "RunState",
    "Traffic",
    "assign",
    "draw_participants",
    "embed",
    "finish",
    "one_round",
    "run",
    "run_compacting",
    "setup",
    "start",
    "traffic",
]
