"""The spares of a fleet of plain processes: processes of this machine, which may take any address."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from bml.errors import StartError

_LOG = logging.getLogger(__name__)


class Child(Protocol):
    """What is needed of a process."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        ...

    def end(self) -> object:
        """Kill it and release it."""
        ...


C = TypeVar("C", bound=Child)


class ProcessSpares(Generic[C]):
    """See bml.cluster.fleets.fleet.Spares. Any thread may call `left` and `take`, one thread all else.

    There are to be `count` of them, each of which `make` starts.
    """

    def __init__(self, count: int, make: Callable[[], C]) -> None:
        self._to_come, self._make = count, make
        self._changing = threading.Lock()
        self._waiting: list[C] = []
        self._aside: dict[int, C] = {}

    @property
    def left(self) -> int:
        """See Spares: those that have not ended."""
        with self._changing:
            return sum(not child.has_ended for child in self._waiting)

    def start(self) -> None:
        """See Spares."""
        while self._to_come:
            self._to_come -= 1
            try:
                child = self._make()
            except StartError as error:  # the job goes on without it
                _LOG.warning("a spare cannot start: %s", error)
                continue
            with self._changing:
                self._waiting.append(child)

    def set_aside(self, lost: int, free: Collection[int]) -> int | None:
        """See Spares."""
        with self._changing:
            while self._waiting and lost not in self._aside:
                child = self._waiting.pop(0)
                if child.has_ended:
                    child.end()
                else:
                    self._aside[lost] = child
            return lost if lost in self._aside else None

    def take(self, server: int) -> C | None:
        """Return the process that is set aside for this server; None if there is none."""
        with self._changing:
            return self._aside.pop(server, None)

    def close(self) -> list[C]:
        """Return all that still wait, or are set aside: they are to be ended."""
        with self._changing:
            left = [*self._waiting, *self._aside.values()]
            self._waiting.clear()
            self._aside.clear()
        return left
