"""Faults of real cables and machines, for servers that share no socket with the launcher.

Such a server, a Ray actor on an emulated fabric, asks the launcher over the management network to apply a
fault. It opens a connection for each fault. Both ends prove that they have the job's token; then

    server      sends the fault as text
    launcher    sends "applied" when the fault is in force, or could not be applied
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

from bml.cluster.fleets.fleet import ApplyFault
from bml.cluster.spec.job import Endpoint
from bml.errors import UsageError
from bml.fabric import namespace
from bml.faults import Fault
from bml.io.interruptible import Event

_LOG = logging.getLogger(__name__)

_APPLIED = b"applied"
_MOST_NBYTES = 1 << 12
_POLL_S = 0.1  # how often it looks whether it was closed
_ASK_S = 5.0  # how long who asks may take to say what for


class FaultListener:
    """Listens at `host` in a network namespace and calls `apply_fault` for each fault."""

    def __init__(self, space: str, host: str, token: bytes, apply_fault: ApplyFault):
        self._key, self._apply_fault = _key(token), apply_fault
        self._sock = namespace.inside(space, lambda: socket.create_server((host, 0)))
        self._sock.settimeout(_POLL_S)
        self._closed = Event()
        self._thread = threading.Thread(target=self._run, name="bml-actuators", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        """Address and port where it listens."""
        host, port = self._sock.getsockname()
        return host, port

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._closed.set()
        self._thread.join()
        self._sock.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError:  # no call in time, or the caller has already gone
                continue
            threading.Thread(target=self._serve, args=(sock,), name="bml-actuator", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with _patient(sock, _ASK_S) as connection, suppress(OSError, EOFError):
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                fault = Fault.parse(connection.recv_bytes(_MOST_NBYTES).decode(), at_once=True)
            except (AuthenticationError, AssertionError, UsageError, ValueError) as error:
                _LOG.warning("refused a connection that asked for a fault: %s", error)
                return
            applied = Event()
            self._apply_fault(fault, applied.set)
            while not applied.wait(_POLL_S) and not self._closed.is_set():
                pass
            connection.send_bytes(_APPLIED)


def apply_fault_through(endpoint: Endpoint, token: bytes, within_s: float) -> Callable[[Fault], None]:
    """Return the function with which a server asks for a fault at `endpoint`.

    That function returns when the fault is in force, or after `within_s` seconds."""

    key = _key(token)

    def apply_fault(fault: Fault) -> None:
        try:
            sock = socket.create_connection(endpoint, timeout=within_s)
            with _patient(sock, within_s) as connection:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                connection.send_bytes(str(fault).encode())
                connection.recv_bytes(_MOST_NBYTES)
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            _LOG.error("%s was not injected, the launcher cannot be reached: %r", fault, error)

    return apply_fault


def _key(token: bytes) -> bytes:
    """Derive a key for this purpose only, as the standard library signs any challenge of the other end."""
    return hmac.digest(token, b"bml actuators", "sha256")


def _patient(sock: socket.socket, read_s: float) -> Connection[Any, Any]:
    """Return a connection whose reads fail after `read_s` seconds."""
    sock.settimeout(None)
    seconds, rest = divmod(read_s, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    return Connection(sock.detach())
