"""Channels of the control plane: whole messages over authenticated TCP connections, on the same poller.

A message travels as its length (4 bytes, big-endian) and its bytes. This module does not read its content.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Literal, NamedTuple

from bml.io.forks import close_on_fork
from bml.io.poller import Poller
from bml.io.sendqueue import Counters, SendQueue
from bml.topology.errors import FabricError, UsageError
from bml.transport.handshake import greeting
from bml.transport.handshake.auth import DialerHandshake, Hello, Identity, Role
from bml.transport.handshake.listening import BACKLOG, Listener
from bml.transport.interface import Endpoint, LostKind
from bml.transport.stream import PASS_NBYTES, Stream

_LOG = logging.getLogger(__name__)

EndKind = Literal["refused", "reset", "eof", "timeout", "auth", "malformed", "overflow"]
"""`refused`: the machine is alive, and no process listens on that port. `auth`: the process that listens does
not belong to this job, or refuses this one. `overflow`: the other side does not read what is sent."""
COORDINATOR = 0xFFFF_FFFF
"""The server id with which the coordinator introduces itself in handshakes."""
MAX_MESSAGE_NBYTES = 16 << 20
MAX_QUEUED_NBYTES = 64 << 20

_LENGTH_NBYTES = 4
_READ_NBYTES = 64 << 10


class End(NamedTuple):
    """The reason why a channel ended, or could not be opened."""

    kind: EndKind
    why: str


def _ignore_message(message: bytes) -> None:
    _LOG.debug("a channel without a listener dropped %d bytes", len(message))


def _ignore_end(end: End) -> None:
    _LOG.debug("a channel without a listener ended: %s", end)


class Channel:
    """One open, authenticated control connection; its owner calls `listen` before anything is read."""

    def __init__(self, sock: socket.socket, peer: Hello, poller: Poller, max_message_nbytes: int) -> None:
        self.peer = peer
        """The identity that the other side has proved."""
        self._on_message: Callable[[bytes], None] = _ignore_message
        self._on_close: Callable[[End], None] = _ignore_end
        self._poller = poller
        self._max_message_nbytes = max_message_nbytes
        self._queue = SendQueue(Counters())
        self._stream = MessageStream(
            sock, poller, self._queue, max_message_nbytes, self._message, self._ended, self._malformed
        )
        self._stream.start()

    def listen(self, on_message: Callable[[bytes], None], on_close: Callable[[End], None]) -> None:
        """Set the callbacks: `on_message(message)`, and `on_close(end)` if the channel ends by itself.

        `on_close` is called once, and not after `close()`. Both are called from within a poll only.
        """
        self._on_message, self._on_close = on_message, on_close

    def send(self, message: bytes) -> None:
        """Queue one message; no effect when the channel is closed.

        If more than MAX_QUEUED_NBYTES wait, the channel ends with `overflow`. Raises UsageError for a message
        that is too long for the other side: it would end every channel over which it is sent.
        """
        if len(message) > self._max_message_nbytes:
            raise UsageError(
                f"message of {len(message)} bytes, at most {self._max_message_nbytes} are allowed"
            )
        if self.closed:
            return
        if self._queue.nbytes + len(message) > MAX_QUEUED_NBYTES + _LENGTH_NBYTES:
            self._poller.soon(lambda: self._end("overflow", f"{self._queue.nbytes} bytes wait to be sent"))
            return
        self._queue.push(0, len(message).to_bytes(_LENGTH_NBYTES, "big"), memoryview(message))
        self._stream.flush_soon()

    def close(self) -> None:
        """Close without `on_close`; messages that fit into the kernel's buffer are still sent. Idempotent."""
        self._stream.flush_now()
        self._stream.close()

    @property
    def closed(self) -> bool:
        """Whether either side has closed the channel."""
        return not self._stream.is_open

    @property
    def queued_nbytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._queue.nbytes

    def _message(self, message: bytes) -> None:
        self._on_message(message)

    def _ended(self, kind: LostKind, why: str) -> None:
        self._queue.clear()
        self._on_close(End(kind, why))

    def _malformed(self, why: str) -> None:
        self._end("malformed", why)

    def _end(self, kind: EndKind, why: str) -> None:
        if not self.closed:
            self._stream.close()
            self._queue.clear()
            self._on_close(End(kind, why))


