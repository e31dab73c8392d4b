"""An attacker without the token: it sits at an address and relays, byte by byte, to another server's port."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

Endpoint = tuple[str, int]

_POLL_S = 0.02
_FREE_S = 75.0
"""How long the port of a dead server may be in use: its connections stay in TIME_WAIT for 60 s, if there was
nothing in them that it had not read."""


class Relayed(NamedTuple):
    """One incoming connection: the bytes of the dialer, and those of the relayed server."""

    said: bytes
    answered: bytes


class Relay:
    """Listens at `seat`, and relays every dialer to `victim`; `injected` follows once both have sent.

    `relayed` has the connections, when the victim has hung up or `injected` was sent; `came` counts dialers.
    """

    def __init__(self, seat: Endpoint, victim: Endpoint, injected: bytes):
        self.relayed: list[Relayed] = []
        self.came = 0
        self.moved = threading.Condition()
        self._victim = victim
        self._injected = injected
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._listener = _listen(seat)
        self._listener.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _run(self) -> None:
        while not self._closed:
            with suppress(TimeoutError):
                dialer, _ = self._listener.accept()
                self._sockets.append(dialer)
                with self.moved:
                    self.came += 1
                    self.moved.notify_all()
                passed = self._relay(dialer)
                with self.moved:
                    self.relayed.append(passed)
                    self.moved.notify_all()

    def _relay(self, dialer: socket.socket) -> Relayed:
        """Pass bytes on until the victim answers the dialer's words; then speak in the dialer's place."""
        victim = socket.create_connection(self._victim)
        self._sockets.append(victim)
        passed = {dialer: b"", victim: b""}
        with selectors.DefaultSelector() as selector, suppress(ConnectionError):
            for sock, other in ((dialer, victim), (victim, dialer)):
                selector.register(sock, selectors.EVENT_READ, other)
            while not self._closed:
                for key, _ in selector.select(_POLL_S):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    data = sock.recv(4096)
                    answers = sock is victim and passed[dialer]
                    passed[sock] += data
                    if answers and data:
                        victim.sendall(self._injected)
                    if answers or not data:
                        # The dialer is not told: it would notice that another process answers.
                        return Relayed(passed[dialer], passed[victim])
                    key.data.sendall(data)
        return Relayed(passed[dialer], passed[victim])


def _listen(seat: Endpoint) -> socket.socket:
    deadline = time.monotonic() + _FREE_S
    while True:
        try:
            return socket.create_server(seat)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)
