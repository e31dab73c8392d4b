"""Writes docs/explanation/papers.md and its figures: `python docs/papers.py`, which takes two minutes.

`bml figures` computes the figures into docs/explanation/figures, and the page is made from their JSON.
tests/documents/test_papers.py fails when the page is not what this writes, or a figure has other values.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bml.lab.commands.figures.shown import number, rendered, write
from bml.lab.figures import available  # noqa: F401 (registers the figures)
from bml.lab.figures.absent import ABSENT
from bml.lab.figures.figure import registered

PAGE = Path(__file__).resolve().parent / "explanation" / "papers.md"
FIGURES = PAGE.parent / "figures"
MOST_ROWS = 36
"""A longer table has only the points that have a published value or a note."""
HEAD = """\
# The papers

Figures and tables of the papers on BML and HiPS, computed here, with the published value beside ours. This
page is written by `python docs/papers.py`; `bml figures` computes the same into a folder of your own.

- *Published* is a value of the paper, the paper's formula at that size (*formula*), or an end of a range of
  which we do not know the setting (*range*).
- *Ratio* is ours over published. Nothing was fitted: a ratio that is off is shown as it is, with the likely
  reason.
- *Theory* is a formula, or bytes and messages that were counted in a schedule. *Simulation* is that of
  [`bml sim`](../reference/simulation.md), which has flows; *packets* is that of `bml sim --packets`.
- In the pictures a ring is a published value, and a dashed line an end of a published range.
"""


def records() -> list[dict[str, Any]]:
    """The figures as they lie in FIGURES, in the order of the registry."""
    return [json.loads((FIGURES / f"{name}.json").read_text()) for name in registered()]


def page(figures: list[dict[str, Any]]) -> str:
    """The whole page."""
    parts = [HEAD, *_summary(figures)]
    for figure in figures:
        parts += _section(figure)
    return "\n".join([*parts, *_absent(), *_sources(figures)])


def _summary(figures: list[dict[str, Any]]) -> Iterator[str]:
    yield "| figure | what it shows | points with a published value | ratio |"
    yield "| --- | --- | --- | --- |"
    for figure in figures:
        ratios = [point["ratio"] for point in figure["points"] if point["ratio"] is not None]
        ends = " to ".join(dict.fromkeys(f"{end(ratios):.3f}" for end in (min, max))) if ratios else "-"
        name = figure["name"]
        yield f"| [`{name}`](#{name}) | {figure['title']} | {len(ratios)} | {ends} |"
    yield ""


def _section(figure: dict[str, Any]) -> Iterator[str]:
    name, points = figure["name"], figure["points"]
    yield f"({name})=\n\n## {figure['title']}\n"
    yield f"{_wrapped(figure['about'])}\n"
    yield f"![{figure['title']}: {figure['unit']}](figures/{name}.svg)\n"
    yield f"{_wrapped(figure['reading'])}\n"
    shown = points
    if len(points) > MOST_ROWS:
        shown = [each for each in points if each["published"] is not None or each["note"]]
    yield f"| {figure['unit']} | published | ours | ratio | how |"
    yield "| --- | --- | --- | --- | --- |"
    yield from (_row(point) for point in shown)
    left_out = len(points) - len(shown)
    more = f" It has {left_out} more points, for which we know no published value." if left_out else ""
    yield f"\nAll values: [{name}.json](figures/{name}.json), by `bml figures {name}`.{more}\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _row(point: dict[str, Any]) -> str:
    basis = "" if point["basis"] in ("", "value") else f" ({point['basis']})"
    note = f", {point['note']}" if point["note"] else ""
    numbers = f"{number(point['published'])}{basis} | {number(point['ours'])} | {number(point['ratio'])}"
    return f"| {point['what']} | {numbers} | {point['how']}{note} |"


def _absent() -> Iterator[str]:
    yield "## What cannot be had\n"
    yield "| what | published | why it is not here |"
    yield "| --- | --- | --- |"
    yield from (f"| {each.what} | {each.published} | {each.why} |" for each in ABSENT)
    yield ""


def _sources(figures: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Sources\n"
    for source in dict.fromkeys(figure["source"] for figure in figures):
        names = ", ".join(f"`{each['name']}`" for each in figures if each["source"] == source)
        yield f"- {names}: {source}."
    yield ""


def main() -> None:
    """Compute all figures, and write them and the page."""
    made = []
    for name, figure in registered().items():
        print(name, file=sys.stderr)
        made.append(rendered(figure))
    write(made, FIGURES)
    PAGE.write_text(page(records()))


if __name__ == "__main__":
    main()
