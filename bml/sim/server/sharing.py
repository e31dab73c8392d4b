"""Direct reduction on a simulated server: it posts, waits, adds, and fetches shares from others' memory.

Reading is not instantaneous: each half of a sum is made, and of a result that is fetched, some time after it
could be, from the bytes that lie there then. So memory that is written too early shows in the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Stage, Sum, epoch_of, standing, standings
from bml.protocol.step.workspace import Array
from bml.sim.judge.promises import PromiseBroken
from bml.sim.server.context import World
from bml.sim.world.host import NOTHING, Host, StatusPage
from bml.sim.world.process import Process

_LOOK_S = 0.02  # how late a thread may see what another one wrote
_WORK_S = (0.001, 0.1)
"""How long half a sum, or half of a copy, takes at most: each server draws its own time between these."""
_READ_S = 0.1
"""How long a user reads a result in place, at most."""
_IN_PLACE = 0.3
"""How likely a server says that its user reads the result in place."""


class Sharing:
    """The training thread of one server: it works, waits, and tells the core through `dispatch`.

    It does one thing at a time. Work of an earlier try, which may still be under way, does not count.
    """

    def __init__(
        self, server: int, host: Host, world: World, process: Process, dispatch: Callable[[ev.Event], None]
    ):
        self._server = server
        self._host = host
        self._world = world
        self._process = process
        self._dispatch = dispatch
        self._work_s = world.network.random.uniform(*_WORK_S)
        self._own = host.status_pages[server] = StatusPage()
        self._tries = 0
        self._step = 0
        self._sum: Sum | None = None
        self._done: Sum | None = None
        self._whole = False
        self._set = 0
        self._members: tuple[int, ...] = ()
        self._pages: list[StatusPage] = []
        self._result: Array = NOTHING
        self._fetched = 0

    def bring(
        self, step: int, contribution: Array, result: Array, members: tuple[int, ...], follows: bool
    ) -> None:
        """Begin a try: the result belongs into `result`. Some users would read it where it lies.

        `follows`: this server is a learner, which keeps results of its own.
        """
        self._tries += 1
        self._step, own = step, self._own
        self._host.waiting.pop(self._server, None)
        if self._reads_in_place:
            own.held.discard(self._set)  # of a try that came to nothing
        self._result, self._members = result, members
        self._pages = [self._host.status_pages[member] for member in members]
        self._sum = self._done = None
        self._whole = False
        self._fetched = 0
        own.contribution = contribution
        own.in_place = not follows and self._world.network.random.random() < _IN_PLACE
        if self._server == members[0]:
            own.chosen = self._host.free_set()

    def post(self, post: Post) -> None:
        """Let all members see where this server stands, then wait for them."""
        if post.stage is Stage.COMPLETE:
            if self._reads_in_place:
                self._own.held.add(self._set)
            self._stand(standing(*post))
            self._fetch_result(partial(self._look, post))
        else:
            self._stand(standing(*post))
            self._later(_LOOK_S, partial(self._look, post))

    def quit(self, epoch: int) -> None:
        """Let all members see that this server has left the epochs before."""
        self._stand(standing(epoch, 0, Stage.NONE))

    def fetch_result(self, what: ev.FetchResult) -> None:
        """Fetch the missing part of the result, then look where the members stand."""
        self._tries += 1
        self._host.waiting.pop(self._server, None)

        def look() -> None:
            newest = max(epoch_of(page.standing) for page in self._pages)
            self._later(_LOOK_S, lambda: self._dispatch(ev.ResultFetched(what.epoch, what.step, newest)))

        self._fetch_result(look)

    def add(self, instruction: Sum) -> None:
        """Add when all are ready; `instruction` comes with the Post."""
        self._sum = instruction

    def take(self) -> None:
        """The step is committed: fetch the missing part of the result.

        A user that reads in place has it where it lies, and may read it for a while.
        """
        if not self._reads_in_place:
            self._fetch(len(self._result))
            return
        done, result_set, pages, step = self._done, self._set, self._pages, self._step
        assert done is not None
        self._done = None  # a next try must not let go of it
        _read(self._result, 0, len(self._result), done, pages, result_set)
        again, before = np.empty_like(self._result), self._result.copy()

        def read_again() -> None:
            _read(again, 0, len(again), done, pages, result_set)
            self._own.held.discard(result_set)
            if again.tobytes() != before.tobytes():
                raise PromiseBroken(
                    6, f"the result of step {step} was overwritten, server {self._server} reads it in place"
                )

        network = self._world.network
        network.after(network.random.uniform(0, _READ_S), lambda: self._process.run(read_again))

    @property
    def _reads_in_place(self) -> bool:
        """Whether the result is read where it lies, now that it is made."""
        return self._own.in_place and not self._whole and self._done is not None

    def _stand(self, where: int) -> None:
        self._own.standing = where
        waiting, self._host.waiting = self._host.waiting, {}
        for look in waiting.values():
            look()

    def _fetch_result(self, then: Callable[[], None]) -> None:
        """Fetch the missing part in two halves, then go on; a vector that was added whole is complete."""
        point, size = self._world.point, len(self._result)
        what = f"the result of step {self._step}"
        point("fetch", f"server {self._server} begins to fetch {what}", self._server)

        def half() -> None:
            self._fetch(size // 2)
            self._later(self._work_s, rest)

        def rest() -> None:
            self._fetch(size)
            point("fetched", f"server {self._server} has fetched {what}", self._server)
            then()

        if self._whole:
            rest()
        else:
            self._later(self._work_s, half)

    def _fetch(self, upto: int) -> None:
        if self._done is not None and not self._whole and not self._own.in_place:
            own = self._own
            _read(self._result, self._fetched, upto, self._done, self._pages, self._set, own)
        self._fetched = max(self._fetched, upto)

    def _look(self, post: Post) -> None:
        low, high = standings(*post)
        if not all(low <= page.standing < high for page in self._pages):
            look = partial(self._later, _LOOK_S, partial(self._look, post))
            self._host.waiting[self._server] = look
        elif self._sum is not None:
            self._begin_to_add()
        else:
            self._dispatch(ev.Gathered(*post))

    def _begin_to_add(self) -> None:
        done, self._sum = self._sum, None
        assert done is not None
        self._world.point("add", f"server {self._server} begins to add in step {done.step}", self._server)
        self._done = done
        self._whole = done.adds_whole(any(page.in_place for page in self._pages))
        self._set = self._pages[0].chosen
        start, stop = (0, len(self._result)) if self._whole else (done.start, done.stop)
        if self._whole:
            out = self._result
        else:
            out = self._own.shares.setdefault(self._set, np.zeros_like(self._result))
        self._add(done, out, start, (start + stop) // 2, partial(self._add_rest, done, out, start, stop))

    def _add_rest(self, done: Sum, out: Array, start: int, stop: int) -> None:
        def summed() -> None:
            if not self._whole and not self._own.in_place:
                self._result[start:stop] = out[start:stop]
            self._dispatch(ev.Summed(done.epoch, done.step, self._whole))

        self._add(done, out, (start + stop) // 2, stop, summed)

    def _add(self, done: Sum, out: Array, start: int, stop: int, then: Callable[[], None]) -> None:
        """Some time later add these elements of all contributions, then go on."""

        def act() -> None:
            parts = [page.contribution[start:stop] for page in self._pages]
            total = parts[0]
            for part in parts[1:]:
                total = np.add(total, part)
            out[start:stop] = total
            then()

        self._later(self._work_s, act)

    def _later(self, within_s: float, action: Callable[[], None]) -> None:
        tries = self._tries

        def act() -> None:
            if tries == self._tries:
                action()

        network = self._world.network
        network.after(network.random.uniform(0, within_s), lambda: self._process.run(act))


def _read(
    out: Array,
    start: int,
    stop: int,
    done: Sum,
    pages: list[StatusPage],
    result_set: int,
    without: StatusPage | None = None,
) -> None:
    """Copy elements [start, stop) from where the members' shares of them lie, but for those of one page."""
    for index, page in enumerate(pages):
        first, last = max(start, index * done.share), min(stop, (index + 1) * done.share)
        share = page.shares.get(result_set)
        if first < last and page is not without and share is not None:
            out[first:last] = share[first:last]


__all__ = ["Sharing"]
