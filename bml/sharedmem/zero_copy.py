"""Zero-copy sends: a server reads long payloads of a neighbour on its host in that neighbour's memory.

The header of a slice still goes over the link, in its turn, and so does everything else. Only the bytes of
the slice do not. The receiver copies them out of the sender's memory when it would have read them from the
stream. If they are a term of a sum, it reads them there when it makes that sum. It finds the bytes that were
sent:

- Within a step no server overwrites a payload that it has sent until the receiver has used it: a place is
  written again only with data that depends on that use (bml.protocol.step.engine). When a step is committed,
  every server is complete, so every server has used every payload.
- A server that leaves an epoch in another way fences first, and says so on its registration page. A receiver
  that copies looks there afterwards: a payload that was fenced meanwhile was never received. Partial sums
  need no look afterwards: the server that sent one cannot become complete before the sum is made. If it
  fenced before, it never becomes complete in that epoch, so the step cannot be committed in it; and it writes
  there only in a view in which no member makes that sum.

A pair makes zero-copy sends only where each has opened the other's registration page and found the proof
there that the other is of the same job, user and container. Else the payloads' bytes are sent, and so are
those of payloads outside of the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy.typing as npt

from bml.io.limits import NoRoom
from bml.io.memory import Array, address_of
from bml.protocol.wire.frame import FrameError, Header, Reference
from bml.sharedmem.pool import SharedPool
from bml.sharedmem.registration_page import (
    PeerRegistrationPage,
    RegistrationPage,
    RegistrationPageAddress,
    host,
)
from bml.sharedmem.segment import Segment

_LOG = logging.getLogger(__name__)

LEAST_NBYTES = 64 << 10
"""Shorter payloads are sent: a copy is quicker than finding them in another server's memory."""


ReadInPlace = Callable[[Header, memoryview], bool]
"""Arranges that the payload of an admitted frame is read in place, later; False if it must be copied."""


def never_in_place(header: Header, referenced: memoryview) -> bool:
    """Have every payload copied."""
    return False


class ZeroCopy:
    """The zero-copy sends of one server, and those to it.

    `pool` has the memory that can be referred to, and may be used by any thread; one thread uses the rest.
    `server` is one of `n_servers`. Raises NoRoom when there is no memory for a registration page.
    """

    def __init__(
        self, token: bytes, job: str, server: int, n_servers: int, read_in_place: ReadInPlace = never_in_place
    ):
        self._token = token
        self._job = job
        self._server = server
        self._page = RegistrationPage(token, job, server, n_servers)
        self.pool = SharedPool(least_nbytes=LEAST_NBYTES)
        self._host = host()
        self._shown: dict[int, Segment] = {}  # number on the registration page -> segment
        self._changes = 0
        """The value of the pool's `changes` that the registration page shows."""
        self._peers: dict[int, PeerRegistrationPage] = {}
        self._refused: set[RegistrationPageAddress] = set()
        self.nbytes_copied = 0
        """Bytes of payloads that were received by reference and copied here."""
        self.read_in_place = read_in_place

    @property
    def address(self) -> RegistrationPageAddress:
        """Where others find this server's registration page."""
        return self._page.address

    @property
    def partners(self) -> tuple[int, ...]:
        """The servers to which zero-copy sends are made."""
        return tuple(peer for peer in sorted(self._peers) if self._is_read_by(peer))

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """See bml.io.memory.Memory; an array of less than `LEAST_NBYTES` does not lie in the pool."""
        return self.pool.empty(shape, dtype)

    def meet(self, pages: Mapping[int, RegistrationPageAddress | None]) -> None:
        """Take in the other servers of a view and the addresses of their pages; unmap all other memory."""
        for server in self._peers.keys() - pages.keys():
            self._forget(server)
        for server, address in pages.items():
            known = self._peers.get(server)
            if known is not None and known.address != address:
                self._forget(server)
            if address is not None and server != self._server and server not in self._peers:
                self._open(server, RegistrationPageAddress(*address))

    def reads(self, peer: int) -> bool:
        """Whether this server can read the memory of this peer, until `meet` says otherwise."""
        return peer in self._peers

    def reference_for(self, peer: int, payload: memoryview) -> Reference | None:
        """Where this peer can read a payload; None if the payload must be sent."""
        if not self._is_read_by(peer):
            return None
        if self._changes != self.pool.changes:
            self._show_all()
        start, nbytes = address_of(payload), len(payload)
        for number, segment in self._shown.items():
            if segment.has(start, nbytes):
                return Reference(number, self._page.fences, start - segment.start)
        return None

    def receive(self, peer: int, header: Header, reference: Reference, into: memoryview) -> bool:
        """Take a payload by reference: leave it there if `read_in_place` allows that, else copy it.

        Returns False if the reference is fenced; then `into` may have any content. Raises FrameError for a
        reference that the peer cannot have sent, or if its memory cannot be mapped.
        """
        page = self._peers.get(peer)
        if page is None:
            raise FrameError(f"server {peer} sent a reference to memory that this server has not mapped")
        try:
            referenced = page.region(reference.segment)[reference.offset : reference.offset + len(into)]
        except (OSError, ValueError, NoRoom) as error:
            if page.fences != reference.fences:
                return False  # its memory may be gone since
            self._forget(peer)  # on the next connection everything is sent
            self._refused.add(page.address)
            raise FrameError(
                f"server {peer} sent a reference to memory that cannot be mapped: {error}"
            ) from error
        if len(referenced) != len(into):
            if page.fences != reference.fences:
                return False
            raise FrameError(f"server {peer} sent {reference}, which is not {len(into)} bytes of its memory")
        if not self.read_in_place(header, referenced):
            into[:] = referenced
            self.nbytes_copied += len(into)
        return page.fences == reference.fences

    def fence(self) -> None:
        """Let no server use a reference that was sent before."""
        self._page.fence()

    def close(self) -> None:
        """Let no process open this server's memory any more; mappings stay valid. Idempotent."""
        self._page.close()
        self.pool.close()
        self._peers.clear()

    def _is_read_by(self, peer: int) -> bool:
        other = self._peers.get(peer)
        return other is not None and other.reads(self._server) == self._page.address.nonce

    def _show_all(self) -> None:
        """Show the present segments of the pool, as far as the page has room."""
        self._changes, there = self.pool.changes, self.pool.segments
        gone = [number for number, segment in self._shown.items() if segment not in there]
        for number in gone:
            del self._shown[number]
        self._page.drop(gone)
        shown = set(self._shown.values())
        new = [segment for segment in there if segment not in shown]
        numbers = self._page.add([segment.address for segment in new])
        self._shown.update(zip(numbers, new, strict=False))

    def _open(self, server: int, address: RegistrationPageAddress) -> None:
        if address[:2] != self._host or address in self._refused:
            return
        try:
            self._peers[server] = PeerRegistrationPage(self._token, self._job, server, address)
        except (OSError, ValueError, NoRoom) as error:
            self._refused.add(address)
            _LOG.info("server %d sends payloads to server %d: %s", self._server, server, error)
            return
        self._page.reads(server, address.nonce)

    def _forget(self, server: int) -> None:
        self._page.reads(server, 0)
        self._peers.pop(server, None)
