"""What the thread of a group asks of the training thread while that is in the backward pass.

Autograd's engine waits for futures in C++ once backward has made all gradients, and computes nothing then. So
the hook of the last bucket waits here, where it can compute.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from typing import Any

from bml.topology.errors import UsageError
from bml.torch.work import GroupWork


class _Call:
    """A function that the training thread calls; `reply` brings its result or its error."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self.reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self.reply.put((self._function(), None))
        except BaseException as error:
            self.reply.put((None, error))
            if not isinstance(error, Exception):  # such as KeyboardInterrupt
                raise

    def refuse(self, error: Exception) -> None:
        self.reply.put((None, error))


class TrainingThread:
    """The training thread in one backward pass. The thread of the group calls `ask`, it calls the rest."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls to make, and None when a collective is over."""
        self._unanswered: _Call | None = None
        """The last call, also when it is taken from the queue: the handler of a signal may raise then."""
        self._has_left = False

    def ask(self, function: Callable[[], Any]) -> Any:
        """Let the training thread call a function; returns its result, or raises its error.

        Raises UsageError if the backward pass ended with an error meanwhile.
        """
        call = self._unanswered = _Call(function)
        self._asked.put(call)
        if self._has_left:
            self._refuse()
        value, error = call.reply.get()
        self._unanswered = None
        if error is not None:
            raise error
        return value

    def serve(self) -> None:
        """Make the calls that were asked for, and wait for no other."""
        while not self._asked.empty():
            call = self._asked.get()
            if call is not None:
                call.run()

    def wait_for(self, works: Iterable[GroupWork]) -> None:
        """Wait for collectives, and make calls meanwhile. Raises the error of the first that failed."""
        for work in works:
            work.get_future().add_done_callback(lambda _: self._asked.put(None))
            while not work.is_completed():
                call = self._asked.get()
                if call is not None:
                    call.run()
            work.wait()

    def leave(self) -> None:
        """Make no calls any more: the backward pass is over."""
        self._has_left = True
        self._refuse()

    def _refuse(self) -> None:
        call = self._unanswered
        if call is not None:  # if it is answered already, that comes first
            call.refuse(UsageError("the backward pass ended before the samples of lost ranks were computed"))
