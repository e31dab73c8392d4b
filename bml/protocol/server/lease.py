"""How long a server goes without a coordinator that it needs: for a view, to be let in, to leave, to end.

A server that needs a coordinator asks it again and again whether it is there, and a coordinator answers. So
it learns that the coordinator is gone, or cannot be reached, also where no connection breaks: those that may
start another one look at `unanswered`. One that waits for a view asks every `detect_s`. One whose training
function has ended may wait for hours, while others still compute, and so may one that is to be let in; these
ask now and then, and give up without an answer: the coordinator may be stopped for good, and so may the
launcher that would start another.

A server that leaves says so, and waits until the others have a view without it: so none of them has to find
out. That is a courtesy and no matter of safety, as it brings nothing to the next step, and its process might
as well be killed. So if no coordinator is heard, it leaves alone.
"""

from __future__ import annotations

from bml.protocol.server.events import Instruction
from bml.protocol.timeouts import Timeouts

_QUESTIONS = 4
"""How often a server that waits for long asks before it gives up. While it is stopped it asks nothing."""


class CoordinatorLease:
    """The waits of one server for its coordinator. Times are in seconds on one clock that never goes back."""

    def __init__(self, timeouts: Timeouts):
        self.unanswered = 0
        """How many questions were asked since a coordinator was heard last."""
        self._timeouts = timeouts
        self._abandoned = False
        self._needs_view_since: float | None = None
        self._heard_at: float | None = None
        """When a coordinator was heard last since this server said that it leaves."""
        self._ask_at: float | None = None
        self._n_patient = 0
        """How many of the questions were those of a server that waits for long."""

    def abandon(self) -> list[Instruction]:
        """The launcher is gone, so no other coordinator will be started; there is nothing to do at once."""
        self._abandoned = True
        return []

    def heard(self, now: float) -> None:
        """A coordinator says something."""
        self.unanswered = self._n_patient = 0
        if self._heard_at is not None:
            self._heard_at = now

    def asks(self, needs_view: bool, waits: bool, now: float) -> bool:
        """Whether a question is due, which counts as asked then; to be called often.

        `needs_view`: the server needs a view; `waits`: it waits for the end of the job, or to be let in.
        """
        if not (needs_view or waits):
            self._ask_at, self.unanswered, self._n_patient = None, 0, 0
            return False
        every_s = self._timeouts.detect_s if needs_view else self._timeouts.orphan_s / _QUESTIONS
        self._ask_at = now + every_s if self._ask_at is None else min(self._ask_at, now + every_s)
        if now < self._ask_at:
            return False
        self._ask_at = now + every_s
        self.unanswered += 1
        self._n_patient += not needs_view
        return True

    @property
    def in_vain(self) -> bool:
        """Whether a server that waits for long must assume that no coordinator will answer."""
        return self._n_patient >= _QUESTIONS

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
