"""The memory of joining: the state that a server sends or gets, and the results that a learner keeps.

The loop's thread and the training thread meet here: the one fills, the other takes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bml.io.interruptible import Condition, Event
from bml.protocol.server import events as ev
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.server.transfer import OutgoingState, Part, SegmentedBytes, cut, verify
from bml.protocol.step.dataflow import Place
from bml.topology.errors import BmlError, FabricError
from bml.train.communicator import Committed

_Here = tuple[int, memoryview, dict[Part, str]]


class Handover:
    """One server's; `joins`: it is one that gets the state. `step` is the one that the user brings next."""

    def __init__(self, joins: bool):
        self.step = 1
        self.leaves = ""
        """Why the training function is to stop before the next step; empty: it is not."""
        self.no_pauses = Event()
        """Set when the training function is to end: what slows it down does so no more."""
        self.joins = joins
        self._bounded = False
        self._given_epoch = 0
        self._outgoing = memoryview(b"")
        self._incoming = memoryview(b"")
        self._needs_state = joins
        self._here: _Here | None = None
        self._overtaken = False
        self._unanswered = 0
        self._replays = False
        self._kept: KeptResults[Committed] = KeptResults()
        self._changed = Condition()  # the kept results, or whether a state is here
        self._error: BmlError | None = None

    def ask_to_leave(self, why: str) -> None:
        """Any thread may ask."""
        self.leaves = why
        self.no_pauses.set()

    # --- the training thread ---------------------------------------------------------------------

    def take(self) -> memoryview | None:
        """Wait for the state. Raises the error that came instead.

        None: it was here, but results that come after it are lost by now. Another one is to be asked for.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._here is not None or self._overtaken or self._error is not None
            )
            overtaken, self._overtaken = self._overtaken, False
            if self._here is None:
                if self._error is not None:
                    raise self._error
                assert overtaken
                return None
            (step, state, digests), self._here = self._here, None
            self._incoming = memoryview(b"")
            self._needs_state = False
            self._kept.took()
        verify(state, digests)
        self.step = step + 1
        return state

    @property
    def needs_state(self) -> bool:
        """Whether the training thread is to take a state before it goes on: its first, or a later one."""
        return self._needs_state

    def first_boundary(self) -> bool:
        """Whether the training function has come to a boundary for the first time."""
        first, self._bounded = not self._bounded, True
        return first

    def copy_state(
        self, outgoing: OutgoingState | None, state: Callable[[], SegmentedBytes]
    ) -> ev.SendState | None:
        """Copy the parts of the state that joiners get from this server, once a view."""
        if outgoing is None or outgoing.epoch == self._given_epoch:
            return None
        self._given_epoch = outgoing.epoch
        heads, pieces = cut(state(), outgoing.parts)
        self._outgoing = memoryview(pieces)
        return ev.SendState(outgoing, self.step - 1, heads)

    def kept(self, step: int) -> Committed:
        """Give out the result of a step that was followed; over shared memory it may still be on its way.

        Raises the error that ended the job instead.
        """
        with self._changed:
            self._changed.wait_for(lambda: step in self._kept or self._error is not None)
            if step not in self._kept and self._error is not None:
                raise self._error
            return self._kept.pop(step)

    def arrive(self) -> ev.Arrived:
        """The training function is at a boundary: tell the core this event, then ask `replays`."""
        with self._changed:
            self._unanswered += 1
        return ev.Arrived(self.step)

    def replays(self) -> bool:
        """Wait until the core says whether the iteration that begins replays.

        Raises the error that ended the job.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered == 0 or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._replays

    def wait_for_next(self) -> None:
        """Wait until the result of the step that comes next is kept, or will not be.

        Raises the error that ended the job.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.step in self._kept or self._needs_state or self._error is not None
            )
            if self._error is not None:
                raise self._error

    # --- the loop's thread -----------------------------------------------------------------------

    def outgoing(self, place: Place, nbytes: int) -> memoryview:
        """The bytes of a piece that leaves."""
        return self._outgoing[place.offset : place.offset + nbytes]

    def expect(self, nbytes: int) -> None:
        """Make room for a state. Raises FabricError if there is not so much memory."""
        try:
            self._incoming = memoryview(np.empty(nbytes, np.uint8).data)
        except (MemoryError, ValueError) as error:
            raise FabricError(f"no memory for the training state of {nbytes} bytes: {error}") from None

    @property
    def incoming_nbytes(self) -> int:
        """The length of the state that arrives, in bytes."""
        return len(self._incoming)

    def incoming(self, place: Place, nbytes: int) -> memoryview:
        """Where a piece that arrives belongs."""
        return self._incoming[place.offset : place.offset + nbytes]

    def begin(self, replays: bool) -> None:
        """The core answers to `arrive`; a handler of a signal may have raised meanwhile."""
        with self._changed:
            self._unanswered -= 1
            self._replays = replays
            self._changed.notify_all()

    def here(self, step: int, digests: dict[Part, str]) -> None:
        """The state after `step` is complete: results up to it are in it."""
        with self._changed:
            self._kept.here(step)
            self._here = (step, self._incoming, digests)
            self._changed.notify_all()

    def behind(self, step: int) -> None:
        """Results from this step on are lost: the training thread takes a later state at a boundary."""
        with self._changed:
            self._kept.behind(step)
            self._overtaken = self._here is not None
            self._here, self._incoming = None, memoryview(b"")
            self._needs_state = True
            self._changed.notify_all()

    def keep(self, result: Committed) -> None:
        """Keep a result until the training thread comes to its step; any thread may.

        Over shared memory it may come later than the state that it is in; then no call would ever ask for it.
        """
        with self._changed:
            self._kept.keep(result.step, result)
            self._changed.notify_all()

    @property
    def keeps(self) -> tuple[int, ...]:
        """The steps whose results wait for the training thread; any thread may ask."""
        with self._changed:
            return self._kept.steps

    def fail(self, error: BmlError) -> None:
        """The job is over before the state was here."""
        self.no_pauses.set()
        with self._changed:
            self._error = error
            self._changed.notify_all()
