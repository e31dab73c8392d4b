"""Simulated runs whose servers record, and their replay."""

from __future__ import annotations

from typing import Any

import pytest

from bml.protocol.record.recorded import RecordedCore
from bml.protocol.record.recording import Recording, pack, pack_part, unpack
from bml.protocol.record.replay import Replayed, replay
from bml.protocol.record.setup import Making, Setup
from bml.sim.check import Scenario, run
from bml.sim.server import machine

Made = list[tuple[RecordedCore, tuple[Any, ...]]]


def recorded_run(
    patch: pytest.MonkeyPatch, scenario: Scenario, kind: type[RecordedCore] = RecordedCore
) -> tuple[Recording, list[Making]]:
    """Run a scenario with recording cores; returns what they recorded, as read from a file."""
    made: Made = []

    class Kept(kind):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append((self, arguments))

    with patch.context() as within:
        within.setattr(machine, "ServerCore", Kept)
        run(scenario)
    parts, making = [], {}
    for core, arguments in made:
        server, fabric, planner, timeouts, slice_nbytes, _, incarnation, kept_nbytes = arguments
        setup = Setup(
            server, fabric.name, scenario.algorithm, scenario.constants, scenario.shared_memory, timeouts,
            kept_nbytes, 1e9, incarnation,
        )  # fmt: skip
        parts.append(pack_part(setup, "end", 0.0, core.recording()))
        making[server, incarnation.number if incarnation else 0] = Making(planner, slice_nbytes)
    recording = unpack(pack("simulated", scenario.fabric, "0", parts))
    return recording, [making[each.who] for each in recording.servers]


def replayed(recording: Recording, making: list[Making]) -> list[Replayed]:
    """The replays of all servers."""
    return [replay(each, made=made) for each, made in zip(recording.servers, making, strict=True)]
