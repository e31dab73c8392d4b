"""`bml plan --compare`: tables of algorithms by fabrics, healthy and damaged, as in the papers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import click
from rich.console import Console
from rich.table import Table

from bml.cli.output import current
from bml.cli.tables import print_table
from bml.schedule import ALGORITHMS
from bml.schedule.select.compare import PAPERS, Cell, compare, single_failures
from bml.topology import BigSwitch, Fabric, FatTree, parse

SIZES = (4, 8, 16)
DEPTHS = (2, 3, 4)
EQUAL = ("switch:256", "fattree:10/250", "bcube:16x2", "torus:16x2")
"""Fabrics of about one size: one big switch, a Fat-Tree, BCube, torus."""
DAMAGED = ("bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:4x2")
"""Fabrics of the table of failures."""


@dataclass(frozen=True)
class Grid:
    """One table: a row per algorithm, a column per fabric."""

    title: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per algorithm: its name and its time on every fabric; `-` where it has none."""
        width = len(self.columns)
        algorithms = len(self.cells) // width
        by_fabric = [self.cells[i::algorithms] for i in range(algorithms)]
        return [(row[0].algorithm, *(_time(cell) for cell in row)) for row in by_fabric]

    def notes(self) -> list[str]:
        """Return for every entry without a time why it has none."""
        return [f"{cell.algorithm} on {cell.fabric}: {cell.why}" for cell in self.cells if cell.why]


def papers() -> list[Grid]:
    """Return the papers' tables: n = 4, 8, 16 and h = 2, 3, 4 healthy; about equal sizes; single failures."""
    healthy = [
        _grid(
            f"healthy, n = {n}", [parse(f"{family}:{n}x{h}") for family in ("bcube", "torus") for h in DEPTHS]
        )
        for n in SIZES
    ]
    healthy.append(_grid("healthy, about 256 servers", [parse(name) for name in EQUAL]))
    names = [name for name in ALGORITHMS if name != "auto"]
    return healthy + [of_fabric(parse(name), names) for name in DAMAGED]


def of_fabric(fabric: Fabric, algorithms: Iterable[str] = ()) -> Grid:
    """Compare all algorithms on one fabric; on a healthy one also after single failures."""
    names = list(algorithms) or [name for name in ALGORITHMS if name != "auto"]
    one_nic = isinstance(fabric.wiring, BigSwitch | FatTree)
    if fabric.failures:
        return Grid(fabric.name, (str(fabric),), tuple(compare([fabric], names)))
    fabrics = single_failures(fabric)[: 2 if one_nic else 4]
    dead = [f"{part} dead" for each in fabrics for part in sorted(map(str, each.failures))]
    return Grid(fabric.name, ("healthy", *dead), tuple(compare(fabrics, names)))


def _grid(title: str, fabrics: list[Fabric]) -> Grid:
    return Grid(title, tuple(fabric.name for fabric in fabrics), tuple(compare(fabrics, PAPERS)))


def show(grids: list[Grid], form: str) -> None:
    """Print the tables as 'table', 'markdown' or 'json'. Times are pipelined, in units of T."""
    if form == "json":
        current().answer({"tables": [_as_json(grid) for grid in grids]})
    elif form == "markdown":
        click.echo("\n\n".join(as_markdown(grid) for grid in grids))
    else:
        for grid in grids:
            _print(grid)


def _time(cell: Cell) -> str:
    return "-" if cell.gst is None else f"{float(cell.gst):.4f}"


def _rounded(value: Fraction | None) -> float | None:
    return None if value is None else round(float(value), 4)


def _as_json(grid: Grid) -> dict[str, object]:
    rows = [
        {
            "fabric": cell.fabric,
            "algorithm": cell.algorithm,
            "gst": _rounded(cell.gst),
            "gst_staged": _rounded(cell.gst_staged),
            "how": cell.how,
            "why": cell.why,
        }
        for cell in grid.cells
    ]
    return {"title": grid.title, "rows": rows}


def as_markdown(grid: Grid) -> str:
    """Write a table in Markdown, its title above it."""
    lines = [f"**{grid.title}**", "", "| GST in T | " + " | ".join(grid.columns) + " |"]
    lines.append("| --- |" + " --- |" * len(grid.columns))
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in grid.rows()])


def _print(grid: Grid) -> None:
    table = Table(title=f"{grid.title}: pipelined GST in T")
    for head in ("algorithm", *grid.columns):
        table.add_column(head)
    for row in grid.rows():
        table.add_row(*row)
    console = Console(markup=False)
    print_table(table, console)
    for note in grid.notes():
        console.print(f"- {note}", soft_wrap=True)
