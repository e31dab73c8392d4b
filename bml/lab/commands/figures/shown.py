"""A figure that was computed: its files, its rows in JSON, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bml.cli.printed import strict_json
from bml.cli.tables import print_table
from bml.errors import FabricError
from bml.lab.commands.figures.picture import draw
from bml.lab.figures.absent import ABSENT
from bml.lab.figures.figure import Figure, Point

_DIGITS = 6
"""Significant digits of values in files: what differs between machines is far below."""


@dataclass(frozen=True)
class Made:
    """A figure with its points and its picture, an SVG."""

    figure: Figure
    points: Sequence[Point]
    picture: bytes


def rendered(figure: Figure) -> Made:
    """Compute and draw a figure. Raises UsageError without matplotlib."""
    points = figure.points()
    return Made(figure, points, draw(figure, points))


def record(figure: Figure, points: Sequence[Point]) -> dict[str, Any]:
    """What NAME.json has of a figure: all that the documents say of it."""
    return {
        "name": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "source": figure.source,
        "about": figure.about,
        "reading": figure.reading,
        "points": [_values(point) for point in points],
    }


def _values(point: Point) -> dict[str, Any]:
    return {
        "what": point.what,
        "series": point.series,
        "at": point.at,
        "published": _rounded(point.published),
        "basis": point.basis.value,
        "ours": _rounded(point.ours),
        "ratio": _rounded(point.ratio),
        "how": point.how.value,
        "note": point.note,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def write(made: Sequence[Made], folder: Path) -> list[str]:
    """Write NAME.svg and NAME.json of each figure into a folder; return their paths.

    They take the place of older ones when all have been written; until then these stay as they were.

    Raises:
        FabricError: a file or the folder can no longer be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".figures-", dir=folder) as beside:
            for each in made:
                text = strict_json(record(each.figure, each.points), indent=1) + "\n"
                for suffix, content in ((".svg", each.picture), (".json", text.encode())):
                    written.append(Path(beside) / f"{each.figure.name}{suffix}")
                    written[-1].write_bytes(content)
            taken = [file.name for file in written if (folder / file.name).is_dir()]
            if taken:
                raise FabricError(f"{folder} could not be written: {taken[0]} in it is a folder")
            return [str(file.replace(folder / file.name)) for file in written]
    except OSError as error:
        raise FabricError(f"{folder} could not be written: {error.strerror or error}") from None


def answer(made: Sequence[Made], files: Sequence[str], seconds: float) -> dict[str, Any]:
    """The answer to --json: a row for each point of each figure."""
    rows = [
        {"name": each.figure.name, "unit": each.figure.unit, **_values(point)}
        for each in made
        for point in each.points
    ]
    return {
        "figures": rows,
        "absent": [asdict(each) for each in ABSENT],
        "files": list(files),
        "seconds": round(seconds, 3),
    }


def show(made: Sequence[Made]) -> None:
    """Print a table for each figure, and one of what cannot be had."""
    console = Console(markup=False)
    for each in made:
        print_table(_table(each), console)
    table = Table(title="published, and not to be had here")
    for head in ("what", "published", "why not"):
        table.add_column(head, overflow="fold")
    for missing in ABSENT:
        table.add_row(missing.what, missing.published, missing.why)
    print_table(table, console)


def _table(made: Made) -> Table:
    table = Table(title=f"{made.figure.name}: {made.figure.title}; {made.figure.unit}")
    table.add_column("what", overflow="fold")
    for head in ("published", "ours", "ratio"):
        table.add_column(head, justify="right")
    for head in ("how", "note"):
        table.add_column(head, overflow="fold")
    for point in made.points:
        numbers = (number(value) for value in (point.published, point.ours, point.ratio))
        note = ", ".join(filter(None, [point.basis.value, point.note]))
        table.add_row(point.what, *numbers, point.how.value, note)
    return table


def number(value: float | None) -> str:
    """A value as it is shown, with four digits; a dash for None."""
    return "-" if value is None else f"{value:.4g}"
