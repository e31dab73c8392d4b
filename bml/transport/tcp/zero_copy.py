"""The connection of servers that share a host: long payloads stay in place (bml.sharedmem.zero_copy)."""

from __future__ import annotations

import socket
from collections.abc import Callable

from bml.io.poller import Poller
from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import (
    REFERENCE_AT,
    REFERENCE_BYTE,
    REFERENCE_FRAME_NBYTES,
    FrameError,
    Header,
    Reference,
    pack_reference,
    unpack_reference,
)
from bml.sharedmem.zero_copy import LEAST_NBYTES, ZeroCopy
from bml.transport.interface import LostKind, Verdict
from bml.transport.tcp.connection import Connection
from bml.transport.tcp.incoming import Intake

_TURN_NBYTES = 4 << 20
"""How many bytes are received by reference before it is the turn of other descriptors: the headers of a whole
step come at once."""


class ZeroCopyIntake(Intake):
    """An intake that takes reference frames, too; `tired` when it stopped for others, until `go_on`."""

    __slots__ = ("_peer", "_reference", "_taken", "_zero_copy")

    def __init__(
        self,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        counters: Counters,
        max_nbytes: int,
        zero_copy: ZeroCopy,
        peer: int,
    ) -> None:
        super().__init__(admit, received, counters, max_nbytes)
        self._zero_copy = zero_copy
        self._peer = peer
        self._reference: Reference | None = None
        self._taken = 0

    def resume(self) -> None:
        """See Intake."""
        if self.paused and self._reference is not None:
            self.paused = False
            if self._take_referenced(self._reference):
                self._parse()
        else:
            super().resume()

    def go_on(self) -> None:
        """It is this connection's turn again; raises FrameError like `advance`."""
        self.tired = False
        self._taken = 0
        if not self.paused:
            self._parse()

    def stop(self) -> None:
        """See Intake."""
        super().stop()
        self._reference = None
        self.tired = False

    def _take(self) -> bool:
        low, scratch = self._low, self._scratch
        if scratch[low + REFERENCE_AT] != REFERENCE_BYTE:
            return Intake._take(self)  # quicker than super()
        if self._taken >= _TURN_NBYTES:
            self.tired = True
            return False
        if self._high - low < REFERENCE_FRAME_NBYTES:
            return False
        self._header, reference = unpack_reference(scratch, low, self._max_nbytes)
        self._low += REFERENCE_FRAME_NBYTES
        return self._take_referenced(reference)

    def _take_referenced(self, reference: Reference) -> bool:
        """Have the payload copied to where it belongs; returns whether to go on."""
        header = self._header
        assert header is not None
        if not self._ask():
            self._reference = reference if self.paused else None
            return False
        self._reference = None
        self._missing = 0  # nothing of it follows
        if not self._dropped:
            self._taken += header.nbytes
            zero_copy, counters = self._zero_copy, self._counters
            copied = zero_copy.nbytes_copied
            self._dropped = not zero_copy.receive(self._peer, header, reference, self._rest)
            if not self._dropped:
                counters.nbytes_zero_copy_received += header.nbytes
                counters.nbytes_copied_received += zero_copy.nbytes_copied - copied
        self._finish()
        return True


class ZeroCopyConnection(Connection):
    """A connection that sends references to payloads that the peer can read."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        intake: ZeroCopyIntake,
        on_heard: Callable[[], None],
        on_end: Callable[[LostKind, str], None],
        zero_copy: ZeroCopy,
        peer: int,
        counters: Counters,
    ) -> None:
        super().__init__(sock, poller, queue, intake, on_heard, on_end)
        self._zero_copy_intake = intake
        self._zero_copy = zero_copy
        self._peer = peer
        self._counters = counters

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """See Connection."""
        if payload is not None and len(payload) >= LEAST_NBYTES:
            reference = self._zero_copy.reference_for(self._peer, payload)
            if reference is not None:
                self._counters.nbytes_zero_copy_sent += len(payload)
                self._send_reference(priority, pack_reference(head, reference))
                return
        Connection.send(self, priority, head, payload)  # quicker than super()

    def _send_reference(self, priority: int, frame: bytes) -> None:
        if self._write_error:
            return
        idle = self.queue.nbytes == 0
        self.queue.push(priority, frame, None)
        if idle and not self._flush_is_due:
            self._write_now()
        self.flush_soon()

    def unmute(self) -> None:
        """See Stream."""
        super().unmute()
        if self._zero_copy_intake.tired:
            self._tired()

    def _resume(self) -> None:
        super()._resume()
        if self._zero_copy_intake.tired:
            self._tired()

    def _tired(self) -> None:
        """See Connection."""
        self._poller.soon(self._go_on)

    def _go_on(self) -> None:
        """The others have had their turn."""
        intake = self._zero_copy_intake
        if self._sock is None or self._muted or not intake.tired:
            return
        try:
            intake.go_on()
        except FrameError as error:
            self._end("malformed", str(error))
        self._pause(intake.paused)
        if intake.tired:
            self._tired()
