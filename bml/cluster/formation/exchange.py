"""Messages between two ranks for the threads of a program; point_to_point.py decides, this carries out.

`PointToPoint` belongs to the thread that polls for the server: calls of other threads are carried out there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from bml.cluster.formation.point_to_point import ANY, Done, PointToPoint
from bml.cluster.server.peer_lines import PeerLines
from bml.cluster.server.server import Server
from bml.errors import BmlError, FabricError, UsageError
from bml.protocol.step.workspace import Array

_LOOK_S = 0.1
"""How often it is seen whether a rank is there of which something is awaited, in seconds."""


class Exchange:
    """The messages of `rank` in a group of `size`; `open` comes before all else. Any thread may use it."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._point_to_point = PointToPoint(self._post)
        self._looks = False
        self._changed = threading.Lock()
        self._futures: set[Future[int]] = set()
        self._closed = False
        self._server: Server | None = None
        self._lines: PeerLines | None = None

    def open(self, server: Server) -> None:
        """Use the channels of this server, which has not started yet."""
        self._server = server
        self._lines = server.peer_lines(
            self._point_to_point.came, self._point_to_point.unsent, self._point_to_point.cut
        )

    def send(self, array: Array, to: int, tag: int) -> Future[int]:
        """See Group.begin_send."""
        self._check(to, "to")
        data = _bytes_of(array)
        return self._begin(lambda done: self._point_to_point.send(to, tag, data, done))

    def receive(self, array: Array, source: int, tag: int) -> Future[int]:
        """See Group.begin_recv."""
        if source != ANY:
            self._check(source, "source")
        if not array.flags.writeable:
            raise UsageError("the array to receive into is read-only: give one of your own")
        into = _bytes_of(array)
        return self._begin(lambda done: self._point_to_point.receive(source, tag, into, done))

    def close(self) -> None:
        """End all that still waits, with an error."""
        with self._changed:
            self._closed = True
            futures = list(self._futures)
        for future in futures:
            self._finish(future, self._over())

    def _check(self, rank: int, name: str) -> None:
        if not 0 <= rank < self._size or rank == self._rank:
            raise UsageError(f"{name} is {rank}: give another rank than this one, of 0 to {self._size - 1}")

    def _begin(self, begin: Callable[[Done], None]) -> Future[int]:
        assert self._server is not None
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back
        with self._changed:
            over = self._closed or self._server.is_over
            if not over:
                self._futures.add(future)
        if over:
            raise self._over()

        def carry_out() -> None:
            begin(lambda outcome: self._finish(future, outcome))
            if not self._looks:
                self._look()

        self._server.call(carry_out)
        return future

    def _finish(self, future: Future[int], outcome: int | BmlError) -> None:
        with self._changed:
            if future not in self._futures:
                return
            self._futures.remove(future)
        if isinstance(outcome, int):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _over(self) -> BmlError:
        assert self._server is not None
        return self._server.error or FabricError(f"rank {self._rank} has closed its group")

    # --- the thread that polls -------------------------------------------------------------------

    def _post(self, to: int, message: bytes) -> None:
        assert self._lines is not None
        self._lines.send(to, message)

    def _look(self) -> None:
        """See whether the ranks are there of which something is awaited, now and again."""
        assert self._server is not None
        assert self._lines is not None
        if self._server.is_over:
            self._point_to_point.fail(self._over())
        for rank in self._point_to_point.partners - {ANY}:
            why = self._lines.why_lost(rank)
            if why:
                self._lines.hang_up(rank)
                self._point_to_point.lost(rank, why)
        others = [rank for rank in range(self._size) if rank != self._rank]
        if ANY in self._point_to_point.partners and all(map(self._lines.why_lost, others)):
            self._point_to_point.lost(ANY, "they are out of the view")
        self._looks = bool(self._point_to_point.partners)
        if self._looks:
            self._lines.after(_LOOK_S, self._look)


def _bytes_of(array: Array) -> memoryview:
    """Return the memory of an array. Raises UsageError if it is no array of numbers in one piece."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.hasobject:
        raise UsageError("give a contiguous numpy array of numbers")
    return array.reshape(-1).view(np.uint8).data
