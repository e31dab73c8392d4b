"""The views that a coordinator knows of: its own, and what the servers say of those before it."""

from __future__ import annotations

from bml.protocol.coordinator.decision import epoch_of
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, View


class KnownViews:
    """`view` is the newest, whose decisions count; `epoch` is the highest that anybody has promised.

    `committed` is the last step of which it is known that it is. `first` are the servers that are to be in
    the first view. With fewer than `min_servers` no view may be; None: it must have more than half of the
    contributors of the one before.
    """

    def __init__(self, first: tuple[int, ...], min_servers: int | None):
        self.view: View | None = None
        self.epoch = 0
        self.committed = 0
        self.min_servers = min_servers
        self._first = first
        self._chosen: View | None = None  # the newest one known to be in force
        self.abandoned: set[View] = set()
        """What this coordinator has proposed since the last view that was accepted by all."""

    @property
    def members(self) -> tuple[int, ...]:
        """Servers of the newest view; before there is one, those that are to be in the first."""
        return self.view.members if self.view else self._first

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without those that only learn."""
        return self.view.contributors if self.view else self._first

    def shortage(self, left: tuple[int, ...]) -> str:
        """Why these contributors may not go on alone, "" if they may.

        What counts is the newest view that is known to be in force: one that was only accepted by some may
        never have been, and then the rest is free to go on with another coordinator. More than half of its
        contributors are needed, and a learner that is to contribute from now on is none of them.
        """
        old = self._chosen.contributors if self._chosen else self._first
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
        """Take over what another coordinator did: newer promises and views. Returns whether there was any."""
        news = status.promised > self.epoch
        self.epoch = max(self.epoch, status.promised)
        self.committed = max(self.committed, status.committed)
        for view in (status.installed, status.accepted):
            # One of ours that is not in force yet may never be: only we could have said so.
            if view is not None and view not in self.abandoned and view.epoch > epoch_of(self.view):
                self.view = view
                news = True
        if epoch_of(status.installed) > epoch_of(self._chosen):
            self._chosen = status.installed
        return news

    def propose(self, view: View) -> None:
        """This coordinator asks for a view."""
        self.abandoned.add(view)

    def choose(self, view: View) -> None:
        """All its members have accepted it: it is in force."""
        self.view = self._chosen = view
        self.abandoned.clear()

    def has_in_force(self, status: msg.Status) -> bool:
        """Whether a server has the newest view in force, and has promised nothing newer."""
        epoch = epoch_of(self.view)
        return (epoch_of(status.installed), status.promised) == (epoch, epoch)

    def has_accepted(self, status: msg.Status) -> bool:
        """Whether a server only waits to hear that the newest view is in force."""
        return status.accepted == self.view and status.promised == epoch_of(self.view)
