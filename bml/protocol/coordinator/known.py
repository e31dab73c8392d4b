"""The views that a coordinator knows: its own, and those of earlier coordinators that servers report."""

from __future__ import annotations

from bml.protocol.coordinator.decision import epoch_of
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, View


class KnownViews:
    """All known views. `view` is the newest: its decision counts. `epoch` is the highest promised one.

    `committed` is the last step that is known to be committed. `first` are the servers that are to be in
    the first view. With fewer than `min_servers` no view may be; None: it must have more than half of the
    contributors of the one before.
    """

    def __init__(self, first: tuple[int, ...], min_servers: int | None):
        self.view: View | None = None
        self.epoch = 0
        self.committed = 0
        self.min_servers = min_servers
        self._first = first
        self._in_force: View | None = None  # the newest one known to be in force
        self.abandoned: set[View] = set()
        """Proposals of this coordinator since the last view that all members accepted."""

    @property
    def members(self) -> tuple[int, ...]:
        """Servers of the newest view; before there is one, those that are to be in the first."""
        return self.view.members if self.view else self._first

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without the learners."""
        return self.view.contributors if self.view else self._first

    def shortage(self, left: tuple[int, ...]) -> str:
        """Why these contributors may not go on alone, "" if they may.

        The majority is counted in the newest view that is known to be in force. A view that only some members
        accepted may never have been, and then the other members are free to go on with another coordinator.
        More than half of its contributors are needed; a learner that is to contribute from now on is none of
        them.
        """
        old = self._in_force.contributors if self._in_force else self._first
        if self.min_servers is not None:
            enough, need = len(left) >= max(1, self.min_servers), f"min_servers is {self.min_servers}"
        else:
            left = tuple(server for server in left if server in old)
            enough = 2 * len(left) > len(old)
            need = f"more than half of the {len(old)} before are needed (min_servers sets another limit)"
        return "" if enough else f"only {len(left)} of {len(old)} servers are left, {list(left)}: {need}"

    def incarnation(self, server: int) -> Incarnation | None:
        """The incarnation in which the newest view has this server."""
        return self.view.incarnation(server) if self.view else None

    def learn(self, status: msg.Status) -> bool:
        """Take over newer promises and views of other coordinators. Returns whether there were any."""
        news = status.promised > self.epoch
        self.epoch = max(self.epoch, status.promised)
        self.committed = max(self.committed, status.committed)
        for view in (status.installed, status.accepted):
            # A proposal of this coordinator is in force only when it says so itself.
            if view is not None and view not in self.abandoned and view.epoch > epoch_of(self.view):
                self.view = view
                news = True
        if epoch_of(status.installed) > epoch_of(self._in_force):
            self._in_force = status.installed
        return news

    def propose(self, view: View) -> None:
        """This coordinator asks for a view."""
        self.abandoned.add(view)

    def put_in_force(self, view: View) -> None:
        """All its members have accepted it: it is in force."""
        self.view = self._in_force = view
        self.abandoned.clear()

    def has_in_force(self, status: msg.Status) -> bool:
        """Whether a server has the newest view in force, and has promised nothing newer."""
        epoch = epoch_of(self.view)
        return (epoch_of(status.installed), status.promised) == (epoch, epoch)

    def has_accepted(self, status: msg.Status) -> bool:
        """Whether a server only waits to hear that the newest view is in force."""
        return status.accepted == self.view and status.promised == epoch_of(self.view)
