"""A step over shared memory, in the training thread itself: no other thread of this server is woken for it.

The server's loop goes on with heartbeats, the coordinator and broken links meanwhile. Both threads bring
events to the same core and carry out what it says, under one lock, `guard`; sums and copies are made outside
of it. So a core that the loop has frozen answers this thread's next event with nothing, and it waits for the
view that the loop installs.

On a server that joins, a third thread takes part in the steps that others call until this one contributes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from bml.cluster.steps.deferral import unbroken
from bml.cluster.steps.host import StepHost
from bml.cluster.steps.mailbox import Signalled
from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.step.workspace import Array, Padded, vector_of
from bml.protocol.wire.call import Call, neutral
from bml.protocol.wire.frame import Header, Kind
from bml.sharedmem import Reduction, StatusPages, Use
from bml.topology.errors import FabricError
from bml.train.communicator import Committed, Outcome

#: A learner whose step stands still looks so often whether it is over, in seconds.
_NAP_S = 0.002


class DirectSync:
    """One step at a time. The training thread calls `sync`; the thread of a learner calls `follow`.

    `post` and `add` are called from inside them.
    """

    def __init__(self, pages: StatusPages, reduction: Reduction, host: StepHost, give_up_s: float):
        self._pages = pages
        self._reduction = reduction
        self._host = host
        self._mailbox = host.mailbox
        self._give_up_s = give_up_s
        self._sum: Sum | None = None
        self._posted: Post | None = None
        self._waits_at: Post | None = None
        self._members: tuple[int, ...] = ()
        self._nbytes = 0
        self._beside = False
        self._mapped_epoch = 0
        self._turn = threading.Lock()
        self._takes_part = False
        self._over: Callable[[], object] = host.mailbox.replies.qsize
        self._kept: queue.SimpleQueue[Committed | ev.FetchResult] = queue.SimpleQueue()
        self._neutral: tuple[Call, Array] | None = None

    @property
    def server(self) -> int:
        """The id of this server."""
        return self._pages.server

    def sync(
        self, submit: ev.Submit, contribution: Array | Padded, op: str, shared: bool
    ) -> Outcome | ev.Replay:
        """See Server.sync; `Replay` stands for the result of a step that was followed."""
        deferral, begins = self._mailbox.deferral, True
        while True:
            deferral.look()
            try:
                outcome = self._step(submit, contribution, op, shared, begins)
            finally:
                if deferral.came:
                    deferral.release()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
            begins = False

    @unbroken
    def _step(
        self, submit: ev.Submit, contribution: Array | Padded, op: str, shared: bool, begins: bool
    ) -> Outcome | ev.Replay | Exception | None:
        """Begin the step, or go on with it; None: a signal came, its handler is next."""
        host = self._host
        view = host.core.view
        if begins:
            self._takes_part = view is not None and host.core.server not in view.learners
        if not self._takes_part:
            if begins:
                self._carry_on(host.core.handle, submit)
            return self._finish()
        with self._turn:
            if begins:
                assert view is not None
                self._over = self._mailbox.replies.qsize
                self._bring(submit, contribution, op, Use.READ if shared else Use.OWN, view.members)
                if host.faults.pending:
                    host.apply_faults(None)
                self._carry_on(host.core.handle, submit)
            try:
                self._go_through(submit)
            except (OSError, ValueError) as error:
                return self._after(error)
            return self._finish()

    def follow(self, submit: ev.Submit) -> Committed | None:
        """Take part in a step that others call, changing nothing; None if it was over before its end."""
        host = self._host
        with self._turn:
            view = host.core.view
            if view is None or view.epoch != submit.epoch:
                return None
            at, core = (submit.epoch, submit.step), host.core
            self._over = lambda: (core.epoch, core.step) != at or self._mailbox.stopped
            call = submit.call
            self._bring(submit, self._changes_nothing(call), call.op, Use.KEPT, view.members)
            self._carry_on(core.handle, ev.Follow(submit))
            try:
                self._go_through(submit)
                self._wait_until_over()
            except (OSError, ValueError) as error:
                self._wait_until_over(error)
            kept = self._what_became()
            return None if kept is None else self._with_result(kept)

    def keep(self, what: Committed | ev.FetchResult) -> None:
        """The step that `follow` is in is committed, or a view commits it, under the guard."""
        self._kept.put(what)

    def quit(self, instruction: Quit) -> None:
        """Carry out a `Quit`, under the guard."""
        self._pages.post(instruction.epoch, 0, Stage.NONE)

    def post(self, post: Post) -> None:
        """Carry out a `Post`, under the guard."""
        if post.stage is Stage.COMPLETE:
            self._reduction.hold()
        self._pages.post(*post)
        self._posted = post

    def add(self, instruction: Sum) -> None:
        """Take a `Sum`, to be carried out when the guard is free."""
        self._sum = instruction

    def waits_for(self) -> str:
        """The servers that this thread waits for, in words; empty if there are none. Any thread may ask."""
        post, members = self._waits_at, self._members
        if post is None:
            return ""
        behind = self._pages.behind(*post, members)
        return f"servers {behind} to be {post.stage.name} in step {post.step}" if behind else ""

    def _bring(
        self,
        submit: ev.Submit,
        contribution: Array | Padded,
        op: str,
        use: Use,
        members: tuple[int, ...],
    ) -> None:
        self._sum = self._posted = None
        self._members, self._nbytes = members, vector_of(contribution).nbytes
        self._beside = self._host.beside()
        if self._mapped_epoch != submit.epoch:
            self._mapped_epoch = submit.epoch
            self._reduction.forget_mappings()
        self._reduction.contribute(contribution, op, use, submit.signature, submit.call.text, members)

    def _changes_nothing(self, call: Call) -> Array:
        """A neutral contribution, in memory that others read; steps that are alike have the same."""
        if self._neutral is None or self._neutral[0] != call:
            self._neutral = None  # its memory can be the new one's
            vector = self._reduction.empty(call.n_elements, call.dtype)
            vector[...] = neutral(call)
            self._neutral = call, vector
        return self._neutral[1]

    def _go_through(self, submit: ev.Submit) -> None:
        """Carry out the last request of the core and tell it, until it asks for nothing more."""
        while not self._over():
            if self._posted is not None:
                post, self._posted = self._posted, None
                self._meet(post, submit.signature)
            elif self._sum is not None:
                what, self._sum = self._sum, None
                whole = self._reduction.add(what)
                self._carry_on(self._host.core.handle_shared, ev.Summed(what.epoch, what.step, whole))
            else:
                return

    def _meet(self, post: Post, signature: int) -> None:
        epoch, step, stage = post
        if stage is Stage.COMPLETE:
            self._reduction.fetch()  # before looking for COMPLETE; see bml.protocol.step.direct
        members = self._members
        self._waits_at = post
        there = self._pages.wait_for_stage(
            epoch, step, stage, members, self._nbytes, self._over, self._beside
        )
        self._waits_at = None
        if not there:
            self._posted = post  # to go on from, if it was a signal
            return
        if stage is Stage.READY:
            other = self._pages.differing(signature, members)
            if other is not None:
                self._sum = None
                self._carry_on(
                    self._host.core.handle_shared, ev.CallDiffers(epoch, step, other.server, other.text)
                )
            return  # the sum was asked for together with the meeting
        if stage is Stage.DONE:
            self._reduction.join()
            self._results_are_there(epoch, step)
        self._carry_on(self._host.core.handle_shared, ev.Gathered(epoch, step, stage))

    def _results_are_there(self, epoch: int, step: int) -> None:
        me = self._pages.server
        if self._host.faults.pending:
            self._host.apply_faults(Header(Kind.BROADCAST, epoch, step, me, me, 0, 0, 0, 0))

    def _what_became(self) -> Committed | None:
        """The end of a followed step; None: it is not committed, or no user will ask for its result."""
        host, kept = self._host, self._kept
        while True:
            with host.guard:  # under it a view is installed and decides about the step
                what = None if kept.empty() else kept.get()
                if what is None and (not host.core.in_doubt or self._mailbox.stopped):
                    return None
            if isinstance(what, ev.FetchResult):
                self._fetch_result(what)
            elif what is not None:
                return what
            else:
                time.sleep(_NAP_S)

    def _fetch_result(self, what: ev.FetchResult) -> None:
        """Look where all stand when the result is fetched: it may be torn, see bml.protocol.step.direct."""
        self._reduction.fetch()
        newest = self._pages.newest_epoch(self._members)
        self._carry_on(self._host.core.handle_shared, ev.ResultFetched(what.epoch, what.step, newest))

    def _carry_on(self, handle: Callable[[Any, float], list[ev.Instruction]], event: ev.Event) -> None:
        host = self._host
        with host.guard:
            host.execute(handle(event, time.monotonic()))
        if host.faults.pending:
            host.apply_faults(None)

    def _finish(self, timeout_s: float | None = None) -> Outcome | ev.Replay | Exception | None:
        """Wait for the end of the step; None: a signal came. Raises queue.Empty after `timeout_s` seconds."""
        while True:
            reply = self._mailbox.replies.get(timeout=timeout_s)
            if isinstance(reply, Committed):
                return self._with_result(reply)
            if isinstance(reply, Signalled):
                return None
            if not isinstance(reply, ev.FetchResult):
                break
            self._fetch_result(reply)
        assert not isinstance(reply, ev.Prepare), "nothing of a step over shared memory outlives its view"
        return reply

    def _with_result(self, committed: Committed) -> Committed:
        step, epoch, contributors = committed.step, committed.epoch, committed.contributors
        return Committed(step, epoch, contributors, self._reduction.take())

    def _after(self, error: Exception) -> Outcome | ev.Replay | Exception | None:
        """Memory of another server cannot be read: it died, and a view will say so, or the job is over."""
        try:
            return self._finish(self._give_up_s)
        except queue.Empty:
            return self._lost(error)

    def _wait_until_over(self, error: Exception | None = None) -> None:
        """Wait for the view, or the end of the job, that ends a followed step."""
        until_s = time.monotonic() + self._give_up_s
        while not self._over():
            if error is not None and time.monotonic() > until_s:
                raise self._lost(error) from error
            time.sleep(_NAP_S)

    def _lost(self, error: Exception) -> FabricError:
        return FabricError(f"server {self._pages.server} cannot read what the others share: {error}")
