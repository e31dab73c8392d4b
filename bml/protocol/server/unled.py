"""How long a server goes without a coordinator when it needs one: to get a view, to leave, or to end.

A server that leaves says so, and waits until the others have a view without it: so none of them has to find
out. That is a courtesy and no matter of safety, as it brings nothing to the next step, and its process might
as well be killed. So if no coordinator is heard, it leaves alone.

A coordinator says when the job is over. A server whose training function has ended may wait for that for
hours, while others still compute. So it repeats, now and then, that its function has ended, and a coordinator
answers. The coordinator may be stopped for good, and so may the launcher that would start another: without an
answer the server gives up.
"""

from __future__ import annotations

from bml.protocol.server.events import Instruction
from bml.protocol.timeouts import Timeouts

_QUESTIONS = 4
"""How often the message is sent before a server gives up. While the server is stopped it sends none."""


class Unled:
    """The waits of one server for its coordinator. Times are in seconds on one clock that never goes back."""

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._abandoned = False
        self._needs_view_since: float | None = None
        self._heard_at: float | None = None
        """When a coordinator was heard last since this server said that it leaves."""

    def abandon(self) -> list[Instruction]:
        """The launcher is gone, so no other coordinator will be started; there is nothing to do at once."""
        self._abandoned = True
        return []

    def heard(self, now: float) -> None:
        """A coordinator says something."""
        if self._heard_at is not None:
            self._heard_at = now

    def leaves(self, now: float) -> None:
        """This server says that it leaves."""
        self._heard_at = now

    def leaves_alone(self, now: float) -> str:
        """Say why this server is to leave without an answer; empty: it waits, or does not leave."""
        if self._heard_at is None:
            return ""
        if self._abandoned:
            return "its launcher is gone, so no coordinator will let it go"
        waits_s = self._timeouts.unanswered_s
        return f"no coordinator has answered for {waits_s:g} s" if now - self._heard_at > waits_s else ""

    def has_view(self) -> None:
        """A view is in force."""
        self._needs_view_since = None

    def lacks_view(self, needed: bool, ended: bool, now: float) -> str:
        """Say how long a view was needed, once that is in vain; empty before. It is to be asked often.

        A server whose training function has `ended` needs no view, but a coordinator.
        """
        if not (needed or (ended and self._abandoned)):
            self._needs_view_since = None
            return ""
        self._needs_view_since = now if self._needs_view_since is None else self._needs_view_since
        waits_s = self._timeouts.longest_answer_s if self._abandoned else self._timeouts.orphan_s
        return f"{waits_s:g} s" if now - self._needs_view_since > waits_s else ""


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
