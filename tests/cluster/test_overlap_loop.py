"""The loop of docs/guides/overlap.md as it is: coupled layers, and a server that dies at every step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import blocks
import jobs
import numpy as np
import pytest

import bml
from bml.sharedmem import segment
from bml.sim.programs.oracle import OracleSession
from bml.sim.programs.writer import gradient

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

ROOT = Path(__file__).resolve().parents[2]
LOOP, *_ = blocks.read(ROOT / "docs" / "guides" / "overlap.md", ROOT)
N_SAMPLES, LAYERS = 576, 2
N_STEPS = 1 + 3 * 2 * LAYERS
"""That of the state, and in three epochs of two batches a part for each layer."""
TRANSPORTS = ("tcp",) if segment.why_not() else ("tcp", "shm")


class Layer:
    """Its gradient depends on the parameters of both; all numbers are whole, so sums have one value."""

    def __init__(self, number: int, w: list[Any]):
        self.number, self.w = number, w

    def backward(self, indices: Any) -> Any:
        return self.backward_of(indices, w=self.w)

    def backward_of(self, indices: Any, w: list[Any]) -> Any:
        return gradient(self.number, indices, w)

    def update(self, mean: Any) -> None:
        self.w[self.number] -= np.rint(mean * 288) % 23


def train(session: bml.Session) -> list[Any]:
    w = [np.full(3, 4.0), np.full((2, 2), 5.0)]
    session.state(params=w)
    layers = [Layer(number, w) for number in range(LAYERS)]
    names = {"session": session, "layers": layers, "w": w, "n_samples": N_SAMPLES, "functools": functools}
    exec(compile(LOOP.text, LOOP.place, "exec"), names)
    return w


@pytest.mark.parametrize("step", range(1, N_STEPS + 1))
def test_a_death_at_any_step_changes_no_parameter(step: int) -> None:
    oracle: Any = OracleSession(range(4), 0)
    expected = train(oracle)
    transport = TRANSPORTS[step % len(TRANSPORTS)]
    result = jobs.launch(train, "bcube:2x2", transport=transport, faults=[f"kill:3@step={step}"])
    assert sorted(result.dead) == [3]
    assert not result.never_struck
    for value in result.values.values():
        assert all(np.array_equal(one, other) for one, other in zip(value, expected, strict=True))
