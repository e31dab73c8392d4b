"""bml: fault-tolerant parameter synchronisation for server-centric networks.

import bml

def train(session: bml.Session) -> dict: ...

result = bml.launch(train, fabric="bcube:3x2", faults=["kill:4@step=20"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bml.cluster.launcher.launch import launch, start
    from bml.cluster.launcher.result import Result
    from bml.cluster.launcher.running import Job
    from bml.errors import (
        BmlError,
        ContributorLost,
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
    from bml.train.batch import Batch
    from bml.train.pending import Pending
    from bml.train.session import Session
    from bml.train.vectors import Bucket

__all__ = [
    "Batch",
    "BmlError",
    "Bucket",
    "ContributorLost",
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
    "Batch": "bml.train.batch",
    "Bucket": "bml.train.vectors",
    "Job": "bml.cluster.launcher.running",
    "Pending": "bml.train.pending",
    "Result": "bml.cluster.launcher.result",
    "Session": "bml.train.session",
    "launch": "bml.cluster.launcher.launch",
    "start": "bml.cluster.launcher.launch",
}
"""Where public names are defined; all others are errors."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first: `bml.topology` alone loads no runtime."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES.get(name, "bml.errors")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
