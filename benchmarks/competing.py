"""Other traffic on a NIC of an emulated fabric: plain TCP flows, from and to its neighbours."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice

from bml.fabric import EmulatedFabric, namespace
from bml.topology import Link

_BLOCK = bytes(1 << 16)


@contextmanager
def flows(network: EmulatedFabric, nic: Link, n_flows: int = 2) -> Iterator[None]:
    """Keep so many flows busy each way, as many as a job has: that is half of the NIC's rate."""
    peers = islice(cycle(network.fabric.neighbours(*nic)), n_flows)
    ends = [pair for peer in peers for pair in ((nic[0], peer), (peer, nic[0]))]
    running = [
        multiprocessing.Process(target=_flow, args=(network, *pair, nic[1]), daemon=True) for pair in ends
    ]
    for each in running:
        each.start()
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.join()


def _flow(network: EmulatedFabric, source: int, target: int, level: int) -> None:
    """Send as fast as the path takes it; one process is both ends."""
    listener = _socket(network, target, level)
    listener.listen()
    sender = _socket(network, source, level)
    sender.connect(listener.getsockname())
    receiver, _ = listener.accept()
    sender.setblocking(False)
    while True:
        try:
            sender.send(_BLOCK)
        except BlockingIOError:
            receiver.recv(1 << 20)


def _socket(network: EmulatedFabric, server: int, level: int) -> socket.socket:
    """Open a TCP socket in a server's namespace, bound to one of its NICs."""

    def open_it() -> socket.socket:
        sock = socket.socket()
        sock.bind((network.layout.nics(server)[level], 0))
        return sock

    return namespace.inside(network.namespace(server), open_it)
