"""Figures of the papers: their points, closed forms beside the simulation, and what is counted for them."""

from __future__ import annotations

import pytest

from bml.errors import UsageError
from bml.lab.figures import available  # noqa: F401 (registers the figures)
from bml.lab.figures.absent import ABSENT
from bml.lab.figures.failures import damaged, failure_schedule, more_failures
from bml.lab.figures.fat_tree import (
    flows_of_uplinks,
    n_switches,
    switch_counts,
    switch_share,
    uplink_flows,
)
from bml.lab.figures.figure import Basis, How, Point, chosen, figure, registered
from bml.lab.figures.hips import gst_on_bcube, gst_on_torus, reductions
from bml.lab.figures.pauses import SHUFFLED, elsewhere, packet_times, pauses
from bml.lab.figures.steps import WHOLE_S, by_formula, simulated
from bml.lab.figures.synchronisation import one_kth, times_by_algorithm
from bml.lab.figures.trainings import job_completion
from bml.lab.figures.tree_shapes import shapes, shapes_of_flextree, size_text
from bml.lab.flows.simulate import Conditions, traffic_of
from bml.schedule import plan
from bml.schedule.select.model import DEFAULTS
from bml.topology import parse
from bml.topology.fattree import AGGREGATION, EDGE, fat_tree

CLOSE = 1e-3
"""Closed forms and the simulation agree to this."""


def by_name(points: list[Point]) -> dict[str, Point]:
    found = {point.what: point for point in points}
    assert len(found) == len(points), "two points have one name"
    return found


def agree(points: list[Point]) -> bool:
    """Whether all points that can be compared agree with the published formula, and some can."""
    ratios = [point.ratio for point in points if point.ratio is not None]
    return bool(ratios) and all(abs(ratio - 1) < CLOSE for ratio in ratios)


def test_every_figure_says_what_it_is() -> None:
    assert len(registered()) >= 12
    for name, found in registered().items():
        assert found.name == name
        assert all((found.title, found.unit, found.source, found.about, found.reading))
        assert not found.about.endswith(" ")
    assert all((each.what and each.published and each.why) for each in ABSENT)
    assert any("PFC" in each.what for each in ABSENT)
    assert "pauses" in registered()


def test_a_name_or_all() -> None:
    assert [each.name for each in chosen("one-kth")] == ["one-kth"]
    assert [each.name for each in chosen("all")] == list(registered())
    with pytest.raises(UsageError, match=r"'one-third' is no figure: write all, or one of .*one-kth"):
        chosen("one-third")


@pytest.mark.parametrize("name", ["one-kth", "all"])
def test_a_name_is_taken_once(name: str) -> None:
    with pytest.raises(ValueError, match="two figures with the name"):
        figure(name, title="", unit="", source="", about="", reading="")(switch_counts)


def test_a_ratio_needs_both_values() -> None:
    assert Point("a", "b", 3.0, How.theory, 2.0, Basis.value).ratio == 1.5
    assert Point("a", "b", 3.0, How.theory).ratio is None
    assert Point("a", "b", None, How.theory, 2.0, Basis.formula).ratio is None


def test_bcube_simulated_and_counted_has_the_published_formulas() -> None:
    points = gst_on_bcube((3, 4), (2, 3))
    found = by_name(points)
    assert agree(points)
    assert found["HiPS, bcube:4x3"].how is How.simulation
    assert found["mesh, bcube:4x2"].ours == 1.5
    assert found["HiPS, bcube:4x2"].ours == pytest.approx(0.9375, rel=CLOSE)
    assert all(point.ours is not None for point in points)


def test_what_is_too_large_is_left_open_and_hips_on_bcube_never_is() -> None:
    found = by_name(gst_on_bcube((16,), (4,)))
    assert found["ring, bcube:16x4"].ours is None
    assert found["ring, bcube:16x4"].note
    assert found["HiPS, bcube:16x4"].ratio == pytest.approx(1, rel=CLOSE)


def test_torus_simulated_and_counted_has_the_published_formulas() -> None:
    points = gst_on_torus((4,), (2, 3))
    found = by_name(points)
    assert agree(points)
    assert found["HiPS, torus:4x2"].ours == pytest.approx(0.46875, rel=CLOSE)
    assert found["HiPS, torus:4x2"].how is How.simulation


@pytest.mark.slow
def test_a_large_torus_is_counted() -> None:
    (*_, hips) = gst_on_torus((8,), (3,))
    assert hips.how is How.theory
    assert hips.ratio == pytest.approx(1, rel=CLOSE)


