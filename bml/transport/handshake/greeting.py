"""Runs a handshake over a socket: `Greeting` over a connected one, `Dial` over one that it connects first.

Both end in exactly one callback, from within a poll, or in `cancel`. Both have a time limit.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from typing import Literal, NamedTuple

from bml.io.forks import close_on_fork
from bml.io.poller import READ, WRITE, Poller, Timer
from bml.topology.errors import UsageError
from bml.transport.handshake.auth import NONCE_NBYTES, AcceptorHandshake, DialerHandshake, Hello
from bml.transport.handshake.flows import hold
from bml.transport.handshake.traffic_class import mark
from bml.transport.interface import Endpoint
from bml.transport.stream import kind_of

GreetingKind = Literal["refused", "reset", "eof", "timeout", "auth"]
OnGreeted = Callable[[socket.socket, Hello], None]
OnFailed = Callable[[GreetingKind, str], None]

HANDSHAKE_S = 2.0
"""The usual time limit of a handshake in seconds."""

# Linux; the socket module of Python 3.11 has no name for it. Without it, binding a source address would use
# up a port for all destinations.
_IP_BIND_ADDRESS_NO_PORT = 24


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address; raises UsageError for a name, whose lookup would block."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UsageError(f"not an IP address: {host!r}; give a numeric one (NICs: BML_NICS)") from None
    return socket.AF_INET if version == 4 else socket.AF_INET6


def fresh_nonce() -> bytes:
    """Return the random bytes of one handshake."""
    return secrets.token_bytes(NONCE_NBYTES)


class Greeting:
    """One handshake over a connected, non-blocking socket, which it owns until the handshake is over."""

    def __init__(
        self,
        sock: socket.socket,
        handshake: AcceptorHandshake | DialerHandshake,
        poller: Poller,
        on_done: OnGreeted,
        on_fail: OnFailed,
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self._sock: socket.socket | None = sock
        self._handshake = handshake
        self._poller = poller
        self._on_done = on_done
        self._on_fail = on_fail
        self._timer = poller.after(timeout_s, lambda: self._fail("timeout", f"no handshake in {timeout_s} s"))
        poller.add(sock.fileno(), READ, self._ready)
        poller.soon(self._start)

    def detach(self) -> socket.socket | None:
        """Give up, without a callback, and return the socket as it is."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._timer.cancel()
            self._poller.remove(sock.fileno())
        return sock

    def cancel(self) -> None:
        """Give up without a callback. Idempotent."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    def _start(self) -> None:
        if self._sock is not None:
            try:
                here, there = self._sock.getsockname()[:2], self._sock.getpeername()[:2]
                self._write(self._sock, self._handshake.start(here, there))
            except OSError as error:
                self._fail(kind_of(error), error.strerror or str(error))

    def _ready(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        try:
            data = sock.recv(self._handshake.wants_nbytes)
            if data:
                self._write(sock, self._handshake.feed(data))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(kind_of(error), error.strerror or str(error))
            return
        if self._handshake.error:
            self._fail("auth", self._handshake.error)
        elif not data:
            self._fail("eof", "closed during the handshake")
        elif self._handshake.done:
            self._succeed()

    def _write(self, sock: socket.socket, data: bytes) -> None:
        # A few hundred bytes fit into an empty send buffer.
        if data and sock.send(data, socket.MSG_NOSIGNAL) != len(data):
            raise OSError(errno.ENOBUFS, "no room for a handshake")

    def _succeed(self) -> None:
        sock = self.detach()
        peer = self._handshake.peer
        assert sock is not None
        assert peer is not None
        self._on_done(sock, peer)

    def _fail(self, kind: GreetingKind, why: str) -> None:
        if self._sock is not None:
            self.cancel()
            self._on_fail(kind, why)


class Route(NamedTuple):
    """The way of an attempt to connect out of this machine."""

    source: str | None = None
    """The local address to connect from; None: the kernel chooses."""
    traffic_class: int = 0
    """The byte that marks all packets of the connection."""
    held: bool = False
    """Whether an injected fault keeps the attempt without an answer (see flows.hold)."""


ANY_ROUTE = Route()
"""The kernel chooses the local address, and packets are not marked."""


class Dial:
    """One attempt to connect to `endpoint`, and to be accepted there, within `timeout_s`."""

    def __init__(
        self,
        endpoint: Endpoint,
        handshake: DialerHandshake,
        poller: Poller,
        on_open: OnGreeted,
        on_fail: OnFailed,
        route: Route = ANY_ROUTE,
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self._endpoint = endpoint
        self._handshake = handshake
        self._poller = poller
        self._on_open = on_open
        self._on_fail = on_fail
        self._timeout_s = timeout_s
        self._greeting: Greeting | None = None
        self._sock: socket.socket | None = close_on_fork(
            socket.socket(address_family(endpoint[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        )
        self._timer: Timer = poller.after(timeout_s, self._time_out)
        # A failure that is known at once is reported from a poll, like all others.
        try:
            mark(self._sock, route.traffic_class)
            if route.held:
                hold(self._sock)
            error = self._connect(self._sock, route.source)
        except OSError as raised:
            error = raised.errno or errno.EIO
        if error:
            poller.soon(lambda: self._fail_by(error))
        else:
            poller.add(self._sock.fileno(), WRITE, self._connected)

    def detach(self) -> socket.socket | None:
        """Give up, without a callback, and return the socket as it is."""
        self._timer.cancel()
        if self._greeting is not None:
            greeting, self._greeting = self._greeting, None
            return greeting.detach()
        sock, self._sock = self._sock, None
        if sock is not None:
            self._poller.remove(sock.fileno())
        return sock

    def cancel(self) -> None:
        """Give up without a callback. Idempotent."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    def _connect(self, sock: socket.socket, source: str | None) -> int:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source is not None:
            sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        error = sock.connect_ex(self._endpoint)
        return 0 if error == errno.EINPROGRESS else error

    def _connected(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _self_connected(sock)
        if error:
            self._fail_by(error)
            return
        self._poller.remove(sock.fileno())
        self._sock = None
        left_s = max(0.0, self._timer.due_s - self._poller.now_s())
        self._timer.cancel()
        self._greeting = Greeting(
            sock, self._handshake, self._poller, self._on_open, self._greeting_failed, left_s
        )

    def _greeting_failed(self, kind: GreetingKind, why: str) -> None:
        self._on_fail(kind, f"{self._where()}: {why}")

    def _time_out(self) -> None:
        self._fail("timeout", f"no answer in {self._timeout_s:g} s")

    def _fail_by(self, code: int) -> None:
        self._fail(kind_of(OSError(code, os.strerror(code))), os.strerror(code))

    def _fail(self, kind: GreetingKind, why: str) -> None:
        if self._sock is not None:
            self.cancel()
            self._on_fail(kind, f"{self._where()}: {why}")

    def _where(self) -> str:
        return f"connecting to {self._endpoint[0]}:{self._endpoint[1]}"


def _self_connected(sock: socket.socket) -> int:
    """An errno if TCP has connected the socket to itself, else 0.

    That can happen when no process listens on an ephemeral port of the socket's own address.
    """
    try:
        return errno.ECONNREFUSED if sock.getsockname() == sock.getpeername() else 0
    except OSError as error:  # the peer is gone again already
        return error.errno or errno.ECONNRESET
