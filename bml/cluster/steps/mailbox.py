"""The training thread and the loop meet here: a contribution comes in, a result or an error goes out."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

from bml.cluster.steps.deferral import Deferral
from bml.io import forks
from bml.io.interruptible import Event
from bml.metrics.counts import Counts
from bml.protocol.server import events as ev
from bml.protocol.step.workspace import Array
from bml.topology.errors import BmlError, UsageError
from bml.train.communicator import Committed, Outcome

Reply = Outcome | ev.Prepare | ev.FetchResult | ev.Replay | Exception


class Signalled:
    """A signal came while the training thread waited for a reply: its handler is to run."""


Replies = queue.SimpleQueue[Reply | Signalled]

#: Of how many steps, the last ones, the times are kept for the report: a job may run for months.
_COMMITS_KEPT = 100_000


class Mailbox:
    """`contribution` is the vector of the step that is under way, and how it is reduced.

    `error` ended the job early. `in_force`: the first view is in force, or there will be none;
    `left`: the loop has ended; `out`: it has, or an error ended the job. `deferral` puts off handlers of
    signals; `Signalled` among the replies says that one came. `wake` makes the thread that polls look again.
    `counts` are for metrics, under the guard of the poller.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.replies: Replies = queue.SimpleQueue()
        self.deferral = Deferral(self._signalled)
        self.contribution: tuple[Array, str] | None = None
        self.error: BmlError | None = None
        self.in_force = Event()
        self.left = Event()
        self.out = Event()
        self.steps = 0
        self.commit_at_s: deque[float] = deque(maxlen=_COMMITS_KEPT)
        self.counts = Counts()
        self._wake = wake
        self._thrown: Exception | None = None
        self._syncing = False
        forks.on_fork(self)

    @property
    def stopped(self) -> bool:
        """Whether the job is over for this server."""
        return self.error is not None or self.left.is_set()

    # --- the training thread ---------------------------------------------------------------------

    def enter(self, contribution: Array, op: str) -> None:
        """Bring a contribution. Raises the error that ended the job."""
        if self.error:
            raise self.error
        self._syncing = True
        if self._thrown:
            raise self._thrown
        self.contribution = (contribution, op)

    def leave(self) -> None:
        """The reply has been taken."""
        self._syncing = False
        self.contribution = None  # its memory is the user's again

    def forked(self) -> None:
        """In a process that the training function has forked, no thread would answer."""
        self.error = UsageError("this process was forked by a training function: it is no server of the job")

    # --- the loop's thread -----------------------------------------------------------------------

    def commit(self, result: Committed) -> None:
        """The step that was brought is committed."""
        # Before the training thread is woken: it may bring the next contribution at once.
        self.contribution = None
        self.give(result)

    def give(self, result: Committed | ev.Replay) -> None:
        """A result goes to the training function, or the word that it is one of those kept for it."""
        self.steps += 1
        now = time.monotonic()
        self.commit_at_s.append(now)
        self.counts.step(now)
        self.replies.put(result)

    def throw(self, error: Exception) -> None:
        """Make the training function's current or next call raise this, and every later one."""
        self._thrown = error
        if self._syncing:
            self.replies.put(error)

    def stop(self, error: BmlError) -> None:
        """The job is over."""
        self.error = error
        self.replies.put(error)
        self.in_force.set()
        self.out.set()

    def over(self) -> None:
        """The loop has ended: no thread is to wait for it."""
        self.left.set()
        self.in_force.set()
        self.out.set()

    def _signalled(self) -> None:
        self._wake()
        self.replies.put(Signalled())
