"""Every algorithm on random fabrics under random damage is sound and sums; every mutated forest is caught."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from every_algorithm import FORESTS, SPELLINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import first
from schedule_executor import check_sums

from bml.schedule import Exchange, Phase, gst, gst_staged, load, plan, verify
from bml.schedule.ir.forest import AT_ROOT, NOT_THERE
from bml.topology import FabricError, UsageError, parse

SMALL = [
    "bcube:2x2",
    "bcube:3x2",
    "bcube:4x2",
    "bcube:2x3",
    "bcube:3x1",
    "torus:2x2",
    "torus:3x2",
    "torus:4x2",
]
SMALL += ["torus:5x1", "torus:2x3", "switch:2", "switch:7", "fattree:4", "fattree:4/7"]
WISHES = [*SPELLINGS, "flextree:2", "flextree:2x3"]


@st.composite
def fabrics(draw, most_failures=5):
    """A small fabric of any family with some failures and perhaps links of other rates, connected or not."""
    healthy = parse(draw(st.sampled_from(SMALL)))
    servers = st.sampled_from(healthy.servers).map(lambda server: f"server:{server}")
    links = st.sampled_from(healthy.links).map(lambda link: f"link:{link[0]}/{link[1]}")
    parts = [servers, links]
    if len(healthy.switches) > 1:
        parts.append(st.sampled_from(healthy.switches).map(lambda switch: f"switch:{switch[0]}/{switch[1]}"))
    rates = st.dictionaries(
        st.sampled_from(healthy.links), st.sampled_from(["1/2", "2", "0.4", "3"]), max_size=3
    )
    return healthy.with_rates(draw(rates)).without(*draw(st.lists(st.one_of(parts), max_size=most_failures)))


def why_not(made):
    """What an algorithm says that cannot work on a fabric; empty if it can."""
    try:
        made.schedule  # noqa: B018
    except (FabricError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("n_examples", first(1, [80, 250]))
def test_every_algorithm_is_sound_or_says_why_not(n_examples):
    drawn = given(fabrics(), st.sampled_from(WISHES), st.integers(0, 90), st.integers(0, 9))
    settings(max_examples=n_examples, deadline=None, derandomize=True)(drawn(sound_or_says_why_not))()


def sound_or_says_why_not(fabric, algorithm, n_elements, seed):
    if not fabric.is_connected:
        with pytest.raises(FabricError, match=r"fall into parts|no server"):
            plan(fabric, algorithm)
        return
    made = plan(fabric, algorithm)
    if problem := why_not(made):
        assert algorithm == "exchange" or algorithm.startswith(("ps:", "flextree:"))
        assert "exchange cannot work" in problem or "needs" in problem
        return
    assert made.violations() == []
    assert made.gst_staged() >= made.gst() >= 0
    schedule = made.schedule
    if isinstance(schedule, Exchange):
        return
    check_sums(fabric, {server: made.program(server) for server in fabric.servers}, n_elements, seed)
    counted = load(schedule, fabric)
    assert counted.sent.sum() == counted.received.sum()
    if len(fabric.servers) > 1:
        # Every server but the owner sends its partial and is sent the result, at least over one hop.
        assert counted.sent.sum() >= 2 * (len(fabric.servers) - 1) * counted.whole


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(fabric=fabrics(), algorithm=st.sampled_from(WISHES))
def test_the_same_question_has_the_same_answer(fabric, algorithm):
    if not fabric.is_connected or algorithm == "exchange":
        return
    try:
        one, other = plan(fabric, algorithm).forest, plan(fabric, algorithm).forest
    except UsageError:
        return
    for column in ("root", "weight", "parent", "level", "stage"):
        assert (getattr(one, column) == getattr(other, column)).all()
    assert one.detours == other.detours


@st.composite
def broken(draw):
    """A sound forest made wrong in one place, and the fabric it was for."""
    fabric = draw(fabrics(most_failures=3).filter(lambda one: one.is_connected and len(one.servers) > 2))
    names = [name for name in FORESTS if ":" not in name]
    forest = plan(fabric, draw(st.sampled_from(names))).forest
    piece = draw(st.integers(0, forest.pieces - 1))
    root = int(forest.root[piece])
    others = [server for server in fabric.servers if server != root]
    a, b = draw(st.permutations(others))[:2]
    parent, weight = forest.parent.copy(), forest.weight.copy()
    match draw(st.sampled_from(["twice", "missing", "cycle", "share", "link", "level", "dead"])):
        case "twice":
            parent[piece, root] = a
        case "missing":
            parent[piece, a] = draw(st.sampled_from([NOT_THERE, AT_ROOT]))
        case "cycle":
            parent[piece, a], parent[piece, b] = b, a
        case "share":
            weight[piece] = draw(st.integers(-2, 0))
        case "link":
            hops = next(forest.blocks(draw(st.sampled_from(list(Phase)))))
            hop = draw(st.integers(0, len(hops.piece) - 1))
            return forest, fabric.without(f"link:{hops.sender[hop]}/{hops.level[hop]}")
        case "level":
            level = forest.level.copy()
            level[piece, a] = draw(st.sampled_from([-1, fabric.levels]))
            return replace(forest, level=level), fabric
        case "dead":
            return forest, fabric.without(f"server:{a}")
    return replace(forest, parent=parent, weight=weight), fabric


@pytest.mark.slow
@pytest.mark.parametrize("n_examples", first(1, [80, 250]))
def test_a_mutated_forest_is_always_caught(n_examples):
    @settings(max_examples=n_examples, deadline=None, derandomize=True)
    @given(case=broken())
    def is_caught(case):
        assert verify(*case)

    is_caught()


@pytest.mark.parametrize("column", ["source", "level", "stage"])
def test_a_mutated_way_down_is_caught(column):
    fabric = parse("bcube:3x2")
    forest = plan(fabric, "ring").forest
    changed = getattr(forest.broadcast, column).copy()
    changed[0, 4] = -1
    assert verify(replace(forest, broadcast=replace(forest.broadcast, **{column: changed})), fabric)


def test_rates_change_times_and_not_forests_of_healthy_fabrics():
    plain = parse("torus:4x2")
    slow = plain.with_rates({(0, 0): Fraction(1, 3)})
    one, other = plan(plain, "hips").forest, plan(slow, "hips").forest
    assert (one.parent == other.parent).all()
    assert gst(other, slow) == 3 * gst(one, plain)
    assert gst_staged(other, slow) > gst_staged(one, plain)
    assert np.array_equal(load(one, plain).sent, load(other, slow).sent)
