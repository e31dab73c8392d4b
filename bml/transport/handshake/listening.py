"""A listening socket whose connections must pass the handshake, in time; their number is bounded.

A connection that brings a wrong token, garbage, or nothing at all is closed and logged. Other connections are
not disturbed.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable

from bml.io.forks import close_on_fork
from bml.io.poller import READ, Poller, Timer
from bml.transport.handshake.auth import AcceptorHandshake, Hello
from bml.transport.handshake.greeting import HANDSHAKE_S, Greeting, GreetingKind, fresh_nonce
from bml.transport.handshake.traffic_class import queue_as

_LOG = logging.getLogger(__name__)

_ACCEPTS_PER_PASS = 16
_MAX_PENDING = 64
"""The most handshakes that may be in progress; if there are more, one is closed."""
_OUT_OF_FILES_S = 0.1  # a descriptor may be free again then
_SAY_EVERY_S = 1.0
"""The least time between two log lines about refused connections, so that strangers cannot fill the disk."""
BACKLOG = 128


class Listener:
    """The owner of a listening socket; calls `on_open(socket, hello)` for each peer that proves itself.

    The socket is non-blocking. A handshake may take `timeout_s` seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        *,
        token: bytes,
        me: Hello,
        on_open: Callable[[socket.socket, Hello], None],
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self._sock = sock
        self._poller = poller
        self._token = token
        self._me = me
        self._on_open = on_open
        self._timeout_s = timeout_s
        self._pending: dict[int, tuple[str, Greeting]] = {}
        self._accepted = 0
        self._pause: Timer | None = None
        self._said_s = float("-inf")
        self._unsaid = 0
        self._muted = False
        host, port = sock.getsockname()[:2]
        self.endpoint = (str(host), int(port))
        """(host, port) it listens on."""
        poller.add(sock.fileno(), READ, self._ready)

    def mute(self) -> list[socket.socket]:
        """Accept nothing until `unmute`; return the sockets of handshakes in progress, to be closed later."""
        if self._muted:
            return []
        self._muted = True
        self._poller.remove(self._sock.fileno())
        sockets = [greeting.detach() for _, greeting in self._pending.values()]
        self._pending.clear()
        return [sock for sock in sockets if sock is not None]

    def unmute(self) -> None:
        """End `mute`."""
        if self._muted:
            self._muted = False
            self._watch()

    def close(self) -> None:
        """Stop listening, and close handshakes in progress. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._poller.remove(self._sock.fileno())
        self._sock.close()
        for _, greeting in self._pending.values():
            greeting.cancel()
        self._pending.clear()

    def _watch(self) -> None:
        self._pause = None
        if self._sock.fileno() >= 0 and not self._muted:
            self._poller.remove(self._sock.fileno())
            self._poller.add(self._sock.fileno(), READ, self._ready)

    def _ready(self, events: int) -> None:
        for _ in range(_ACCEPTS_PER_PASS):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors or memory: the waiting connections would wake the poller again and again.
                _LOG.warning("%s: cannot accept: %s; trying again soon", self._name(), error)
                self._poller.remove(self._sock.fileno())
                self._pause = self._poller.after(_OUT_OF_FILES_S, self._watch)
                return
            self._greet(close_on_fork(sock), address)

    def _greet(self, sock: socket.socket, address: tuple[object, ...]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        queue_as(sock, self._sock)
        self._accepted += 1
        number = self._accepted

        def done(sock: socket.socket, hello: Hello) -> None:
            del self._pending[number]
            self._on_open(sock, hello)

        def failed(kind: GreetingKind, why: str) -> None:
            del self._pending[number]
            if kind != "eof":  # a peer that closes may only have lost patience
                self._say(f"closed a connection from {address}: {why} ({kind})")

        if len(self._pending) >= _MAX_PENDING:
            self._make_room()
        handshake = AcceptorHandshake(self._token, self._me, fresh_nonce())
        greeting = Greeting(sock, handshake, self._poller, done, failed, self._timeout_s)
        self._pending[number] = str(address[0]), greeting

    def _make_room(self) -> None:
        """Close the oldest handshake of the address that has most, so that a flood harms no other address."""
        hosts = Counter(host for host, _ in self._pending.values())
        busiest, most = hosts.most_common(1)[0]
        oldest = next(number for number, (host, _) in self._pending.items() if host == busiest)
        self._pending.pop(oldest)[1].cancel()
        self._say(f"too many handshakes in progress, closed the oldest of {most} from {busiest}")

    def _say(self, text: str) -> None:
        now_s = self._poller.now_s()
        if now_s - self._said_s < _SAY_EVERY_S:
            self._unsaid += 1
            return
        more = f"; {self._unsaid} like it were not logged" if self._unsaid else ""
        self._said_s, self._unsaid = now_s, 0
        _LOG.warning("%s: %s%s", self._name(), text, more)

    def _name(self) -> str:
        return f"server {self._me.server} {self._me.role.name.lower()} port {self.endpoint}"
