"""The promises of the runtime as checks that a simulated run calls at every event.

docs/explanation/protocol.md has them by number.

They see more than any server does: every frame carries the view of its sender, and every commit of every
server is known. A promise that does not hold raises `PromiseBroken` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice

import numpy as np

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.sim.judge.history import History
from bml.topology import Fabric
from bml.topology.errors import InvariantError
from bml.train.ledger import LoopLedger


class PromiseBroken(InvariantError):
    """Promise `number` does not hold (0: the protocol's own code failed)."""

    def __init__(self, number: int, text: str):
        super().__init__(f"promise {number}: {text}")
        self.number = number


class Promises:
    """Of one run. Promise 2 and 7 are checked by `contribution` and `ledgers`, the others as named.

    `reachable(lost, view)` returns those of the lost servers that all members of the view could reach,
    `slowed(server, level)` whether the NIC, or another one of its switch, has been slow.
    """

    def __init__(
        self,
        history: History,
        reachable: Callable[[Collection[int], View], list[int]],
        slowed: Callable[[int, int], bool],
    ):
        self._history = history
        self._reachable = reachable
        self._slowed = slowed
        self._planned: dict[int, Fabric] = {}
        self._views: dict[int, View] = {}
        self._results: dict[int, bytes] = {}
        self._commit_epoch: dict[int, int] = {}
        self._retried: dict[int, int] = {}
        self._complete: dict[tuple[int, int], set[int]] = {}
        self._states: dict[int, bytes] = {}
        self._given: dict[int, bytes] = {}

    def installed(self, server: int, view: View, planned: Fabric) -> None:
        """Promise 1, for views: one view and one plan an epoch, none undoes a commit; 3 and 8: see there.

        `planned` is the fabric that the server's programs are made for.
        """
        if view.epoch not in self._views:
            self._evicted(view)
            self._slow(view)
        known_plan = self._planned.setdefault(view.epoch, planned)
        if known_plan != planned:
            said = f"server {server} plans view {view.epoch} for {planned}, others for {known_plan}"
            raise PromiseBroken(1, said)
        known = self._views.setdefault(view.epoch, view)
        if known != view:
            raise PromiseBroken(1, f"epoch {view.epoch} is two views: {known}; on server {server} {view}")
        if server not in view.members:
            raise PromiseBroken(5, f"server {server} installs {view}, which it is not a member of")
        for step, epoch in self._commit_epoch.items():
            if epoch < view.epoch and step > view.commit:
                raise PromiseBroken(
                    1, f"step {step} was committed in epoch {epoch}, view {view.epoch} commits {view.commit}"
                )

    def _slow(self, view: View) -> None:
        """Promise 3: no NIC is planned slow that never was, nor any other one of its switch."""
        for rate in view.rates:
            if not self._slowed(rate.server, rate.level):
                raise PromiseBroken(3, f"{rate} in {view}, though all NICs of that switch only wander")

    def _evicted(self, view: View) -> None:
        """Promise 8: no server is evicted that all others could reach."""
        earlier = [epoch for epoch in self._views if epoch < view.epoch]
        if not earlier or any(epoch > view.epoch for epoch in self._views):
            return
        before = self._views[max(earlier)]
        wrongly = self._reachable(sorted({*before.members} - {*view.members}), view)
        if wrongly:
            raise PromiseBroken(
                8, f"servers {wrongly} are evicted by {view}, though all its members could reach them"
            )

    def entered(self, server: int, step: int, epoch: int) -> None:
        """A server entered the barrier of a step."""
        self._complete.setdefault((step, epoch), set()).add(server)

    def committed(self, server: int, step: int, view: View, now: View, result: Array, right: Array) -> None:
        """Promise 1: same contributors, same bits, no retry of a step that was returned; 6 and 7: the sum.

        `view` is the one in which the step ran, `now` the one in force; `right` the exact sum.
        """
        contributors = view.contributors
        commits = self._history.commits.setdefault(step, {})
        if server in commits:
            raise PromiseBroken(1, f"server {server} commits step {step} twice")
        for other, theirs in islice(commits.items(), 1):  # all that are there are equal
            if theirs != contributors:
                raise PromiseBroken(
                    1, f"step {step} has contributors {theirs} on server {other}, {contributors} on {server}"
                )
        if self._retried.get(step, 0) > view.epoch:
            raise PromiseBroken(
                1,
                f"server {server} commits step {step} of epoch {view.epoch}, others retry it "
                f"in epoch {self._retried[step]}",
            )
        for later in self._views.values():
            if later.epoch > view.epoch and later.commit < step:
                raise PromiseBroken(
                    1, f"server {server} commits step {step} of epoch {view.epoch}, but {later} does not"
                )
        self._barrier(server, step, view, now)
        self._bits(server, step, result, right)
        commits[server] = contributors
        self._commit_epoch[step] = min(self._commit_epoch.get(step, view.epoch), view.epoch)

    def _barrier(self, server: int, step: int, view: View, now: View) -> None:
        entered = self._complete.get((step, view.epoch), set())
        missing = sorted(set(view.members) - entered - {server})
        if view.epoch == now.epoch and missing:
            raise PromiseBroken(
                1, f"server {server} passes the barrier of step {step} before servers {missing} entered it"
            )

    def _bits(self, server: int, step: int, result: Array, right: Array) -> None:
        half = len(right) - len(right) // 2
        if not (result[:half] == right[:half]).all():
            raise PromiseBroken(7, f"server {server}, step {step}: {result[:half]} is not {right[:half]}")
        if not np.allclose(result, right):
            raise PromiseBroken(7, f"server {server}, step {step}: the sum is {result}, not {right}")
        bits = self._results.setdefault(step, result.tobytes())
        if bits != result.tobytes():
            raise PromiseBroken(6, f"step {step}: server {server} has other bits than the first servers")

    def state(self, server: int, step: int, params: Array) -> None:
        """Promise 6: the parameters that users make of the results are the same everywhere."""
        if self._states.setdefault(step, params.tobytes()) != params.tobytes():
            raise PromiseBroken(6, f"server {server} has other parameters than the others after step {step}")

    def given(self, server: int, step: int, state: bytes) -> None:
        """Promise 6: the training state after a step is the same on all that send it, and all that get it."""
        if self._given.setdefault(step, state) != state:
            raise PromiseBroken(6, f"server {server} has another state than others gave after step {step}")

    def retried(self, server: int, step: int, epoch: int) -> None:
        """Promise 1: no server is asked again for a step that any has returned.

        It may be asked in a view that is over without its knowledge: it cannot commit there.
        """
        self._retried[step] = max(self._retried.get(step, 0), epoch)
        if self._commit_epoch.get(step, epoch) < epoch:
            done = sorted(self._history.commits[step])
            raise PromiseBroken(
                1, f"server {server} retries step {step} in epoch {epoch}, servers {done} have committed it"
            )

    def keeps(self, server: int, n_results: int, nbytes: int, most_nbytes: int) -> None:
        """Promise 9: a joiner's memory is bounded; each of so many results that it keeps has `nbytes`.

        It may keep as many for the iteration that its user is in as for the state that the user will take.
        """
        most = 2 * max(nbytes, most_nbytes)
        if n_results * nbytes > most:
            raise PromiseBroken(
                9, f"server {server} keeps {n_results} results of {nbytes} bytes: {most} at most"
            )

    def contribution(self, server: int, step: int, now: Array, before: Array) -> None:
        """Promise 2: a contribution is not overwritten until it is committed or asked for again."""
        if now.tobytes() != before.tobytes():
            raise PromiseBroken(2, f"the contribution of server {server} to step {step} was overwritten")

    def admitted(self, server: int, origin: int, theirs: View | None, mine: View | None) -> None:
        """Promise 5: nothing is let in that was sent in another view."""
        if theirs is not mine and theirs != mine:
            raise PromiseBroken(
                5,
                f"server {server} in epoch {mine.epoch if mine else 0} let in a frame that server {origin} "
                f"sent in epoch {theirs.epoch if theirs else 0}",
            )

    def ended(self, steps: int, done: Mapping[int, int]) -> None:
        """Promises 1 and 4: a server that ended well has every step; `done`: server -> its first one."""
        for server, first in done.items():
            commits = self._history.commits
            missing = [step for step in range(first, steps + 1) if server not in commits.get(step, {})]
            if missing:
                raise PromiseBroken(1, f"server {server} ended without steps {missing}")

    def ledgers(self, ledgers: dict[int, LoopLedger]) -> None:
        """Promise 7: all servers that ended well have one ledger, with every sample exactly once an epoch."""
        if len({ledger["digest"] for ledger in ledgers.values()}) > 1:
            raise PromiseBroken(7, f"the ledgers of servers {sorted(ledgers)} differ")
        for server, ledger in ledgers.items():
            if not ledger["complete"]:
                raise PromiseBroken(7, f"the ledger of server {server} is not exact: {ledger}")
