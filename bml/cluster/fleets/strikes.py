"""How servers that the launcher has no socket to ask it to break their cables: over the management network.

A connection for each strike: both ends prove that they have the job's token, then

    server      the fault
    launcher    "struck", when it is done
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from bml.cluster.spec.job import Endpoint
from bml.errors import UsageError
from bml.fabric import namespace
from bml.faults import Fault

_LOG = logging.getLogger("bml.cluster")

_STRUCK = b"struck"
_MOST_NBYTES = 1 << 12
_POLL_S = 0.1
_ASK_S = 5.0

Strike = Callable[[Fault, Callable[[], None]], None]
"""Does a fault to real cables, and calls the function when it is done."""


class StrikeListener:
    """Hears servers at `host` in a network namespace, in a thread of its own, and has it done by `strike`."""

    def __init__(self, space: str, host: str, token: bytes, strike: Strike):
        self._key, self._strike = _key(token), strike
        self._sock = namespace.inside(space, lambda: socket.create_server((host, 0)))
        self._sock.settimeout(_POLL_S)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bml-strikes", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        host, port = self._sock.getsockname()
        return host, port

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._closed.set()
        self._thread.join()
        self._sock.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError:  # nobody called, or has gone again
                continue
            threading.Thread(target=self._serve, args=(sock,), name="bml-strike", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with _patient(sock, _ASK_S) as connection, suppress(OSError, EOFError):
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                fault = Fault.parse(connection.recv_bytes(_MOST_NBYTES).decode(), at_once=True)
            except (AuthenticationError, AssertionError, UsageError, ValueError) as error:
                _LOG.warning("somebody was refused who wanted a cable broken: %s", error)
                return
            struck = threading.Event()
            self._strike(fault, struck.set)
            while not struck.wait(_POLL_S) and not self._closed.is_set():
                pass
            connection.send_bytes(_STRUCK)


def strike_from(endpoint: Endpoint, token: bytes, within_s: float) -> Callable[[Fault], None]:
    """What a server has faults of real cables done with; returns when one is done, or after so long."""

    key = _key(token)

    def strike(fault: Fault) -> None:
        try:
            sock = socket.create_connection(endpoint, timeout=within_s)
            with _patient(sock, within_s) as connection:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                connection.send_bytes(str(fault).encode())
                connection.recv_bytes(_MOST_NBYTES)
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            _LOG.error("%s was not injected, the launcher cannot be reached: %r", fault, error)

    return strike


def _key(token: bytes) -> bytes:
    """A key for this purpose alone: the standard library signs whatever the other side challenges it with."""
    return hmac.digest(token, b"bml strikes", "sha256")


def _patient(sock: socket.socket, read_s: float) -> Connection[Any, Any]:
    """A connection whose reads fail after so long."""
    sock.settimeout(None)
    seconds, rest = divmod(read_s, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    return Connection(sock.detach())
