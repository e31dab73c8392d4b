"""A process of the calibration: `python -m bml.lab.bench.probe PATH INDEX`.

Probe 0 asks others for bytes and measures the time. The others answer with frames of the tcp transport, over
one NIC each, cut into slices like those of a step. Probe 0 also times additions as they are in a step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from bml.cluster.spec.job import default_nics
from bml.io.poller import READ, Poller
from bml.lab.bench.host import Orders
from bml.protocol.step.dataflow import Buffer, Place, Reduce
from bml.protocol.step.workspace import Workspace
from bml.protocol.wire.frame import Header, Kind
from bml.transport import Identity
from bml.transport import interface as wire
from bml.transport.tcp.transport import TcpTransport

SLICE_NBYTES = 256 << 10
MAX_NBYTES = 16 << 20
_EMPTY = memoryview(bytearray())
_CONNECT_S = 10.0
_PULL_S = 10.0


class Probe:
    """The handler of a transport: it sends the bytes that it is asked for, and counts received ones."""

    def __init__(self, path: str, index: int):
        self._index = index
        self._poller = Poller()
        self._orders = Orders(path, index)
        order = self._orders.next()
        assert order is not None
        identity = Identity.of(bytes.fromhex(order["token"]), "bml-calibration", index)
        self._transport = TcpTransport(identity, default_nics(index, 1), self._poller, self)
        self._memory = memoryview(bytearray(MAX_NBYTES))
        self._missing = 0
        self._orders.answer(endpoint=self._transport.endpoints[0])

    def run(self) -> None:
        """Serve until the host hangs up."""
        order = self._orders.next()
        if order is None:
            return
        peers = [0] if self._index else list(range(1, len(order["endpoints"])))
        self._transport.set_peers({(peer, 0): tuple(order["endpoints"][peer]) for peer in peers})
        self._poll_until(lambda: all(self._transport.is_up(peer, 0) for peer in peers), _CONNECT_S)
        self._orders.answer(up=True)
        if self._index:
            self._poller.add(self._orders.fileno(), READ, self._hung_up)
            while not self._poller.closed:
                self._poller.poll()
        else:
            self._measure()
        self._transport.close()

    def _measure(self) -> None:
        while order := self._orders.next():
            if order["do"] == "pull":
                took = [self._pull(order["senders"], order["nbytes"]) for _ in range(order["times"])]
            else:
                took = _additions(order["partials"], order["nbytes"], order["times"])
            self._orders.answer(seconds=took)

    def _pull(self, senders: int, nbytes: int) -> float:
        self._missing = senders * nbytes
        start_s = time.perf_counter()
        for peer in range(1, senders + 1):
            self._transport.send(peer, 0, self._header(Kind.TOKEN, peer, nbytes, 0), None)
        self._poll_until(lambda: self._missing == 0, _PULL_S)
        return time.perf_counter() - start_s

    def _poll_until(self, done: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self._poller.poll(1.0)
            if time.monotonic() > deadline:
                raise TimeoutError(f"probe {self._index}: nothing came for {timeout_s:g} s")

    def _header(self, kind: Kind, peer: int, start: int, nbytes: int) -> Header:
        stop = start + nbytes if kind == Kind.REDUCE else 0
        return Header(kind, 1, 1, self._index, peer, 0, start, stop, nbytes)

    def _hung_up(self, events: int) -> None:
        self._poller.close()

    # --- the transport's handler -----------------------------------------------------------------

    def admit(self, peer: int, level: int, header: Header) -> memoryview | wire.Verdict:
        """See bml.transport.interface.Handler."""
        return _EMPTY if header.kind == Kind.TOKEN else self._memory[header.start : header.stop]

    def received(self, peer: int, level: int, header: Header) -> None:
        """See bml.transport.interface.Handler."""
        if header.kind == Kind.REDUCE:
            self._missing -= header.nbytes
            return
        for start in range(0, header.start, SLICE_NBYTES):
            size = min(SLICE_NBYTES, header.start - start)
            payload = self._memory[start : start + size]
            self._transport.send(peer, 0, self._header(Kind.REDUCE, peer, start, size), payload)

    def heard(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""

    def stood_in(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""

    def proved(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""

    def lost(self, peer: int, level: int, kind: wire.LostKind, why: str) -> None:
        """See bml.transport.interface.Handler: the host has hung up on that probe."""
        self._poller.close()


def _additions(partials: int, nbytes: int, times: int) -> list[float]:
    """Sum partials and an own vector, slice by slice, as a step does; without partials, copy it."""
    size, per_slice = nbytes // 4, SLICE_NBYTES // 4
    workspace = Workspace(np.ones(size, np.float32), partials * size, "sum")
    if partials:  # pages that were never written share one page of zeros
        np.frombuffer(workspace.view(Place(Buffer.SCRATCH, 0), partials * size), np.float32)[:] = 1
    slices = [
        Reduce(start, min(start + per_slice, size), _terms(start, partials, size))
        for start in range(0, size, per_slice)
    ]
    took = []
    for _ in range(times + 1):
        start_s = time.perf_counter()
        for each in slices:
            workspace.reduce(each)
        took.append(time.perf_counter() - start_s)
    return took[1:]  # the first one also allocated the pages of the result


def _terms(start: int, partials: int, size: int) -> tuple[Place, ...]:
    others = (Place(Buffer.SCRATCH, number * size + start) for number in range(partials))
    return (Place(Buffer.IN, start), *others)


if __name__ == "__main__":
    Probe(sys.argv[1], int(sys.argv[2])).run()
