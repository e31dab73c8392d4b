"""One (peer, level) as long as the transport lives: wanted or not, its queue and counters, its connection."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from functools import partial

from bml.transport.connection import Connection
from bml.protocol.frame import Header, pack
from bml.transport.intake import Intake
from bml.transport.interface import Endpoint, Handler, LinkStats, LostKind
from bml.transport.opening import Opening
from bml.transport.poller import Poller
from bml.transport.sendqueue import Counters, SendQueue
from topology.errors import InvariantError


class LinkState(enum.Enum):
    """Where a link stands."""

    UNWANTED = "unwanted"
    OPENING = "opening"
    UP = "up"
    LOST = "lost"
    """Wanted, and its loss was reported; waits for `set_peers`."""


class Link:
    """State UNWANTED → OPENING → UP → LOST or UNWANTED; `connection` exists in UP, `opening` in OPENING."""

    def __init__(self, peer: int, level: int, poller: Poller, handler: Handler, max_nbytes: int) -> None:
        self.peer = peer
        self.level = level
        self.state = LinkState.UNWANTED
        self.endpoint: Endpoint = ("", 0)
        self.opening: Opening | None = None
        self.connection: Connection | None = None
        self._counters = Counters()
        self._queue = SendQueue(self._counters)
        self._poller = poller
        self._handler = handler
        self._max_nbytes = max_nbytes
        self._nbytes_at_attach = 0

    def send(self, priority: int, header: Header, payload: memoryview | None) -> None:
        """Queue a frame for the connection, now or when it is there; see `Transport.send`."""
        if payload is not None:
            if payload.nbytes == 0:
                payload = None
            elif payload.format != "B" or payload.ndim != 1:
                payload = payload.cast("B")
        if (0 if payload is None else len(payload)) != header.nbytes:
            raise InvariantError(f"payload {payload!r} to server {self.peer} does not fit its {header}")
        if self.connection is not None:
            self.connection.send(priority, pack(header), payload)
        elif self.state is LinkState.OPENING:
            self._queue.push(priority, pack(header), payload)
        elif self.state is LinkState.UNWANTED:
            raise InvariantError(
                f"server {self.peer} over NIC {self.level} is not wanted, cannot send {header}"
            )

    def attach(self, sock: socket.socket, on_end: Callable[[LostKind, str], None], muted: bool) -> None:
        """Use this authenticated socket; what is queued goes out over it."""
        self._end_opening()
        self._nbytes_at_attach = self._nbytes_moved()
        handler, peer, level = self._handler, self.peer, self.level
        intake = Intake(
            partial(handler.admit, peer, level),
            partial(handler.received, peer, level),
            self._counters,
            self._max_nbytes,
        )
        heard = partial(handler.heard, peer, level)
        self.connection = Connection(sock, self._poller, self._queue, intake, heard, on_end)
        self.connection.start()
        if muted:
            self.connection.mute()
        self.state = LinkState.UP

    def detach(self, state: LinkState) -> socket.socket | None:
        """Leave UP or OPENING for `state`; hand over the socket, if there is one, for closing."""
        self._end_opening()
        self.state = state
        connection, self.connection = self.connection, None
        sock = connection.detach() if connection is not None else None
        self._queue.clear()
        return sock

    def swap(self, sock: socket.socket, on_end: Callable[[LostKind, str], None], muted: bool) -> None:
        """Replace an untouched connection by a newer one; what is queued goes out over the new one."""
        if self.connection is not None:
            self.connection.close()
        self.attach(sock, on_end, muted)

    @property
    def untouched(self) -> bool:
        """Whether not one byte went over the present connection."""
        return self._nbytes_moved() == self._nbytes_at_attach

    def fence(self) -> None:
        """See `Transport.fence`."""
        if self.connection is not None:
            self.connection.fence()
        else:
            self._queue.clear()

    @property
    def queued_nbytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._queue.nbytes

    def stats(self) -> LinkStats:
        """The counters now."""
        counters = self._counters
        return LinkStats(
            counters.frames_sent,
            counters.nbytes_sent,
            counters.frames_received,
            counters.nbytes_received,
            len(self._queue),
            self._queue.nbytes,
        )

    def _nbytes_moved(self) -> int:
        return self._counters.nbytes_sent + self._counters.nbytes_received

    def _end_opening(self) -> None:
        opening, self.opening = self.opening, None
        if opening is not None:
            opening.cancel()
