"""How a server whose training function has ended waits for the end of the job, and for how long.

A coordinator says when the job is over; while others still compute, that may take hours. So the server says
again, now and then, that its function has ended, and a coordinator answers. Where nobody answers any more,
as the coordinator and the launcher, which would start another, are stopped for good, the server gives up.
"""

from __future__ import annotations

_QUESTIONS = 4
"""So often it is said before a server gives up; time in which the server itself is stopped does not count."""


class EndNotice:
    """The end of a training function, and how often it was said in vain. Times are in seconds.

    `waits_s`: how long no coordinator may be heard.
    """

    def __init__(self, waits_s: float):
        self._every_s = waits_s / _QUESTIONS
        self._say_at: float | None = None
        self._unanswered = 0

    def begin(self, now: float) -> None:
        """It is said for the first time."""
        self._say_at = now + self._every_s

    def heard(self) -> None:
        """A coordinator says something."""
        self._unanswered = 0

    @property
    def in_vain(self) -> bool:
        """Whether there is nobody who would answer."""
        return self._unanswered >= _QUESTIONS

    def is_due(self, now: float) -> bool:
        """Whether it is to be said again; that counts as said."""
        if self._say_at is None or now < self._say_at:
            return False
        self._say_at = now + self._every_s
        self._unanswered += 1
        return True
