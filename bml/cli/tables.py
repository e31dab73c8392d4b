"""Prints a table, or its rows as lines where the terminal has too few columns for the table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

_LEAST = 12
"""The least width of a line, on however narrow a terminal."""
_ENOUGH = 1 << 20
"""A width that no table needs: rich clips what it measures to the width that there is."""


def print_table(table: Table, console: Console) -> None:
    """Print a table, or a paragraph for each row where its longest words do not fit beside each other.

    A table that fits if its cells are wrapped gets its widths here: rich takes the space from wide columns
    even when that cuts words in them.
    """
    ranges = [_range(column, console) for column in table.columns]
    whole = table.__rich_measure__(console, console.options.update(width=_ENOUGH)).maximum
    free = console.width - (whole - sum(each.maximum for each in ranges))
    widest = min(max(each.maximum for each in ranges), console.width)
    fitting = (widths for most in range(widest, 0, -1) if sum(widths := _widths(ranges, most)) <= free)
    if (chosen := next(fitting, None)) is None:
        for line in _lines(table, console):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    if whole > console.width:
        for column, width in zip(table.columns, chosen, strict=True):
            column.width = width
    console.print(table)


def _widths(ranges: list[Measurement], most: int) -> list[int]:
    """The widths of columns if none is wider than `most`, unless a word in it is."""
    return [max(each.minimum, min(each.maximum, most)) for each in ranges]


def _range(column: Column, console: Console) -> Measurement:
    """The width of a column's longest word, and that of its longest line."""
    options = console.options.update(width=_ENOUGH)
    found = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    longest = max(each.maximum for each in found)
    return Measurement(longest if column.no_wrap else max(each.minimum for each in found), longest)


def _lines(table: Table, console: Console) -> Iterator[str]:
    """The title, and for each row its cells, each after the head of its column."""
    width = max(console.width, _LEAST)
    if table.title is not None:
        yield from _wrapped(_text(table.title, console), width)
    heads = [_text(column.header, console) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        texts = [_text(cell, console) for cell in cells]
        named = (f"{head} {text}".strip() for head, text in zip(heads, texts, strict=True) if text)
        yield from _wrapped(", ".join(named), width)


def _wrapped(text: str, width: int) -> list[str]:
    """The text as lines; a word that is too long, such as a path, stays whole, so that it can be copied."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _text(cell: RenderableType, console: Console) -> str:
    words = console.render_str(cell).plain if isinstance(cell, str) else str(cell)
    return " ".join(words.split())
