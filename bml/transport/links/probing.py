"""Probes: a link is used again only after its path has carried data there and back.

A probe is a connection of its own, bound to the NIC and authenticated like all others. It carries some bytes,
and the other side sends them back. They fill several packets of the largest size, so that a path that drops
large packets fails, too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

from bml.io.poller import Poller
from bml.io.sendqueue import Counters, SendQueue
from bml.transport.handshake.auth import Hello
from bml.transport.handshake.greeting import HANDSHAKE_S, Dial, GreetingKind, OnFailed, OnGreeted
from bml.transport.interface import LinkKey, LostKind
from bml.transport.stream import Stream

PROBE_NBYTES = 256 << 10
"""The bytes of a probe. The largest packet, on a loopback interface, has 64 KiB."""
_READ_NBYTES = 64 << 10

StartDial = Callable[[OnGreeted, OnFailed], Dial | None]
"""Starts to connect; returns None if nothing can be sent now."""


class _ProbeStream(Stream):
    """One end of a probe: calls `on_whole` when all bytes have come. `echoes`: it sends them back."""

    def __init__(self, sock: socket.socket, poller: Poller, echoes: bool, on_whole: Callable[[], None]):
        super().__init__(sock, poller, SendQueue(Counters()), self._over)
        self._echoes = echoes
        self._on_whole = on_whole
        self._missing = PROBE_NBYTES
        if not echoes:
            self.queue.push(0, bytes(PROBE_NBYTES), None)
        self.start()

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(min(_READ_NBYTES, max(1, self._missing)))
        except BlockingIOError:
            return
        except OSError as error:
            self._end_by(error)
            return
        if not data or not self._missing:
            self._end_of_file()
            return
        self._missing -= len(data)
        if self._echoes:
            self.queue.push(0, data, None)
            self.flush_soon()
        if not self._missing:
            self._on_whole()

    def _over(self, kind: LostKind, why: str) -> None:
        """A failed probe is not reported: the caller waits for a success only so long."""


class Probes:
    """The probes of one server, at most two per link: one that it makes, one that it answers.

    `on_proved(peer, level)` is called when all bytes of a probe came back.
    """

    def __init__(self, poller: Poller, on_proved: Callable[[int, int], None]) -> None:
        self._poller = poller
        self._on_proved = on_proved
        self._made: dict[LinkKey, Dial | _ProbeStream] = {}
        self._answered: dict[LinkKey, Dial | _ProbeStream] = {}

    def start(self, key: LinkKey, dial: StartDial) -> None:
        """Make a probe over this link; it replaces the one before."""
        _close(self._made, [key])

        def opened(sock: socket.socket, hello: Hello) -> None:
            self._made[key] = _ProbeStream(sock, self._poller, echoes=False, on_whole=whole)

        def failed(kind: GreetingKind, why: str) -> None:
            self._made.pop(key, None)

        def whole() -> None:
            _close(self._made, [key])
            self._on_proved(*key)

        started = dial(opened, failed)
        if started is not None:
            self._made[key] = started

    def answer(self, key: LinkKey, sock: socket.socket) -> None:
        """Answer a probe: send back the bytes that come over this socket."""
        _close(self._answered, [key])
        answered = _ProbeStream(sock, self._poller, echoes=True, on_whole=lambda: None)
        self._answered[key] = answered

        def end() -> None:
            if self._answered.get(key) is answered:
                _close(self._answered, [key])

        self._poller.after(HANDSHAKE_S, end)

    def abandon(self, level: int) -> list[socket.socket]:
        """End the probes over the NIC of this level; returns their sockets, to be closed later."""
        return [
            *_detach(self._made, [key for key in self._made if key[1] == level]),
            *_detach(self._answered, [key for key in self._answered if key[1] == level]),
        ]

    def close(self) -> None:
        """End all probes."""
        _close(self._made, list(self._made))
        _close(self._answered, list(self._answered))


def _detach(probes: dict[LinkKey, Dial | _ProbeStream], keys: Iterable[LinkKey]) -> list[socket.socket]:
    ended = (probes.pop(key, None) for key in keys)
    sockets = [probe.detach() for probe in ended if probe is not None]
    return [sock for sock in sockets if sock is not None]


def _close(probes: dict[LinkKey, Dial | _ProbeStream], keys: Iterable[LinkKey]) -> None:
    for sock in _detach(probes, keys):
        sock.close()
