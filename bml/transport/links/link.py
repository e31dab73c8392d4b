"""One link, a (peer, level), as long as the transport exists: its state, queue, counters and connection."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import Header, pack
from bml.topology.errors import InvariantError
from bml.transport.interface import Endpoint, LinkStats, LostKind, Verdict
from bml.transport.links.opening import Opening

OnEnd = Callable[[LostKind, str], None]


class LinkCallbacks(NamedTuple):
    """The callbacks of a connection: methods of the `Handler`, bound to one link, and `end` for its end."""

    admit: Callable[[Header], memoryview | Verdict]
    received: Callable[[Header], None]
    heard: Callable[[], None]
    end: OnEnd


class LinkConnection(Protocol):
    """Moves a link's frames over an open, authenticated stream. See `Transport` for what each call does."""

    def start(self) -> None:
        """Begin to send the queued frames, and to receive."""
        ...

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """Queue one frame: its packed header and its bytes."""
        ...

    def resume(self) -> None:
        """Ask `admit` again for the frame that was told to wait."""
        ...

    def fence(self) -> None:
        """Use no buffer of the old epoch any more."""
        ...

    def mute(self) -> None:
        """Neither send nor notice anything until `unmute`; queued frames wait."""
        ...

    def unmute(self) -> None:
        """End `mute`."""
        ...

    def detach(self) -> socket.socket | None:
        """End without calling `end`, and return the stream's socket."""
        ...

    def close(self) -> None:
        """End without calling `end`."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether frames can move."""
        ...

    @property
    def pending(self) -> tuple[int, int]:
        """(frames, nbytes) taken from the queue and not sent yet."""
        ...


class LinkState(enum.Enum):
    """The states of a link."""

    UNWANTED = "unwanted"
    OPENING = "opening"
    UP = "up"
    LOST = "lost"
    """The link is wanted and its loss was reported; `set_peers` opens it again."""


class Link:
    """The link to `peer` over this server's NIC of `level`.

    The states are UNWANTED → OPENING → UP → LOST or UNWANTED. There is a `connection` in UP only, and an
    `opening` in OPENING only. `connect` makes the connection from an authenticated socket.
    """

    def __init__(
        self, peer: int, level: int, connect: Callable[[Link, socket.socket, OnEnd], LinkConnection]
    ) -> None:
        self.peer = peer
        self.level = level
        self.state = LinkState.UNWANTED
        self.endpoint: Endpoint = ("", 0)
        self.incarnation = 0
        self.opening: Opening | None = None
        self.connection: LinkConnection | None = None
        self.counters = Counters()
        self.queue = SendQueue(self.counters)
        self._connect = connect
        self._sock: socket.socket | None = None
        self._nbytes_at_attach = 0

    def send(self, priority: int, header: Header, payload: memoryview | None) -> None:
        """Queue a frame for the connection, or for the one that is being opened; see `Transport.send`.

        Raises InvariantError if the payload does not fit the header, or if the link is not wanted.
        """
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
            self.queue.push(priority, pack(header), payload)
        elif self.state is LinkState.UNWANTED:
            raise InvariantError(
                f"server {self.peer} over NIC {self.level} is not wanted, cannot send {header}"
            )

    def attach(self, sock: socket.socket, on_end: OnEnd, muted: bool) -> None:
        """Use this authenticated socket, and send the queued frames over it."""
        self._end_opening()
        self._nbytes_at_attach = self._nbytes_moved()
        self._sock = sock
        self.connection = self._connect(self, sock, on_end)
        self.connection.start()
        if muted:
            self.connection.mute()
        self.state = LinkState.UP

    def detach(self, state: LinkState) -> socket.socket | None:
        """Leave UP or OPENING for `state`; return the socket, if there is one, for the caller to close."""
        self._end_opening()
        self.state = state
        self._sock = None
        connection, self.connection = self.connection, None
        sock = connection.detach() if connection is not None else None
        self.queue.clear()
        return sock

    def swap(self, sock: socket.socket, on_end: OnEnd, muted: bool) -> None:
        """Replace a connection over which nothing was sent by a newer one, which sends the queued frames."""
        if self.connection is not None:
            self.connection.close()
        self.attach(sock, on_end, muted)

    def set_sndbuf(self, nbytes: int) -> None:
        """Set the size of the kernel's send buffer, if there is a connection. Raises OSError."""
        if self._sock is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    @property
    def sock(self) -> socket.socket | None:
        """The socket of the connection, if there is one."""
        return self._sock

    @property
    def untouched(self) -> bool:
        """Whether no byte has gone over the present connection."""
        return self._nbytes_moved() == self._nbytes_at_attach

    def fence(self) -> None:
        """See `Transport.fence`."""
        if self.connection is not None:
            self.connection.fence()
        else:
            self.queue.clear()

    @property
    def queued_nbytes(self) -> int:
        """Bytes that wait to be sent, with headers."""
        return self.queue.nbytes + self._pending[1]

    @property
    def is_up(self) -> bool:
        """Whether frames can move."""
        return self.connection is not None and self.connection.is_ready

    def stats(self) -> LinkStats:
        """The present values of the counters."""
        counters = self.counters
        return LinkStats(
            counters.frames_sent,
            counters.nbytes_sent,
            counters.frames_received,
            counters.nbytes_received,
            len(self.queue) + self._pending[0],
            self.queued_nbytes,
            counters.nbytes_copied_sent,
            counters.nbytes_copied_received,
            counters.nbytes_zero_copy_sent,
            counters.nbytes_zero_copy_received,
        )

    @property
    def _pending(self) -> tuple[int, int]:
        return (0, 0) if self.connection is None else self.connection.pending

    def _nbytes_moved(self) -> int:
        return self.counters.nbytes_sent + self.counters.nbytes_received

    def _end_opening(self) -> None:
        opening, self.opening = self.opening, None
        if opening is not None:
            opening.cancel()
