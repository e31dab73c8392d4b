"""bml: fault-tolerant parameter synchronisation for server-centric networks.

import bml

def train(session: bml.Session) -> dict: ...

result = bml.launch(train, fabric="bcube:3x2", faults=["kill:4@step=20"])
"""

from bml.cluster.launch import launch, start
from bml.cluster.result import Result
from bml.cluster.running import Job
from bml.errors import BmlError, TooFewServers, TrainingError, UsageError
from bml.train.pending import Pending
from bml.train.session import Batch, Session
from bml.train.vectors import Bucket

__all__ = [
    "Batch",
    "BmlError",
    "Bucket",
    "Job",
    "Pending",
    "Result",
    "Session",
    "TooFewServers",
    "TrainingError",
    "UsageError",
    "launch",
    "start",
]
