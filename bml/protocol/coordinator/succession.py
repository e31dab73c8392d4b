"""The launcher's decision when a job gets another coordinator, and under which term.

State table of the coordinator that was started last, as the launcher sees it:

    state     event                                              becomes   and
    --------  -------------------------------------------------  --------  ------------------------------
    starting  a sign of life                                     working
    starting  none within `starts_s`                             ended     it is killed
    working   no sign of life for too long (see                  ended     it is killed: it may be stopped
             bml.faults.detector)
    any       its process ended, or its term is not the highest  ended
    any       it ended after it had ended the job                over
    ended     its pause is over                                  starting  a successor is started
    ended     _MOST_FAILURES in a row failed                     over      the job is given up

Terms are counted and never read from a clock, which may step back. A coordinator that a server deposes for
a higher term reports that term, and its successor gets a term above it. Only the launcher starts
coordinators, so only the one that it started last is ever replaced. An older one that was stopped and wakes
has a lower term: it is deposed and ends, and the launcher starts no other for it.
"""

from __future__ import annotations

from typing import NamedTuple

from bml.faults import Detector
from bml.protocol.timeouts import Timeouts

#: A coordinator that has brought all servers to one view, or has ended the job, has succeeded.
_SUCCEEDED = ("steady", "stopped")
_MOST_FAILURES = 10
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0  # a crash at each start must not fill the machine
#: Coordinators that are replaced for their silence again and again may only be slow: each may be silent twice
#: as long as the one before, until one has given signs of life for so many `detect_s`. That one has succeeded
#: is no reason: coordinators that succeed and then fall silent would be replaced as fast for ever.
_MOST_DOUBLED = 3
_TRUSTED_AFTER = 64
_LINK = (0, 0)


class Start(NamedTuple):
    """Start a coordinator with this term."""

    term: int


class Kill(NamedTuple):
    """Kill the newest coordinator, whether it runs or is stopped."""

    why: str


class GiveUp(NamedTuple):
    """End the job with this error: it cannot get a coordinator."""

    why: str


Order = Start | Kill | GiveUp


class Succession:
    """See the module's text. Times are in seconds on one clock that never goes back.

    `starts_s`: how long a coordinator may take from its start to its first sign of life.
    """

    def __init__(self, timeouts: Timeouts, starts_s: float, now: float):
        self.term = 0
        """Of the coordinator that was started last."""
        self.interval_s = timeouts.heartbeat_s
        """How often a coordinator gives a sign of life, and `look` is to be called."""
        self._detect_s = timeouts.detect_s
        self._starts_s = starts_s
        self._detector = Detector(0, (), timeouts.detect_s, now)
        self._state = "ended"
        self._why = ""
        self._highest = 0
        self._n_failed = 0
        self._silenced = 0
        self._start_at = now

    @property
    def over(self) -> bool:
        """Whether no further coordinator will be started."""
        return self._state == "over"

    def look(self, now: float) -> Order | None:
        """Return the order to carry out now, if any. It counts as carried out."""
        if self._state == "ended" and self._n_failed >= _MOST_FAILURES:
            self._state = "over"
            return GiveUp(f"{_MOST_FAILURES} coordinators in a row failed; the last {self._why}")
        if self._state == "ended" and now >= self._start_at:
            return self._begin(now)
        if self._state == "starting" and now >= self._start_at + self._starts_s:
            return self._kill(f"gave no sign of life within {self._starts_s:g} s", now)
        if self._state == "working":
            for silent in self._detector.check(now):
                self._silenced += 1
                return self._kill(f"was silent for {silent.silent_s:.3f} s", now)
        return None

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, `look` is due: a later call shows that the launcher itself paused."""
        due = now + self.interval_s
        if self._state == "ended":
            due = max(now, min(self._start_at, due))
        return due

    def heartbeat(self, term: int, now: float) -> None:
        """A sign of life of the coordinator of this term."""
        if term != self.term or self._state not in ("starting", "working"):
            return
        if self._state == "starting":
            self._state = "working"
            self._detector.patience_s = self._detect_s * 2 ** min(self._silenced, _MOST_DOUBLED)
            self._detector.set_links((_LINK,), now)
        self._detector.heard(*_LINK, now)
        if now - self._start_at >= _TRUSTED_AFTER * self._detect_s:
            self._silenced = 0

    def reported(self, term: int, state: str, highest: int) -> None:
        """A coordinator reports its state, and the highest term that it has heard of."""
        self._highest = max(self._highest, highest)
        if term == self.term and state in _SUCCEEDED:
            self._n_failed = 0

    def ended(self, term: int, why: str, now: float, done: bool = False) -> None:
        """A coordinator's process is gone, or it was deposed; `done`: it had ended the job before."""
        if term == self.term and self._state in ("starting", "working"):
            self._state, self._why = "over" if done else "ended", why
            late = self._n_failed - 2  # the first successor starts at once
            self._start_at = now if late < 0 else now + min(_LEAST_PAUSE_S * 2**late, _MOST_PAUSE_S)

    def _begin(self, now: float) -> Start:
        self.term = self._highest = max(self.term, self._highest) + 1
        self._state, self._start_at = "starting", now
        self._n_failed += 1
        return Start(self.term)

    def _kill(self, why: str, now: float) -> Kill:
        self.ended(self.term, why, now)
        return Kill(why)
