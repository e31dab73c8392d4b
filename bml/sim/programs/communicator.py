"""The communicator of one server of a modelled job; its session sees nothing else of the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.errors import Evicted, StepMismatch
from bml.faults.busy import Slowdown
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import Array, Padded, written
from bml.protocol.wire.messages import View
from bml.sim.programs.clock import CLOCK
from bml.sim.programs.faults import Dead
from bml.sim.programs.group import Contribution, Group, StateRequest
from bml.train.communicator import Committed, Outcome, Retried


class ModelCommunicator:
    """The communicator of one server in its present incarnation; `joins`: the job ran before it."""

    def __init__(self, group: Group, server: int, joins: bool = False):
        self.server = server
        self.job = group.job
        self.joins = joins
        self.slowdown = Slowdown(self.clock, lambda seconds: None)
        self.servers = group.servers
        self.n_servers = len(group.servers)
        self.piece_nbytes = group.faults.piece_nbytes
        self._group = group
        self._request = StateRequest(server)
        self._step = 1
        self._calls = 0
        self._boundaries = 0
        self._took = not joins
        self._level = self._replays = self.is_lost = self._has_left = False

    @property
    def view(self) -> View:
        """The view in force."""
        with self._group.changed:
            self._check()
            return self._group.view

    @property
    def leaves(self) -> bool:
        """See Communicator."""
        return self._has_left or (
            not self.joins
            and not self.is_lost
            and self._boundaries + 1 >= self._group.faults.leaves.get(self.server, self._boundaries + 2)
        )

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        return self._replays

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Memory with anything in it."""
        made: Array = np.empty(shape, dtype)
        made.view(np.uint8 if made.ndim else made.dtype).fill(0xA5)
        return made

    def sync(
        self,
        epoch: int,
        contribution: Array | Padded,
        op: str,
        text: str,
        signature: int,
        shared: bool = False,
    ) -> Outcome:
        """See Communicator. Raises Evicted, StepMismatch, and the error that ended the job."""
        group = self._group
        with group.changed:
            self._check()
            group.hold()
            self._calls += 1
            if self._replays or self._step <= group.committed:
                self._die_if("before")
                group.wait_for(
                    lambda: group.committed >= self._step or group.over,
                    f"the kept result of step {self._step}",
                )
                if group.committed < self._step:
                    raise Evicted("the others ended the job without it")
                called = group.called[self._step]
                if called.signature != signature:
                    raise StepMismatch(
                        f"the others called {called.text} in step {self._step}, this is {text}"
                    )
                return self._given(shared)
            self._die_if("before")
            if epoch != group.epoch:
                return Retried(self._step, group.epoch)
            group.bring(self.server, Contribution(written(contribution), op, text, signature, shared))
            self._die_if("brought")
            group.wait_for(
                lambda: group.committed >= self._step or group.epoch != epoch,
                f"step {self._step}: {text}",
            )
            if group.committed < self._step:
                return Retried(self._step, group.epoch)
            self._die_if("committed")
            return self._given(shared)

    def _given(self, shared: bool) -> Committed:
        self._step += 1
        return self._group.result(self._step - 1, shared)

    def _die_if(self, when: str) -> None:
        faults = self._group.faults
        kills = faults.doomed if self.joins else faults.kills
        if kills.get(self.server) == (self._calls, when):
            self.is_lost = True
            self._group.lose(self.server)
            raise Dead

    def _check(self) -> None:
        if self.is_lost:
            raise Dead  # in another of its threads
        if self._group.error is not None:
            raise self._group.error

    def clock(self) -> float:
        """The virtual time that this server's training function has computed for."""
        return CLOCK.now_s

    def show_shares(self, shares: dict[str, Any] | None, news: str) -> None:
        """See Communicator; all servers must be told the same after the same step."""
        group = self._group
        with group.changed:
            told = group.shares.setdefault(self._step, shares)
            if told != shares:
                group.violations.append(f"server {self.server} has the shares {shares}, others have {told}")

    def show_checkpoints(self, shown: Callable[[], dict[str, Any]]) -> None:
        """See Communicator; no status is asked for here."""

    def joined(self) -> memoryview | None:
        """See Communicator."""
        if self._took:
            return None
        group, request = self._group, self._request
        with group.changed:
            group.ask(request)
            group.wait_for(lambda: request.state is not None or request.in_vain, "the state for a joiner")
            if request.state is None:
                raise Evicted("the others had ended")
            (step, state), self._took = request.state, True
            self._step = step + 1
            return memoryview(state)

    def begin_iteration(self) -> None:
        """See Communicator."""
        group = self._group
        with group.changed:
            self._check()
            if not self.joins or self.server in group.contributors:
                self._replays = False
                return
            self._replays = self._step <= group.committed
            if self._replays:
                return
            if self._level:
                group.promote(self.server)
            else:
                self._level = self._replays = True

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """See Communicator."""
        group = self._group
        with group.changed:
            self._check()
            self._boundaries += 1
            if self.server in group.contributors:
                if not self.joins and group.faults.leaves.get(self.server) == self._boundaries:
                    self.is_lost = self._has_left = True
                    group.lose(self.server)
                    raise Evicted("it was asked to leave")
                group.hold()
                group.send_state(self.server, self._step - 1, state)
