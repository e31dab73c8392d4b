"""A donor: a server that sends its part of the training state to joiners.

Every contributor becomes one when a view has learners beside it. The receiving side is learner.py; how the
state is cut into parts and pieces is transfer.py.
"""

from __future__ import annotations

from collections.abc import Callable

from bml.protocol.server.events import Instruction, SendState, SendText, Tell
from bml.protocol.server.transfer import OutgoingState, outgoing_state
from bml.protocol.step.dataflow import Buffer, Place, Send
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.topology import Fabric

_STATE_NBYTES = 16 << 20
"""A guess of the state's length, from which the length of its pieces is derived: it is not known before."""
_PRIORITY = 1 << 30
"""Priority of frames of state: they move when no step needs the link."""


class Donor:
    """The state that `server` has to send in the view in force; `slice_nbytes`: see ServerCore.

    `can_send`: the training function comes to step boundaries, at which the state is whole.
    """

    def __init__(self, server: int, slice_nbytes: Callable[[int], int]):
        self.can_send = False
        self._server = server
        self._slice_nbytes = slice_nbytes
        self._outgoing: OutgoingState | None = None

    def can_send_state(self) -> list[Instruction]:
        """The training function has come to its first boundary: tell the coordinator."""
        self.can_send = True
        return self.announced()

    def announced(self) -> list[Instruction]:
        """The message that the coordinator has got, for its successor."""
        return [Tell(msg.CanSendState(self._server))] if self.can_send else []

    def install(self, view: msg.View, fabric: Fabric) -> None:
        """A view is in force on this (damaged) fabric. A transfer that the view before asked for is over."""
        self._outgoing = outgoing_state(view, fabric, self._server, self._slice_nbytes(_STATE_NBYTES))

    def due(self, committed: int) -> OutgoingState | None:
        """The state to send at the boundary after step `committed`; None: nothing."""
        return self._outgoing if self._outgoing is not None and committed > self._outgoing.commit else None

    def send(self, event: SendState) -> list[Instruction]:
        """Send joiners their parts of the state, unless the view that asked for them is over."""
        if event.outgoing != self._outgoing:
            return []
        self._outgoing = None
        epoch, step = event.outgoing.epoch, event.step
        done: list[Instruction] = []
        offset = 0
        for each, head in zip(event.outgoing.parts, event.heads, strict=True):
            peer, text = each.peer, head.encode()
            header = Header(Kind.HEAD, epoch, step, self._server, peer, 0, 0, len(text), len(text))
            done.append(SendText(peer, each.level, header, text))
            for start, stop in each.part.pieces(head.nbytes):
                size = stop - start
                header = Header(Kind.STATE, epoch, step, self._server, peer, 0, start, stop, size)
                done.append(Send(peer, each.level, header, Place(Buffer.STATE, offset), _PRIORITY))
                offset += size
        return done
