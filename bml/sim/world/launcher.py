"""The launcher of a simulated job: it starts coordinators, as the real one does.

Its decisions are `bml.protocol.coordinator.succession`. This module has its mishaps: it is stopped, does not
hear its coordinator, cannot kill a process on a machine that it does not reach, starts coordinators that
crash, and has a clock that steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bml.protocol.coordinator.succession import GiveUp, Kill, Start, Succession
from bml.protocol.timeouts import Timeouts
from bml.sim.world.network import Network
from bml.sim.world.process import Process

#: The time that a clock shows when a job begins, in seconds.
_EPOCH_S = 1.8e9


class Started(Protocol):
    """A coordinator as the launcher that started it sees it."""

    term: int
    process: Process

    def end(self) -> None:
        """Its process is killed."""


class Launcher:
    """See the module's text.

    `start(term)` makes a coordinator, which takes `start_s`; `on_event(name, text)` is called for every
    event, and `on_give_up(why)` when the job ends with this error. `reaches`: whether a process that it kills
    dies.
    """

    def __init__(
        self,
        network: Network,
        timeouts: Timeouts,
        start_s: float,
        reaches: bool,
        start: Callable[[int], Started],
        on_event: Callable[[str, str], None],
        on_give_up: Callable[[str], None],
    ):
        self.process = Process()
        self.deaf_until_s = 0.0
        """Until then it hears nothing of its coordinators."""
        self.crashes = 0
        """How many coordinators are still to crash on their start."""
        self.clock_offset_s = _EPOCH_S
        self.succession = Succession(timeouts, timeouts.warm_up_s, network.now)
        self._network = network
        self._start_s = start_s
        self._reaches = reaches
        self._start, self._on_event, self._on_give_up = start, on_event, on_give_up
        self._newest: Started | None = None
        self._wake_at = float("inf")

    @property
    def clock_ns(self) -> int:
        """The time of the wall clock, which mishaps step: no decision may follow from it."""
        return int((self._network.now + self.clock_offset_s) * 1e9)

    def look(self) -> None:
        """Carry out the orders of the succession."""
        now = self._network.now
        while (order := self.succession.look(now)) is not None:
            match order:
                case Start(term):
                    self._launch(term)
                case Kill(why):
                    self._kill(why)
                case GiveUp(why):
                    self._on_give_up(why)
        if not self.succession.over:
            self._schedule(self.succession.next_deadline(now))

    def heartbeat(self, term: int) -> None:
        """A sign of life of a coordinator."""
        self._hear(lambda: self.succession.heartbeat(term, self._network.now))

    def said(self, term: int, state: str, highest: int) -> None:
        """A coordinator says where it stands."""
        self._hear(lambda: self.succession.reported(term, state, highest))

    def ended(self, term: int, why: str) -> None:
        """The process of a coordinator is gone. The kernel tells, so it is heard in any case."""

        def hear() -> None:
            self.succession.ended(term, why, self._network.now)
            self.look()

        self._network.after(0.0, lambda: self.process.run(hear))

    def freeze(self, for_s: float) -> None:
        """It is stopped, or blocked, for a while."""
        if self.process.runs:
            self._on_event("fault", f"the launcher is stopped for {for_s:.3f} s")
            self.process.freeze()
            if for_s != float("inf"):
                self._network.after(for_s, self._thaw)

    def _thaw(self) -> None:
        self._on_event("heal", "the launcher goes on")
        self.process.thaw()

    def _hear(self, action: Callable[[], None]) -> None:
        if self._network.now >= self.deaf_until_s:
            self.process.run(action)

    def _launch(self, term: int) -> None:
        """Start a process: it takes a while, except for the first."""

        def begin() -> None:
            if self.crashes > 0:
                self.crashes -= 1
                self._on_event("fault", f"coordinator {term} crashes on its start")
                self.ended(term, "crashed on its start")
            else:
                self._newest = self._start(term)

        if self._newest is None:
            begin()
        else:
            self._network.after(self._start_s, begin)

    def _kill(self, why: str) -> None:
        coordinator = self._newest
        if coordinator is None:
            return
        self._on_event("kill", f"the launcher kills coordinator {coordinator.term}, which {why}")
        if self._reaches:
            coordinator.end()

    def _schedule(self, due: float) -> None:
        if due < self._wake_at:
            self._wake_at = due
            self._network.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._wake_at:
            self._wake_at = float("inf")
            self.process.tick(self.look)
