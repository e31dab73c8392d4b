"""The program of every rank: it waits for orders, does allreduce, measures the time, checks the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bml.bench.host import Orders

Vector = npt.NDArray[np.float32]
_PERIOD = 61


class Collective(Protocol):
    """One rank of an allreduce."""

    def prepare(self, data: Vector) -> None:
        """Take this as the rank's contribution to every `run` from now on, in memory of its own."""
        ...

    def run(self) -> Vector:
        """Do one allreduce of sums; return the result, in place or not as is usual for the library."""
        ...

    def failures(self) -> Sequence[str]:
        """Return the parts of the fabric that this rank knows to be dead."""
        ...


def serve(path: str, rank: int, collective: Collective) -> None:
    """Carry out the orders of the host at `path` until it hangs up."""
    orders = Orders(path, rank)
    while order := orders.next():
        match order["do"]:
            case "failures":
                orders.answer(failures=list(collective.failures()))
            case "check":
                orders.answer(wrong=_check(collective, rank, order["count"], order["of"]))
            case "time":
                ends_s, cpu_s = _time(collective, order["count"], order["times"])
                orders.answer(ends_s=ends_s, cpu_s=cpu_s)


def _time(collective: Collective, count: int, times: int) -> tuple[list[float], float]:
    """Return when each allreduce ended, on the clock that all processes share, and the processor time.

    The first one is not timed: the ranks may be apart, and memory is not allocated yet.
    """
    collective.prepare(np.ones(count, np.float32))
    collective.run()
    ends_s, cpu_s = [time.monotonic()], time.process_time()
    for _ in range(times):
        collective.run()
        ends_s.append(time.monotonic())
    return ends_s, time.process_time() - cpu_s


def _check(collective: Collective, rank: int, count: int, ranks: list[int]) -> int:
    """Count the elements that are not the sum of the contributions of all `ranks`, each once."""
    collective.prepare(contribution(rank, count))
    return int(np.count_nonzero(collective.run() != total(ranks, count)))


def contribution(rank: int, count: int) -> Vector:
    """Return small integers that differ by rank and place; every order of additions has the same sum."""
    vector: Vector = _ramp(count) + np.float32(rank * rank)
    return vector


def total(ranks: Sequence[int], count: int) -> Vector:
    """Return the sum of the contributions of all `ranks`."""
    vector: Vector = _ramp(count) * np.float32(len(ranks)) + np.float32(sum(rank * rank for rank in ranks))
    return vector


def _ramp(count: int) -> Any:
    return np.resize(np.arange(_PERIOD, dtype=np.float32), count)
