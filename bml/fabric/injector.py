"""Breaks the cables of an emulated fabric while a job runs on it, when the job's fault plan says so.

It runs beside the launcher, outside the job: the servers learn of it as they would of a real cable. A fault
with `t=` strikes that long after the first view, one with `step=` when the coordinator says that this step
is under way, which is up to a tenth of a second after it began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from bml.fabric.condition import Damage
from bml.fabric.network import Emulated
from faults import AtTime, FaultPlan, due
from topology import LinkFailure, SwitchFailure
from topology.errors import BmlError

_LOG = logging.getLogger("bml.fabric")


class CableInjector:
    """Executes `plan` on `network` in a thread of its own; `close` heals what it broke."""

    def __init__(self, network: Emulated, plan: FaultPlan):
        self._network = network
        self._pending = tuple(plan)
        self._news = threading.Condition()
        self._first_view_at: float | None = None
        self._step = 0
        self._closed = False
        self._done: list[Damage] = []
        self._thread = threading.Thread(target=self._run, name="bml-cables", daemon=True)

    def start(self) -> None:
        """Be ready; nothing strikes before the first view."""
        if self._pending:
            self._thread.start()

    def changed(self, snapshot: Mapping[str, Any]) -> None:
        """Take in a snapshot of the job (see CoordinatorLoop.snapshot)."""
        with self._news:
            if snapshot["epoch"] and self._first_view_at is None:
                self._first_view_at = time.monotonic()
            self._step = snapshot["step"] + 1
            self._news.notify()

    def close(self) -> None:
        """Stop, and heal what was broken. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()
        while self._done:
            self._network.mend(self._done.pop())

    def _run(self) -> None:
        while self._pending:
            with self._news:
                self._news.wait(self._wait_s())
                if self._closed:
                    return
                since, step = self._first_view_at, self._step
            if since is not None:
                firings, self._pending = due(self._pending, step, 1.0, time.monotonic() - since)
                for firing in firings:
                    self._strike(firing.fault.kind, firing.fault.target, firing.why)

    def _wait_s(self) -> float | None:
        """Until the next fault with a time is due; None if only news can make one due."""
        times = [fault.trigger.t_s for fault in self._pending if isinstance(fault.trigger, AtTime)]
        if self._first_view_at is None or not times:
            return None
        return max(0.0, self._first_view_at + min(times) - time.monotonic())

    def _strike(self, kind: str, target: object, why: str) -> None:
        match target:
            case LinkFailure(server, level):
                damage = Damage(kind, (server, level))
            case SwitchFailure(level, group):
                damage = Damage(kind, (level, group))
            case _:
                return
        try:
            self._network.damage(damage)
            self._done.append(damage)
            _LOG.info("%s of the emulated fabric: %s", damage, why)
        except BmlError as error:
            _LOG.error("%s was not injected: %s", damage, error)
