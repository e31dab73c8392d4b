"""The picture of a figure: our values as points, published ones as rings, ends of ranges as lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bml.lab.bench.plot import pyplot
from bml.lab.figures.figure import Basis, Figure, Point

_GREY = "#777777"
"""Of texts and axes: readable on white and on black. The background is transparent."""
_COLOURS = ("#2f7fc8", "#d9822b", "#2a9d6f", "#a06cc8", "#d0506a", "#8c8c2f", "#3fa7a7")
_MARKS = "osD^vPX"
_STYLE = {
    "svg.fonttype": "none",
    "text.color": _GREY,
    "axes.labelcolor": _GREY,
    "axes.edgecolor": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "font.size": 9,
}
_WIDTH = 0.7
"""Of the points at one place, in units of the distance between places."""
_CROWDED = 6
"""Places on the horizontal axis from which on their names are turned."""


def draw(figure: Figure, points: Sequence[Point]) -> bytes:
    """Draw a figure as SVG. Raises UsageError without matplotlib."""
    plots = pyplot()
    places = list(dict.fromkeys(point.at for point in points))
    if figure.relative:
        points = _over_the_least(points)
    buffer = io.BytesIO()
    with plots.rc_context({**_STYLE, "svg.hashsalt": figure.name}):
        drawing, axes = plots.subplots(figsize=(7.5, 3.8), layout="constrained")
        _place(axes, points, places)
        if figure.log:
            axes.set_yscale("log")
        turned = 60 if len(places) >= _CROWDED else 0
        axes.set_xticks(range(len(places)), places, rotation=turned, ha="right" if turned else "center")
        axes.set_xlim(-0.6, len(places) - 0.4)
        axes.set_ylabel("times the least at that place" if figure.relative else figure.unit)
        axes.grid(alpha=0.25, axis="y")
        drawing.legend(loc="outside right upper", frameon=False)
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plots.close(drawing)
    return buffer.getvalue()


def _place(axes: Any, points: Sequence[Point], places: list[str]) -> None:
    """Draw the points of each series beside those of the others at the same place."""
    names = list(dict.fromkeys(point.series for point in points))
    for number, series in enumerate(names):
        aside = _WIDTH * ((number + 0.5) / len(names) - 0.5)
        mine = [(places.index(each.at) + aside, each) for each in points if each.series == series]
        style = {"ls": "", "color": _COLOURS[number % len(_COLOURS)]}
        ours = [(x, each.ours) for x, each in mine if each.ours is not None]
        mark = _MARKS[number % len(_MARKS)]
        axes.plot(*zip(*ours, strict=True), marker=mark, ms=4, label=series, **style)
        known = [(x, each.published) for x, each in mine if _has_ring(each)]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", ms=9, mfc="none", **style)
    if any(_has_ring(point) for point in points):
        axes.plot([], [], marker="o", ms=9, ls="", mfc="none", color=_GREY, label="published")
    # Several series may be set beside one range: its ends belong to none of them.
    ends = {(places.index(each.at), each.published) for each in points if each.basis is Basis.range}
    for number, (x, end) in enumerate(sorted(ends)):
        label = "end of a published range" if number == 0 else None
        axes.plot((x - 0.4, x + 0.4), (end, end), ls="--", color=_GREY, label=label)


def _has_ring(point: Point) -> bool:
    return point.published is not None and point.basis is not Basis.range


def _over_the_least(points: Sequence[Point]) -> list[Point]:
    """Return the points with their values over the least of ours at the same place."""
    ours = [(point.at, point.ours) for point in points if point.ours is not None]
    least = {at: min(value for other, value in ours if other == at) for at, _ in ours}
    points = [point for point in points if least.get(point.at)]
    return [
        replace(
            point,
            ours=None if point.ours is None else point.ours / least[point.at],
            published=None if point.published is None else point.published / least[point.at],
        )
        for point in points
    ]
