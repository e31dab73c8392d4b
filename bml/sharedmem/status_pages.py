"""The status pages of all servers of a host, as one server uses them: it posts, and waits for the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from bml.io.limits import NoRoom
from bml.io.spin import CoreContention, n_cores, yield_core, yield_idle_core
from bml.protocol.step.direct import Stage, epoch_of, standings
from bml.sharedmem.status_page import (
    ASLEEP,
    CALL,
    IN_PLACE,
    N_SETS,
    PADDED,
    SIGNATURE,
    STANDING,
    PeerStatusPage,
    StatusPage,
    StatusPageAddress,
)
from bml.topology.errors import FabricError

_SPINS = 60
_SMALL_NBYTES = 64 << 10
"""In steps of larger vectors, servers that share cores wait for computations, not just for a post."""
_MOST_PER_CORE = 2
"""With more servers to a core, their shares of it differ too little for a move to help."""
_ALL = (0, sys.maxsize)
_NAP_S = 0.005
"""The longest sleep in seconds: after it `interrupted` is asked again."""


class _Known(NamedTuple):
    """The pages of all servers' newest incarnations, and of former ones whose processes may still run."""

    pages: dict[int, PeerStatusPage]
    former: tuple[PeerStatusPage, ...] = ()


class StatusPages:
    """All status pages; `own` is this server's, and the others are known after `open`.

    One thread at a time calls `admit` and `post`. Another thread may call everything else meanwhile: it sees
    all status pages as they were before a view, or as they are after it.
    """

    def __init__(self, server: int, token: bytes, job: str):
        self.server = server
        self.own = StatusPage(token, job, server)
        self._token = token
        self._job = job
        self._known = _Known({})
        self._asked: tuple[_Known, Iterable[int], list[PeerStatusPage]] = self._known, (), []
        self._missing: dict[int, OSError | NoRoom] = {}
        self._small = self._large = CoreContention(0, 1, 1, most_per_core=1)

    def __getitem__(self, server: int) -> PeerStatusPage:
        """The page of `server`. Raises OSError if it could not be mapped, NoRoom if that was a limit here."""
        return self._page(self._known, server)

    def open(self, addresses: Mapping[int, StatusPageAddress | None]) -> None:
        """Map the status pages of all servers, also this server's own; one that is dead already has none.

        Raises FabricError, which names the server and the reason, if a page cannot be used.
        """
        pages: dict[int, PeerStatusPage] = {}
        for server, address in addresses.items():
            if address is None:
                raise FabricError(f"server {server} shares no memory, server {self.server} does: use tcp")
            try:
                pages[server] = self._map(server, StatusPageAddress(*address))
            except FileNotFoundError as error:
                self._missing[server] = OSError(f"the process of server {server} is gone: {error}")
            except OSError as error:
                raise FabricError(self._refused(server, error)) from error
        self._known = _Known(pages)
        self._small, self._large = (
            CoreContention(self.server, len(addresses), n_cores(), most) for most in (_MOST_PER_CORE, 1)
        )

    def admit(self, addresses: Mapping[int, StatusPageAddress | None]) -> None:
        """Take in the members of a view; servers that joined, or joined again, have new status pages.

        A page that cannot be mapped is missing, and a later call that needs it raises the reason.
        """
        pages, former = dict(self._known.pages), self._known.former
        for server, address in addresses.items():
            known = pages.get(server)
            if address is None or (known is not None and known.address == address):
                continue
            if known is not None:
                former = (*former, pages.pop(server))
            try:
                pages[server] = self._map(server, StatusPageAddress(*address))
            except NoRoom as error:
                self._missing[server] = error
            except (OSError, FabricError) as error:
                self._missing[server] = OSError(self._refused(server, error))
        self._known = _Known(pages, tuple(page for page in former if page.lives))

    def _page(self, known: _Known, server: int) -> PeerStatusPage:
        try:
            return known.pages[server]
        except KeyError:
            raise self._missing.get(server, OSError(f"server {server} shares no memory")) from None

    def _refused(self, server: int, error: object) -> str:
        return (
            f"server {self.server} cannot map the memory of server {server}: {error}; the transport shm is "
            "for servers on one host, of one user, in one container: use tcp"
        )

    def _map(self, server: int, address: StatusPageAddress) -> PeerStatusPage:
        if address.namespace != self.own.address.namespace:
            raise FabricError(self._refused(server, "it is in another container"))
        page = PeerStatusPage(server, address)
        if not page.proves(self._token, self._job):
            raise FabricError(
                f"the status page of server {server} is not of this job, or was made without its token"
            )
        return page

    def post(self, epoch: int, step: int, stage: Stage) -> None:
        """Show all servers where this one stands, and wake them.

        Waking costs a system call, which is left out if no server is asleep. A server that falls asleep
        meanwhile says so before it looks for the last time. If it misses this post all the same, it sleeps
        until its nap is over.
        """
        self.own.post(epoch, step, stage)
        for page in self._known.pages.values():
            if page.words[ASLEEP]:
                self.own.wake()
                return

    def wait_for_stage(
        self,
        epoch: int,
        step: int,
        stage: Stage,
        members: Iterable[int],
        nbytes: int,
        interrupted: Callable[[], object],
        beside: bool = False,
    ) -> bool:
        """Wait until all members stand at this stage of this step, or beyond it, in this epoch.

        The step is of a vector of `nbytes`. Returns False as soon as `interrupted()` returns true; it is
        asked again and again. The thread first yields its core, as the others are usually about to post, and
        sleeps later; `beside` a thread that computes it sleeps as soon as that wants the core. Raises OSError
        when a member's status page is missing.
        """
        low, high = standings(epoch, step, stage)
        waiting = list(self.of(members))
        contention = self._small if nbytes <= _SMALL_NBYTES else self._large
        spins, waits = 0, False
        while True:
            while waiting and low <= waiting[-1].words[STANDING] < high:
                waiting.pop()
            if not waiting:
                return True
            if interrupted():
                return False
            if not waits:
                waits = True
                contention.wait_begins()
            if spins < _SPINS:
                if beside:
                    spins = spins + 1 if yield_idle_core() else _SPINS
                else:
                    spins += yield_core(contention)
                continue
            page = waiting[-1]
            changes = page.changes
            self.own.sleeps(True)
            if not low <= page.words[STANDING] < high:
                page.wait(changes, _NAP_S)
            self.own.sleeps(False)

    def of(self, members: Iterable[int]) -> list[PeerStatusPage]:
        """The status pages of these members, which are usually the same as last time.

        Raises OSError if one is missing.
        """
        known, asked, pages = self._asked
        if known is not self._known or members != asked:
            known = self._known
            pages = [self._page(known, server) for server in members]
            self._asked = known, members, pages
        return pages

    def behind(self, epoch: int, step: int, stage: Stage, members: Iterable[int]) -> list[int]:
        """The members that do not stand at this stage now."""
        low, high = standings(epoch, step, stage)
        pages = {server: self._known.pages.get(server) for server in members}
        return [each for each, page in pages.items() if not page or not low <= page.words[STANDING] < high]

    def newest_epoch(self, members: Iterable[int]) -> int:
        """The newest epoch in which any of these members stands."""
        pages = filter(None, map(self._known.pages.get, members))
        return max(epoch_of(page.words[STANDING]) for page in pages)

    def differing(self, signature: int, members: Iterable[int]) -> PeerStatusPage | None:
        """A member whose call is different, None if there is none; valid when all members are ready."""
        for page in self.of(members):
            if page.words[CALL] & SIGNATURE != signature:
                return page
        return None

    def in_place(self, members: Iterable[int]) -> bool:
        """Whether any member wants to read the result in place; valid when all members are ready."""
        calls = [page.words[CALL] for page in self.of(members)]
        return max(calls) >= IN_PLACE

    def filled(self, members: Iterable[int]) -> list[tuple[int, int]] | None:
        """The elements of each contribution outside of which it is zero; None if no contribution is padded.

        Valid when all members are ready.
        """
        pages = self.of(members)
        if not any(page.words[CALL] & PADDED for page in pages):
            return None
        return [page.filled or _ALL for page in pages]

    def free_set(self) -> int:
        """The first result set that no server of the job reads, in or out of the view, of any incarnation."""
        held: set[int] = set()
        pages, former = self._known
        for page in (*pages.values(), *former):
            held |= page.held()
        return min(set(range(N_SETS)) - held) if held else 0

    def close(self) -> None:
        """Let no process open this server's status page any more; all pages stay mapped."""
        self.own.close()
