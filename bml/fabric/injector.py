"""Breaks cables and machines of an emulated fabric under a job, when a server reports that a fault is due.

It works beside the launcher, outside the job: the servers notice the damage as they would notice that of a
real cable.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil, inf
from types import MappingProxyType
from typing import assert_never

from bml.fabric.condition import Damage
from bml.fabric.network import EmulatedFabric
from bml.faults import Fault
from bml.faults.holds import Holds
from bml.faults.kinds import FALLS_S
from bml.io.interruptible import Condition
from bml.topology import LinkFailure, ServerFailure, SwitchFailure
from bml.topology.errors import UsageError

_FALL_S, _FALLS = 0.5, 4
"""A step of a rate that falls lasts half a second at most, and there are four or more."""
_NUMBERS = count(1)  # one process may run several jobs
_LOG = logging.getLogger(__name__)

Task = Callable[[], None]


class FabricInjector:
    """Applies faults to `network`, in a thread of its own; `close` heals the cables that it broke."""

    def __init__(self, network: EmulatedFabric):
        self._network = network
        self._job = f"{os.getpid()}-{next(_NUMBERS)}"
        self._news = Condition()
        self._tasks: list[tuple[float, int, Task]] = []
        self._order = count()
        self._closed = False
        self._holds = Holds()
        self._done: set[Damage] = set()
        self._failed: deque[tuple[Fault, str]] = deque()
        self._thread: threading.Thread | None = None

    def apply_fault(self, fault: Fault, done: Task) -> None:
        """Apply this fault now; call `done`, in the injector's thread, when it is applied or has failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bml-cables", daemon=True)
            self._thread.start()

        def carry_out() -> None:
            try:
                self._begin(fault)
            except Exception as error:
                self._failed.append((fault, str(error)))
                _LOG.error("%s was not injected: %s", fault, error)
            finally:
                done()

        self._at(0.0, carry_out)

    def take_failed(self) -> list[tuple[Fault, str]]:
        """Return the faults that could not be applied since the last call, with the reasons."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def close(self) -> None:
        """Stop, and heal all damage that was done. Idempotent; damage that cannot be healed is logged."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._done:
            damage = self._done.pop()
            try:
                self._network.undo(damage, self._job)
            except Exception as error:
                _LOG.warning("%s of the emulated fabric is not healed: %s", damage, error)

    def _begin(self, fault: Fault) -> None:
        FABRIC_ACTS[fault.kind](self, fault)

    def kill_machine(self, fault: Fault) -> None:
        """Kill every process of a server's machine."""
        assert isinstance(fault.target, ServerFailure)
        killed = self._network.kill_machine(fault.target.server)
        _LOG.info("%s of the emulated fabric: %d processes", fault, killed)

    def damage(self, fault: Fault) -> None:
        """Damage a cable or switch, for a time or until `close`."""
        damage = damage_of(fault)
        self._damage(damage)
        if fault.duration_s is not None:
            self._at(fault.duration_s, lambda: self._mend(damage))

    def flap(self, fault: Fault) -> None:
        """Cut a cable for the first half of every period."""
        until_s = inf if fault.duration_s is None else time.monotonic() + fault.duration_s
        self._flap(damage_of(fault), fault.period_s / 2, until_s)

    def degrade(self, fault: Fault) -> None:
        """Let the rate of a cable fall step by step to a lower one, for a time or until `close`."""
        lowest, now_bit = damage_of(fault), self._network.condition.rate_bit
        began_s = time.monotonic()
        ends_at_s = inf if fault.duration_s is None else began_s + fault.duration_s
        present: list[Damage] = []
        steps = falling(now_bit, lowest.rate_bit, fault.settings.get("over", FALLS_S))

        def follow() -> None:
            if (step := next(steps, None)) is not None:
                after_s, rate_bit = step
                left_s = began_s + after_s - time.monotonic()
                self._at(left_s, partial(fall, replace(lowest, rate_bit=rate_bit)))

        def fall(damage: Damage) -> None:
            if time.monotonic() < ends_at_s:
                follow()
                self._damage(damage)
                present.append(damage)
                mend(leave=1)

        def mend(leave: int = 0) -> None:
            while len(present) > leave:
                self._mend(present.pop(0))

        follow()
        if fault.duration_s is not None:
            self._at(fault.duration_s, mend)

    def _flap(self, damage: Damage, half_s: float, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        self._damage(damage)
        self._at(min(half_s, left_s), lambda: self._mend(damage))
        self._at(2 * half_s, lambda: self._flap(damage, half_s, until_s))

    def _damage(self, damage: Damage) -> None:
        if not self._holds.take(damage):
            return
        try:
            if self._network.apply(damage, self._job):  # else it was done by hand, and stays
                self._done.add(damage)
        except Exception:
            self._done.add(damage)  # one end of the cable may be set: `close` undoes it
            raise
        _LOG.info("%s of the emulated fabric", damage)

    def _mend(self, damage: Damage) -> None:
        if self._holds.let_go(damage) and damage in self._done:
            self._network.undo(damage, self._job)
            self._done.remove(damage)  # then: `close` undoes what could not be undone now
            _LOG.info("%s of the emulated fabric is healed", damage)

    def _at(self, delay_s: float, task: Task) -> None:
        with self._news:
            heapq.heappush(self._tasks, (time.monotonic() + delay_s, next(self._order), task))
            self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._closed and not (self._tasks and self._tasks[0][0] <= time.monotonic()):
                    self._news.wait(self._tasks[0][0] - time.monotonic() if self._tasks else None)
                if self._closed:
                    return
                _, _, task = heapq.heappop(self._tasks)
            try:
                task()
            except Exception as error:  # the next fault may well succeed
                _LOG.error("a fault of a cable failed: %s", error)


FABRIC_ACTS: Mapping[str, Callable[[FabricInjector, Fault], None]] = MappingProxyType(
    {
        "cut": FabricInjector.damage,
        "blackhole": FabricInjector.damage,
        "switch": FabricInjector.damage,
        "slow": FabricInjector.damage,
        "loss": FabricInjector.damage,
        "flap": FabricInjector.flap,
        "degrade": FabricInjector.degrade,
        "node": FabricInjector.kill_machine,
    }
)
"""Kind -> the act on the emulated fabric, for every kind of which bml.faults.kinds says that there is one."""

_DAMAGES = MappingProxyType(
    {
        "cut": "cut",
        "blackhole": "blackhole",
        "flap": "cut",
        "slow": "slow",
        "degrade": "slow",
        "loss": "loss",
        "switch": "switch",
    }
)
"""Kind of fault -> kind of damage."""


def falling(from_bit: int, to_bit: int, over_s: float) -> Iterator[tuple[float, int]]:
    """Yield the steps of a rate that falls evenly: (seconds from the beginning, bits per second from then).

    A step lasts half a second at most. A cable that is as slow already has the lower rate at once.
    """
    if not over_s or to_bit >= from_bit:
        yield 0.0, to_bit
        return
    n_steps = max(_FALLS, ceil(over_s / _FALL_S))
    for n in range(1, n_steps + 1):
        yield over_s * n / n_steps, round(from_bit + (to_bit - from_bit) * n / n_steps)


def damage_of(fault: Fault) -> Damage:
    """Return the damage that a fault does to cables. Raises UsageError for a fault that strikes no cable."""
    if fault.kind not in _DAMAGES:
        *first, last = _DAMAGES
        raise UsageError(f"'{fault}' strikes no cable: {', '.join(first)} and {last} do")
    kind = _DAMAGES[fault.kind]
    match fault.target:
        case LinkFailure(server, level):
            rate_bit, share = fault.settings.get("rate", 0), fault.settings.get("share", 0.0)
            return Damage(kind, (server, level), rate_bit, share, fault.direction)
        case SwitchFailure(level, group):
            return Damage(kind, (level, group))
        case ServerFailure() | None:
            raise UsageError(f"'{fault}' strikes no cable: its target is no link and no switch")
        case never:
            assert_never(never)
