"""All servers of a job and its coordinator as threads of one process, with real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bml.cluster.process import training
from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.server.server import Server
from bml.cluster.spec.job import JobSpec, ServerReport, default_nics
from bml.train.session import Session

DEADLINE_S = 60.0


class OneProcess:
    """The servers of `spec`, each with a thread that runs `train`.

    They are daemons: a server that ends waits for what its training function has begun, not for the others.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: JobSpec, train: Callable[[Session], Any]):
        monkeypatch.setattr(training, "unpack", lambda sent: train)
        self.spec = spec
        self.changed = threading.Condition()
        self.now: dict[str, Any] = {"epoch": 0, "learners": [], "members": []}
        self.reports: list[ServerReport] = []
        self.servers = {server: self.make(server, None) for server in spec.servers}
        contacts = self.contacts()
        self.threads = {server: self.run(each, contacts) for server, each in self.servers.items()}
        self.coordinator = CoordinatorLoop(spec, contacts, {}, 1, self._changed, lambda: None)
        self._desk = threading.Thread(target=self.coordinator.run, name="coordinator", daemon=True)
        self._desk.start()

    def contacts(self) -> dict[int, Any]:
        return {server: each.contact for server, each in self.servers.items()}

    def until(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.now), DEADLINE_S), self.now

    def wait(self) -> None:
        """Wait until all have ended."""
        for thread in (*self.threads.values(), self._desk):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def die(self, server: int) -> None:
        """End a server as if its process were killed: its sockets are closed, and it says no word."""
        shell = self.servers[server]._shell
        shell.execution.leave_at = 0.0
        shell.poller.wake()
        shell.loop.join()

    def make(self, server: int, incarnation: int | None) -> Server:
        levels = self.spec.parsed_fabric().levels
        return Server(self.spec, server, default_nics(server, levels), incarnation=incarnation)

    def run(self, server: Server, contacts: Any) -> threading.Thread:
        def run() -> None:
            self.reports.append(training.run_training(server, contacts, b""))
            self.reports[:] = [each for each in self.reports if each.outcome == "done"]

        thread = threading.Thread(target=run, name=f"train-{server.server}", daemon=True)
        thread.start()
        return thread

    def _changed(self, now: dict[str, Any]) -> None:
        with self.changed:
            self.now = now
            self.changed.notify_all()
