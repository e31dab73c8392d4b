"""Packings of large BCubes, of which only the broken trees are mended."""

from __future__ import annotations

import numpy as np
import pytest
from sampled import first
from schedule_executor import check_sums

from bml.schedule import Schedules, bound, gst, verify
from bml.schedule.algorithms.bml import digits_of
from bml.schedule.ir.nics import cut_bound, number_nics
from bml.schedule.ir.program import compile_program
from bml.schedule.packed.healthy import cut_large, is_large
from bml.schedule.packed.packing import packed
from bml.topology import parse

CASES = [
    ("bcube:2x8", ("server:5",)),
    ("bcube:14x2", ("link:5/0", "server:77")),
    ("bcube:4x4", ("switch:0/3", "server:17", "link:99/2")),
    ("bcube:14x2", ("switch:0/3", "switch:0/9")),
    ("bcube:16x2", ("link:5/0", "link:99/0", "link:200/1")),
    ("bcube:2x8", ("switch:0/3", "switch:1/5", "link:7/7", "server:200")),
    ("bcube:7x3", ("server:5", "link:77/0", "switch:2/9")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "failures"), first(2, CASES))
def test_mended_packings_are_sound_and_near_the_bound(name: str, failures: tuple[str, ...]) -> None:
    fabric = parse(name).without(*failures)
    assert is_large(number_nics(fabric))
    forest = packed(fabric)
    assert verify(forest, fabric) == []
    reached = gst(forest, fabric)
    assert reached >= cut_bound(number_nics(fabric))
    assert reached <= bound(fabric) * 1.025
    made = Schedules(fabric).for_nbytes(64 << 20)
    assert made.algorithm == "packed"
    for column in ("root", "weight", "parent", "level", "stage"):
        assert np.array_equal(getattr(forest, column), getattr(made.forest, column)), "all plan alike"


@pytest.mark.slow
def test_sums_over_a_mended_packing_are_right() -> None:
    fabric = parse("bcube:14x2").without("link:5/0", "server:77")
    forest = packed(fabric)
    programs = {server: compile_program(forest, server) for server in fabric.servers}
    check_sums(fabric, programs, n_elements=60)


@pytest.mark.parametrize("name", ["bcube:2x8", "bcube:4x5", "bcube:14x2"])
def test_unbroken_trees_load_all_nics_nearly_alike(name: str) -> None:
    """Fewer trees, where that is so, make a root's NIC no busier than by one part in a hundred."""
    nics = number_nics(parse(name))
    trees = cut_large(nics, 9)
    assert not trees.roots, "nothing is broken"
    assert max(trees.load) <= min(trees.load) * 1.02
    assert sum(trees.load) == 2 * trees.pieces * (len(nics.servers) - 1)


def test_digits_are_addresses() -> None:
    fabric = parse("bcube:3x3")
    assert [tuple(row) for row in digits_of(fabric).tolist()] == [fabric.address(each) for each in range(27)]
