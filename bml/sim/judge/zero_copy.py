"""Payloads that are read where they lie: the check of the assumptions of bml.sharedmem.zero_copy.

Every slice travels as bytes and as a reference to its sender's memory. A server that takes it, and was not
told that it is fenced, must find the bytes there, and must come before the sender's user is given the step:
from then on the user may write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bml.protocol.wire.frame import Header
from bml.sim.judge.promises import PromiseBroken


@dataclass
class ZeroCopySender:
    """One server's memory: how often it was fenced, and the last step that its user was given."""

    server: int
    fences: int = 0
    committed: int = 0

    def reference_for(self, memory: memoryview) -> Reference:
        """A reference to it as it is from now on."""
        return Reference(self, self.fences, memory)


class Reference(NamedTuple):
    """Memory of a server, referred to when it had fenced so often."""

    owner: ZeroCopySender
    fences: int
    memory: memoryview

    def good(self, server: int, header: Header, payload: bytes) -> bool:
        """Whether `server` may use it now; raises PromiseBroken if it may and other bytes are there."""
        if self.owner.fences != self.fences:
            return False
        owner = self.owner.server
        if self.owner.committed >= header.step:
            raise PromiseBroken(6, f"server {server} takes {header} when the user of {owner} has the step")
        if self.memory != payload:
            raise PromiseBroken(6, f"server {owner} has overwritten {header}, which {server} takes now")
        return True
