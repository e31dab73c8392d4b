"""docs/explanation/papers.md is what docs/papers.py makes of the figures beside it, and these are of today.

Figures that take long are computed for some of their parameters only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from reference_pages import script

from bml.lab.commands.figures.shown import record
from bml.lab.figures import failures, fat_tree, hips, pauses, trainings
from bml.lab.figures.figure import Point, registered

papers = script("papers")

SAMPLES: dict[str, Callable[[], Any]] = {
    "gst-bcube": partial(hips.gst_on_bcube, (4,), (2, 3)),
    "gst-torus": partial(hips.gst_on_torus, (4,), (2, 3)),
    "more-failures": partial(failures.more_failures, (0, 1)),
    "pauses": partial(pauses.pauses, ("HiPS, bcube:16x2",)),
    "packet-times": partial(pauses.packet_times, ("HiPS, bcube:16x2",)),
    "uplink-flows": partial(fat_tree.uplink_flows, ("HiPS",)),
    "job-completion": partial(trainings.job_completion, ("resnet50",), (10, 40)),
}
#: Figures of long simulations: for the gate, and what cannot be sampled for the nightly run.
SLOW = {"pauses": 3, "packet-times": 3, "uplink-flows": 3, "job-completion": 3, "fat-tree-bcube": 0}
NUMBERS = ("published", "ours", "ratio")
ENDS = ("least", "most")


def stored(name: str) -> dict[str, Any]:
    return json.loads((papers.FIGURES / f"{name}.json").read_text())  # type: ignore[no-any-return]


def test_the_page_is_that_of_the_figures_beside_it() -> None:
    page = papers.PAGE.read_text()
    assert page == papers.page(papers.records()), "run: python docs/papers.py"
    assert page.count("\n## ") == len(registered()) + 2


def test_the_folder_has_the_figures_and_nothing_else() -> None:
    files = {path.name for path in papers.FIGURES.iterdir()}
    assert files == {f"{name}{suffix}" for name in registered() for suffix in (".svg", ".json")}


def same(point: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two points have the same texts, and numbers that differ by less than machines may."""
    numbers = {key: pytest.approx(other[key], rel=1e-5) for key in NUMBERS if other[key] is not None}
    return point == {**other, **numbers}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.few(SLOW[name])] if name in SLOW else [])
        for name in registered()
    ],
)
def test_a_figure_has_the_values_of_today(name: str) -> None:
    figure = registered()[name]
    points: list[Point] = SAMPLES.get(name, figure.points)()
    today, kept = record(figure, points), stored(name)
    assert {**today, "points": None} == {**kept, "points": None}, "run: python docs/papers.py"
    known = {point["what"]: point for point in kept["points"]}
    compared = [point for point in today["points"] if name not in SAMPLES or point["at"] not in ENDS]
    assert compared
    differ = [point for point in compared if not same(point, known[point["what"]])]
    assert not differ, "run: python docs/papers.py"
    assert name in SAMPLES or len(known) == len(compared)


def test_a_changed_value_is_seen() -> None:
    point = stored("one-kth")["points"][0]
    assert same(point, {**point, "ours": point["ours"] * (1 + 1e-7)})
    assert not same(point, {**point, "ours": point["ours"] * 1.001})
    assert not same(point, {**point, "ours": None})
    assert not same(point, {**point, "how": "theory"})


def test_a_fat_tree_beside_bcube_is_as_published() -> None:
    """What stands on the page, which the test above computes again: that takes half a minute."""
    ratios = {point["what"]: point["ratio"] for point in stored("fat-tree-bcube")["points"]}
    theory = [ratio for what, ratio in ratios.items() if what.endswith("theory")]
    assert theory == pytest.approx([1.0] * 5, abs=1e-3)
    assert ratios["HiPS, bcube:16x2, simulation"] == pytest.approx(1, rel=1e-3)
    assert 1.05 < ratios["mesh, fattree:10, simulation"] < 1.3, "flows collide in a Fat-Tree"
