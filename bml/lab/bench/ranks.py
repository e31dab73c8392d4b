"""The program of every rank: it waits for orders, does allreduce, measures the time, checks the result."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bml.lab.bench.host import Orders

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
                collective.prepare(np.ones(order["count"], np.float32))
                orders.answer(**timed(collective.run, order["times"])._asdict())


class Timed(NamedTuple):
    """When each step ended, on the clock that all processes share, and the processor time of all, in seconds.

    `system_s` is the part of `cpu_s` in the kernel.
    """

    ends_s: list[float]
    cpu_s: float
    system_s: float


def timed(step: Callable[[], object], times: int) -> Timed:
    """Time so many steps, one after the other.

    The first one is not timed: the ranks may be apart, and memory is not allocated yet.
    """
    step()
    ends_s, cpu_s, system_s = [time.monotonic()], time.process_time(), _system_s()
    for _ in range(times):
        step()
        ends_s.append(time.monotonic())
    return Timed(ends_s, time.process_time() - cpu_s, _system_s() - system_s)


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


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
