"""Choosing an algorithm, refusing what cannot be planned, and the bound that no plan beats."""

from fractions import Fraction

import numpy as np
import pytest

from bml.schedule import bound, gst, gst_staged, load, plan, verify
from bml.schedule.select.sample import sample_of_bml
from bml.topology import FabricError, UsageError, parse


def test_auto_gives_its_reason():
    healthy = plan(parse("bcube:3x2"))
    assert (healthy.algorithm, healthy.why) == ("bml", "the fabric is healthy: all levels work at once")
    damaged = plan(parse("bcube:3x2").without("link:0/0"))
    assert damaged.algorithm == "packed"
    assert "damaged" in damaged.why


def test_bml_on_a_damaged_fabric_is_the_papers_way():
    fabric = parse("bcube:4x2").without("server:0")
    assert plan(fabric, "bml").forest.detours == plan(fabric, "detour").forest.detours
    assert plan(parse("bcube:4x2"), "detour").forest.detours == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rings", "'rings' is not an algorithm: choose one of auto, bml"),
        ("mesh:3", "'3' cannot follow the colon in 'mesh:3': write mesh alone"),
        ("ring:two", "write it like ring or ring:both"),
        ("flextree:3y3", "write it like flextree or flextree:3x3"),
        ("ps:", "write it like ps or ps:4"),
    ],
)
def test_what_is_no_algorithm(text, says):
    with pytest.raises(UsageError, match=says):
        plan(parse("bcube:3x2"), text)


def test_disconnected_survivors_are_named():
    fabric = parse("bcube:3x2").without("link:4/0", "link:4/1")
    with pytest.raises(FabricError, match=r"server\(s\) 0, 1, 2, 3, 5, 6, 7, 8; server\(s\) 4\."):
        plan(fabric)
    large = parse("bcube:4x2").without("switch:0/0", "link:0/1")
    with pytest.raises(FabricError, match="and 3 more"):
        plan(large)
    with pytest.raises(FabricError, match="no server of bcube:2x1 is left"):
        plan(parse("bcube:2x1").without("server:0", "server:1"))


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x1", "bcube:2x4"])
def test_healthy_bml_without_building_it(name):
    made = plan(parse(name))
    found = made.pieces, made.detours, made.gst(), made.gst_staged(), made.load().busiest
    assert "schedule" not in vars(made)
    forest = made.forest
    assert found == (
        forest.pieces,
        0,
        gst(forest, made.fabric),
        gst_staged(forest, made.fabric),
        load(forest, made.fabric).busiest,
    )
    assert np.array_equal(made.load().sent, load(forest, made.fabric).sent)
    sample = sample_of_bml(made.fabric, 5)
    rows = np.unique(np.linspace(0, forest.pieces - 1, 5).astype(int))
    assert all(
        np.array_equal(getattr(sample, column), getattr(forest, column)[rows])
        for column in ("root", "parent", "level", "stage")
    )
    assert verify(sample, made.fabric) == []


@pytest.mark.slow
def test_large_bml_is_verified_by_sample():
    large = plan(parse("bcube:39x2"))
    assert (large.verified_pieces, large.pieces) == (64, 2 * 39**2)
    assert large.violations() == []
    assert "schedule" not in vars(large)
    assert plan(parse("bcube:4x3")).verified_pieces == 192


def test_dead_and_unknown_servers_have_no_program():
    made = plan(parse("bcube:3x2").without("server:4"))
    for server in (4, 9, -1):
        with pytest.raises(UsageError, match=f"server {server} is not alive"):
            made.program(server)


@pytest.mark.parametrize(
    ("name", "failure", "expected"),
    [
        ("bcube:3x2", None, 0.8889),
        ("bcube:4x2", None, 0.9375),
        ("bcube:2x3", None, 0.5833),
        ("bcube:3x2", "server:0", 0.8750),
        ("bcube:4x2", "server:0", 0.9333),
        ("bcube:2x3", "server:0", 0.6667),
        ("bcube:4x3", "server:0", 0.6561),
        ("bcube:3x2", "link:0/0", 1.0000),
        ("bcube:4x2", "link:0/0", 1.0000),
        ("bcube:2x3", "link:0/0", 0.6364),
        ("bcube:4x3", "link:0/0", 0.6597),
        ("bcube:3x2", "switch:0/0", 1.0667),
        ("bcube:4x2", "switch:0/0", 1.0714),
        ("bcube:2x3", "switch:0/0", 0.6364),
        ("bcube:4x3", "switch:0/0", 0.6702),
    ],
)
def test_the_cut_bound_is_the_published_optimum_of_single_failures(name, failure, expected):
    fabric = parse(name).without(*([failure] if failure else []))
    assert float(bound(fabric)) == pytest.approx(expected, abs=5e-5)
    assert gst(plan(fabric).forest, fabric) >= bound(fabric)


def test_the_cut_bound_of_a_server_that_is_cut_off():
    with pytest.raises(FabricError, match=r"server 4 of .* is cut off"):
        bound(parse("bcube:3x2").without("link:4/0", "link:4/1"))
    assert bound(parse("bcube:3x2")) == Fraction(16, 18)
