"""Real cables under running steps: no sum is wrong, and the speed is that of what is left, then whole again.

BML_CUTS says how many cuts there are to be; `python benchmarks/cuts.py --cuts 200` makes them in many jobs.
"""

from __future__ import annotations

import os

import cuts
import damaged
import pytest

from bml.pytest_plugin import BringUp, seed_of

CUTS = int(os.environ.get("BML_CUTS", "6"))

pytestmark = [pytest.mark.real, pytest.mark.timeout(60 + 2 * CUTS)]


def test_no_transfer_is_lost_or_counted_twice_when_its_cable_is_cut(
    emulated_fabric: BringUp, pytestconfig: pytest.Config
) -> None:
    """Every server compares every sum with the exact one; no cable takes a server with it.

    See benchmarks/cuts.py.
    """
    seen = cuts.run(emulated_fabric("bcube:3x2", "100mbit"), CUTS, seed_of(pytestconfig))
    assert len(seen["cuts"]) == CUTS
    assert seen["same_on_all"]
    assert seen["servers_left"] == list(range(9)), seen["reasons"]
    # A seed draws long vectors: six cuts are over in two to ten steps.
    assert seen["steps"] >= 2, "the job stood still"


@pytest.mark.serial("steps after a cut against steps before it")
def test_steps_take_what_is_left_and_then_what_is_whole_again(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    before, during, healed = damaged.measure(network, "cut:4/0", 1 << 20, n_steps=10, lasts_s=2.0)
    assert [each["failures"] != () for each in (before, during, healed)] == [False, True, False]
    assert min(each["steps"] for each in (before, during, healed)) >= 3
    slower = during["theory_s"] / before["theory_s"]
    assert 1.0 < slower < 1.25, "what is left carries nearly as much"
    # On a small vector start-up times count, too, and the trees of a damaged fabric are deeper.
    assert during["median_s"] < 2.0 * slower * before["median_s"]
    # A NIC that is not used again is seen in `failures`; the machine may be busier than it was before.
    assert healed["median_s"] < 1.5 * before["median_s"]
