"""The next view while it is being agreed on: its members, their answers, and the proposal."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from msgspec import structs

from bml.protocol.coordinator.decision import decide, final_everywhere
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, View


@dataclass
class Ballot:
    """`next` is the view so far: its decision (`commit`, `final`) comes with the last status.

    `newcomers` are those of its members that are let in by it: nothing is decided by them.
    """

    next: View
    newcomers: frozenset[int]
    statuses: dict[int, msg.Status] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    proposal: View | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The servers whose answers are needed."""
        return self.next.members

    def incarnation(self, server: int) -> Incarnation | None:
        """The incarnation of `server` that is asked; None: its first."""
        return self.next.incarnation(server)

    @property
    def answered(self) -> bool:
        """Whether any member has answered what was asked last."""
        return len(self.silent) < len(self.members)

    @property
    def silent(self) -> list[int]:
        """The members whose answer is missing: the status, then the acceptance of the proposal."""
        answered = self.statuses.keys() if self.proposal is None else self.accepted
        return [server for server in self.members if server not in answered]

    def question(self, term: int) -> msg.Freeze | msg.Propose:
        """The message to the members now, from the coordinator of this term."""
        if self.proposal is None:
            return msg.Freeze(term, self.next.epoch, self.next.reason)
        return msg.Propose(term, self.proposal)

    def decide(self, old: View | None, abandoned: Container[View] = ()) -> View:
        """The view to propose, now that every member has said where it stands; `old` is the newest known.

        The coordinator has `abandoned` these proposals of its own before all members had accepted them. They
        do not bind it, and may be without a server that is asked now and was not complete. The statuses that
        they were made of still count: a server that accepted one of them had accepted `old` before, if that
        was ever in force.
        """
        known = [
            structs.replace(status, accepted=None) if status.accepted in abandoned else status
            for server, status in self.statuses.items()
            if server not in self.newcomers
        ]
        commit = decide(known, old)
        # A step whose contributors stay goes on where it was.
        stay = old is not None and old.contributors == self.next.contributors and not self.newcomers
        final = final_everywhere(known, commit, old) if stay else ()
        # A learner that has fallen behind since it said CaughtUp learns on.
        learning = {*self.next.learners, *(status.server for status in known if _learns_on(status))}
        learners = tuple(server for server in self.members if server in learning)
        self.proposal = structs.replace(self.next, commit=commit, final=final, learners=learners)
        return self.proposal


def _learns_on(status: msg.Status) -> bool:
    """Whether a learner must not contribute yet.

    It is one in the view that it has installed. A later view that has it as a contributor cannot be in force:
    this server would have accepted it, and says that it is behind only of a time when it was not frozen.
    """
    return status.behind and status.installed is not None and status.server in status.installed.learners
