"""The server's loop: it polls sockets and clocks, in a thread of its own or in one that waits for a reply.

A thread that waits for a step polls itself, so that no step needs a switch between threads; polling_lock.py
says how. The training function runs in another thread (bml.cluster.server.server).
"""

from __future__ import annotations

import threading
import time

import numpy as np

from bml.cluster.server.shell import ServerShell
from bml.cluster.steps.deferral import unbroken
from bml.cluster.steps.mailbox import Reply, Signalled
from bml.io.polling_lock import PollingLock
from bml.io.spin import NO_SPIN, CoreContention, Spin, n_cores, yield_core, yield_idle_core
from bml.protocol.server import events as ev
from bml.topology.errors import BmlError, InvariantError


class ServerLoop:
    """Polls for the server of which `shell` is the rest, one of `n_servers`."""

    def __init__(self, shell: ServerShell, server: int, n_servers: int):
        self._shell = shell
        self._polling_lock = PollingLock(shell.poller)
        # Servers have unequal parts in most schedules: one that has less to do must not move.
        self._contention = CoreContention(server, n_servers, n_cores(), most_per_core=1)
        self._training_thread = 0
        self._tick_at = time.monotonic()
        self._rests_until = 0.0
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"bml-server-{server}", daemon=True)

    def start(self) -> None:
        """Start the thread; the caller is the training thread."""
        self._training_thread = threading.get_ident()
        self._thread.start()

    def in_worker_thread(self) -> bool:
        """Whether the caller is another thread than the training thread, which may compute meanwhile."""
        return threading.get_ident() != self._training_thread

    def answer(self, event: ev.Event, spin: Spin = NO_SPIN) -> Reply:
        """Bring an event to the core, and poll in the calling thread until there is a reply.

        Before it sleeps it spins as `spin` says; in another thread than the training thread, only as long as
        no other thread wants the core. Raises the reply if it is an error, and the exception of a handler
        whose signal comes in here.
        """
        beside = self.in_worker_thread()
        deferral = self._shell.mailbox.deferral
        bring: ev.Event | None = event
        while True:
            deferral.look()
            try:
                reply = self._reply(bring, spin, beside)
            finally:
                if deferral.came:
                    deferral.release()
            if isinstance(reply, Exception):
                raise reply
            if reply is not None:
                return reply
            bring = None

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._shell.mailbox.left.wait()
        self._thread.join()

    def close(self) -> None:
        """Free the descriptor of the lock; only when the thread does not run, or in it."""
        self._polling_lock.close()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        np.seterr(all="ignore")  # of this thread: an overflow is a result
        shell = self._shell
        try:
            while not self._over():
                self._pass()
        except BaseException as error:  # the training thread must not wait for ever for a dead loop
            me = shell.core.server
            bug = error if isinstance(error, BmlError) else InvariantError(f"server {me}: {error!r}")
            shell.execution.stop(bug)
            raise
        finally:
            with self._polling_lock:
                shell.mailbox.over()
                shell.close()

    def _over(self) -> bool:
        leave_at = self._shell.execution.leave_at
        return leave_at is not None and time.monotonic() >= leave_at

    def _pass(self) -> None:
        self._polling_lock.rest(max(0.0, self._rests_until - time.monotonic()))
        with self._polling_lock:
            if self._crash is not None:
                raise self._crash
            self._turn(0.0)
            self._rests_until = self._due()

    # --- a thread that waits ---------------------------------------------------------------------

    @unbroken
    def _reply(self, bring: ev.Event | None, spin: Spin, beside: bool) -> Reply | None:
        """Bring an event, if it is not brought yet, and wait; None: a signal came, its handler is next."""
        if bring is not None:
            self._shell.queue(bring)
        replies = self._shell.mailbox.replies
        while replies.empty() and self._poll_for_reply(spin, beside):
            pass
        reply = replies.get()
        return None if isinstance(reply, Signalled) else reply

    def _poll_for_reply(self, spin: Spin, beside: bool) -> bool:
        """Hold the polling lock until there is a reply, or a signal; returns whether the loop goes on."""
        self._polling_lock.take()
        try:
            if self._crash is None and not self._shell.mailbox.left.is_set():
                self._poll_until_reply(spin, beside)
                return True
        except BaseException as error:  # the loop's thread ends the job
            self._crash = error
            self._shell.poller.wake()
        finally:
            self._polling_lock.give()
        return False

    def _poll_until_reply(self, spin: Spin, beside: bool) -> None:
        shell, left = self._shell, spin.yields
        only_idle = beside or spin.only_idle
        replies = shell.mailbox.replies
        with shell.poller.guard:
            shell.opened.transport.beside_computation(beside)
            shell.take_requests()
        self._contention.wait_begins()
        while replies.empty():
            if left == 0:
                self._turn(max(0.0, self._due() - time.monotonic()))
                left = spin.yields
            elif self._turn(0.0):
                self._contention.wait_begins()
                left = spin.yields
            elif only_idle:
                left = left - 1 if yield_idle_core() else 0
            else:
                left -= yield_core(self._contention)
        if self._due() < self._rests_until:
            shell.poller.wake()

    # --- one pass --------------------------------------------------------------------------------

    def _due(self) -> float:
        """Until when, at the latest, some thread is to poll."""
        shell, due = self._shell, self._tick_at
        if shell.injection.armed:
            due = min(due, shell.injection.next_deadline(time.monotonic()))
        if shell.execution.leave_at is not None:
            due = min(due, shell.execution.leave_at)
        return min(due, shell.poller.due_s)

    def _turn(self, timeout_s: float) -> int:
        """One pass of the poller, and what is due by time; the caller holds the lock. See `Poller.poll`."""
        shell = self._shell
        ready = shell.poller.poll(timeout_s)
        now = time.monotonic()
        if now >= self._tick_at or shell.core.urgent or shell.injection.armed:
            with shell.poller.guard:
                if now >= self._tick_at or shell.core.urgent:
                    self._tick(now)
                shell.apply_faults()
        return ready

    def _tick(self, now: float) -> None:
        shell, core, transport = self._shell, self._shell.core, self._shell.opened.transport
        shell.tell_heard()
        core.flows(transport.flows(), now)
        shell.execution.execute(core.handle(ev.Tick(), now))
        # Nothing can become due before then: a tick sends the heartbeats that are due, and
        # no silence can become suspect between two heartbeats that could not be suspect now.
        self._tick_at = core.next_deadline(now)
        shell.nics.note(transport, now)
        shell.stand_in.turned()
