"""Payloads that stay where they are: servers of one host read what their neighbours there would send.

The header of a slice still goes over the link, in its turn, and so do heartbeats and everything else. Only
its bytes do not: the receiver copies them out of the sender's memory when it would have taken them off the
wire, or, if they are a term of a sum, reads them there when it makes that sum. It finds what was sent:

- Within a step no server overwrites what it has sent until whoever got it has used it: a place is written
  again only with what depends on that (bml.protocol.step.engine). When a step is committed every server is
  complete, so every server has used everything.
- Who leaves an epoch in another way has fenced first, and said so on its plate. Whoever copies looks there
  afterwards: what was fenced meanwhile was never received. Partial sums need no look afterwards: whoever lent
  one cannot become complete before the sum is made. If he fenced before, he never does in that epoch, so the
  step cannot be committed in it; and he writes there only in a view of whose members none makes that sum.

A pair lends only where each has opened the other's plate and found the proof there that it is who it should
be: of the same job, user and container. Else its payloads are sent, as is what lies outside of the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy.typing as npt

from bml.io.limits import NoRoom
from bml.io.memory import Array, address_of
from bml.protocol.wire.frame import FrameError, Header, Loan
from bml.sharedmem.pool import SharedPool
from bml.sharedmem.registration_page import PeerPlate, Plate, PlateAddress, host
from bml.sharedmem.segment import Segment

_LOG = logging.getLogger("bml.transport")

LEAST_NBYTES = 64 << 10
"""Shorter payloads are sent: they are copied faster than they are looked for."""


class Lending:
    """What one server lends and borrows. `pool` has the memory that can be lent; one thread uses the rest.

    `server` is one of `n_servers`. Raises NoRoom when there is no memory for a plate.
    """

    def __init__(self, token: bytes, job: str, server: int, n_servers: int):
        self._token = token
        self._job = job
        self._server = server
        self._plate = Plate(token, job, server, n_servers)
        self.pool = SharedPool(least_nbytes=LEAST_NBYTES)
        self._host = host()
        self._shown: dict[int, Segment] = {}  # by their numbers on the plate
        self._changes = 0
        """Of the pool's, those that the plate shows."""
        self._peers: dict[int, PeerPlate] = {}
        self._refused: set[PlateAddress] = set()
        self.nbytes_copied = 0
        """Of what was borrowed: what was copied from where it lay."""
        self.refer: Callable[[Header, memoryview], bool] = _never
        """Has the payload of an admitted frame read where it lies, later; says whether it will be."""

    @property
    def address(self) -> PlateAddress:
        """Where others find this server's plate."""
        return self._plate.address

    @property
    def partners(self) -> tuple[int, ...]:
        """The servers that payloads are lent to."""
        return tuple(peer for peer in sorted(self._peers) if self._may_lend(peer))

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """See bml.io.memory.Memory; what is too short to be lent is no memory of the pool."""
        return self.pool.empty(shape, dtype)

    def meet(self, plates: Mapping[int, PlateAddress | None]) -> None:
        """These are the others from now on, and where their plates are; nobody else's memory stays mapped."""
        for server in self._peers.keys() - plates.keys():
            self._forget(server)
        for server, address in plates.items():
            known = self._peers.get(server)
            if known is not None and known.address != address:
                self._forget(server)
            if address is not None and server != self._server and server not in self._peers:
                self._open(server, PlateAddress(*address))

    def reads(self, peer: int) -> bool:
        """Whether what this peer lends can be read here, until `meet` says otherwise."""
        return peer in self._peers

    def lend(self, peer: int, payload: memoryview) -> Loan | None:
        """Where this peer can read a payload; None if it must be sent."""
        if not self._may_lend(peer):
            return None
        if self._changes != self.pool.changes:
            self._show_all()
        start, nbytes = address_of(payload), len(payload)
        for number, segment in self._shown.items():
            if segment.has(start, nbytes):
                return Loan(number, self._plate.fences, start - segment.start)
        return None

    def borrow(self, peer: int, header: Header, loan: Loan, into: memoryview) -> bool:
        """Take what a peer has lent: refer to it if `refer` allows that, else copy it.

        False if it is not good any more; then `into` may have anything in it. Raises FrameError for what the
        peer cannot have lent, or if its memory cannot be mapped.
        """
        plate = self._peers.get(peer)
        if plate is None:
            raise FrameError(f"server {peer} lends what cannot be read here")
        try:
            lent = plate.region(loan.segment)[loan.offset : loan.offset + len(into)]
        except (OSError, ValueError, NoRoom) as error:
            if plate.fences != loan.fences:
                return False  # its memory may be gone since
            self._forget(peer)  # on the next connection everything is sent
            self._refused.add(plate.address)
            raise FrameError(f"server {peer} lends what cannot be mapped: {error}") from error
        if len(lent) != len(into):
            if plate.fences != loan.fences:
                return False
            raise FrameError(f"server {peer} lends {loan}, which is not {len(into)} bytes of its memory")
        if not self.refer(header, lent):
            into[:] = lent
            self.nbytes_copied += len(into)
        return plate.fences == loan.fences

    def fence(self) -> None:
        """From now on nobody uses what was lent before."""
        self._plate.fence()

    def close(self) -> None:
        """Let nobody open this server's memory any more; what is mapped stays. Idempotent."""
        self._plate.close()
        self.pool.close()
        self._peers.clear()

    def _may_lend(self, peer: int) -> bool:
        other = self._peers.get(peer)
        return other is not None and other.reads(self._server) == self._plate.address.nonce

    def _show_all(self) -> None:
        """Show the segments that the pool has now, as far as there is room."""
        self._changes, there = self.pool.changes, self.pool.segments
        gone = [number for number, segment in self._shown.items() if segment not in there]
        for number in gone:
            del self._shown[number]
        self._plate.drop(gone)
        shown = set(self._shown.values())
        new = [segment for segment in there if segment not in shown]
        numbers = self._plate.add([segment.address for segment in new])
        self._shown.update(zip(numbers, new, strict=False))

    def _open(self, server: int, address: PlateAddress) -> None:
        if address[:2] != self._host or address in self._refused:
            return
        try:
            self._peers[server] = PeerPlate(self._token, self._job, server, address)
        except (OSError, ValueError, NoRoom) as error:
            self._refused.add(address)
            _LOG.info("server %d sends payloads to server %d: %s", self._server, server, error)
            return
        self._plate.reads(server, address.nonce)

    def _forget(self, server: int) -> None:
        self._plate.reads(server, 0)
        self._peers.pop(server, None)


def _never(header: Header, lent: memoryview) -> bool:
    return False
