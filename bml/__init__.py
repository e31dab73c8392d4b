"""bml: fault-tolerant parameter synchronisation for server-centric networks.

    import bml

    def train(session: bml.Session) -> dict: ...

    result = bml.launch(train, fabric="bcube:3x2", faults=["kill:4@step=20"])
"""

from bml.cluster.launch import Result, launch
from bml.errors import BmlError
from bml.train.session import Batch, Session

__all__ = ["Batch", "BmlError", "Result", "Session", "launch"]
