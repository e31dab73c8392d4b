"""Which schedule a step of a running job takes: by its size, by the damage, the same on every server."""

import pytest

from bml.schedule import ExchangeProgram, Programs, Schedules, bound, gst, plan
from bml.schedule.select import cases
from bml.schedule.select.choice import prepare
from bml.schedule.select.model import DEFAULTS, Constants
from bml.topology import parse

FOUR_BYTES, MIB_64 = 4, 64 << 20


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x2", "bcube:2x3", "switch:5"])
def test_healthy_fabrics_change_from_exchange_to_trees_where_both_take_equally_long(name):
    """Or where they differ by 5 % at most."""
    fabric = parse(name)
    schedules = Schedules(fabric)
    few, many = (plan(fabric, algorithm).counts() for algorithm in ("exchange", "bml"))
    saved_s = many.start_s(DEFAULTS) - few.start_s(DEFAULTS)
    limit = saved_s / (few.per_byte_s(DEFAULTS) - many.per_byte_s(DEFAULTS))
    sizes = (0, FOUR_BYTES, int(limit * 0.85), int(limit * 1.15), MIB_64)
    for nbytes in sizes:
        assert schedules.for_nbytes(nbytes).algorithm == plan(fabric, nbytes=nbytes).algorithm
    assert [schedules.for_nbytes(n).algorithm for n in sizes] == ["exchange"] * 3 + ["bml"] * 2


def test_constants_move_the_switch_over():
    fabric = parse("bcube:3x2")
    slow = Schedules(fabric, constants=Constants(alpha_s=1e-3))
    quick = Schedules(fabric, constants=Constants(alpha_s=1e-6))
    assert [each.for_nbytes(16 << 10).algorithm for each in (slow, quick)] == ["exchange", "bml"]
    assert Schedules(fabric, constants=Constants(alpha_s=0.0)).for_nbytes(1).algorithm == "bml"


def test_programs_are_compiled_when_needed_and_kept(monkeypatch):
    fabric = parse("bcube:3x2")
    programs = Programs(Schedules(fabric), 4)
    compiled = []
    monkeypatch.setattr(
        "bml.schedule.select.plan.local_bml", lambda fabric, server: compiled.append(server) or server
    )
    small = programs.for_nbytes(FOUR_BYTES)
    assert isinstance(small, ExchangeProgram)
    assert compiled == []
    assert programs.for_nbytes(MIB_64) == programs.for_nbytes(MIB_64 + 8) == 4
    assert compiled == [4]
    assert programs.for_nbytes(8) is small


@pytest.mark.parametrize("name", ["bcube:3x2", "torus:4x2", "bcube:4x3"])
def test_long_vectors_are_packed_after_several_failures(name):
    fabric = parse(name).without("server:1", "link:2/0")
    made = Schedules(fabric).for_nbytes(MIB_64)
    assert made.algorithm == "packed"
    assert gst(made.forest, fabric) <= bound(fabric) * 1.02


@pytest.mark.slow
def test_what_would_take_too_long_is_not_packed():
    large = parse("torus:9x2").without("server:1", "link:2/0")
    for nbytes in (FOUR_BYTES, MIB_64):
        assert Schedules(large).for_nbytes(nbytes).algorithm == "detour"
        assert Schedules(large, "packed").for_nbytes(nbytes).algorithm == "packed"
    assert Schedules(parse("bcube:9x2")).for_nbytes(MIB_64).algorithm == "bml"


def test_a_large_bcube_is_packed_while_a_step_waits():
    large = parse("bcube:9x2").without("server:1", "link:2/0")
    made = Schedules(large).for_nbytes(MIB_64)
    assert made.algorithm == "packed"
    assert made.gst() <= bound(large) * 1.02


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("rate", ["1/2", "1/8", "1/32"])
@pytest.mark.parametrize("name", ["bcube:9x2", "torus:9x2", "bcube:5x3"])
def test_a_slow_nic_of_a_large_damaged_fabric_costs_what_a_dead_one_does_at_most(name, rate):
    damaged = parse(name).without("server:8")
    large = damaged.with_rates({(4, 0): rate})
    made = Schedules(large).for_nbytes(MIB_64)
    dead = Schedules(damaged.without("link:4/0")).for_nbytes(MIB_64).gst()
    assert made.algorithm == ("detour" if name.startswith("torus") else "packed")
    assert made.gst() <= min(dead, plan(large, "detour").gst())


def test_a_slow_nic_of_a_large_fabric_is_packed_round():
    large = parse("bcube:9x2").with_rates({(4, 0): "1/8"})
    assert Schedules(large).for_nbytes(MIB_64).gst() == 1, "a little more than .99 T of the healthy fabric"


def test_a_large_fabric_that_only_slow_nics_join_uses_them():
    large = parse("switch:66").without("server:8").with_rates({(4, 0): "1/8"})
    assert not large.without("link:4/0").is_connected
    assert Schedules(large).for_nbytes(MIB_64).fabric == large


def test_a_wish_is_followed_whatever_the_size():
    fabric = parse("bcube:3x2")
    assert Schedules(fabric, "packed").for_nbytes(FOUR_BYTES).algorithm == "packed"
    assert Schedules(fabric, "exchange").for_nbytes(MIB_64).algorithm == "exchange"


def test_a_wish_that_cannot_be_fulfilled_is_replaced_by_what_auto_takes():
    damaged = parse("bcube:3x2").without("server:4")
    for wish in ("exchange", "flextree:3x3"):
        taken = [Schedules(damaged, wish).for_nbytes(nbytes).algorithm for nbytes in (FOUR_BYTES, MIB_64)]
        assert taken == ["mesh", "packed"]
    assert Schedules(damaged, "ring").for_nbytes(FOUR_BYTES).algorithm == "ring"


def test_plans_made_ahead():
    def made(name, algorithm="auto"):
        return prepare(parse(name), algorithm, DEFAULTS)

    assert made("bcube:3x2") == made("bcube:3x2", "packed") == 3
    assert prepare(parse("bcube:3x2").without("server:1"), "auto", DEFAULTS) == 0
    assert made("torus:4x2") == made("bcube:9x2") == 0
    assert made("bcube:3x1") == 1  # without its only switch or a link nothing holds together


def test_after_a_single_failure_nothing_is_left_to_be_built():
    prepare(parse("bcube:3x2"), "auto", DEFAULTS)
    before = cases._built.cache_info().misses
    for failure in ("server:5", "link:7/1", "switch:1/2"):
        schedules = Schedules(parse("bcube:3x2").without(failure))
        assert {schedules.for_nbytes(nbytes).algorithm for nbytes in (FOUR_BYTES, MIB_64)} == {
            "mesh",
            "packed",
        }
    assert cases._built.cache_info().misses == before


@pytest.mark.parametrize(
    ("name", "failures", "works"),
    [
        ("bcube:3x2", (), True),
        ("bcube:3x2", ("server:0", "server:1", "server:2"), True),
        ("bcube:3x2", ("server:0",), False),
        ("bcube:3x2", ("server:0", "server:4", "server:8"), False),
        ("bcube:3x2", ("link:0/0",), False),
        ("torus:4x2", (), False),
        ("torus:3x2", (), True),
        ("switch:5", ("server:2",), True),
    ],
)
def test_where_an_exchange_works(name, failures, works):
    fabric = parse(name).without(*failures)
    small = Schedules(fabric).for_nbytes(FOUR_BYTES)
    assert (small.algorithm == "exchange") is works
    assert small.violations() == []