def test_reductions_begin_with_the_published_end() -> None:
    found = by_name(reductions())
    assert found["BCube against mesh, least"].ours == -37.5 == found["BCube against mesh, 4x2"].ours
    assert found["BCube against mesh, 8x3"].ours == pytest.approx(-61.979, abs=1e-3)
    assert found["BCube against mesh, most"].published == -61.9
    assert found["BCube against mesh, most"].basis is Basis.range
    assert found["torus against ring, 4x2"].ours == pytest.approx(-50)
    assert found["torus against ring, 16x4"].ours == pytest.approx(-75)
    assert found["torus against Fat-Tree, 4x2"].ours == pytest.approx(-75)
    assert found["BCube against mesh, abstract"].ratio == pytest.approx(1, abs=0.01)
    assert found["BCube against ring, abstract"].ratio == pytest.approx(1, abs=0.01)


def test_theory_and_simulation_of_hips_on_the_published_bcube() -> None:
    theory = by_formula(parse("bcube:16x2"), "bml") * WHOLE_S
    assert theory * 1e3 == pytest.approx(11.46, abs=0.01)
    assert simulated(parse("bcube:16x2"), "bml", 1e-6) * WHOLE_S == pytest.approx(theory, rel=CLOSE)
    assert simulated(parse("bcube:16x2"), "bml", 1e-3) * WHOLE_S > theory * 1.05


def test_an_algorithm_without_a_formula_is_refused() -> None:
    with pytest.raises(UsageError, match="tree has no formula on bcube:3x2"):
        by_formula(parse("bcube:3x2"), "tree")


def test_switches() -> None:
    assert [point.ratio for point in switch_counts()] == [1, 1, 1, 1]
    assert n_switches(fat_tree(4)) == 20
    assert agree(switch_share())


def test_a_mesh_has_every_flow_that_leaves_an_edge_switch_or_a_pod() -> None:
    fabric = fat_tree(4)
    up, over = (flows_of_uplinks(fabric, "mesh", layer, 0) for layer in (EDGE, AGGREGATION))
    assert [len(up), len(over)] == [16, 16]
    assert sum(up) == 16 * 14, "each of 16 servers sends to 15, one of them below its own edge switch"
    assert sum(over) == 16 * 12, "three are in its own pod"
    assert flows_of_uplinks(fabric, "mesh", EDGE, 0) == up != flows_of_uplinks(fabric, "mesh", EDGE, 2)


def test_the_tiers_of_hips_have_few_flows_over_the_core() -> None:
    """A server speaks to one other below its edge switch, one in its pod, and three over the core."""
    fabric = fat_tree(4)
    assert sum(flows_of_uplinks(fabric, "hips:tiers", EDGE, 0)) == 16 * 4
    assert sum(flows_of_uplinks(fabric, "hips:tiers", AGGREGATION, 0)) == 16 * 3


def test_only_the_flows_of_hips_over_the_core_are_published() -> None:
    found = by_name(uplink_flows(("HiPS",), seeds=1))
    assert [point.published for point in found.values()] == [None, None, 9, 19]
    assert found["HiPS, aggregation to core, median"].ours == 9
    assert 17 <= (found["HiPS, aggregation to core, maximum"].ours or 0) <= 20


def test_times_by_algorithm() -> None:
    points = times_by_algorithm(("bcube:3x2", "bcube:2x3"))
    assert agree(points)
    assert by_name(points)["one parameter server, bcube:3x2"].ours == 18


def test_two_nics_take_half_the_time() -> None:
    (two, three) = one_kth(("bcube:3x2", "bcube:3x3"))
    assert two.ours == pytest.approx(1 / 2, rel=CLOSE)
    assert three.ours == pytest.approx(1 / 3, rel=CLOSE)


def test_a_dead_server() -> None:
    found = by_name(failure_schedule((3, 4)))
    assert found["detour, by stages, bcube:4x2"].ours == pytest.approx(32 / 30)
    assert found["detour, by stages, bcube:4x2"].basis is Basis.value
    assert found["detour, by stages, bcube:3x2"].ratio == pytest.approx(1)
    assert found["optimum, bcube:3x2"].ours == found["packed, bcube:3x2"].ours == pytest.approx(7 / 8)
    for name in ("detour", "packed"):
        played, counted = found[f"{name}, simulated, bcube:3x2"], found["optimum, bcube:3x2"]
        assert (played.ours or 0) > (counted.ours or 0)


