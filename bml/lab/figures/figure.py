"""What a figure is: points with the published value beside ours. The registry of figures.

    @figure("switch-share", title="…", unit="…", source=BML, about="…", reading="…")
    def switch_share(sizes: Sequence[int] = (4, 8, 16)) -> list[Point]: ...

`bml.lab.figures.available` imports the modules of figures, one line for each. `bml figures` and
docs/explanation/papers.md are made from this registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from bml.errors import UsageError

ALL = "all"
"""The name that stands for all figures."""


class How(Enum):
    """How our value was found.

    `theory`: a formula, or bytes and messages counted in a schedule or a fabric. `simulation`: the flow
    simulation of `bml.lab.flows`, or a count of paths that a hash chose. `packets`: the simulation of
    `bml.lab.packets`.
    """

    theory = "theory"
    simulation = "simulation"
    packets = "packets"


class Basis(Enum):
    """What the published value is.

    `none`: we know of none. `value`: a number of the paper. `formula`: the paper's formula at this size.
    `reading`: a formula as we read it, which differs from the paper's as the figure says.
    `range`: an end of a range, of which we know neither the fabric nor the setting that belongs to it.
    """

    none = ""
    value = "value"
    formula = "formula"
    reading = "our reading"
    range = "range"


@dataclass(frozen=True)
class Point:
    """One value of a figure, in the figure's unit.

    Attributes:
        series: the line that it belongs to, such as `HiPS`.
        at: its place on the horizontal axis, such as `bcube:4x2`.
        ours: our value; None where a schedule is too large to be counted or simulated.
        how: how `ours` was found.
        published: the value of the paper; None if we know of none.
        basis: what `published` is.
        note: what is special about this point, in words; "" if nothing is.
    """

    series: str
    at: str
    ours: float | None
    how: How
    published: float | None = None
    basis: Basis = Basis.none
    note: str = ""

    @property
    def what(self) -> str:
        """Series and place; no other point of the figure has both."""
        return f"{self.series}, {self.at}"

    @property
    def ratio(self) -> float | None:
        """Our value over the published one; None where one of them is missing."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published


def ends(series: str, values: Collection[float], how: How, published: tuple[float, float]) -> list[Point]:
    """Return the least and the most of reductions, in percent, beside those of a published range."""
    least, most = published
    return [
        Point(series, "least", max(values), how, least, Basis.range),
        Point(series, "most", min(values), how, most, Basis.range),
    ]


Points = Callable[..., Sequence[Point]]
Made = TypeVar("Made", bound=Points)


@dataclass(frozen=True)
class Figure:
    """A figure or a table of a paper.

    Attributes:
        name: by which `bml figures` calls it.
        title: what it shows.
        unit: of all its points, in words.
        source: the paper, as the documents cite it.
        about: what is compared, and with which parameters, in Markdown.
        reading: what the figure says, and the likely reason where a ratio is not 1, in Markdown.
        points: computes the points; without arguments it takes the paper's parameters.
        log: whether the vertical axis is logarithmic.
        relative: whether the picture has each value over the least of ours at its place.
    """

    name: str
    title: str
    unit: str
    source: str
    about: str
    reading: str
    points: Points
    log: bool = False
    relative: bool = False


_REGISTERED: dict[str, Figure] = {}


def figure(
    name: str,
    *,
    title: str,
    unit: str,
    source: str,
    about: str,
    reading: str,
    log: bool = False,
    relative: bool = False,
) -> Callable[[Made], Made]:
    """Register the function that computes the points of a figure. The fields are those of `Figure`.

    Raises:
        ValueError: the name is taken.
    """

    def register(points: Made) -> Made:
        if name in _REGISTERED or name == ALL:
            raise ValueError(f"there are two figures with the name '{name}'")
        _REGISTERED[name] = Figure(name, title, unit, source, about, reading, points, log, relative)
        return points

    return register


def registered() -> dict[str, Figure]:
    """Every name and its figure, in alphabetical order."""
    return dict(sorted(_REGISTERED.items()))


def chosen(name: str) -> list[Figure]:
    """Return the figure of this name, or every one for `all`.

    Raises:
        UsageError: there is no such figure; the message lists the names.
    """
    if name == ALL:
        return list(registered().values())
    if name not in _REGISTERED:
        raise UsageError(f"'{name}' is no figure: write {ALL}, or one of {', '.join(registered())}")
    return [_REGISTERED[name]]
