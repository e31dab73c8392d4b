"""Draws a benchmark: time and bus bandwidth over size, with a line per contender."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bml.errors import UsageError
from bml.lab.bench.rows import Row, size_text

_COLOURS = {"bml": "#2f6fb0", "gloo": "#c77f1a", "openmpi": "#2a9d6f", "openmpi-tcp": "#8d5fb8"}


def check(target: Path) -> None:
    """Raise UsageError if nothing can be drawn into this file."""
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{target} is no .png, .svg or .pdf")
    pyplot()


def plot(table: Sequence[Row], title: str, target: Path) -> None:
    """Draw the rows into an image file."""
    figures = pyplot()
    figure, (left, right) = figures.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for who in dict.fromkeys(row.who for row in table):
        mine = sorted((row for row in table if row.who == who), key=lambda row: row.size)
        sizes = [row.size for row in mine]
        style = {"marker": "o", "color": _COLOURS[who], "label": who}
        left.plot(sizes, [row.median_s * 1e3 for row in mine], **style)
        right.plot(sizes, [row.busbw for row in mine], **style)
    left.set(yscale="log", ylabel="median time (ms)")
    right.set(ylabel="bus bandwidth (GB/s)")
    ticks = sorted({row.size for row in table})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [size_text(size) for size in ticks], rotation=30)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(target, dpi=120)
    figures.close(figure)


def pyplot() -> Any:
    """Return matplotlib's pyplot, for files. Raises UsageError without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'bml[plot]'") from None
    return importlib.import_module("matplotlib.pyplot")
