"""The server's part in giving the training state to joiners; what comes to a joiner: learner.py."""

from __future__ import annotations

from collections.abc import Callable

from bml.protocol.server.events import Give, Instruction, SendText, Tell
from bml.protocol.server.transfer import Giving, giving
from bml.protocol.step.dataflow import Buffer, Place, Send
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.topology import Fabric

_STATE_NBYTES = 16 << 20  # how much the state is thought to be, to cut it: nobody knows before
_PRIORITY = 1 << 30  # the state moves when no step needs the link


class Donor:
    """What `server` is to give in the view in force; it is cut as vectors are, see ServerCore.

    `gives`: its training function has come to boundaries, at which the state is whole.
    """

    def __init__(self, server: int, slice_nbytes: Callable[[int], int]):
        self.gives = False
        self._server = server
        self._slice_nbytes = slice_nbytes
        self._giving: Giving | None = None

    def begins(self) -> list[Instruction]:
        """The training function has come to its first boundary."""
        self.gives = True
        return self.said()

    def said(self) -> list[Instruction]:
        """What the coordinator has been told of it."""
        return [Tell(msg.Gives(self._server))] if self.gives else []

    def install(self, view: msg.View, fabric: Fabric) -> None:
        """A view is in force on this (damaged) fabric; what the one before asked for is over."""
        self._giving = giving(view, fabric, self._server, self._slice_nbytes(_STATE_NBYTES))

    def due(self, committed: int) -> Giving | None:
        """What to give at the boundary after step `committed`."""
        return self._giving if self._giving is not None and committed > self._giving.commit else None

    def give(self, event: Give) -> list[Instruction]:
        """Send a joiner its parts of the state, unless the view that asked for them is over."""
        if event.giving is not self._giving:
            return []
        self._giving = None
        epoch, step = event.giving.epoch, event.step
        done: list[Instruction] = []
        offset = 0
        for gift, head in zip(event.giving.gifts, event.heads, strict=True):
            peer, text = gift.peer, head.encode()
            header = Header(Kind.HEAD, epoch, step, self._server, peer, 0, 0, len(text), len(text))
            done.append(SendText(peer, gift.level, header, text))
            for start, stop in gift.part.pieces(head.nbytes):
                size = stop - start
                header = Header(Kind.STATE, epoch, step, self._server, peer, 0, start, stop, size)
                done.append(Send(peer, gift.level, header, Place(Buffer.STATE, offset), _PRIORITY))
                offset += size
        return done
