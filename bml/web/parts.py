"""The state of each server and NIC, from the status of a job (docs/reference/formats.md). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bml.topology import Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure, parse_failure
from bml.web.words import State

_SLOW_SPEED = 0.8
"""A server that computes at less than this part of the fastest's speed is slow."""
_OUT = re.compile(r"^server \d+ is out of view \d+: ")
Numbered = dict[int, Any]


@dataclass(frozen=True)
class Nic:
    """A NIC: its state, why, and its rates in bytes per second, None where they are not known."""

    level: int
    state: State
    why: str
    sent_per_s: float | None = None
    received_per_s: float | None = None


@dataclass(frozen=True)
class Server:
    """A server: its state, why, and what it does. `progress`: the part of the step that is done, or None."""

    server: int
    state: State
    why: str
    step: int | None = None
    phase: str = ""
    progress: float | None = None
    waits_for: str = ""
    nics: list[Nic] = field(default_factory=list)


def by_number(mapping: dict[Any, Any]) -> Numbered:
    """Servers as numbers: JSON has them as texts."""
    return {int(server): value for server, value in mapping.items()}


class Parts:
    """Reads the status of a job on `fabric`, the whole one."""

    def __init__(self, status: dict[str, Any], fabric: Fabric):
        self.fabric = fabric
        self.epoch = int(status.get("epoch", 0))
        self.members: list[int] = list(status.get("members", []))
        self.failures: list[Failure] = [parse_failure(each) for each in status.get("failures", [])]
        self.answers = by_number(status.get("servers", {}))
        self.lost = by_number(status.get("lost", {}))
        self.left = by_number(status.get("left", {}))
        self.ended = by_number(status.get("ended", {}))
        self._learners = set(status.get("learners", []))
        self._waiting = set(status.get("waiting", []))
        self._awaited = set(status.get("awaited", []))
        self._absent = set(status.get("absent", []))
        self._runs = bool(status.get("running", True))
        self._slow: dict[str, str] = dict(status.get("slow", {}))
        self._dead = {each.server for each in self.failures if isinstance(each, ServerFailure)}
        self._links = {each for each in self.failures if isinstance(each, LinkFailure)}
        self.dead_switches = {
            (each.level, each.group) for each in self.failures if isinstance(each, SwitchFailure)
        }

    @cached_property
    def suspected(self) -> dict[tuple[int, int], str]:
        """(server, level; -1: the server itself) -> why it is suspected, by the first that does."""
        found: dict[tuple[int, int], str] = {}
        for observer in sorted(self.answers):
            for each in self.answers[observer].get("suspects", []):
                found.setdefault((each["peer"], each["level"]), each["why"])
        return found

    @cached_property
    def servers(self) -> list[Server]:
        """All servers of the fabric, in order."""
        return [self._server(server) for server in range(self.fabric.n_servers)]

    def _server(self, server: int) -> Server:
        answer = self.answers.get(server, {})
        state, why = self._state(server, answer)
        nics = self._nics(server, answer, state)
        alive = [nic for nic in nics if nic.state != "dead"]
        if state == "working" and alive and all(nic.state == "suspected" for nic in alive):
            state, why = "suspected", alive[0].why
        says = bool(answer) and answer.get("answers", True) and state != "dead"
        return Server(
            server,
            state,
            why,
            answer.get("step") if says else None,
            str(answer.get("phase", "")) if says else "",
            answer.get("progress") if says else None,
            str(answer.get("waits_for", "")) if says else "",
            nics,
        )

    def _state(self, server: int, answer: dict[str, Any]) -> tuple[State, str]:
        if server in self.ended:
            return "ended", f"it has ended: {self.ended[server]}"
        if self._runs and server in self._learners:
            return "joining", "it follows the steps while the training state is sent to it"
        if self._runs and server in self._waiting:
            return "joining", "it asks to join, and is let in at the next step boundary"
        if self._runs and server in self._awaited:
            return "joining", "it is still to come"
        if server in self.lost:
            return "dead", _OUT.sub("", str(self.lost[server]))
        if server in self.left:
            return "absent", _OUT.sub("", str(self.left[server]))
        if server in self._absent:
            return "absent", "it has not been started"
        if not self._runs:
            return "ended", "it ended with the job"
        if answer.get("answers", bool(answer)) and self.epoch and server not in self.members:
            return "absent", "it runs, and is not in the view"
        if server in self._dead:
            return "dead", "it is not in the view any more"
        if self.epoch and server not in self.members:
            return "absent", "it has not been started"
        if answer.get("answers") is False:
            return "silent", "it is frozen or too busy"
        if (server, -1) in self.suspected:
            return "suspected", self.suspected[server, -1]
        speed = by_number((answer.get("shares") or {}).get("speeds", {})).get(server, 1.0)
        if speed < _SLOW_SPEED:
            return "slow", f"it computes at {speed:.0%} of the fastest's speed, and has smaller shares"
        return "working", ""

    def _nics(self, server: int, answer: dict[str, Any], state: State) -> list[Nic]:
        told = {each["level"]: each for each in answer.get("nics", [])}
        found = []
        for level in range(self.fabric.levels):
            if self.fabric.group(server, level) >= 0:
                nic, why = self._nic(server, level, told.get(level, {}), state)
                rates = told.get(level, {}) if nic != "dead" else {}
                found.append(Nic(level, nic, why, rates.get("sent_per_s"), rates.get("received_per_s")))
        return found

    def _nic(self, server: int, level: int, told: dict[str, Any], state: State) -> tuple[State, str]:
        if state in ("dead", "absent"):
            return state, f"its server {'is dead' if state == 'dead' else 'is not there'}"
        if (level, self.fabric.group(server, level)) in self.dead_switches:
            return "dead", "its switch is dead"
        if LinkFailure(server, level) in self._links:
            return "dead", "the NIC or its cable is dead"
        if state == "ended":
            return state, "its server has ended"
        if told.get("carrier") is False:
            return "dead", "it has no carrier"
        if (server, level) in self.suspected:
            return "suspected", self.suspected[server, level]
        if f"{server}/{level}" in self._slow:
            return "slow", f"it runs at {self._slow[f'{server}/{level}']} of its rate, trees avoid it"
        return "working", ""
