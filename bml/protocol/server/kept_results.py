"""The results that wait for the training function of a joiner, which still has to come to their steps.

keep(step)    -- a result is here, perhaps later than the state that it is in
behind(step)  -- results from this step on are lost; the function goes on to a boundary and takes a later
state here(step)    -- the state after this step is whole took          -- the function goes on from that
state pop(step)     -- the function has come to this step
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class KeptResults(Generic[T]):
    """See the module's text.

    There are two parts: results for the iteration that the training function is in, up to the step from which
    results were lost, and results that follow the state which it will take.
    """

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._lost = 0
        self._state = -1
        self._taken = False

    def __contains__(self, step: int) -> bool:
        return step in self._kept

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose results are kept, in order."""
        return tuple(sorted(self._kept))

    def keep(self, step: int, result: T) -> None:
        """Keep a result, unless the state that is whole contains it: then it is not needed."""
        if not self._lost <= step <= self._state:
            self._kept[step] = result

    def behind(self, step: int) -> None:
        """The result of this step is lost; so are those after a state that was not taken yet."""
        if self._taken:
            self._lost = step
        else:
            self._drop(self._lost, max(self._kept, default=-1))
        self._state, self._taken = -1, False

    def here(self, step: int) -> None:
        """The state after `step` is whole: the results up to there are in it."""
        self._state = step
        self._drop(self._lost, step)

    def took(self) -> None:
        """The training function goes on from the state that is here."""
        self._taken, self._lost = True, 0
        self._drop(0, self._state)

    def pop(self, step: int) -> T:
        """Hand out the result of this step."""
        return self._kept.pop(step)

    def _drop(self, first: int, last: int) -> None:
        self._kept = {step: kept for step, kept in self._kept.items() if not first <= step <= last}
