"""A step over shared memory, in the training thread itself: no other thread of this server is woken for it.

The server's loop goes on with heartbeats, the coordinator and broken links meanwhile. Both threads bring
events to the same core and carry out what it says, under one lock, `guard`; sums and copies are made outside
of it. So a core that the loop has frozen answers this thread's next event with nothing, and it waits for the
view that the loop installs.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bml.cluster.meeting import Replies
from bml.protocol import events as ev
from bml.protocol.direct import Post, Stage, Sum
from bml.protocol.frame import Header, Kind
from bml.protocol.server import ServerCore
from bml.protocol.workspace import Array
from bml.train.communicator import Committed, Outcome
from bml.transport.shm import Boards, Reduction
from topology.errors import FabricError


@dataclass(frozen=True)
class Shell:
    """What of the server's shell a step needs."""

    core: ServerCore
    guard: AbstractContextManager[object]
    """The lock; not reentrant."""
    replies: Replies
    execute: Callable[[Iterable[ev.Instruction]], None]
    """Carry out what the core says; Post and Sum come back to `DirectSync.post` and `DirectSync.add`."""
    armed: Callable[[], bool]
    """Whether faults are still to come."""
    suffer: Callable[[Header | None], None]
    """Suffer those that are due: now (None), or as if a frame of this header moved."""


class DirectSync:
    """One thread calls `sync`; `post` and `add` are called from inside it."""

    def __init__(self, boards: Boards, reduction: Reduction, shell: Shell, give_up_s: float):
        self._boards = boards
        self._reduction = reduction
        self._shell = shell
        self._give_up_s = give_up_s
        self._sum: Sum | None = None
        self._posted: Post | None = None
        self._meeting: Post | None = None
        self._members: tuple[int, ...] = ()

    def sync(self, submit: ev.Submit, vector: Array, op: str, shared: bool) -> Outcome:
        """See Server.sync."""
        shell = self._shell
        self._sum = self._posted = None
        self._members = shell.core.view.members if shell.core.view else ()
        self._reduction.bring(vector, op, shared, submit.signature, submit.call.text)
        if shell.armed():
            shell.suffer(None)
        self._carry_on(shell.core.handle, submit)
        while shell.replies.empty() and (self._sum or self._posted):
            try:
                self._go_on(submit)
            except (OSError, ValueError) as error:
                return self._after(error, submit.epoch)
        return self._finish(shell.replies.get())

    def post(self, post: Post) -> None:
        """Carry out a `Post`, under the guard."""
        if post.stage is Stage.COMPLETE:
            self._reduction.hold()
        self._boards.own.post(*post)
        self._posted = post

    def add(self, instruction: Sum) -> None:
        """Take a `Sum`, to be carried out when the guard is free."""
        self._sum = instruction

    def waits_for(self) -> str:
        """Whom this thread waits for, in words; empty if it does not. Any thread may ask."""
        post, members = self._meeting, self._members
        if post is None:
            return ""
        behind = self._boards.behind(*post, members)
        return f"servers {behind} to be {post.stage.name} in step {post.step}"

    def _go_on(self, submit: ev.Submit) -> None:
        """Do what the core asked for last, and tell it."""
        if self._posted is not None:
            post, self._posted = self._posted, None
            self._meet(post, submit.signature)
            return
        instruction, self._sum = self._sum, None
        assert instruction is not None
        self._reduction.add(instruction)
        self._feel(ev.Summed(instruction.epoch, instruction.step))

    def _meet(self, post: Post, signature: int) -> None:
        epoch, step, stage = post
        if stage is Stage.COMPLETE:
            self._reduction.fetch()  # before looking for COMPLETE; see bml.protocol.direct
        members = self._members
        self._meeting = post
        there = self._boards.gather(epoch, step, stage, members, self._interrupted)
        self._meeting = None
        if not there:
            self._sum = None
            return
        if stage is Stage.READY:
            other = self._boards.differing(signature, members)
            if other is not None:
                self._sum = None
                self._feel(ev.Differs(epoch, step, other.server, other.text))
                return
            if self._sum is not None:
                return  # it was asked for together with the meeting
        if stage is Stage.DONE:
            self._results_are_there(epoch, step)
        self._feel(ev.Gathered(epoch, step, stage))

    def _interrupted(self) -> bool:
        return not self._shell.replies.empty()

    def _results_are_there(self, epoch: int, step: int) -> None:
        me = self._boards.server
        if self._shell.armed():
            self._shell.suffer(Header(Kind.DOWN, epoch, step, me, me, 0, 0, 0, 0))

    def _feel(self, event: ev.Gathered | ev.Summed | ev.Differs) -> None:
        self._carry_on(self._shell.core.met, event)

    def _carry_on(self, handle: Callable[[Any, float], list[ev.Instruction]], event: ev.Event) -> None:
        shell = self._shell
        with shell.guard:
            shell.execute(handle(event, time.monotonic()))
        if shell.armed():
            shell.suffer(None)

    def _finish(self, reply: Outcome | ev.Prepare | Exception) -> Outcome:
        if isinstance(reply, Exception):
            raise reply
        assert not isinstance(reply, ev.Prepare), "nothing of a step over shared memory outlives its view"
        if isinstance(reply, Committed):
            return Committed(reply.step, reply.epoch, reply.contributors, self._reduction.take())
        return reply

    def _after(self, error: Exception, epoch: int) -> Outcome:
        """What another server shares cannot be read: it died, which will be noticed, or all is lost."""
        try:
            return self._finish(self._shell.replies.get(timeout=self._give_up_s))
        except queue.Empty:
            raise FabricError(
                f"server {self._boards.server} cannot read what the others share in epoch {epoch}: {error}"
            ) from error
