"""The connection of servers that share a host: long payloads are lent, see bml.sharedmem.zero_copy."""

from __future__ import annotations

import socket
from collections.abc import Callable

from bml.io.poller import Poller
from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import (
    LENT_AT,
    LENT_BYTE,
    LENT_NBYTES,
    FrameError,
    Header,
    Loan,
    pack_lent,
    unpack_lent,
)
from bml.sharedmem.zero_copy import LEAST_NBYTES, Lending
from bml.transport.interface import LostKind, Verdict
from bml.transport.tcp.connection import Connection
from bml.transport.tcp.incoming import Intake

_TURN_NBYTES = 4 << 20
"""How much is borrowed before other descriptors have their turn: the headers of a whole step come at once."""


class LentIntake(Intake):
    """An intake that takes lent frames, too; `tired` when it stopped for others, until `go_on`."""

    __slots__ = ("_lending", "_loan", "_peer", "_taken")

    def __init__(
        self,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        counters: Counters,
        max_nbytes: int,
        lending: Lending,
        peer: int,
    ) -> None:
        super().__init__(admit, received, counters, max_nbytes)
        self._lending = lending
        self._peer = peer
        self._loan: Loan | None = None
        self._taken = 0

    def resume(self) -> None:
        """See Intake."""
        if self.paused and self._loan is not None:
            self.paused = False
            if self._borrow(self._loan):
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
        self._loan = None
        self.tired = False

    def _take(self) -> bool:
        low, scratch = self._low, self._scratch
        if scratch[low + LENT_AT] != LENT_BYTE:
            return Intake._take(self)  # quicker than super()
        if self._taken >= _TURN_NBYTES:
            self.tired = True
            return False
        if self._high - low < LENT_NBYTES:
            return False
        self._header, loan = unpack_lent(scratch, low, self._max_nbytes)
        self._low += LENT_NBYTES
        return self._borrow(loan)

    def _borrow(self, loan: Loan) -> bool:
        """Have the payload copied to where it belongs; returns whether to go on."""
        header = self._header
        assert header is not None
        if not self._ask():
            self._loan = loan if self.paused else None
            return False
        self._loan = None
        self._missing = 0  # nothing of it follows
        if not self._dropped:
            self._taken += header.nbytes
            lending, counters = self._lending, self._counters
            copied = lending.nbytes_copied
            self._dropped = not lending.borrow(self._peer, header, loan, self._rest)
            if not self._dropped:
                counters.nbytes_borrowed += header.nbytes
                counters.nbytes_copied_received += lending.nbytes_copied - copied
        self._finish()
        return True


class LentConnection(Connection):
    """A connection that lends what the peer can read."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        intake: LentIntake,
        on_heard: Callable[[], None],
        on_end: Callable[[LostKind, str], None],
        lending: Lending,
        peer: int,
        counters: Counters,
    ) -> None:
        super().__init__(sock, poller, queue, intake, on_heard, on_end)
        self._lent_intake = intake
        self._lending = lending
        self._peer = peer
        self._counters = counters

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """See Connection."""
        if payload is not None and len(payload) >= LEAST_NBYTES:
            loan = self._lending.lend(self._peer, payload)
            if loan is not None:
                self._counters.nbytes_lent += len(payload)
                self._send_lent(priority, pack_lent(head, loan))
                return
        Connection.send(self, priority, head, payload)  # quicker than super()

    def _send_lent(self, priority: int, frame: bytes) -> None:
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
        if self._lent_intake.tired:
            self._tired()

    def _resume(self) -> None:
        super()._resume()
        if self._lent_intake.tired:
            self._tired()

    def _tired(self) -> None:
        """See Connection."""
        self._poller.soon(self._go_on)

    def _go_on(self) -> None:
        """The others have had their turn."""
        intake = self._lent_intake
        if self._sock is None or self._muted or not intake.tired:
            return
        try:
            intake.go_on()
        except FrameError as error:
            self._end("malformed", str(error))
        self._pause(intake.paused)
        if intake.tired:
            self._tired()
