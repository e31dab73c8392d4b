"""The thread of a process group: it carries out the collectives in the order in which they were called.

Each call returns a `GroupWork` at once. Its future belongs to PyTorch: autograd's threads wait for it in C++,
so an error must be set by a callback that raises, as `Future.set_exception` is seen by Python alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bml.io.interruptible import Event
from bml.topology.errors import FabricError, UsageError
from bml.torch.tensors import Tensor

_END_S = 1.0
"""How long the thread may take to see that the group is over."""
_LOOK_S = 0.5
"""How often it is seen whether a collective has taken too long, in seconds."""
_settling = threading.Lock()
_NO_BACKWARD = -1


def this_backward() -> int:
    """The number of the backward pass in which the calling thread is; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


class GroupWork(dist.Work):  # type: ignore[misc]  # PyTorch is untyped here
    """One collective that was begun: torch.distributed.Work. Its tensors are not yours before it is over."""

    def __init__(self, call: str, outputs: Sequence[Tensor], limit_s: float):
        super().__init__()
        self._call = call
        self._outputs = list(outputs)
        self._limit_s = limit_s
        self._due_s = time.monotonic() + limit_s
        self._is_settled = False
        self._over = Event()
        self._error: BaseException | None = None
        self._source = -1
        self._settled = self._new_future()
        self._future = self._settled.then(self._value)
        # The first of its callbacks: whoever has waited finds the future done. DDP's reducer relies on that.
        self._future.add_done_callback(lambda _: self._over.set())
        self.waiting_backward = _NO_BACKWARD
        """The backward pass in which it was waited for last, as PyTorch numbers them."""

    def settle(self, error: BaseException | None, source: int = -1) -> None:
        """Say that it is over, or failed; no effect if that was said. `source`: from where a message came."""
        with _settling:
            if self._is_settled:
                return
            self._is_settled, self._error, self._source = True, error, source
        self._settled.set_result(None)

    def expire(self, now: float) -> None:
        """End it with an error if it took longer than the group allows: DDP waits for its future alone."""
        if now >= self._due_s:
            self.settle(self._too_late(self._limit_s))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is over; raises its error, FabricError after `timeout` (0: that of the group).

        After that error it still goes on: a rank that calls it late lets it write into its tensors.
        """
        self.waiting_backward = this_backward()
        limit_s = timeout.total_seconds() or self._limit_s
        if not self._over.wait(limit_s):
            raise self._too_late(limit_s)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of output tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it is over, or failed."""
        done: bool = self._future.done()
        return done

    def is_success(self) -> bool:
        """Whether it is over and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Its error, None if there is none yet."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait until it is over."""
        self.wait()

    def source_rank(self) -> int:
        """The rank from which a message came; -1 for anything else."""
        return self._source

    _source_rank = source_rank

    def _too_late(self, limit_s: float) -> FabricError:
        return FabricError(
            f"{self._call} did not end within its timeout of {limit_s:g} s: a rank that is alive has not "
            "called it; its tensors may still change, when that rank calls it late"
        )

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def _value(self, settled: Any) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs


class WorkThread:
    """A thread that carries out jobs one after the other."""

    def __init__(self, name: str):
        # A queue, not a condition: a signal's handler that raised in a condition would leave its lock wrong.
        self._todo: queue.SimpleQueue[tuple[Callable[[], int], GroupWork] | None] = queue.SimpleQueue()
        self._begun: dict[GroupWork, None] = {}
        """What is not over yet, the oldest first."""
        self._closed = Event()
        self._name = name
        self._start()
        threading.Thread(target=self._watch, name=f"{name}-limits", daemon=True).start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], int], work: GroupWork) -> GroupWork:
        """Put a job behind those that were begun before; it returns the source of its work, or -1.

        A callback of a future runs in this thread, and may wait for what it begins: another thread takes
        over then.
        """
        self.check_open()
        if threading.current_thread() is self._thread:
            self._start()
        self._begun[work] = None
        self._todo.put((job, work))
        if self._closed.is_set():  # meanwhile: it may lie behind the end
            work.settle(_over())
        return work

    def check_open(self) -> None:
        """Raise UsageError if it was closed."""
        if self._closed.is_set():
            raise _over()

    def close(self, limit_s: float = _END_S) -> bool:
        """Let it end after what was begun; returns whether it ended within the limit. Idempotent."""
        self._closed.set()
        self._todo.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        this = threading.current_thread()
        while this is self._thread and (next_one := self._todo.get()) is not None:
            job, work = next_one
            try:
                source, error = job(), None
            except BaseException as raised:
                source, error = -1, raised
            self._begun.pop(work)
            work.settle(error, source)
            del next_one, job, work, error  # tensors are not held while it waits

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for work in list(self._begun):
            work.expire(now)


def _over() -> UsageError:
    return UsageError("the process group was destroyed: nothing can begin in it any more")
