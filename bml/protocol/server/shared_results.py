"""A step over shared memory that a view commits: its result is given out when it is home, and whole.

    nothing   -- a view commits the step              -->  asked      (BringHome)
    asked     -- Home, nobody in a later epoch        -->  nothing    (gives out what waits)
    asked     -- Home, somebody in a later epoch      -->  in doubt
    in doubt  -- another view is installed            -->  asked      (BringHome)
    any       -- this server stops                    -->  nothing    (gives out nothing)

Why: bml.protocol.step.direct, point 4.
"""

from __future__ import annotations

from bml.protocol.server.events import BringHome, Home, Instruction


class Homecoming:
    """See the module's text."""

    def __init__(self) -> None:
        self.awaited: BringHome | None = None
        """The result that is on its way, or in doubt; asked for in every step."""
        self._asked = False
        self._waiting: list[Instruction] = []

    def begin(self, what: BringHome, then: list[Instruction]) -> list[Instruction]:
        """A view commits a step: `then` is for when its result is home."""
        self.awaited, self._waiting = what, then
        return self.ask()

    def ask(self) -> list[Instruction]:
        """A view is installed: what is in doubt may be so no more."""
        if self.awaited is None or self._asked:
            return []
        self._asked = True
        return [self.awaited]

    def behind(self, instructions: list[Instruction]) -> list[Instruction]:
        """These must not come before what is awaited; returns what can be done now."""
        if self.awaited is None:
            return instructions
        self._waiting += instructions
        return []

    def home(self, event: Home, epoch: int) -> list[Instruction]:
        """The result is there; `epoch` is that of the view in force."""
        if self.awaited is None or (event.epoch, event.step) != (self.awaited.epoch, self.awaited.step):
            return []
        self._asked = False
        if event.newest > epoch:
            return []
        done = self._waiting
        self.drop()
        return done

    def drop(self) -> None:
        """Nobody is to be given the result."""
        self.awaited, self._asked, self._waiting = None, False, []
