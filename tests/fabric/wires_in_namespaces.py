"""Plain sockets in the namespaces of an emulated fabric: they show what a cable carries, without bml."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest

from bml.fabric import EmulatedFabric, namespace

_BLOCK = bytes(1 << 16)


def _socket(network: EmulatedFabric, server: int, kind: socket.SocketKind, address: str) -> socket.socket:
    """Open a socket in a server's namespace, bound to one of its addresses."""

    def open_it() -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.bind((address, 0))
        return sock

    return namespace.inside(network.namespace(server), open_it)


def reaches(network: EmulatedFabric, source: int, target: int, level: int, within_s: float) -> bool:
    """Whether a datagram, of those sent every 10 ms, gets from one NIC to another in time."""
    nics = [network.layout.nics(server)[level] for server in (source, target)]
    sender = _socket(network, source, socket.SOCK_DGRAM, nics[0])
    receiver = _socket(network, target, socket.SOCK_DGRAM, nics[1])
    deadline = time.monotonic() + within_s
    with sender, receiver:
        while time.monotonic() < deadline:
            try:
                sender.sendto(b"ping", receiver.getsockname())
            except OSError:  # its own end is down, as that of a direct cable may be
                time.sleep(0.01)
            if select.select([receiver], [], [], 0.01)[0]:
                return True
    return False


def goodputs(
    network: EmulatedFabric, flows: list[tuple[int, int, int]], seconds: float, classes: Sequence[int] = ()
) -> list[float]:
    """Bits per second of TCP payload that flows (source, target, level) of these classes get, all at once.

    The first fifth of a second, with the burst and the slow start, does not count.
    """
    measured: dict[int, tuple[int, float]] = {}
    ends: list[tuple[socket.socket, socket.socket]] = []
    for (source, target, level), traffic_class in zip_longest(flows, classes, fillvalue=0):
        nics = [network.layout.nics(server)[level] for server in (source, target)]
        listener = _socket(network, target, socket.SOCK_STREAM, nics[1])
        listener.listen()
        sender = _socket(network, source, socket.SOCK_STREAM, nics[0])
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)
        sender.connect(listener.getsockname())
        ends.append((sender, listener.accept()[0]))
        listener.close()
    counts_from, until = time.monotonic() + 0.2, time.monotonic() + 0.2 + seconds

    def send(sock: socket.socket) -> None:
        sock.settimeout(1.0)
        while time.monotonic() < until:
            try:
                sock.send(_BLOCK)
            except TimeoutError:
                return

    def receive(number: int, sock: socket.socket) -> None:
        """Count from one arrival to another, or to the end if there is none: this thread may be late."""
        sock.settimeout(0.2)
        first = last = 0.0
        nbytes = 0
        while last < until and time.monotonic() < until + 1:
            try:
                taken = len(sock.recv(1 << 18))
            except TimeoutError:
                continue
            last = time.monotonic()
            if first:
                nbytes += taken
            elif last >= counts_from:
                first = last
        measured[number] = nbytes, max(last, until) - (first or counts_from)

    threads = [threading.Thread(target=send, args=(sender,)) for sender, _ in ends]
    threads += [threading.Thread(target=receive, args=(i, sock)) for i, (_, sock) in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in ends:
        for sock in pair:
            sock.close()
    return [measured[number][0] * 8 / measured[number][1] for number in range(len(flows))]
