"""The dataflow of one step of direct reduction on one server, and why the protocol stays as safe as it is.

Servers that see each other's memory meet at stages. Each says where it stands in a word that only it writes
(`Post`), and goes on when all members stand there or beyond (`Gathered`):

    start                                               -->  Post READY: my contribution lies there to be read
    all are READY     -- my share is added (`Sum`)      -->  Post DONE
    all are DONE      -- every share is final: complete -->  Post COMPLETE, this server's token of the barrier
    all are COMPLETE                                    -->  commit

A small vector is added whole by everybody, as soon as all are READY: who has done that is complete, and the
stage DONE is left out.

The barrier is the one of docs/architecture.md with words for tokens: passing takes the COMPLETE of every
member; a server posts it when it is complete itself and, like everything, not after it has reported to a
coordinator that freezes the view. So a COMPLETE that anybody sees belongs to a server that reports complete.
What the memory adds to the argument:

1. *Contributions are only read until commit.* Whoever posts COMPLETE has read all that it will read, so when
   a server commits, nobody reads its contribution any more.
2. *Nobody writes into another server's memory*: the kernel refuses it. A server that was evicted while it was
   frozen, and wakes, can finish its own share, in its own memory, of a step that is over for the others; they
   read nothing of it any more.
3. *It cannot take a torn result for a good one either.* It brings the result home first and looks for
   COMPLETE afterwards, of the epoch of its step. The others write into their shares again only after a READY
   of all members: of its own in that epoch, or, without it, in a later one, which they have posted before.
4. *A result that a user reads in place is not written again* until the user has let go: every server says
   what it holds, and says so before it posts COMPLETE; shares go where no server of the job, dead ones too,
   holds anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from bml.protocol.barrier import Phase
from bml.protocol.dataflow import Place, Stamp
from bml.protocol.frame import FrameError, Kind
from bml.schedule.direct import DirectProgram


class Stage(IntEnum):
    """How far a server is in a step."""

    READY = 1
    DONE = 2
    COMPLETE = 3


_STAGE_BITS, _STEP_BITS = 2, 40


def standing(epoch: int, step: int, stage: int) -> int:
    """Where a server stands as one number, which grows."""
    return (epoch << _STEP_BITS | step) << _STAGE_BITS | stage


def standings(epoch: int, step: int, stage: Stage) -> tuple[int, int]:
    """(low, high) of low <= standing < high: at this stage of this step or beyond it, in this epoch."""
    return standing(epoch, step, stage), standing(epoch + 1, 0, 0)


class Post(NamedTuple):
    """Let all servers see that this one stands at this stage, then wait for all members to."""

    epoch: int
    step: int
    stage: Stage


class Sum(NamedTuple):
    """When all are READY, add elements [start, stop) of all contributions, in id order of `members`.

    Then say `Summed`.

    `whole`: into this server's own result; else into its share, which all can read. All shares have the
    length `share`, but the last ones may be shorter or empty.
    """

    epoch: int
    step: int
    start: int
    stop: int
    whole: bool
    share: int
    members: tuple[int, ...]


class DirectEngine:
    """The dataflow of one step; see the module's text. Same properties as `Engine`, but no frames."""

    scratch_elements = 0
    finals: tuple[tuple[int, int], ...] = ()  # what lies in memory of a view that is over is not used again

    def __init__(self, program: DirectProgram, stamp: Stamp, n_elements: int):
        self.server = program.server
        self.stamp = stamp
        self.n_elements = n_elements
        self.complete = False
        self.handled = 0
        self._program = program
        self._whole = program.adds_whole(n_elements * stamp.itemsize)
        self.expected = 1 if self._whole else 2

    @property
    def remaining(self) -> int:
        """Elements of the result that are not final, as far as this server knows."""
        return 0 if self.complete else self.n_elements

    @property
    def progress(self) -> float:
        """Fraction, 0 to 1, of the meetings before completion that this server has passed."""
        return self.handled / self.expected

    def start(self) -> Iterator[Post | Sum]:
        """What can be done with this server's own contribution alone."""
        yield self._post(Stage.READY)
        if self._whole:
            yield self._sum(0, self.n_elements)

    def gathered(self, stage: Stage) -> Iterator[Post | Sum]:
        """All members stand at READY, or at DONE; what can be done now."""
        self.handled += 1
        if stage == Stage.DONE:
            yield from self._completed()
            return
        yield self._sum(*self._program.share(self.n_elements, self.stamp.itemsize))

    def summed(self) -> Iterator[Post]:
        """The sum that was asked for is there; what can be done now."""
        if self._whole:
            self.handled += 1
            yield from self._completed()
        else:
            yield self._post(Stage.DONE)

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Raise FrameError: servers that share memory send each other no data."""
        raise FrameError(f"server {self.server} shares memory, it expects no frame from server {origin}")

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Iterator[Post]:
        """See `place`: never called."""
        raise FrameError(f"server {self.server} shares memory, it expects no frame from server {origin}")

    def _completed(self) -> Iterator[Post]:
        self.complete = True
        yield self._post(Stage.COMPLETE)

    def _sum(self, start: int, stop: int) -> Sum:
        epoch, step, _, itemsize = self.stamp
        share = self._program.share_elements(self.n_elements, itemsize)
        return Sum(epoch, step, start, stop, self._whole, share, self._program.members)

    def _post(self, stage: Stage) -> Post:
        return Post(self.stamp.epoch, self.stamp.step, stage)


def direct_phases(program: DirectProgram) -> tuple[Phase, ...]:
    """The commit barrier: wait for everybody; the token of this server is its word, so none is sent."""
    others = frozenset((peer, 0) for peer in program.members if peer != program.server)
    return (Phase(others, ()),)
