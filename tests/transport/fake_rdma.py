"""RDMA NICs for the tests, all on one wire in this process: real memory, real descriptors, no device.

Writes arrive at once and in order, or are kept back while `wire.held` is True. The rules that a real NIC
enforces, and some that it does not, are asserted: a posted receive for every immediate write, keys and
bounds, no more work requests than the queue takes, nothing left open.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections import deque
from collections.abc import Sequence

from wires import Recorder, Wires

from bml.io.memory import Registration
from bml.transport.verbs.rdma import Address, Completion, Depth, QueuePair, Reliability, Write
from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.transport import VerbsTransport


class FakeWire:
    def __init__(self) -> None:
        self.held = False
        self.pairs: dict[int, FakePair] = {}
        self.regions: dict[int, tuple[int, int]] = {}
        self.open = 0
        self.writes: list[tuple[int, int | None]] = []  # (nbytes, imm)
        self.reliability: list[Reliability] = []
        self.broken_nic = ""
        self._numbers = itertools.count(100)
        self._kept: deque[tuple[FakePair, tuple[object, ...]]] = deque()

    def number(self) -> int:
        return next(self._numbers)

    def send(self, pair: FakePair, *write: object) -> None:
        self._kept.append((pair, write))
        if not self.held:
            self.flow()

    def flow(self, most: int = 1 << 30) -> None:
        for _ in range(min(most, len(self._kept))):
            pair, write = self._kept.popleft()
            if pair.number in self.pairs:
                pair.carry_out(*write)  # type: ignore[arg-type]

    @property
    def kept(self) -> int:
        return len(self._kept)


class FakeRegion:
    def __init__(self, wire: FakeWire, address: int, nbytes: int) -> None:
        self.wire = wire
        self.lkey = self.rkey = wire.number()
        wire.regions[self.rkey] = (address, nbytes)
        wire.open += 1

    def close(self) -> None:
        del self.wire.regions[self.rkey]
        self.wire.open -= 1

    def __repr__(self) -> str:
        return f"region {self.rkey}"


class FakePair:
    def __init__(self, wire: FakeWire, depth: Depth) -> None:
        self.wire = wire
        self.depth = depth
        self.number = wire.number()
        self.address = Address(self.number, 7, "::ffff:10.0.0.1", 5)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.remote: FakePair | None = None
        self.receives = 0
        self.unfinished: deque[tuple[int, bool]] = deque()
        self.completions: deque[Completion] = deque()
        self.armed = False
        self.is_open = True
        wire.pairs[self.number] = self
        wire.open += 1

    def connect(self, remote: Address) -> None:
        assert self.receives, "receives are posted before the peer may write"
        self.remote = self.wire.pairs.get(remote.number)

    def post_receives(self, count: int) -> None:
        self.receives += count
        assert self.receives + len(self.completions) <= self.depth.receives + self.depth.sends
        assert self.receives <= self.depth.receives

    def post(self, writes: Sequence[Write]) -> None:
        assert self.is_open
        for write in writes:
            self.unfinished.append((write.wr_id, write.signaled))
            assert len(self.unfinished) <= self.depth.sends
            self.wire.send(self, *write)

    def carry_out(
        self,
        wr_id: int,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        imm: int | None,
        signaled: bool,
    ) -> None:
        lkey, source, nbytes = local
        rkey, target = remote
        peer = self.remote
        if peer is None or not peer.is_open:
            return  # no acknowledgement will come
        if nbytes:
            assert _within(self.wire.regions[lkey], source, nbytes)
            if rkey not in self.wire.regions or not _within(self.wire.regions[rkey], target, nbytes):
                self.complete(Completion(wr_id, 10, 0))
                return
            ctypes.memmove(target, source, nbytes)
        self.wire.writes.append((nbytes, imm))
        if imm is not None:
            assert peer.receives > 0, "an immediate write came and no receive was posted"
            peer.receives -= 1
            peer.complete(Completion(0, 0, imm))
        while self.unfinished and self.unfinished[0][0] <= wr_id:
            self.unfinished.popleft()
        if signaled:
            self.complete(Completion(wr_id, 0, 0))

    def complete(self, completion: Completion) -> None:
        self.completions.append(completion)
        if self.armed:
            self.armed = False
            os.eventfd_write(self.fd, 1)

    def arm(self, has_event: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self.armed = True

    def poll(self, most: int) -> list[Completion]:
        return [self.completions.popleft() for _ in range(min(most, len(self.completions)))]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            del self.wire.pairs[self.number]
            os.close(self.fd)
            self.wire.open -= 1


def _within(region: tuple[int, int], start: int, nbytes: int) -> bool:
    return region[0] <= start and start + nbytes <= region[0] + region[1]


class FakeNic:
    def __init__(self, wire: FakeWire, name: str) -> None:
        self.wire = wire
        self.name = name
        self.description = f"fake {name}"
        self.pairs: list[FakePair] = []
        wire.open += 1

    def register(self, address: int, nbytes: int) -> Registration:
        return FakeRegion(self.wire, address, nbytes)

    def queue_pair(self, depth: Depth, reliability: Reliability) -> QueuePair:
        if self.wire.broken_nic:
            raise OSError(12, self.wire.broken_nic)
        self.wire.reliability.append(reliability)
        self.pairs.append(FakePair(self.wire, depth))
        return self.pairs[-1]

    def trouble(self) -> str:
        return self.wire.broken_nic

    def close(self) -> None:
        self.wire.open -= 1


SETTINGS = VerbsSettings(slots=16, slot_nbytes=512, window_nbytes=64 << 10, pool_nbytes=4 << 20)


class VerbsWires(Wires):
    """Servers with RDMA NICs; the memory that handlers receive into is their pool's if `pooled`."""

    def __init__(
        self, servers: int = 2, levels: int = 1, nbytes: int = 0, pooled: bool = True, **options: object
    ) -> None:
        self.wire = FakeWire()
        super().__init__(servers, levels, nbytes, **options)
        if pooled and nbytes:
            for handler, transport in zip(self.handlers, self.transports, strict=True):
                handler.memory = transport.pool.empty(nbytes, "uint8").data  # type: ignore[attr-defined]
                handler.memory[:] = bytes(nbytes)

    def make(self, server: int, handler: Recorder, **options: object) -> VerbsTransport:  # type: ignore[override]
        identity, nics, settings, rest = self.arguments(server, {"verbs": SETTINGS, **options})
        return VerbsTransport(
            identity,
            nics,
            self.poller,
            handler,
            settings,
            open_nic=lambda address, setting: FakeNic(self.wire, address),
            **rest,  # type: ignore[arg-type]
        )

    def pooled(self, server: int, data: bytes) -> memoryview:
        """These bytes in the memory of the server's pool."""
        array = self.transports[server].pool.empty(len(data), "uint8")  # type: ignore[attr-defined]
        array.data[:] = data
        return array.data  # type: ignore[no-any-return]

    def pair(self, server: int, peer: int) -> FakePair:
        connection = self.transports[server]._links[peer, 0].connection
        return connection._pair  # type: ignore[union-attr,return-value]
