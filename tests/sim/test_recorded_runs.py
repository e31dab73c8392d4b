"""Simulated servers record, and replay to bit-equal states; what is not recorded is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from recorded_runs import recorded_run, replayed

from bml.protocol.record import tape
from bml.protocol.record.recorded import RecordedCore
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Event, Instruction
from bml.sim.check import Scenario

SEEDS_AT_ONCE = 6


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rings overflow in runs of a few hundred inputs, and replays begin in the middle of steps."""
    monkeypatch.setattr(tape, "MOST_ENTRIES", 100)
    monkeypatch.setattr(tape, "MOST_KEPT", 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(6, 60, 6))],
)
def test_seeds_replay_to_bit_equal_states(monkeypatch: pytest.MonkeyPatch, first: int, shared: bool) -> None:
    states = inputs = in_steps = overflown = 0
    for seed in range(first, first + SEEDS_AT_ONCE):
        recording, making = recorded_run(monkeypatch, Scenario.of(seed, shared_memory=shared))
        for each, done in zip(recording.servers, replayed(recording, making), strict=True):
            found = [state for state in done.checked if state.differs]
            assert not found, (seed, done.server, done.incarnation, found)
            states, inputs = states + len(done.checked), inputs + done.inputs
            overflown += each.segments[0].number > 0
            in_steps += sum(b"n_elements" in segment.state for segment in each.segments)
    assert states > 4 * SEEDS_AT_ONCE
    assert inputs > 1000
    assert overflown, "no ring overflowed"
    assert in_steps, "no segment begins while a step runs"


class Forgetful(RecordedCore):
    """Notes no heartbeat."""

    def heard(self, peer: int, level: int, now: float) -> None:
        ServerCore.heard(self, peer, level, now)


class Undated(RecordedCore):
    """Notes the time of some events wrongly."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self._note((3, now + 1e-9, event))
        return ServerCore.handle(self, event, now)


def chance(monkeypatch: pytest.MonkeyPatch) -> type[RecordedCore]:
    """A core that draws from a generator that nobody records."""
    drawn = random.Random(1)
    told = ServerCore.handle

    def handle(self: ServerCore, event: Event, now: float) -> list[Instruction]:
        done = told(self, event, now)
        self._watch._detector.patience_s += drawn.random() * 1e-12
        return done

    monkeypatch.setattr(ServerCore, "handle", handle)
    monkeypatch.setattr("bml.protocol.record.recorded._handle", handle)
    return RecordedCore


@pytest.mark.parametrize("plant", [lambda _: Forgetful, lambda _: Undated, chance])
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], type[RecordedCore]]
) -> None:
    kind = plant(monkeypatch)
    assert any(differing(monkeypatch, kind)), "no replay differs"


def differing(monkeypatch: pytest.MonkeyPatch, kind: type[RecordedCore]) -> Iterator[str]:
    for seed in range(5):
        recording, making = recorded_run(monkeypatch, Scenario.of(seed), kind)
        for done in replayed(recording, making):
            yield from (state.differs for state in done.checked)
