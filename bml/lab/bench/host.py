"""The host of a contender: it has a connection to each rank, and gives orders over it.

Orders and answers are JSON objects on a Unix socket in a private folder: it can be reached from every
network namespace of this machine, and from nowhere else.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bml.errors import BmlError

ANSWER_S = 120.0
"""How long an order may take."""
_POLL_S = 0.2
_LAST_WORDS_S = 2.0


class RankError(BmlError):
    """Ranks did not start, have ended, or do not answer."""


class Ranks:
    """The ranks of one contender `who`; they connect to `path`, which is in `folder`."""

    def __init__(self, who: str, folder: Path):
        self.who = who
        self.path = str(folder / f"{who}.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._ranks: dict[int, Connection[Any, Any]] = {}

    def gather(self, wanted: Collection[int], check: Callable[[], None], timeout_s: float) -> None:
        """Wait until these ranks have connected. `check` raises if they cannot any more."""
        deadline = time.monotonic() + timeout_s
        while missing := set(wanted) - self._ranks.keys():
            check()
            if time.monotonic() > deadline:
                raise RankError(f"{self.who}: rank {min(missing)} did not start in {timeout_s:g} s")
            if wait([self._listener], _POLL_S):
                self._admit(Connection(self._listener.accept()[0].detach()), deadline)

    def ask(self, ranks: Collection[int], check: Callable[[], None], **order: Any) -> dict[int, Any]:
        """Give an order to all these ranks at the same time, and return their answers."""
        deadline = time.monotonic() + ANSWER_S
        text = json.dumps(order).encode()
        for rank in ranks:
            try:
                self._ranks[rank].send_bytes(text)
            except OSError as error:
                raise self._gone(f"rank {rank}", check) from error
        answers: dict[int, Any] = {}
        by_connection = {self._ranks[rank]: rank for rank in ranks}
        while by_connection:
            for connection in wait(list(by_connection), _POLL_S):
                assert isinstance(connection, Connection)
                rank = by_connection.pop(connection)
                try:
                    answers[rank] = json.loads(connection.recv_bytes())
                except (EOFError, OSError) as error:
                    raise self._gone(f"rank {rank}", check) from error
            check()
            if by_connection and time.monotonic() > deadline:
                late = min(by_connection.values())
                raise RankError(f"{self.who}: rank {late} did not answer in {ANSWER_S:g} s to {order}")
        return answers

    def close(self) -> None:
        """Hang up, which ends the ranks. Idempotent."""
        self._listener.close()
        while self._ranks:
            self._ranks.popitem()[1].close()

    def _admit(self, connection: Connection[Any, Any], deadline: float) -> None:
        """Read which rank has connected. One that has ended already was killed, and `check` knows why."""
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise RankError(f"{self.who}: a new rank does not say its number")
            self._ranks[json.loads(connection.recv_bytes())["rank"]] = connection
        except (EOFError, OSError):
            connection.close()

    def _gone(self, name: str, check: Callable[[], None]) -> RankError:
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            check()  # raises the reason, once the process has ended
            time.sleep(_LAST_WORDS_S / 50)
        return RankError(f"{self.who}: {name} is gone")


class Orders:
    """The rank's end of the connection to its host."""

    def __init__(self, path: str, rank: int, **hello: Any):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        self._connection: Connection[Any, Any] = Connection(sock.detach())
        self.answer(rank=rank, **hello)

    def next(self) -> dict[str, Any] | None:
        """Wait for the next order; None: the host has hung up."""
        try:
            order: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return order

    def answer(self, **answer: Any) -> None:
        """Answer the order. If the host has hung up, the answer is lost, and `next` returns None."""
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(answer).encode())

    def fileno(self) -> int:
        """Return the descriptor of the connection, for pollers."""
        return self._connection.fileno()
