"""The contract of an RDMA NIC: the part of RDMA that `connection` uses and `driver` implements.

Tests implement it with a NIC in memory. No call blocks.
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
    """The code of ibv_mtu: 1 = 256 bytes ... 5 = 4096 bytes."""


class NicMemory(NamedTuple):
    """Registered memory as one NIC knows it: `nic_number` is the NIC's place in a region's registrations."""

    pool: RegisteredPool
    nic_number: int


class Depth(NamedTuple):
    """The number of work requests that a queue pair takes."""

    sends: int
    receives: int


class Reliability(NamedTuple):
    """Retransmission of a queue pair, and the mark of its packets.

    `timeout` is an exponent, 4.096 us x 2^timeout; `retries` are time-outs in a row; `traffic_class` is a
    byte.
    """

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

    With immediate data the peer gets a completion when this write and all before it are in its memory. This
    server gets a completion for requests that are `signaled`, and for failures.
    """

    wr_id: int
    local: tuple[int, int, int]
    remote: tuple[int, int]
    imm: int | None
    signaled: bool


class QueuePair(Protocol):
    """A reliable connection to one peer, with a completion queue and a channel of its own."""

    fd: int
    """A descriptor that is readable when completions came after `arm`."""
    address: Address

    def connect(self, remote: Address) -> None:
        """Make it ready to receive and to send; raises OSError."""
        ...

    def post_receives(self, count: int) -> None:
        """Post `count` receives, one per immediate write; completions have wr_id 0. Raises OSError."""
        ...

    def post(self, writes: Sequence[Write]) -> None:
        """Post these writes, which are carried out in order; raises OSError."""
        ...

    def arm(self, has_event: bool) -> None:
        """Ask for the next event, after taking the one that made `fd` readable; raises OSError."""
        ...

    def poll(self, most: int) -> list[Completion]:
        """Return the completions that have come, at most `most`; raises OSError."""
        ...

    def close(self) -> None:
        """Destroy it: afterwards the NIC neither reads nor writes memory for it. Idempotent."""
        ...


class Nic(Protocol):
    """An opened RDMA device."""

    name: str
    description: str
    """Device, port and GID, as a text."""

    def register(self, address: int, nbytes: int) -> Registration:
        """Let the NIC read and write this memory, and peers write it; raises OSError."""
        ...

    def queue_pair(self, depth: Depth, reliability: Reliability) -> QueuePair:
        """A new queue pair; raises OSError."""
        ...

    def trouble(self) -> str:
        """A text that says what is wrong with the port now; empty if nothing is."""
        ...

    def close(self) -> None:
        """Close the device; its queue pairs and registrations must be closed before. Idempotent."""
        ...
