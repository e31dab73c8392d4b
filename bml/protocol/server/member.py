"""Membership as one server sees it: what it has promised, accepted and installed.

State table (the answers that keep two servers from ever disagreeing on a step):

    state      event                                  becomes    and
    ---------  -------------------------------------  ---------  ------------------------------------
    running    Freeze, epoch > promised               frozen     reports Status; drops old traffic
    frozen     Freeze, ballot > promised              frozen     reports Status again, for that ballot
    frozen     Freeze, ballot = promised              frozen     reports again (it was sent again)
    any        Freeze, ballot < promised              same       Refused
    running    Freeze, ballot = promised              running    Refused (it was late: that view is in force)
    frozen     Propose of the promised ballot         frozen     stores the view, Accepted (Refused if it
                                                                 names another incarnation of this server)
    any        Propose of any other ballot            same       Refused
    frozen     Install of the accepted view, or a     running    commits or retries as the view says
               data frame of its epoch (proof that
               some member installed it)
    any        Evict, Abort                           stopped    the user's call ends with the error
    any        anything of an older term              same       Deposed: that coordinator has a successor

A ballot is (epoch, term): two coordinators, an old one and its successor, may try the same epoch, and
only one of them can gather every member's promise. A view is installed only after all its members have
accepted it, and its members are more than half of the view before. So a coordinator that gathers promises
later finds a server that knows the view, and honours its decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bml.protocol.server.events import Ended
from bml.protocol.step.spans import Spans
from bml.protocol.wire.messages import Accepted, Freeze, Incarnation, Propose, Refused, Status, View
from bml.topology.errors import BmlError


@dataclass
class Member:
    """The membership state of `server`; `incarnation`: None for its first."""

    server: int
    incarnation: Incarnation | None = None
    promised: tuple[int, int] = (0, 0)
    accepted: View | None = None
    installed: View | None = None
    frozen: bool = field(default=True)  # nothing may run before the first view
    stopped: BmlError | None = None
    """The error that ended the job on this server."""
    ready: bool = True
    """Whether it wants to be let in."""
    proven_epoch: int = 0
    """The epoch of the accepted view, if a data frame has proved that it is in force; else 0."""
    left_out_of: int = 0
    """The epoch of the newest view that this server, which waits to be let in, was told to be out of."""

    @property
    def epoch(self) -> int:
        """Epoch of the installed view, 0 before the first."""
        return self.installed.epoch if self.installed else 0

    def status(
        self,
        term: int,
        epoch: int,
        committed: int,
        standing: tuple[int, Spans, int],
        ended: Ended,
        behind: bool,
    ) -> Status:
        """The report to a coordinator that asks with `epoch` (0: it has just introduced itself).

        `standing`: the step that is complete; of the current step the elements that are final, and its
        length. `behind`: it is a learner that must not contribute yet.
        """
        complete, final, n_elements = standing
        return Status(
            server=self.server,
            term=term,
            epoch=epoch,
            promised=self.promised[0],
            installed=self.installed,
            accepted=self.accepted,
            committed=committed,
            complete=complete,
            outcome=ended.outcome,
            error=ended.error,
            incarnation=self.incarnation,
            final=final,
            n_elements=n_elements,
            ready=self.ready,
            behind=behind,
        )

    def freeze(self, message: Freeze) -> Refused | None:
        """Promise the ballot; returns the refusal if a newer one was promised, or this one is over."""
        ballot = (message.epoch, message.term)
        if ballot < self.promised or (ballot == self.promised and not self.frozen):
            return Refused(self.server, message.term, self.promised[0])
        self.promised = ballot
        self.frozen = True
        return None

    def propose(self, message: Propose) -> Accepted | Refused:
        """Store the view, unless something newer was promised meanwhile."""
        view = message.view
        # An earlier incarnation's promises are not this one's.
        mine = view.incarnation(self.server) == self.incarnation
        if (view.epoch, message.term) != self.promised or not self.frozen or not mine:
            return Refused(self.server, message.term, self.promised[0])
        self.accepted = view
        return Accepted(self.server, message.term, view.epoch)

    def left_out(self, epoch: int) -> bool:
        """It is out of a view; returns whether to ask to be let in by another: once for each view."""
        is_news, self.left_out_of = epoch > self.left_out_of, max(epoch, self.left_out_of)
        return is_news and self.ready

    def may_install(self, epoch: int) -> bool:
        """Whether this server must install the view of `epoch`, now that it knows that it is in force.

        Not when it has promised something newer since: that coordinator has been told of the accepted
        view and carries its decision on.
        """
        return self.accepted is not None and self.accepted.epoch == epoch == self.promised[0] > self.epoch

    def install(self) -> View:
        """Make the accepted view the installed one."""
        assert self.accepted is not None
        self.installed = self.accepted
        self.frozen = False
        return self.installed
