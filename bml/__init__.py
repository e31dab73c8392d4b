"""bml: fault-tolerant parameter synchronisation for server-centric networks.

import bml

def train(session: bml.Session) -> dict: ...

result = bml.launch(train, fabric="bcube:3x2", faults=["kill:4@step=20"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bml.cluster.launch import launch, start
    from bml.cluster.result import Result
    from bml.cluster.running import Job
    from bml.errors import (
        BmlError,
        Evicted,
        FabricError,
        InvariantError,
        SessionBroken,
        StartError,
        StateMismatch,
        StepMismatch,
        TooFewServers,
        TooSlow,
        TrainingError,
        UsageError,
    )
    from bml.train.pending import Pending
    from bml.train.session import Batch, Session
    from bml.train.vectors import Bucket

__all__ = [
    "Batch",
    "BmlError",
    "Bucket",
    "Evicted",
    "FabricError",
    "InvariantError",
    "Job",
    "Pending",
    "Result",
    "Session",
    "SessionBroken",
    "StartError",
    "StateMismatch",
    "StepMismatch",
    "TooFewServers",
    "TooSlow",
    "TrainingError",
    "UsageError",
    "launch",
    "start",
]

_HOMES = {
    "bml.cluster.launch": ("launch", "start"),
    "bml.cluster.result": ("Result",),
    "bml.cluster.running": ("Job",),
    "bml.errors": (
        "BmlError",
        "Evicted",
        "FabricError",
        "InvariantError",
        "SessionBroken",
        "StartError",
        "StateMismatch",
        "StepMismatch",
        "TooFewServers",
        "TooSlow",
        "TrainingError",
        "UsageError",
    ),
    "bml.train.pending": ("Pending",),
    "bml.train.session": ("Batch", "Session"),
    "bml.train.vectors": ("Bucket",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first: who needs `bml.topology` only loads no runtime."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
