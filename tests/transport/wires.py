"""Servers on loopback for the tests: every NIC has an address of its own, all on one poller."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from bml.transport import DROP, Header, Identity, Kind, LinkSettings, Poller, TcpTransport, Verdict
from bml.transport.interface import LinkKey

TOKEN = b"a token of the tests"
JOB = "job-of-tests"
USUAL: dict[str, Any] = {"token": TOKEN, "job": JOB, "incarnation": 0}
DEADLINE_S = 20.0


def nic(server: int, level: int) -> str:
    return f"127.77.{level}.{server + 1}"


def until(poller: Poller, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail with `what` if it does not in time."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        left_s = end_s - time.monotonic()
        assert left_s > 0, f"waited {deadline_s} s for: {what}"
        poller.poll(min(left_s, 0.05))


def polled(poller: Poller, duration_s: float) -> None:
    """Poll for a while: only to show that nothing happens."""
    end_s = time.monotonic() + duration_s
    while (left_s := end_s - time.monotonic()) > 0:
        poller.poll(left_s)


def over(sock: socket.socket) -> bool:
    """Whether the other side has closed it; what it said is read and thrown away."""
    sock.setblocking(False)
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class Recorder:
    """A handler that receives into `memory` at the header's range, unless told otherwise."""

    def __init__(self, nbytes: int = 0) -> None:
        self.memory = bytearray(nbytes)
        self.verdict: Callable[[Header], memoryview | Verdict] | None = None
        self.on_received: Callable[[int, int, Header], None] | None = None
        self.admitted: list[Header] = []
        self.frames: list[tuple[int, int, Header]] = []
        self.heard_from: list[LinkKey] = []
        self.proofs: list[LinkKey] = []
        self.held_ones: list[LinkKey] = []
        self.losses: list[tuple[int, int, str, str]] = []

    def admit(self, peer: int, level: int, header: Header) -> memoryview | Verdict:
        self.admitted.append(header)
        if self.verdict is not None:
            return self.verdict(header)
        if header.kind == Kind.TOKEN:
            return memoryview(bytearray())
        if header.stop > len(self.memory):
            return DROP
        return memoryview(self.memory)[header.start : header.start + header.nbytes]

    def received(self, peer: int, level: int, header: Header) -> None:
        self.frames.append((peer, level, header))
        if self.on_received is not None:
            self.on_received(peer, level, header)

    def heard(self, peer: int, level: int) -> None:
        self.heard_from.append((peer, level))

    def stood_in(self, peer: int, level: int) -> None:
        self.held_ones.append((peer, level))

    def proved(self, peer: int, level: int) -> None:
        self.proofs.append((peer, level))

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        self.losses.append((peer, level, kind, why))


class Wires:
    """Servers 0 to n - 1, all wired to each other on every level."""

    def __init__(self, servers: int = 2, levels: int = 1, nbytes: int = 0, **options: object) -> None:
        self.poller = Poller()
        self.levels = levels
        self.handlers = [Recorder(nbytes) for _ in range(servers)]
        self.transports = [
            self.make(server, handler, **options) for server, handler in enumerate(self.handlers)
        ]

    def make(self, server: int, handler: Recorder, **options: object) -> TcpTransport:
        identity, nics, settings, rest = self.arguments(server, options)
        return TcpTransport(identity, nics, self.poller, handler, settings, **rest)  # type: ignore[arg-type]

    def arguments(
        self, server: int, options: dict[str, object]
    ) -> tuple[Identity, list[str], LinkSettings, dict[str, object]]:
        """(identity, NICs, settings) of a server that is made with these options, and the others of them."""
        rest: dict[str, Any] = dict(options)
        token, job, incarnation = (rest.pop(key, usual) for key, usual in USUAL.items())
        identity = Identity.of(token, job, server, incarnation)
        own: Any = {key: rest.pop(key) for key in ("connect_s", "max_nbytes", "traffic_class") if key in rest}
        return identity, [nic(server, level) for level in range(self.levels)], LinkSettings(**own), rest

    def wanted(self, server: int) -> dict[LinkKey, tuple[str, int]]:
        return {
            (peer, level): endpoint
            for peer, other in enumerate(self.transports)
            if peer != server
            for level, endpoint in enumerate(other.endpoints)
        }

    def connect(self) -> Wires:
        for server, transport in enumerate(self.transports):
            transport.set_peers(self.wanted(server))
        self.until(self.all_up, "all links up")
        return self

    def all_up(self) -> bool:
        return all(t.is_up(*key) for server, t in enumerate(self.transports) for key in self.wanted(server))

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        until(self.poller, condition, what, deadline_s)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        self.poller.close()

    def __enter__(self) -> Wires:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def header(
    kind: int = Kind.REDUCE, start: int = 0, stop: int = 0, *, step: int = 1, epoch: int = 1
) -> Header:
    nbytes = 0 if kind == Kind.TOKEN else stop - start
    return Header(kind, epoch, step, 0, 1, 7, start, stop, nbytes)


def read_all(sock: socket.socket, poller: Poller, deadline_s: float = DEADLINE_S) -> bytes:
    """Read a raw, non-blocking socket to its end while the poller runs; a reset counts as an end."""
    data = b""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        poller.poll(0.01)
        try:
            chunk = sock.recv(65536)
        except BlockingIOError:
            continue
        except ConnectionError:
            return data
        if not chunk:
            return data
        data += chunk
    raise AssertionError(f"the connection was still open after {deadline_s} s")


def heartbeat(wires: Wires, server: int, peer: int, level: int) -> None:
    """One heartbeat from `server` to `peer`."""
    wires.transports[server].heartbeat(peer, level, wires.transports[peer].endpoints[level])
