"""The user (the training function) of a simulated server: it computes contributions and checks results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from bml.errors import TooSlow
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.server.transfer import Part, cut, verify
from bml.protocol.step.workspace import Array
from bml.protocol.wire.call import Call
from bml.protocol.wire.messages import View
from bml.sim.server.context import World, samples
from bml.sim.world.process import Process
from bml.train.batches import Assignment, BatchPlan, Indices, assignment, used_indices
from bml.train.ledger import Ledger

_SIGNATURE = 7
_COMPUTE_S = 0.01
"""How long a contribution takes to be computed, at most; on one host, where that decides who meets whom
when, each server draws one of the others."""
_COMPUTES_S = (0.01, 0.1, 0.3)  # of a step, beside shared memory
_SLOWER = (1, 3, 5)
"""By how much a joiner may be slower than the others."""
_WAKES_S = (0.001, 0.05)
"""How long a thread that waits for a state takes to wake, at most: each server draws one of these."""


class _State(msgspec.Struct):
    """The training state: the sum of all results, the contributors of the last step, the ledger."""

    params: bytes
    base: tuple[int, ...]
    ledger: bytes


_decode = msgspec.msgpack.Decoder(_State).decode


@lru_cache(maxsize=16)
def _divided(n_samples: int, base: tuple[int, ...], members: tuple[int, ...]) -> dict[int, Assignment]:
    """The places of a batch by server. All servers divide it alike, and among 1024 that takes a while."""
    return assignment(np.arange(n_samples), base, members)


@lru_cache(maxsize=16)
def _used(indices: bytes, base: tuple[int, ...], members: tuple[int, ...]) -> dict[int, Indices]:
    """The samples of a batch, int64, by the server that contributed them."""
    return used_indices(assignment(np.frombuffer(indices, np.int64), base, members), recomputed=True)


class User:
    """The training thread of `server`; its events reach the core by `handle`.

    `state_bytes` is what a donor sends, or a learner receives. `over`: the job is over for it. `done`: it has
    had all results. `ended`: its training function has ended, well or not. `leaves`: it is told that its
    server must go; `goes`: it has said so. `behind`: it needs a state, its first or a later one, and takes it
    at the next boundary. `keeps` are the results that were kept for it; None: it never joins. A boundary
    comes every so many steps.
    """

    def __init__(
        self,
        server: int,
        world: World,
        core: ServerCore,
        process: Process,
        handle: Callable[[ev.Event], None],
        keeps: KeptResults[Any] | None,
    ):
        self.first_step = 1
        self.behind = self._idle = keeps is not None
        self._keeps = keeps
        self._replays = self._wakes = False
        self._step = 0
        self._awaits: Callable[[], None] | None = None
        self._here: tuple[int, dict[Part, str]] | None = None
        self.contribution: Array | None = None
        self.state_bytes = bytearray()
        self.leaves = self.goes = False
        self.over = False
        self.done = False
        self.ended = False
        self._end_how = ""
        self._ended_so = False
        self._computes = False
        self._server = server
        self._world = world
        self._core = core
        self._process = process
        self._handle = handle
        self._kept: Array | None = None
        # Not the members of the first view: servers may install different ones first.
        self._base: tuple[int, ...] = world.first
        self._params = np.zeros(world.settings.n_elements)
        self._bounded = False
        self._given = 0
        self._wakes_s, self._compute_s = 0.0, _COMPUTE_S
        self.slower = 1.0
        """By how much its computation takes longer than it did."""
        if keeps is not None:
            self._wakes_s = world.network.random.choice(_WAKES_S)
            self._compute_s *= world.network.random.choice(_SLOWER)
        if world.host is not None:
            self._compute_s = world.network.random.choice(_COMPUTES_S)
        # Most users compute nothing that is not used.
        self._replay_s = world.network.random.choice((0.0, 0.0, self._compute_s))
        per_step = 2 * world.fabric.n_servers + 1
        self._batches = BatchPlan(per_step * world.settings.steps, per_step, 1, seed=1)
        self.ledger = Ledger(self._batches.n_samples)

    @property
    def satisfied(self) -> bool:
        """Whether the training function returned, with all results or before."""
        return self.done or (self._ended_so and self._end_how == "return")

    def end_as(self, how: str) -> None:
        """The training function raises, returns or goes on for ever: now, or when its call has returned."""
        self._end_how = how
        if self._computes:
            self._end_so_now()

    def _end_so_now(self) -> None:
        self._computes, self._ended_so = False, True
        match self._end_how:
            case "raise":
                self.fail(ValueError("by seed"))
            case "return":
                self._world.function_ends(self._server, "return", "")
                self._end("done")
            case "endless":
                self._world.function_ends(self._server, "endless", "")

    def fail(self, error: Exception) -> None:
        """The training function raises this, and its server says so, as bml.cluster.process.training does.

        Without a launcher the program of a rank ends with it, and the others go on, as in
        bml.cluster.formation.group.
        """
        if self._world.settings.elects:
            self._world.function_ends(self._server, "depart", "")
            self.goes = True
            self._handle(ev.Leaving("its program ended with an error"))
            return
        said = f"server {self._server} raised {type(error).__name__}: {error}"
        if not isinstance(error, TooSlow):  # a learner's, which ends nothing for the others
            self._world.function_ends(self._server, "raise", said)
        self._end("failed", said)

    def stop(self) -> None:
        """The job is over: a call of the training function raises the error."""
        if not self.ended and not self._ended_so:
            self._end("stopped")
        self.over = True

    def _end(self, outcome: str, error: str = "") -> None:
        self.ended = True
        self._handle(ev.Ended(outcome, error))

    def come_to(self, step: int) -> None:
        """The user's thread comes to a step: at a boundary, that of a joiner asks how it goes on."""
        self._step = step
        if self._keeps is not None and self._is_boundary(step):
            self._handle(ev.Arrived(step))
        else:
            self.prepare(step)

    def begin(self, replays: bool) -> None:
        """The iteration may begin: one that replays waits for the results of the others."""
        self._replays = replays
        self._when_kept(lambda: self.prepare(self._step))

    def _is_boundary(self, step: int) -> bool:
        return (step - 1) % self._world.settings.per_iteration == 0

    def _when_kept(self, action: Callable[[], None]) -> None:
        """Go on at once; in an iteration that replays, when the result of the step is kept, or lost."""
        waits = self._replays and not self.behind
        if waits and self._keeps is not None and self._step not in self._keeps:
            self._awaits = action
        else:
            action()

    def kept(self) -> None:
        """There is one more result, or it is known that no more come."""
        action, self._awaits = self._awaits, None
        if action is not None:
            self._when_kept(action)

    def prepare(self, step: int) -> None:
        """The user's thread: compute this server's part for the view of now, some time later submit it."""
        view = self._core.view
        assert view is not None
        world = self._world
        batch = self._batches.batch(step - 1)
        parts = _divided(len(batch.indices), self._base, view.contributors)
        rows = samples(len(batch.indices), world.settings.n_elements, step)
        mine = np.concatenate(parts[self._server]) if self._server in parts else batch.indices[:0]
        contribution: Array = rows[mine].sum(axis=0)
        if self._replays:
            contribution = np.full_like(contribution, np.nan)  # it would show in the sum
        tells = self._boundary(step - 1) if self._is_boundary(step) else []

        def submit() -> None:
            if self.over or self._ended_so:
                return
            self._computes = False
            if self.leaves:
                self.goes = True
                self._handle(ev.Leaving("it was asked to"))
                return
            for event in tells:
                self._handle(event)
            world.point("submit", f"server {self._server} submits step {step} in epoch {view.epoch}")
            self.contribution, self._kept = contribution, contribution.copy()
            call = Call("sum", contribution.dtype.str, contribution.size, "allreduce sum")
            self._handle(ev.Submit(step, view.epoch, call, _SIGNATURE))

        compute_s = self._replay_s if self._replays else self._compute_s
        world.network.after(
            world.network.random.uniform(0, compute_s) * self.slower,
            lambda: self._process.run(lambda: self._when_kept(submit)),
        )
        self._computes = True
        if self._end_how:
            self._end_so_now()

    def _boundary(self, step: int) -> list[ev.SendState | ev.CanSendState]:
        """After `step`: a first boundary says that there are boundaries; joiners get parts of the state."""
        tells: list[ev.SendState | ev.CanSendState] = [] if self._bounded else [ev.CanSendState()]
        self._bounded = True
        outgoing = self._core.outgoing_state
        if outgoing is None or outgoing.epoch == self._given:
            return tells
        self._given = outgoing.epoch
        state = msgspec.msgpack.encode(self._state())
        self._world.promises.given(self._server, step, state)
        heads, self.state_bytes = cut(memoryview(state), outgoing.parts)
        return [*tells, ev.SendState(outgoing, step, heads)]

    def _state(self) -> _State:
        return _State(self._params.tobytes(), self._base, self.ledger.dump())

    @property
    def waits_for_state(self) -> bool:
        """Whether it has stopped at a boundary to wait for a state that is not here yet."""
        return self._idle and self._here is None and not self._wakes and not self.over

    def state_complete(self, step: int, digests: dict[Part, str]) -> None:
        """The state after `step` is here: take it at the next boundary, or when the waiting thread wakes."""
        self._here = step, digests
        if self._idle:
            self._wakes = True
            network = self._world.network
            network.after(network.random.uniform(0, self._wakes_s), lambda: self._process.run(self._wake))

    def _wake(self) -> None:
        """Take the state that is here; if it has been overtaken meanwhile, ask for another."""
        self._wakes = False
        if self.over:
            return
        if self._here is not None:
            self._take()
        else:
            self._handle(ev.Ready())

    def _take(self) -> None:
        """Go on from the state that is here, if it is undamaged."""
        assert self._here is not None
        (step, digests), self._here = self._here, None
        assert self._keeps is not None
        self._keeps.took()
        self.behind = self._idle = False
        verify(memoryview(self.state_bytes), digests)
        self._world.promises.given(self._server, step, bytes(self.state_bytes))
        state = _decode(self.state_bytes)
        self._params = np.frombuffer(state.params).copy()
        self._base, self.ledger = state.base, Ledger.load(state.ledger)
        self._world.point("state", f"server {self._server} has the state after step {step}", self._server)
        self._world.promises.state(self._server, step, self._params)
        self.first_step = step + 1
        if step < self._world.settings.steps:
            self.come_to(step + 1)

    def fall_behind(self) -> None:
        """The state that is here, or on its way, is of no use: another one will come."""
        self.behind, self._here = True, None
        self.kept()

    def take_back(self, step: int) -> None:
        """Check that the contribution is as it was submitted; from now on the user writes into it."""
        if self.contribution is not None and self._kept is not None:
            self._world.promises.contribution(self._server, step, self.contribution, self._kept)
            self.contribution[...] = np.nan
            self.contribution = self._kept = None

    def committed(
        self, step: int, epoch: int, contributors: tuple[int, ...], view: View, result: Array
    ) -> None:
        """A step is committed; the try that led there began in `view`."""
        world = self._world
        assert self._core.view is not None
        assert (view.epoch, view.contributors) == (epoch, contributors)
        what = f"server {self._server} commits step {step} of epoch {epoch} by {contributors}"
        world.point("commit", what, self._server)
        batch = self._batches.batch(step - 1)
        right = samples(len(batch.indices), world.settings.n_elements, step).sum(axis=0)
        world.promises.committed(self._server, step, view, self._core.view, result, right)
        self._params = self._params + result.astype(np.float64)
        world.promises.state(self._server, step, self._params)
        world.history.commit_at_s.setdefault(step, []).append(world.network.now)
        used = _used(batch.indices.tobytes(), self._base, contributors)
        self.ledger.commit(step, batch, contributors, used)
        self._base = contributors
        if step == world.settings.steps:
            self.done = True
            if self._end_how in ("raise", "endless"):  # after the last result
                self._end_so_now()
            else:
                self._end("done")
        elif not (self.behind and self._is_boundary(step + 1)):
            self.come_to(step + 1)
        elif self._here is not None:
            self._take()
        else:
            self._idle = True
            self._handle(ev.Ready())
