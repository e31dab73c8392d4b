"""The send queue of one connection: frames by priority, then in order, and never a copy of a payload.

The kernel's send buffer is kept small on purpose. So frames wait here, where an urgent frame can still
overtake others, and not in the kernel. Small frames are gathered into one system call.
"""

from __future__ import annotations

import socket
from heapq import heappop, heappush

from bml.io.backlog import Backlog

_GATHER_NBYTES = 64 << 10
_GATHER_VIEWS = 128

Frame = tuple[int, int, bytes, memoryview | None]
"""(priority, number, head, payload). Frames are ordered by the first two; no two have the same number."""


class Counters:
    """Counts the frames and bytes of one link in both directions, over all its connections."""

    __slots__ = (
        "frames_received",
        "frames_sent",
        "nbytes_copied_received",
        "nbytes_copied_sent",
        "nbytes_received",
        "nbytes_sent",
        "nbytes_zero_copy_received",
        "nbytes_zero_copy_sent",
    )

    def __init__(self) -> None:
        self.frames_sent = 0
        self.nbytes_sent = 0
        self.frames_received = 0
        self.nbytes_received = 0
        # Bytes of payload that this process copied; copies made by the kernel in system calls do not count.
        self.nbytes_copied_sent = 0
        self.nbytes_copied_received = 0
        # Bytes of payload that were read in the sender's memory; they are not in nbytes_sent and received.
        self.nbytes_zero_copy_sent = 0
        self.nbytes_zero_copy_received = 0


class SendQueue:
    """The frames that wait, and the rest of a frame that is partly written."""

    __slots__ = (
        "_counters",
        "_number",
        "_partial",
        "_waiting",
        "backlog",
        "nbytes",
    )

    def __init__(self, counters: Counters) -> None:
        self.nbytes = 0
        """Bytes that the kernel does not have yet, with headers."""
        self.backlog: Backlog | None = None
        """What the kernel delivers while others wait here, if that is measured."""
        self._counters = counters
        self._waiting: list[Frame] = []
        self._partial: list[bytes | memoryview] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + bool(self._partial)

    def push(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """Queue one frame; `payload`, a view of bytes, must not change until it is written."""
        self._number += 1
        heappush(self._waiting, (priority, self._number, head, payload))
        self.nbytes += len(head) + (0 if payload is None else len(payload))

    def peek(self) -> Frame | None:
        """The next frame, for a caller that does not write to a socket; None if the queue is empty."""
        return self._waiting[0] if self._waiting else None

    def pop(self) -> Frame:
        """Take the next frame out; the caller counts it when it has been sent."""
        frame = heappop(self._waiting)
        self.nbytes -= len(frame[2]) + (0 if frame[3] is None else len(frame[3]))
        return frame

    def write(self, sock: socket.socket) -> bool:
        """Write the next few frames with one system call; raises OSError, except when it would block.

        Returns whether the kernel took all bytes that were offered, so that another call may write more.
        """
        if len(self._partial) == 1 and len(self._partial[0]) >= _GATHER_NBYTES:
            return self._write_rest(sock)
        views = self._partial.copy()
        size = sum(map(len, views)) if views else 0
        taken: list[Frame] = []
        waiting = self._waiting
        while waiting and size < _GATHER_NBYTES and len(views) < _GATHER_VIEWS:
            frame = heappop(waiting)
            taken.append(frame)
            views.append(frame[2])
            size += len(frame[2])
            if frame[3] is not None:
                views.append(frame[3])
                size += len(frame[3])
        try:
            sent = sock.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._put_back(taken)
            raise
        self.nbytes -= sent
        self._counters.nbytes_sent += sent
        if sent == size:
            self._counters.frames_sent += len(taken) + bool(self._partial)
            self._partial.clear()
            return True
        self._settle(sent, taken)
        return False

    def _write_rest(self, sock: socket.socket) -> bool:
        """Continue a long frame: as `write`, without the work that many small frames need."""
        rest = self._partial[0]
        try:
            sent = sock.sendmsg((rest,), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        self.nbytes -= sent
        self._counters.nbytes_sent += sent
        if sent == len(rest):
            self._counters.frames_sent += 1
            self._partial.clear()
            return True
        self._partial[0] = memoryview(rest)[sent:]
        return False

    def finish_partial(self) -> None:
        """Drop all frames except a partly written one, and copy the rest of that, so that its buffer is free.

        The rest must still be written, or the peer could not tell where the next frame begins.
        """
        self._waiting.clear()
        rest = b"".join(self._partial)
        self._partial = [rest] if rest else []
        self.nbytes = len(rest)

    def clear(self) -> None:
        """Drop all frames: the connection is gone."""
        self._waiting.clear()
        self._partial.clear()
        self.nbytes = 0

    def _put_back(self, frames: list[Frame]) -> None:
        for frame in frames:
            heappush(self._waiting, frame)

    def _settle(self, sent: int, taken: list[Frame]) -> None:
        """Account for `sent` of the offered bytes: first for the partial frame, then for `taken` in order."""
        if self._partial:
            sent = _cut(self._partial, sent)
            if self._partial:
                self._put_back(taken)
                return
            self._counters.frames_sent += 1
        for index, (_, _, head, payload) in enumerate(taken):
            if sent == 0:
                self._put_back(taken[index:])
                return
            self._partial.append(head)
            if payload is not None:
                self._partial.append(payload)
            sent = _cut(self._partial, sent)
            if self._partial:
                self._put_back(taken[index + 1 :])
                return
            self._counters.frames_sent += 1


def _cut(views: list[bytes | memoryview], nbytes: int) -> int:
    """Remove the first `nbytes` bytes from the views; return how many bytes the views were short of that."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    if views and nbytes:
        views[0] = memoryview(views[0])[nbytes:]
        return 0
    return nbytes
