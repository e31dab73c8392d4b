"""The boards of all servers of a host, as one of them sees them: who is there, who lags, what is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from bml.io.limits import NoRoom
from bml.io.spin import Crowding, give_way, n_cores
from bml.protocol.step.direct import Stage, epoch_of, standings
from bml.sharedmem.status_page import (
    ASLEEP,
    CALL,
    IN_PLACE,
    N_SETS,
    STANDING,
    Board,
    BoardAddress,
    PeerBoard,
)
from bml.topology.errors import FabricError

_SPINS = 60
_SMALL_NBYTES = 64 << 10
"""In steps of larger vectors servers that share cores wait for what others compute, not for a word."""
_MOST_PER_CORE = 2
"""With more servers to a core, shares of it differ too little to move for."""
_NAP_S = 0.005
"""How long a sleep lasts at most: then `interrupted` is asked again."""


class _Known(NamedTuple):
    """The boards of all servers' newest incarnations, and of former ones whose processes may still run."""

    boards: dict[int, PeerBoard]
    former: tuple[PeerBoard, ...] = ()


class Boards:
    """`own` is this server's; the others' are known after `open`.

    One thread at a time calls `admit` and `post`, another one may call everything else meanwhile: it sees
    all boards as they were before a view, or as they are after it.
    """

    def __init__(self, server: int, token: bytes, job: str):
        self.server = server
        self.own = Board(token, job, server)
        self._token = token
        self._job = job
        self._known = _Known({})
        self._asked: tuple[_Known, Iterable[int], list[PeerBoard]] = self._known, (), []
        self._missing: dict[int, OSError | NoRoom] = {}
        self._small = self._large = Crowding(0, 1, 1, most_per_core=1)

    def __getitem__(self, server: int) -> PeerBoard:
        """Its board. Raises OSError if it could not be mapped, NoRoom if that was this process' limit."""
        return self._board(self._known, server)

    def open(self, addresses: Mapping[int, BoardAddress | None]) -> None:
        """Map everybody's board, this server's too; of whoever is dead already there is none.

        Raises FabricError that says whose cannot be, and why.
        """
        boards: dict[int, PeerBoard] = {}
        for server, address in addresses.items():
            if address is None:
                raise FabricError(f"server {server} shares no memory, server {self.server} does: use tcp")
            try:
                boards[server] = self._map(server, BoardAddress(*address))
            except FileNotFoundError as error:
                self._missing[server] = OSError(f"the process of server {server} is gone: {error}")
            except OSError as error:
                raise FabricError(self._refused(server, error)) from error
        self._known = _Known(boards)
        self._small, self._large = (
            Crowding(self.server, len(addresses), n_cores(), most) for most in (_MOST_PER_CORE, 1)
        )

    def admit(self, addresses: Mapping[int, BoardAddress | None]) -> None:
        """These are the members of a view; those who came, or came again, have new boards.

        What cannot be mapped is missing until then or for ever, and whoever needs it is told.
        """
        boards, former = dict(self._known.boards), self._known.former
        for server, address in addresses.items():
            known = boards.get(server)
            if address is None or (known is not None and known.address == address):
                continue
            if known is not None:
                former = (*former, boards.pop(server))
            try:
                boards[server] = self._map(server, BoardAddress(*address))
            except NoRoom as error:
                self._missing[server] = error
            except (OSError, FabricError) as error:
                self._missing[server] = OSError(self._refused(server, error))
        self._known = _Known(boards, tuple(board for board in former if board.lives))

    def _board(self, known: _Known, server: int) -> PeerBoard:
        try:
            return known.boards[server]
        except KeyError:
            raise self._missing.get(server, OSError(f"server {server} shares no memory")) from None

    def _refused(self, server: int, error: object) -> str:
        return (
            f"server {self.server} cannot map the memory of server {server}: {error}; the transport shm is "
            "for servers on one host, of one user, in one container: use tcp"
        )

    def _map(self, server: int, address: BoardAddress) -> PeerBoard:
        if address.namespace != self.own.address.namespace:
            raise FabricError(self._refused(server, "it is in another container"))
        board = PeerBoard(server, address)
        if not board.proves(self._token, self._job):
            raise FabricError(f"what server {server} shares is not of this job, or without its token")
        return board

    def post(self, epoch: int, step: int, stage: Stage) -> None:
        """Let everybody see where this server stands.

        Waking costs a system call, so it is left out if nobody is asleep. Who falls asleep meanwhile says so
        before it looks for the last time; should it miss this post all the same, it sleeps a nap longer.
        """
        self.own.post(epoch, step, stage)
        for board in self._known.boards.values():
            if board.words[ASLEEP]:
                self.own.wake()
                return

    def gather(
        self,
        epoch: int,
        step: int,
        stage: Stage,
        members: Iterable[int],
        nbytes: int,
        interrupted: Callable[[], object],
    ) -> bool:
        """Wait until all members stand at this stage of this step, or beyond it, in this epoch.

        The step is of a vector of `nbytes`.

        Returns False as soon as `interrupted()` says so, which is asked again and again. Waits by giving the
        processor to others first, as they are usually about to post, and by sleeping later. Raises OSError
        when a member's board is missing.
        """
        low, high = standings(epoch, step, stage)
        waiting = list(self.of(members))
        crowding = self._small if nbytes <= _SMALL_NBYTES else self._large
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
                crowding.waits()
            if spins < _SPINS:
                spins += give_way(crowding)
                continue
            board = waiting[-1]
            changes = board.changes
            self.own.sleeps(True)
            if not low <= board.words[STANDING] < high:
                board.wait(changes, _NAP_S)
            self.own.sleeps(False)

    def of(self, members: Iterable[int]) -> list[PeerBoard]:
        """Their boards; as a rule those that were asked for last. Raises OSError if one is missing."""
        known, asked, boards = self._asked
        if known is not self._known or members != asked:
            known = self._known
            boards = [self._board(known, server) for server in members]
            self._asked = known, members, boards
        return boards

    def behind(self, epoch: int, step: int, stage: Stage, members: Iterable[int]) -> list[int]:
        """Members that do not stand there now."""
        low, high = standings(epoch, step, stage)
        boards = {server: self._known.boards.get(server) for server in members}
        return [
            each for each, board in boards.items() if not board or not low <= board.words[STANDING] < high
        ]

    def newest_epoch(self, members: Iterable[int]) -> int:
        """The newest epoch in which one of them stands."""
        boards = filter(None, map(self._known.boards.get, members))
        return max(epoch_of(board.words[STANDING]) for board in boards)

    def differing(self, signature: int, members: Iterable[int]) -> PeerBoard | None:
        """One who called something else; ask when all are ready."""
        for board in self.of(members):
            if board.words[CALL] & ~IN_PLACE != signature:
                return board
        return None

    def in_place(self, members: Iterable[int]) -> bool:
        """Whether anyone would read the result where it lies; ask when all are ready."""
        calls = [board.words[CALL] for board in self.of(members)]
        return max(calls) >= IN_PLACE

    def free_set(self) -> int:
        """The first result set that no server of the job reads, in or out of the view, of any incarnation."""
        held: set[int] = set()
        boards, former = self._known
        for board in (*boards.values(), *former):
            held |= board.held()
        return min(set(range(N_SETS)) - held) if held else 0

    def close(self) -> None:
        """Let nobody open this server's board any more; all stay mapped."""
        self.own.close()
