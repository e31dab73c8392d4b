"""Real cables that are slow: jobs find them by themselves, plan round them, and use them when they heal."""

from __future__ import annotations

import pytest
import slow

from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


@pytest.mark.serial("steps on slow NICs against the optimum")
def test_a_slow_nic_is_found_planned_round_and_used_again(emulated_fabric: BringUp) -> None:
    """All servers compare every sum with the exact one; see benchmarks/slow.py."""
    network = emulated_fabric("bcube:2x2", "100mbit")
    seen = slow.measure(network, slow.slow((1, 0)), nbytes=2 << 20, n_steps=4, lasts_s=8.0)
    # A switch of two ports does not tell which of its NICs is slow.
    (first, *_) = [found for found in seen["slow"] if found]
    assert {*first} <= {"1/0", "0/0"}, seen
    assert any("runs at 1/" in reason and "trees avoid it" in reason for reason in seen["reasons"])
    assert "runs at its full rate again" in seen["reasons"][-1]
    assert seen["slow"][-1] == {}
    # A tenth of a rate takes ten times as long; with trees round it, 1.5 times. The machine may be busy.
    assert seen["planned_s"] < max(seen["slow_s"]) / 2
    assert seen["planned_s"] < 3 * seen["optimum_s"], seen