def test_more_failures_are_at_least_the_optimum() -> None:
    found = by_name(more_failures((0, 1), draws=2))
    for at in ("0 servers", "1 server", "0 links", "1 link"):
        least = found[f"optimum, {at}"].ours or 0
        assert least <= (found[f"packed, {at}"].ours or 0) <= least * 1.01
        assert least <= (found[f"detour, {at}"].ours or 0)
    assert found["detour, 1 link"].ours == 1.875
    assert found["packed, 1 server"].ours == pytest.approx(14 / 15)


def test_damaged_fabrics_are_connected_and_drawn_from_a_seed() -> None:
    fabric = parse("bcube:2x2")
    found = list(damaged(fabric, "link", 2, draws=8))
    assert len(found) == 8
    assert all(each.is_connected and len(each.links) == 6 for each in found)
    assert found == list(damaged(fabric, "link", 2, draws=8))
    assert len(set(found)) > 1


def test_shapes_are_all_widths_with_a_product() -> None:
    assert list(shapes(1)) == [()]
    assert list(shapes(8)) == [(8,), (4, 2), (2, 2, 2)]
    assert list(shapes(12)) == [(12,), (6, 2), (4, 3), (3, 2, 2)]


def test_flextree_counts_what_the_formulas_have() -> None:
    points = shapes_of_flextree((5, 16), (4096, 1 << 26))
    found = by_name(points)
    assert agree(points)
    assert found["FlexTree, best, 4 KiB, N=16"].note == "widths 16"
    best, one = found["FlexTree, best, 64 MiB, N=16"], found["FlexTree, one stage, 64 MiB, N=16"]
    assert best.note != "widths 16"
    assert (best.ours or 0) < (one.ours or 0)
    assert "recursive doubling, 4 KiB, N=5" not in found
    empty = 4 * DEFAULTS.alpha_s * 1e3
    assert found["recursive doubling, 4 KiB, N=16"].ours == pytest.approx(empty, rel=0.1)


def test_sizes_have_units() -> None:
    assert [size_text(each) for each in (1000, 4096, 1 << 26, 3 << 30)] == [
        "1000 B",
        "4 KiB",
        "64 MiB",
        "3 GiB",
    ]


@pytest.mark.slow
def test_trainings_whose_wires_are_the_limit_take_half_the_time() -> None:
    found = by_name(job_completion(("alexnet", "lenet"), (10,)))
    beside = found["mesh, one switch, alexnet 10G"].ours or 0
    assert -50 < beside < -48
    assert "mesh, one switch, least" not in found, "the testbed had no such fabric"
    (ends,) = {found[f"mesh, Fat-Tree, {end}"].ours for end in ("least", "most")}
    assert ends == found["mesh, Fat-Tree, lenet 10G"].ours, "nor was AlexNet measured there"
    assert found["mesh, Fat-Tree, most"].published == -56.4
    after = found["mesh, one switch, after backward, alexnet 10G"].ours or 0
    assert beside < after < 0, "what is not hidden under computation is a smaller part of the job"


@pytest.mark.slow
@pytest.mark.timeout(600)  # it may compile, on a busy machine
def test_hips_on_the_published_bcube_pauses_nothing() -> None:
    cases = ("HiPS, bcube:16x2",)
    counts, times = pauses(cases), packet_times(cases)
    assert [point.ours for point in counts] == [0, 0] == [point.published for point in counts]
    assert [point.at for point in counts] == ["DCQCN", "no rate control"]
    assert all(point.ratio == pytest.approx(1, abs=0.002) for point in times)


@pytest.mark.slow
@pytest.mark.few(0)
@pytest.mark.timeout(600)
def test_a_mesh_on_the_published_fat_tree_pauses_thousands() -> None:
    counts, times = pauses(("mesh, fattree:10",)), packet_times(("mesh, fattree:10",))
    assert all((point.ours or 0) > 10 for point in counts)
    assert all(1.2 < (point.ratio or 0) < 1.7 for point in times)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rate_control_saves_pauses_of_a_shuffled_ring() -> None:
    controlled, free = pauses(SHUFFLED[:1])
    assert (controlled.ours or 0) < (free.ours or 0) / 10


def test_traffic_elsewhere_is_the_same_between_other_servers() -> None:
    traffic, _ = traffic_of(plan(parse("switch:8"), "ring"), Conditions(1e6, 1e9))
    moved = elsewhere(traffic, 8)
    sends = traffic.sender >= 0
    assert (moved.sender[~sends] == traffic.sender[~sends]).all()
    pairs = set(zip(traffic.sender[sends].tolist(), moved.sender[sends].tolist(), strict=True))
    pairs |= set(zip(traffic.receiver[sends].tolist(), moved.receiver[sends].tolist(), strict=True))
    assert len(pairs) == 8, "one place for each server"
    assert any(server != place for server, place in pairs)
