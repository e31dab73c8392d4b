"""Messages between the launcher and its processes, which never wait for each other.

A sender does not wait until there is room, and a reader does not wait for the rest of a message.

A message is sent as its length (8 bytes, big-endian) and its pickle. Both ends belong to one job of one user:
nothing else is ever unpickled.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from itertools import takewhile
from typing import Any

import cloudpickle

from bml.io.interruptible import Condition

_LENGTH_NBYTES = 8
_READ_NBYTES = 1 << 20


class Outbox:
    """Sends messages over `sock`, in order; any thread may.

    Messages for which the reader has no room wait here, and a thread sends them. At most `most` messages that
    begin with the same words wait. Beyond, the oldest is dropped: with `most=1` a slow reader gets
    the newest.
    """

    def __init__(self, sock: socket.socket, most: int):
        self._sock = sock
        self._most = most
        self._waiting: deque[tuple[tuple[str, ...], bytes]] = deque()
        self._changed = Condition()
        self._sending = False
        self._closed = False

    def put(self, *message: Any) -> None:
        """Send a message, now or when there is room. It has no effect if the reader is gone."""
        pickled = cloudpickle.dumps(message)
        data = len(pickled).to_bytes(_LENGTH_NBYTES, "big") + pickled
        with self._changed:
            if self._closed:
                return
            if self._sending:
                self._wait(tuple(takewhile(lambda each: isinstance(each, str), message)), data)
                return
            rest = self._try(data)
            if rest:
                self._sending = True
                threading.Thread(target=self._send, args=(rest,), name="bml-outbox", daemon=True).start()

    def flush(self, within_s: float | None = None) -> None:
        """Wait until all waiting messages are sent or the reader is gone, `within_s` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sending, within_s)

    def close(self) -> None:
        """Send no more messages. The caller closes the socket after this. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # this ends the wait of the sending thread
        except OSError:  # the reader has already gone
            return

    def _wait(self, words: tuple[str, ...], data: bytes) -> None:
        like_it = [each for each in self._waiting if each[0] == words]
        if len(like_it) >= self._most:
            self._waiting.remove(like_it[0])
        self._waiting.append((words, data))

    def _try(self, data: bytes) -> memoryview:
        """Send as many bytes as there is room for; return the rest."""
        try:
            return memoryview(data)[self._sock.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return memoryview(data)
        except OSError:
            self._closed = True
            return memoryview(b"")

    def _send(self, data: memoryview | bytes) -> None:
        while True:
            try:
                self._sock.sendall(data)
            except OSError:
                self._closed = True
            with self._changed:
                if self._closed or not self._waiting:
                    self._sending = False
                    self._changed.notify_all()
                    return
                _, data = self._waiting.popleft()


class Inbox:
    """Takes messages from `sock` without ever waiting, not even for the rest of a message."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._buffer = bytearray()
        self.over = False
        """Whether no more messages can come: every process has closed the other end."""

    def take(self) -> list[Any]:
        """Return the messages that are here now, in order, each a tuple."""
        while not self.over and self._read():
            pass
        messages = []
        buffer = self._buffer
        while len(buffer) >= _LENGTH_NBYTES:
            stop = _LENGTH_NBYTES + int.from_bytes(buffer[:_LENGTH_NBYTES], "big")
            if len(buffer) < stop:
                break
            messages.append(cloudpickle.loads(bytes(buffer[_LENGTH_NBYTES:stop])))
            del buffer[:stop]
        return messages

    def _read(self) -> bool:
        """Take the bytes that the kernel has; return whether there may be more."""
        try:
            data = self._sock.recv(_READ_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._buffer += data
        self.over = not data
        return bool(data)


def receive(sock: socket.socket) -> Any:
    """Wait for the next message, a tuple. Raises EOFError or OSError when the sender is gone."""
    nbytes = int.from_bytes(_exactly(sock, _LENGTH_NBYTES), "big")
    return cloudpickle.loads(_exactly(sock, nbytes))


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(min(nbytes - len(data), _READ_NBYTES))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return bytes(data)
