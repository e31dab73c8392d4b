"""What this package needs of RDMA, and no more: the contract between `connection` and `driver`.

Tests put a NIC of their own behind it. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bml.io.memory import RegisteredPool, Registration

SUCCESS = 0
FLUSHED = 5
RETRIES_EXCEEDED = 12
RNR_RETRIES_EXCEEDED = 13

STATUS_TEXT = {
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    5: "flushed: the queue pair is in the error state",
    8: "local access error",
    9: "the peer's NIC refuses the request as invalid",
    10: "the peer's NIC refuses access to its memory",
    11: "the peer's NIC could not carry out the request",
    12: "no acknowledgement after all retries",
    13: "the peer had no receive posted after all retries",
    21: "fatal error of the NIC",
}


class Address(NamedTuple):
    """One end of a queue pair, as the other end needs to know it."""

    number: int
    psn: int
    gid: str
    mtu: int
    """As the code of ibv_mtu: 1 = 256 bytes ... 5 = 4096."""


class NicMemory(NamedTuple):
    """Registered memory as one NIC knows it: `nic_number` is the NIC's place in a region's registrations."""

    pool: RegisteredPool
    nic_number: int


class Depth(NamedTuple):
    """How many work requests a queue pair takes."""

    sends: int
    receives: int


class Reliability(NamedTuple):
    """How a queue pair treats silence, and how its packets are marked."""

    timeout: int
    retries: int
    traffic_class: int


class Completion(NamedTuple):
    """A work request that ended. `imm` is valid for successful receives."""

    wr_id: int
    status: int
    imm: int


class Write(NamedTuple):
    """A work request: write (lkey, address, nbytes) to (rkey, address).

    With immediate data the peer is told when this write and all before it are in its memory. A completion
    comes of those that are `signaled`, and of failures.
    """

    wr_id: int
    local: tuple[int, int, int]
    remote: tuple[int, int]
    imm: int | None
    signaled: bool


class QueuePair(Protocol):
    """A reliable connection to one peer, with a completion queue and a channel of its own."""

    fd: int
    """Readable when completions came after `arm`."""
    address: Address

    def connect(self, remote: Address) -> None:
        """Make it ready to receive and to send; raises OSError."""
        ...

    def post_receives(self, count: int) -> None:
        """Be ready for `count` more immediate writes; their completions have wr_id 0."""
        ...

    def post(self, writes: Sequence[Write]) -> None:
        """Carry out these writes in their order; raises OSError."""
        ...

    def arm(self, has_event: bool) -> None:
        """Ask for the next event, after taking the one that made `fd` readable; raises OSError."""
        ...

    def poll(self, most: int) -> list[Completion]:
        """Completions that are there, at most so many."""
        ...

    def close(self) -> None:
        """Destroy it: afterwards the NIC neither reads nor writes memory for it. Idempotent."""
        ...


class Nic(Protocol):
    """An opened RDMA device."""

    name: str
    description: str
    """Device, port and GID, for people."""

    def register(self, address: int, nbytes: int) -> Registration:
        """Let the NIC read and write this memory, and peers write it; raises OSError."""
        ...

    def queue_pair(self, depth: Depth, reliability: Reliability) -> QueuePair:
        """A new queue pair; raises OSError."""
        ...

    def trouble(self) -> str:
        """What is wrong with the port now, in words; empty if nothing is."""
        ...

    def close(self) -> None:
        """Close it; queue pairs and registrations must be gone. Idempotent."""
        ...
