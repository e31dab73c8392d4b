"""How a server whose training function has ended waits for the end of the job, and for how long.

A coordinator says when the job is over; while other servers still compute, that may take hours. So the server
repeats, now and then, the message that its function has ended, and a coordinator answers. The coordinator may
be stopped for good, and so may the launcher that would start another: without an answer the server gives up.
"""

from __future__ import annotations

_QUESTIONS = 4
"""How often the message is sent before a server gives up. While the server is stopped it sends none."""


class EndNotice:
    """The message that a training function has ended, and how often it was sent in vain. In seconds:

    `waits_s`: how long no coordinator may be heard.
    """

    def __init__(self, waits_s: float):
        self._every_s = waits_s / _QUESTIONS
        self._say_at: float | None = None
        self._unanswered = 0

    def begin(self, now: float) -> None:
        """The message is sent for the first time."""
        self._say_at = now + self._every_s

    def heard(self) -> None:
        """A coordinator says something."""
        self._unanswered = 0

    @property
    def in_vain(self) -> bool:
        """Whether it must be assumed that no coordinator will answer."""
        return self._unanswered >= _QUESTIONS

    def is_due(self, now: float) -> bool:
        """Whether the message is to be sent again; asking counts as sending."""
        if self._say_at is None or now < self._say_at:
            return False
        self._say_at = now + self._every_s
        self._unanswered += 1
        return True
