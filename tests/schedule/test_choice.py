"""Which schedule a step of a running job takes: by its size, by the damage, the same on every server."""

from math import inf

import pytest

from bml.schedule import ExchangeProgram, Programs, Schedules, bound, gst, plan
from bml.schedule.algorithms.exchange import works_on
from bml.schedule.select.model import Constants, Counts, switch_over
from bml.topology import parse

FOUR_BYTES, MIB_64 = 4, 64 << 20


def test_the_switch_over_is_where_both_take_equally_long():
    """By hand for alpha 1 ms, beta 1 us and nothing else: 2 + 3 S = 4 + S has its solution at 1000 bytes."""
    constants = Constants(1e-3, 1e-6, 0.0, 0.0, 0.0)
    few, many = Counts(2, 3, 0, 0, 0), Counts(4, 1, 0, 0, 0)
    assert switch_over(few, many, constants) == pytest.approx(1000)
    assert few.seconds(1000, constants) == pytest.approx(many.seconds(1000, constants))
    assert switch_over(many, few, constants) == 0
    assert switch_over(few, few, constants) == 0
    assert switch_over(few, Counts(2, 4, 0, 0, 0), constants) == inf
    assert switch_over(Counts(2, 1, 0, 0, 0), Counts(4, 1, 0, 0, 0), constants) == inf


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:3x2", "switch:5"])
def test_sizes_choose_as_the_model_says(name):
    fabric = parse(name)
    schedules = Schedules(fabric)
    limit = schedules.switch_over_nbytes
    sizes = (0, FOUR_BYTES, int(limit) - 1, int(limit) + 1, MIB_64)
    for nbytes in sizes:
        made = schedules.for_nbytes(nbytes)
        assert made.algorithm == plan(fabric, nbytes=nbytes).algorithm
        others = [plan(fabric, other).counts().seconds(nbytes) for other in ("exchange", "bml")]
        assert made.counts().seconds(nbytes) == pytest.approx(min(others))
    assert [schedules.for_nbytes(n).algorithm for n in sizes] == ["exchange"] * 3 + ["bml"] * 2


def test_constants_move_the_switch_over():
    slow = Schedules(parse("bcube:3x2"), constants=Constants(alpha_s=1e-3))
    quick = Schedules(parse("bcube:3x2"), constants=Constants(alpha_s=1e-6))
    assert slow.switch_over_nbytes == pytest.approx(1000 * quick.switch_over_nbytes)
    assert Schedules(parse("bcube:3x2"), constants=Constants(alpha_s=0.0)).switch_over_nbytes == 0


def test_programs_are_compiled_when_needed_and_kept(monkeypatch):
    fabric = parse("bcube:3x2")
    programs = Programs(Schedules(fabric), 4)
    compiled = []
    monkeypatch.setattr(
        "bml.schedule.select.planner.local_bml", lambda fabric, server: compiled.append(server) or server
    )
    small = programs.for_nbytes(FOUR_BYTES)
    assert isinstance(small, ExchangeProgram)
    assert compiled == []
    assert programs.for_nbytes(MIB_64) == programs.for_nbytes(MIB_64 + 8) == 4
    assert compiled == [4]
    assert programs.for_nbytes(8) is small


@pytest.mark.parametrize("name", ["bcube:3x2", "torus:4x2", "bcube:4x3"])
def test_several_failures_are_packed(name):
    fabric = parse(name).without("server:1", "link:2/0")
    made = Schedules(fabric).for_nbytes(MIB_64)
    assert made.algorithm == Schedules(fabric).for_nbytes(FOUR_BYTES).algorithm == "packed"
    assert gst(made.forest, fabric) <= bound(fabric) * 1.02


def test_what_would_take_too_long_is_not_packed():
    large = parse("bcube:9x2").without("server:1", "link:2/0")
    assert Schedules(large).large.algorithm == "detour"
    assert Schedules(large, "packed").large.algorithm == "packed"
    assert Schedules(parse("bcube:9x2")).large.algorithm == "bml"


def test_a_wish_is_followed_whatever_the_size():
    fabric = parse("bcube:3x2")
    assert Schedules(fabric, "packed").for_nbytes(FOUR_BYTES).algorithm == "packed"
    assert Schedules(fabric, "exchange").for_nbytes(MIB_64).algorithm == "exchange"
    damaged = fabric.without("link:0/0")
    assert Schedules(damaged, "exchange").for_nbytes(FOUR_BYTES).algorithm == "packed"


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
    assert works_on(fabric) is works
    small = Schedules(fabric).for_nbytes(FOUR_BYTES)
    assert (small.algorithm == "exchange") is works
    assert small.violations() == []
