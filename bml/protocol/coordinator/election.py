"""The election of a coordinator by the ranks of a group: each decides for itself whether to run it. Pure.

State table, as a rank sees the coordinator of its group:

    state     event                                              becomes   and
    --------  -------------------------------------------------  --------  ------------------------------
    without   the line to a coordinator is open                  attended
    without   this rank's turn has come, its process is ready    leading   Start with a term of its own
    attended  the line is lost                                   without   the turns begin
    attended  the rank of the coordinator is suspected, and the  without   the turns begin
              coordinator says nothing for `answer_s`
    attended  too many questions to it are not answered: 2, up   without   the turns begin
              to 16 after others that were replaced for that
    leading   the line to this coordinator is open               attended
    leading   it has ended, or has no line within `starts_s`     without   the turns begin
    leading   its coordinator was deposed                        without   its turn comes late, see below
    leading   its process is gone, or did not start              without   the turns begin
    any       this rank is a spare                               same      Prepare a process, if it has none
    without   this rank joins, and no coordinator has called     same      Probe, again and again
    without   it joins, and two probes have found nobody         same      GiveUp

**Turns.** The ranks take turns in the order of their numbers, `slot_s` seconds apart; those that are
suspected are passed over. In the first formation rank 0 starts at once, and the turns are long, as processes
start late.

**Deposed.** Where two ranks cannot reach each other and all others reach both, each would depose the other's
coordinator for ever, and none would last long enough to make a view without the other. So a rank whose
coordinator was deposed leaves the next one alone for as long as that may need, unless its rank is gone.

**Spares.** The two lowest ranks that are left have a process ready, and once there is a view a third one: the
lowest rank on another machine than the lowest of all, if there is one, so that a machine may die.

**Terms.** A coordinator of rank r in a group of n ranks has the term round * n + r + 1. So two ranks never
use one term, a newer coordinator can have a higher term than all before it, and the term names its rank. Two
coordinators at a time are safe: servers obey the one with the higher term (bml.protocol.server.member).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bml.protocol.timeouts import Timeouts

#: So many of the lowest ranks that are left have a process ready for a coordinator in any case.
_SPARES = 2
_FIRST_SLOT_S = 5.0  # longer than an interpreter takes to start and import on a busy machine
_RETRY_S = 1.0  # what stopped a process from being started may be over then
_PROBE_EVERY_S = 1.0  # each is a connection to every rank
_PROBES = 2
_STARTS_S = 5.0  # a process that is ready has a coordinator at once, unless it hangs
_UNANSWERED, _MOST_UNANSWERED = 2, 16
"""So many questions may stay unanswered: after each coordinator that gave no answer twice as many, up to the
second number."""
_IMPATIENT_AFTER = 40
"""After so many times `answer_s` it is as few as before again."""


class Seen(NamedTuple):
    """What a rank sees of its group.

    `term`: the highest known one, -1 before any. `is_open`: whether the line to a coordinator is open;
    `n_messages`: how many have come over it. `members`: the ranks of the view; None before there is one.
    `suspected`: the ranks that do not answer this one. `unanswered`: how many questions to the coordinator
    this rank, which needs it, has asked since it was heard last.
    """

    term: int
    is_open: bool
    n_messages: int
    members: tuple[int, ...] | None
    suspected: frozenset[int]
    unanswered: int = 0


class Prepare(NamedTuple):
    """Start a process for a coordinator."""


class Start(NamedTuple):
    """Start a coordinator with this term in the process that is ready."""

    term: int


class Probe(NamedTuple):
    """See whether any other rank is there, and say what was found; see `CoordinatorElection.probed`."""


class GiveUp(NamedTuple):
    """All others have ended, and nobody will let this rank in."""


Order = Prepare | Start | Probe | GiveUp


class CoordinatorElection:
    """See the module's text; as `rank` sees it in a group of `size`. Times are in seconds on one clock.

    `joins`: this rank joins a group that has a coordinator already. `machines`: the machine of each rank;
    without names they share one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeouts: Timeouts,
        now: float,
        joins: bool = False,
        machines: Sequence[str] = (),
    ):
        self._rank, self._size = rank, size
        self._machines = machines or [""] * size
        self._answer_s, self._slot_s = timeouts.answer_s, timeouts.heartbeat_s
        self._joins = joins
        self._state = "without"
        self._since = now
        self._term = 0
        """The highest term that this rank has used or heard of."""
        self._own_term = 0
        self._yields_to, self._yields_until = -1, now
        """The rank whose coordinator has deposed this one's, and how long that is left alone."""
        # So long a coordinator waits for a rank that it does not reach, before the first view and later.
        self._first_s = timeouts.start_s + timeouts.connect_s
        self._later_s = timeouts.hold_s + timeouts.connect_s
        self._ready = False
        self._prepare_at = now
        self._silent: tuple[int, float] | None = None
        """How many messages had come when the coordinator's rank was first suspected, and when that was."""
        self._asked_before = 0
        """How many questions were not answered when this coordinator was reached: they were for others."""
        self._most_unanswered = _UNANSWERED
        self._impatient_at = now
        """From then on the fewest unanswered questions are enough again."""
        self._probe_at = now + _PROBE_EVERY_S
        self._n_alone = 0
        """How many probes in a row have found nobody."""
        self._given_up = -1
        """How many messages had come when the coordinator at the open line was given up."""
        self._seen = Seen(-1, False, 0, None, frozenset())

    @property
    def own_term(self) -> int:
        """The term of this rank's coordinator while it runs; 0: none runs."""
        return self._own_term

    @property
    def leads(self) -> bool:
        """Whether the newest coordinator of which this rank knows is its own."""
        return self._own_term > 0 and self._own_term == self._term

    def ready(self) -> None:
        """The process that was to be prepared can take a coordinator."""
        self._ready = True

    def lost(self, now: float) -> None:
        """The process is gone, and a coordinator in it; or it did not start, and is tried a little later."""
        self._ready, self._prepare_at = False, now if self._ready else now + _RETRY_S
        self.ended(self._own_term, now)

    def probed(self, somebody: bool, now: float) -> None:
        """A probe has found that some other rank may be there, or that the processes of all are gone."""
        self._n_alone = 0 if somebody else self._n_alone + 1
        self._probe_at = now + _PROBE_EVERY_S

    def ended(self, term: int, now: float, deposed_by: int = 0) -> None:
        """This rank's coordinator of this term has ended, or was deposed by that of a higher term."""
        if term != self._own_term:
            return
        if deposed_by:
            self._term = max(self._term, deposed_by)
            yields_s = self._first_s if self._seen.members is None else self._later_s
            self._yields_to, self._yields_until = (deposed_by - 1) % self._size, now + yields_s
        if self._state == "leading":
            self._become_without(now)
        self._own_term = 0

    def saw(self, seen: Seen, now: float) -> None:
        """The present state of things."""
        self._seen = seen
        self._term = max(self._term, seen.term)
        if self._state != "attended":
            if seen.is_open and seen.n_messages != self._given_up and seen.term >= self._own_term:
                self._state, self._asked_before = "attended", seen.unanswered
        elif not seen.is_open:
            self._become_without(now)
        elif self._falls_silent(seen, now) or self._answers_nothing(seen, now):
            self._given_up = seen.n_messages
            self._become_without(now)
        if self._state == "leading" and now >= self._since + _STARTS_S:
            self._become_without(now)

    def look(self, now: float) -> Order | None:
        """Return the order to carry out now, if any. It counts as carried out."""
        if self.is_outside and now >= self._probe_at:
            self._probe_at = float("inf")
            return GiveUp() if self._n_alone >= _PROBES else Probe()
        place = self._place()
        if place is None:
            return None
        turn = self._state == "without" and now >= self._turn_at(place)
        if turn and self._ready:
            self._state, self._since = "leading", now
            self._own_term = self._term = self._next_term()
            return Start(self._own_term)
        if (turn or self._is_spare(place)) and not self._ready and now >= self._prepare_at:
            self._prepare_at = float("inf")
            return Prepare()
        return None

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, this rank is to look again."""
        due = now + self._answer_s / 4
        place = self._place()
        if place is not None and self._state == "without" and self._ready:
            due = min(due, self._turn_at(place))
        return max(now, min(due, self._probe_at) if self.is_outside else due)

    @property
    def is_outside(self) -> bool:
        """Whether this rank joins, is in no view yet, and no coordinator is connected."""
        return self._joins and self._seen.members is None and not self._seen.is_open

    def _become_without(self, now: float) -> None:
        self._state, self._since, self._silent = "without", now, None

    def _falls_silent(self, seen: Seen, now: float) -> bool:
        """Whether the coordinator has said nothing since its rank is suspected: its machine may be off."""
        host = (seen.term - 1) % self._size
        if seen.term < 1 or host == self._rank or host not in seen.suspected:
            self._silent = None
            return False
        if self._silent is None or self._silent[0] != seen.n_messages:
            self._silent = seen.n_messages, now
        return now - self._silent[1] >= self._answer_s

    def _answers_nothing(self, seen: Seen, now: float) -> bool:
        """Whether it must be assumed that the coordinator cannot be reached.

        One that is replaced for that may only be slow: so its successors may be slower, for a while.
        """
        if now >= self._impatient_at:
            self._most_unanswered = _UNANSWERED
        self._asked_before = min(self._asked_before, seen.unanswered)
        if seen.unanswered - self._asked_before < self._most_unanswered:
            return False
        self._most_unanswered = min(2 * self._most_unanswered, _MOST_UNANSWERED)
        self._impatient_at = now + _IMPATIENT_AFTER * self._answer_s
        return True

    def _place(self) -> int | None:
        """Return this rank's place among those that are left; None if it may run no coordinator."""
        members = self._seen.members
        if members is None and self._joins:
            return None
        left: Iterable[int] = range(self._size) if members is None else members
        if self._rank not in left:
            return None
        return sum(each < self._rank for each in left if each not in self._seen.suspected)

    def _is_spare(self, place: int) -> bool:
        if place < _SPARES or self._seen.members is None:
            return place < _SPARES
        machines = self._machines
        left = [each for each in self._seen.members if each not in self._seen.suspected]
        elsewhere = (each for each in left if machines[each] != machines[left[0]])
        return self._rank == next(elsewhere, left[_SPARES])

    def _turn_at(self, place: int) -> float:
        if self._term == 0 and self._seen.members is None:  # no coordinator was ever heard of
            return self._since + _FIRST_SLOT_S * place
        turn_at = self._since + self._slot_s * (place + 1)
        members = self._seen.members
        is_there = self._yields_to not in self._seen.suspected and (
            members is None or self._yields_to in members
        )
        return max(turn_at, self._yields_until) if is_there else turn_at

    def _next_term(self) -> int:
        rounds = (self._term - self._rank - 1) // self._size + 1
        return max(0, rounds) * self._size + self._rank + 1
