"""The simulated memory of one host: what servers post and share, read whenever its readers come to it.

Reading is not instantaneous: a sum is made, and each half of a result brought home, some time after it could
be, from what lies there then. So memory that is written too early shows in the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bml.protocol import events as ev
from bml.protocol.direct import Post, Stage, Sum, standing, standings
from bml.protocol.workspace import Array
from bml.sim.network import Network
from bml.sim.process import Process

_LOOK_S = 0.002
_WORK_S = 0.003
_IN_PLACE = 0.3
"""How likely a server says that its user reads the result in place."""


@dataclass
class Host:
    """Per server where it stands, its contribution, whether its user reads the result in place, the memory
    for its shares, and how it looks again."""

    standing: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, Array] = field(default_factory=dict)
    in_place: dict[int, bool] = field(default_factory=dict)
    shares: dict[int, Array] = field(default_factory=dict)
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)


class Sharing:
    """The training thread of one server: it works, waits, and tells the core through `feel`.

    One thing at a time: what it is at when it is asked to try again is finished before, so it counts no more.
    """

    def __init__(
        self, server: int, host: Host, network: Network, process: Process, feel: Callable[[ev.Event], None]
    ):
        self._server = server
        self._host = host
        self._network = network
        self._process = process
        self._feel = feel
        self._tries = 0
        self._sum: Sum | None = None
        self._done: Sum | None = None
        self._whole = False
        self._members: tuple[int, ...] = ()
        self._result: Array = np.empty(0)
        self._fetched = 0

    def bring(self, contribution: Array, result: Array, members: tuple[int, ...]) -> None:
        """Begin a try: the result belongs into `result`. Some users would read it where it lies."""
        self._tries += 1
        self._host.in_place[self._server] = self._network.random.random() < _IN_PLACE
        self._host.waiting.pop(self._server, None)
        self._host.inputs[self._server] = contribution
        if self._server not in self._host.shares:
            self._host.shares[self._server] = np.zeros_like(contribution)
        self._result, self._members = result, members
        self._sum = self._done = None
        self._fetched = 0

    def post(self, post: Post) -> None:
        """Let everybody see where this server stands, then wait for them."""
        self._host.standing[self._server] = standing(*post)
        waiting, self._host.waiting = self._host.waiting, {}
        for look in waiting.values():
            look()
        if post.stage is Stage.COMPLETE:
            self._later(_WORK_S, lambda: self._bring_home(post))
        else:
            self._later(_LOOK_S, lambda: self._look(post))

    def add(self, instruction: Sum) -> None:
        """Add when all are ready; `instruction` comes with the Post."""
        self._sum = instruction

    def fetch(self) -> None:
        """Bring home what is missing of the result."""
        self._fetch(len(self._result))

    def _fetch(self, upto: int) -> None:
        done = self._done
        assert done is not None
        for index, owner in enumerate(() if self._whole else done.members):
            if owner == self._server and self._copies:
                continue  # it was brought home when it was added
            start = max(self._fetched, index * done.share)
            stop = min((index + 1) * done.share, upto)
            if start < stop:
                self._result[start:stop] = self._host.shares[owner][start:stop]
        self._fetched = max(self._fetched, upto)

    def _bring_home(self, post: Post) -> None:
        self._fetch(len(self._result) // 2)

        def rest() -> None:
            self.fetch()
            self._look(post)

        self._later(_WORK_S, rest)

    def _look(self, post: Post) -> None:
        low, high = standings(*post)
        if not all(low <= self._host.standing.get(server, 0) < high for server in self._members):
            self._host.waiting[self._server] = lambda: self._later(_LOOK_S, lambda: self._look(post))
        elif self._sum is not None:
            self._later(_WORK_S, self._add)
        else:
            self._feel(ev.Gathered(*post))

    def _add(self) -> None:
        done, self._sum = self._sum, None
        assert done is not None
        self._done = done
        self._whole = done.adds_whole(any(self._host.in_place[server] for server in done.members))
        out = self._result if self._whole else self._host.shares[self._server]
        start, stop = (0, len(out)) if self._whole else (done.start, done.stop)
        parts = [self._host.inputs[server][start:stop] for server in done.members]
        total = parts[0]
        for part in parts[1:]:
            total = np.add(total, part)
        out[start:stop] = total
        if self._copies:
            self._result[start:stop] = total
        self._feel(ev.Summed(done.epoch, done.step, self._whole))

    @property
    def _copies(self) -> bool:
        """Whether its user wants a result of his own."""
        return not self._host.in_place[self._server]

    def _later(self, within_s: float, action: Callable[[], None]) -> None:
        tries = self._tries

        def act() -> None:
            if tries == self._tries:
                action()

        delay_s = self._network.random.uniform(0, within_s)
        self._network.after(delay_s, lambda: self._process.run(act))


__all__ = ["Host", "Sharing"]
