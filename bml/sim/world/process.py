"""A simulated process: it runs actions, unless it is dead; while it is frozen they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Action = Callable[[], None]
T = TypeVar("T")


class Process:
    """Alive, frozen (SIGSTOP: messages wait in its sockets, in order) or dead for good."""

    def __init__(self) -> None:
        self.alive = True
        self.frozen = False
        self.behind_s = 0.0
        """By how much its clock is slow: that of a machine stands still while the machine is paused."""
        self.stopped = False
        """Whether it is dead, or will never go on."""
        self._briefly = False
        self._held: deque[Action] = deque()
        self._due: Action | None = None

    def when_s(self, due: float) -> float:
        """When its clock shows this time, at the latest: sums of floats are not exact."""
        return due + self.behind_s + 1e-9 if self.behind_s else due

    @property
    def runs(self) -> bool:
        """Neither dead nor frozen."""
        return self.alive and not self.frozen

    @property
    def answers(self) -> bool:
        """Whether a connection to it can be made within moments."""
        return self.alive and (self._briefly or not self.frozen)

    def run(self, action: Action) -> None:
        """Run now, after the thaw, or never."""
        if self.frozen:
            self._held.append(action)
        elif self.alive:
            action()

    def tick(self, action: Action) -> None:
        """Like `run`, for the timer: after a thaw it comes last, for a loop reads its sockets first."""
        if self.frozen:
            self._due = action
        elif self.alive:
            action()

    def each(self, items: Iterable[T], do: Callable[[T], None]) -> None:
        """Do the items one by one; death or a freeze in the middle stops it there, a thaw goes on."""
        left = deque(items)
        while left and self.runs:
            do(left.popleft())
        if left and self.frozen:
            self._held.appendleft(lambda: self.each(left, do))

    def freeze(self, briefly: bool = False, for_good: bool = False) -> None:
        """Stop without any sign; `briefly`: it only waits for its turn on a busy host."""
        self.frozen, self._briefly, self.stopped = self.alive, briefly, for_good

    def thaw(self) -> None:
        """Go on with the actions that have come in meanwhile, as if no time had passed."""
        self.frozen = self._briefly = False
        self.stopped = not self.alive
        while self._held and self.runs:
            self._held.popleft()()
        if self._due and self.runs:
            due, self._due = self._due, None
            due()

    def die(self) -> None:
        """End now."""
        self.alive = self.frozen = self._briefly = False
        self.stopped = True
        self._held.clear()
        self._due = None
