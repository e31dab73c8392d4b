"""The dataflow of one step of direct reduction on one server, and the reasons why its commit is safe.

Servers that see each other's memory meet at stages. Each posts its stage in a word that only it writes
(`Post`), and goes on when all members stand at that stage or beyond (`Gathered`):

    start                                               -->  Post READY: my contribution lies there to be read
    all are READY     -- my share is added (`Sum`)      -->  Post DONE
    all are DONE      -- every share is final: complete -->  Post COMPLETE, this server's token of the barrier
    all are COMPLETE                                    -->  commit

Where that moves fewer bytes (bml.schedule.algorithms.direct), every server adds the whole vector as soon as
all are READY: a server that has done so is complete, and the stage DONE is left out. The choice depends on
whether any member reads the result where it lies. Every member posts that together with READY, so all choose
alike.

The barrier is the one of docs/explanation/architecture.md with words for tokens: a server passes when it sees
COMPLETE of every member. It posts COMPLETE when it is complete itself and, like everything, not after it has
reported to a coordinator that freezes the view. So a COMPLETE that any server sees belongs to a server that
reports complete. The shared memory adds these points to the argument:

1. *Contributions are only read until commit.* A server that posts COMPLETE has read all that it will read. So
   when a server commits, no server reads its contribution any more. Which of its elements are filled, if the
   others are zeros that were not written, is said and read like where it lies.
2. *No server writes into another's memory*: the kernel refuses it. A server that was evicted while it was
   frozen, and wakes, can finish its own share, in its own memory, of a step that is over for the others; they
   read nothing of it any more.
3. *It cannot take a torn sum for a good one either.* A server that leaves an epoch, for another view or as it
   stops, lets all see that first (`Quit`), before its user hears of it. In an epoch that it has not left, its
   contribution changes only after COMPLETE of all members, and its share only after READY of all members to
   the next step. So a server adds, fetches the result, and looks for COMPLETE of the epoch of its step
   afterwards: if all stand there, none of them had left, and what it has read had not changed.
4. *Nor when a view commits its step.* All members of that view have read all contributions by then, but may
   still copy shares, and rightly leave the epoch of the step. A server fetches the result all the same
   (`FetchResult`), and then looks how far the members of its step are (`ResultFetched`). They write into
   shares again after READY of all members of some view. If this server is in that view, its own READY is
   missing, as it posts that only when the result has been taken. A view without it is later than the one that
   it has installed, and the members of that view have left the epochs before. So the result is whole if no
   member stands in a later epoch. If one does, the server waits for the view that it lacks; if it is not in
   that view, it is evicted: its training function gets that error, and no result.
   For 3 and 4 no load may overtake a load, and no store a store: x86 sees to that, and all that a server does
   between them takes and frees locks.
5. *A result that a user reads in place is not written again* until the user has let go: every server says
   what it holds, and says so before it posts COMPLETE; shares go where no server of the job, dead ones too,
   holds anything.
6. *A server that is complete can fetch the result*, even if all others die now: it has mapped the shares
   of all before.
7. *A learner is a member like the others*: it adds its share, posts, and is waited for. All that it brings is
   a contribution that changes nothing. Another incarnation of a server has a status page and memory of its
   own, known by the view that has it; nothing of the incarnation before is read any more.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from bml.protocol.step.barrier import Phase
from bml.protocol.step.dataflow import Place, Stamp
from bml.protocol.wire.frame import FrameError, Kind
from bml.schedule.algorithms.direct import DirectProgram


class Stage(IntEnum):
    """How far a server is in a step; NONE: it is in no step yet."""

    NONE = 0
    READY = 1
    DONE = 2
    COMPLETE = 3


_STAGE_BITS, _STEP_BITS = 2, 40


def standing(epoch: int, step: int, stage: int) -> int:
    """Where a server stands as one number, which grows."""
    return (epoch << _STEP_BITS | step) << _STAGE_BITS | stage


def standings(epoch: int, step: int, stage: Stage) -> tuple[int, int]:
    """(low, high) of low <= standing < high: at this stage of this step or beyond it, in this epoch."""
    low = (epoch << _STEP_BITS | step) << _STAGE_BITS | stage  # as `standing`; asked for in every wait
    return low, (epoch + 1) << _STEP_BITS + _STAGE_BITS


def epoch_of(standing: int) -> int:
    """The epoch of where a server stands."""
    return standing >> (_STEP_BITS + _STAGE_BITS)


class Quit(NamedTuple):
    """Let all servers see that this one has left every epoch before `epoch`: its memory may change."""

    epoch: int


class Post(NamedTuple):
    """Let all servers see that this one stands at this stage, then wait for all members to."""

    epoch: int
    step: int
    stage: Stage


class Sum(NamedTuple):
    """When all are READY, add all contributions, in id order of `members`; then say `Summed`.

    Either everything into this server's own result, or elements [start, stop) into its share, which all can
    read; `start` to `whole_in_place` are those of bml.schedule.algorithms.direct.Part.
    """

    epoch: int
    step: int
    start: int
    stop: int
    share: int
    whole: bool
    whole_in_place: bool
    members: tuple[int, ...]

    def adds_whole(self, in_place: bool) -> bool:
        """Whether to add everything; `in_place`: some member reads the result where it lies."""
        return self.whole_in_place if in_place else self.whole


class DirectEngine:
    """The dataflow of one step; see the module's text. Same properties as `Engine`, but no frames."""

    scratch_elements = 0
    finals: tuple[tuple[int, int], ...] = ()  # shares of a view that is over are not used again

    def __init__(self, program: DirectProgram, stamp: Stamp, n_elements: int):
        self.server = program.server
        self.stamp = stamp
        self.n_elements = n_elements
        self.complete = False
        self.handled = 0
        self._program = program
        self.expected = 2

    @property
    def remaining(self) -> int:
        """Elements of the result that are not final, as far as this server knows."""
        return 0 if self.complete else self.n_elements

    @property
    def progress(self) -> float:
        """Fraction, 0 to 1, of the way to completion: a half when its share is added."""
        return self.handled / self.expected

    def start(self) -> tuple[Post, Sum]:
        """Return the instructions that need this server's own contribution alone."""
        (epoch, step, _, itemsize), program = self.stamp, self._program
        part = program.part(self.n_elements, itemsize)
        return Post(epoch, step, Stage.READY), Sum(epoch, step, *part, program.members)

    def summed(self, whole: bool) -> tuple[Post]:
        """The sum that was asked for is there, the whole of it or a share."""
        if whole:
            return (self._completed(),)
        self.handled = 1
        return (Post(self.stamp.epoch, self.stamp.step, Stage.DONE),)

    def gathered(self, stage: Stage) -> tuple[Post]:
        """All members stand at DONE."""
        assert stage is Stage.DONE
        return (self._completed(),)

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Raise FrameError: servers that share memory send each other no data."""
        raise FrameError(f"server {self.server} shares memory, it expects no frame from server {origin}")

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> tuple[Post]:
        """Raise FrameError, as `place` does."""
        raise FrameError(f"server {self.server} shares memory, it expects no frame from server {origin}")

    def _completed(self) -> Post:
        self.handled = self.expected
        self.complete = True
        return Post(self.stamp.epoch, self.stamp.step, Stage.COMPLETE)


def direct_phases(program: DirectProgram) -> tuple[Phase, ...]:
    """The commit barrier: wait for all others; this server's token is the word that it posts."""
    others = frozenset((peer, 0) for peer in program.members if peer != program.server)
    return (Phase(others, ()),)
