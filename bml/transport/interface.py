"""What every transport does for a server, and what it asks of it: the contract of tcp, shm and verbs.

One thread owns a transport, its poller and its handler. A transport calls its handler only from inside
`Poller.poll`, never from inside `send`, `set_peers`, `fence`, `resume` or `heartbeat`; the handler may call
any of those, and `close`, from inside its own methods.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
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
"""How a connection was lost: `reset` and `refused` come from a living machine without the process;
`timeout` says nothing came back, or the path is gone; `malformed` that the bytes were not frames."""


class Verdict(enum.Enum):
    """What to do with a frame when there is no buffer to receive it into."""

    DROP = "drop"
    WAIT = "wait"


DROP: Final = Verdict.DROP
"""Read the payload and throw it away; `received` is not called."""
WAIT: Final = Verdict.WAIT
"""Stop reading this connection; ask `admit` again with the same header after `resume()`."""


class LinkStats(NamedTuple):
    """Counters of one (peer, level) since the transport was made; nbytes include headers."""

    frames_sent: int
    nbytes_sent: int
    frames_received: int
    nbytes_received: int
    frames_queued: int
    nbytes_queued: int
    nbytes_copied_sent: int = 0
    """Payload that this process copied before sending it; over nbytes_sent: copies per byte."""
    nbytes_copied_received: int = 0
    nbytes_zero_copy_sent: int = 0
    """Payload that the peer reads in this server's memory; it is not in nbytes_sent."""
    nbytes_zero_copy_received: int = 0
    """Payload that was read in the peer's memory; it is not in nbytes_received."""


class Handler(Protocol):
    """The server's side: where payloads go, and what became of peers."""

    def admit(self, peer: int, level: int, header: Header) -> memoryview | Verdict:
        """Say where the payload of this frame goes.

        Return a writable contiguous view of exactly `header.nbytes` bytes (an empty one if 0), `DROP`, or
        `WAIT`. The view is written until `received`, `lost`, or the transport's `fence()`.
        """
        ...

    def received(self, peer: int, level: int, header: Header) -> None:
        """The payload of an admitted frame is complete, in the view that `admit` gave."""
        ...

    def heard(self, peer: int, level: int) -> None:
        """A sign of life: a valid heartbeat, or bytes on the connection (at most once a pass each)."""
        ...

    def lost(self, peer: int, level: int, kind: LostKind, why: str) -> None:
        """The wanted connection is gone, said once per connection; `set_peers` again to reconnect."""
        ...

    def proved(self, peer: int, level: int) -> None:
        """The probe of this link, see `Transport.probe`, came back whole."""
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
        """Say which links are wanted from now on, and where the other side of each listens.

        `incarnations` (peer -> number) has those peers that joined the job: a connection of such a peer in
        another incarnation is not theirs, nor is a heartbeat from elsewhere.

        Missing links are opened, lost ones opened again, those no longer wanted are closed without
        `lost`; links that are up, or being opened, to the same endpoint stay as they are.
        """
        ...

    def send(
        self, peer: int, level: int, header: Header, payload: memoryview | None, priority: int = 0
    ) -> None:
        """Queue one frame; lower priority first, equal ones in order.

        The payload is not copied: it must not change until it has been sent, or `fence()`. Frames for a
        link that is not up yet wait for it; frames for a link whose loss was reported are dropped.
        Raises InvariantError if the link is not wanted or the payload is not `header.nbytes` long.
        """
        ...

    def fence(self) -> None:
        """End an epoch: afterwards no buffer given to `send` or by `admit` is read or written any more.

        Queued frames are dropped, one that is partly sent is finished from a private copy, one that is
        partly received goes nowhere (`received` is not called). Connections stay up.
        """
        ...

    def resume(self) -> None:
        """Ask `admit` again for every frame that was told to wait; happens in the next poll."""
        ...

    def beside_computation(self, beside: bool) -> None:
        """Say whether, from now on, this process computes while steps go on; at first it does not."""
        ...

    def heartbeat(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """Send one heartbeat over this NIC to a peer, wanted or not; best effort, never fails.

        It counts for this `incarnation` of the peer only.
        """
        ...

    def probe(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """Have a connection of its own carry some bytes to this peer and back, then call `proved`.

        Nothing is said if it fails; the next probe of the same link takes its place.
        """
        ...

    def flows(self) -> dict[LinkKey, Flow]:
        """What the kernel says of every connection that is up."""
        ...

    def is_up(self, peer: int, level: int) -> bool:
        """Whether the connection is open and authenticated."""
        ...

    @property
    def queued_nbytes(self) -> int:
        """Bytes given to `send` and not yet to the kernel, over all links (0 = everything is out)."""
        ...

    def stats(self) -> dict[LinkKey, LinkStats]:
        """Counters of every link that was ever wanted."""
        ...

    def silence(self, level: int) -> None:
        """Inject a fault: from now on this NIC neither sends nor receives anything, without a sign."""
        ...

    def unsilence(self, level: int) -> None:
        """End the fault of `silence`."""
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