class MessageStream(Stream):
    """A stream whose bytes are messages; `on_malformed(why)` is called if they are not."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        max_message_nbytes: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[LostKind, str], None],
        on_malformed: Callable[[str], None],
    ) -> None:
        super().__init__(sock, poller, queue, on_end)
        self._max_message_nbytes = max_message_nbytes
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._buffer = bytearray()

    def flush_now(self) -> None:
        """Write as much as the kernel takes; errors are not reported."""
        if self._sock is not None and not self._write_error:
            try:
                while self.queue.nbytes and self.queue.write(self._sock):
                    pass
            except OSError as error:
                _LOG.debug("the last messages of a channel were not sent: %s", error)

    def _read(self, sock: socket.socket) -> None:
        nbytes_read = 0
        while nbytes_read < PASS_NBYTES and self._sock is sock:
            try:
                data = sock.recv(_READ_NBYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._end_by(error)
                return
            if not data:
                self._end_of_file()
                return
            nbytes_read += len(data)
            self._buffer += data
            self._parse()
            if len(data) < _READ_NBYTES:
                return

    def _parse(self) -> None:
        buffer = self._buffer
        while len(buffer) >= _LENGTH_NBYTES and self._sock is not None:
            nbytes = int.from_bytes(buffer[:_LENGTH_NBYTES], "big")
            if nbytes > self._max_message_nbytes:
                limit = self._max_message_nbytes
                self._on_malformed(f"message of {nbytes} bytes announced, at most {limit} are allowed")
                return
            end = _LENGTH_NBYTES + nbytes
            if len(buffer) < end:
                return
            message = bytes(buffer[_LENGTH_NBYTES:end])
            del buffer[:end]
            self._on_message(message)


class ControlListener:
    """Accepts control connections to the process with this `identity`.

    `on_connect(channel, hello)` is called for each dialer that wants this process and proves the token. The
    listener is bound to `host` (a numeric address) and `port`, or inherits a socket that is bound already. A
    message of more than `max_message_nbytes` ends its channel; a handshake may take `handshake_s` seconds.
    Raises FabricError if it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        identity: Identity,
        poller: Poller,
        on_connect: Callable[[Channel, Hello], None],
        listening: socket.socket | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
        handshake_s: float = greeting.HANDSHAKE_S,
    ) -> None:
        self._poller = poller
        self._on_connect = on_connect
        self._max_message_nbytes = max_message_nbytes
        self._listener = Listener(
            _listening_socket(host, port) if listening is None else _adopt(listening),
            poller,
            token=identity.token,
            me=identity.hello(Role.CONTROL),
            on_open=self._accept,
            timeout_s=handshake_s,
        )

    @property
    def endpoint(self) -> Endpoint:
        """(host, port) where it listens."""
        return self._listener.endpoint

    def close(self) -> None:
        """Stop listening; open channels stay open. Idempotent."""
        self._listener.close()

    def _accept(self, sock: socket.socket, hello: Hello) -> None:
        self._on_connect(Channel(sock, hello, self._poller, self._max_message_nbytes), hello)


def dial(
    host: str,
    port: int,
    *,
    identity: Identity,
    poller: Poller,
    on_open: Callable[[Channel], None],
    on_fail: Callable[[End], None],
    expect_server: int,
    expect_incarnation: int = 0,
    timeout_s: float = greeting.HANDSHAKE_S,
    max_message_nbytes: int = MAX_MESSAGE_NBYTES,
) -> greeting.Dial:
    """Open a channel to a listener, as the process with this `identity`: one attempt.

    The attempt ends in exactly one of `on_open(channel)` and `on_fail(end)`, from within a poll, or in
    `.cancel()` of the returned object; the caller decides whether to dial again. `expect_server` must answer,
    in its incarnation `expect_incarnation`. Raises UsageError if `host` is not a numeric address.
    """

    def opened(sock: socket.socket, hello: Hello) -> None:
        on_open(Channel(sock, hello, poller, max_message_nbytes))

    def failed(kind: greeting.GreetingKind, why: str) -> None:
        on_fail(End(kind, why))

    me, nonce = identity.hello(Role.CONTROL), greeting.fresh_nonce()
    handshake = DialerHandshake(identity.token, me, nonce, expect_server, expect_incarnation)
    return greeting.Dial((host, port), handshake, poller, opened, failed, timeout_s=timeout_s)


def _listening_socket(host: str, port: int) -> socket.socket:
    family = greeting.address_family(host)
    sock = close_on_fork(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
    try:
        # A restarted coordinator uses its old port again while old connections still end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        hint = "; give another port" if error.errno == errno.EADDRINUSE else ""
        raise FabricError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from error
    return sock


def _adopt(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.listen(BACKLOG)
    return sock
