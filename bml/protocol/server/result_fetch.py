"""The result of a step over shared memory that a view commits: it is fetched, and given out once it is safe.

    nothing   -- a view commits the step                   -->  asked      (FetchResult)
    asked     -- ResultFetched, no server in a later epoch -->  nothing    (the instructions held back go out)
    asked     -- ResultFetched, a server in a later epoch  -->  in doubt
    in doubt  -- another view is installed                 -->  asked      (FetchResult)
    any       -- this server stops                         -->  nothing    (nothing goes out)

bml.protocol.step.direct, point 4, says why.
"""

from __future__ import annotations

from bml.protocol.server.events import FetchResult, Instruction, ResultFetched


class ResultFetch:
    """The table above; at most one result is fetched at a time."""

    def __init__(self) -> None:
        self.awaited: FetchResult | None = None
        """The result that is being fetched, or is in doubt; read in every step."""
        self._asked = False
        self._held_back: list[Instruction] = []

    def begin(self, what: FetchResult, then: list[Instruction]) -> list[Instruction]:
        """A view commits a step: hold `then` back until its result is fetched."""
        self.awaited, self._held_back = what, then
        return self.ask()

    def ask(self) -> list[Instruction]:
        """A view is installed: a result that is in doubt may be whole under it."""
        if self.awaited is None or self._asked:
            return []
        self._asked = True
        return [self.awaited]

    def hold_back(self, instructions: list[Instruction]) -> list[Instruction]:
        """Keep these until the awaited result is fetched; returns them if none is awaited."""
        if self.awaited is None:
            return instructions
        self._held_back += instructions
        return []

    def fetched(self, event: ResultFetched, epoch: int) -> list[Instruction]:
        """The result is there; `epoch` is that of the view in force.

        Returns the instructions that were held back if the result is safe, else none.
        """
        if self.awaited is None or (event.epoch, event.step) != (self.awaited.epoch, self.awaited.step):
            return []
        self._asked = False
        if event.newest > epoch:
            return []
        done = self._held_back
        self.drop()
        return done

    def drop(self) -> None:
        """The result goes to no user."""
        self.awaited, self._asked, self._held_back = None, False, []
