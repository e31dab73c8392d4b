"""The contract between a `Transport` (tcp, shm or verbs) and its `Handler`, the server that uses it.

One thread owns a transport, its poller and its handler. A transport calls its handler only from inside
`Poller.poll`, never from inside `send`, `set_peers`, `fence`, `resume` or `heartbeat`; the handler may call
any of those, and `close`, from inside its own methods.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

from bml.faults.stalls import Flow
from bml.protocol.wire.frame import Header

Endpoint = tuple[str, int]
"""(host, port) at which a NIC listens: TCP for connections, and UDP of the same number for heartbeats."""
LinkKey = tuple[int, int]
"""(peer, level): the connection to server `peer` over this server's NIC of that level."""
FIRST_INCARNATIONS: Final[Mapping[int, int]] = MappingProxyType({})
"""Peer -> its incarnation, for the peers that are not in their first: none."""
LostKind = Literal["reset", "eof", "refused", "timeout", "malformed"]
"""The ways to lose a connection. `reset` and `refused`: the machine lives, but without the process;
`timeout`: nothing came back, or the path is gone; `malformed`: the bytes were not frames."""


class Verdict(enum.Enum):
    """The treatment of a frame for which the handler has no buffer."""

    DROP = "drop"
    WAIT = "wait"


DROP: Final = Verdict.DROP
"""Read the payload and discard it; `received` is not called."""
WAIT: Final = Verdict.WAIT
"""Stop reading this connection; ask `admit` again with the same header after `resume()`."""


class LinkStats(NamedTuple):
    """Counters of one (peer, level) since the transport was made; bytes include headers."""

    frames_sent: int
    nbytes_sent: int
    frames_received: int
    nbytes_received: int
    frames_queued: int
    nbytes_queued: int
    nbytes_copied_sent: int = 0
    """Bytes of payload that this process copied before it sent them."""
    nbytes_copied_received: int = 0
    nbytes_zero_copy_sent: int = 0
    """Bytes of payload that the peer reads in this server's memory; they are not in nbytes_sent."""
    nbytes_zero_copy_received: int = 0
    """Bytes of payload that were read in the peer's memory; they are not in nbytes_received."""


class LinkVitals(NamedTuple):
    """What one connection and its heartbeats say of its health, since the transport was made.

    `segments`: sent with data, `resent`: of those again, as they were lost. `late_s`: the longest time
    between two heartbeats since it was asked for last, or since the last one; None before there are two.
    """

    segments: int
    resent: int
    late_s: float | None


class Handler(Protocol):
    """The server, as a transport sees it: it says where payloads go, and hears what happens to peers."""

    def admit(self, peer: int, level: int, header: Header) -> memoryview | Verdict:
        """Return where the payload of this frame goes.

        That is a writable contiguous view of exactly `header.nbytes` bytes (an empty one if 0), or `DROP`, or
        `WAIT`. The transport may write to the view until `received`, `lost`, or `fence()`.
        """
        ...

    def received(self, peer: int, level: int, header: Header) -> None:
        """Take in a frame whose payload is complete, in the view that `admit` returned."""
        ...

    def heard(self, peer: int, level: int) -> None:
        """Note a sign of life: a valid heartbeat, or bytes on the connection (at most once a pass each)."""
        ...

    def stood_in(self, peer: int, level: int) -> None:
        """Note that a heartbeat is of the peer's stand-in: the peer lives, and its loop does not turn."""
        ...

    def lost(self, peer: int, level: int, kind: LostKind, why: str) -> None:
        """Note that a wanted connection is gone, once per connection; `set_peers` opens it again."""
        ...

    def proved(self, peer: int, level: int) -> None:
        """Note that all bytes of this link's probe came back, see `Transport.probe`."""
        ...


class Transport(Protocol):
    """Moves frames between this server and its neighbours, one connection per (peer, level)."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where this server listens, one endpoint per level."""
        ...

    def set_peers(
        self, wanted: Mapping[LinkKey, Endpoint], incarnations: Mapping[int, int] = FIRST_INCARNATIONS
    ) -> None:
        """Set which links are wanted from now on, and where the other side of each listens.

        `incarnations` (peer -> number) has those peers that joined the job: a connection of such a peer in
        another incarnation is not theirs, nor is a heartbeat from elsewhere.

        Missing links are opened, lost ones opened again, those no longer wanted are closed without
        `lost`; links that are up, or being opened, to the same endpoint stay as they are. Raises UsageError
        for a level that does not exist, or an address that cannot be used.
        """
        ...

    def send(
        self, peer: int, level: int, header: Header, payload: memoryview | None, priority: int = 0
    ) -> None:
        """Queue one frame; frames of lower `priority` go first, equal ones in order.

        The payload is not copied: it must not change until it has been sent, or until `fence()`. Frames for a
        link that is not up yet wait for it; frames for a link whose loss was reported are dropped.
        Raises InvariantError if the link is not wanted or the payload is not `header.nbytes` long.
        """
        ...

    def fence(self) -> None:
        """End an epoch: afterwards no buffer of `send` or `admit` is read or written any more.

        Queued frames are dropped, one that is partly sent is finished from a private copy, one that is
        partly received is discarded (`received` is not called). Connections stay up.
        """
        ...

    def resume(self) -> None:
        """Ask `admit` again, in the next poll, for every frame that was told to wait."""
        ...

    def beside_computation(self, beside: bool) -> None:
        """Set whether, from now on, this process computes while steps go on; at first it does not."""
        ...

    def heartbeat(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """Send one heartbeat over this NIC to a peer, wanted or not. It may get lost; nothing is raised.

        It counts for this `incarnation` of the peer only.
        """
        ...

    def probe(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """Send some bytes to this peer and back, over a connection of their own, then call `proved`.

        No call tells of a failure; the next probe of the same link takes its place.
        """
        ...

    def flows(self) -> dict[LinkKey, Flow]:
        """The kernel's counters of every connection that is up."""
        ...

    def vitals(self) -> dict[LinkKey, LinkVitals]:
        """What every connection that is up says of its health; a maximum is that since the last call."""
        ...

    def is_up(self, peer: int, level: int) -> bool:
        """Whether the connection is open and authenticated."""
        ...

    @property
    def queued_nbytes(self) -> int:
        """Bytes given to `send` that the kernel does not have yet, over all links."""
        ...

    def stats(self) -> dict[LinkKey, LinkStats]:
        """Counters of every link that was ever wanted."""
        ...

    def silence(self, level: int) -> None:
        """Inject a fault: from now on this NIC neither sends nor receives anything; no peer is told."""
        ...

    def unsilence(self, level: int) -> None:
        """End the fault of `silence`."""
        ...

    def stand_still(self, level: int) -> None:
        """Inject a fault: this NIC neither sends nor receives until `go_on`; nothing is lost."""
        ...

    def go_on(self, level: int) -> None:
        """End the fault of `stand_still`: what waited moves now."""
        ...

    def pace(self, peer: int, level: int, nbytes_s: int) -> Callable[[], None]:
        """Inject a fault: connections to this peer send that many bytes a second; returns what ends it.

        The slowest of several counts. It has no effect on RDMA.
        """
        ...

    def stall(self, peer: int, level: int) -> None:
        """Inject a fault: from now on no connection to this peer carries anything; heartbeats pass."""
        ...

    def unstall(self, peer: int, level: int) -> None:
        """End the fault of `stall`."""
        ...

    def close(self) -> None:
        """Close everything; may be called again. The poller stays open."""
        ...
