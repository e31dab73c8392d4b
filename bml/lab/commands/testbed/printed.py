"""The answer of `bml bench train`: its JSON and its tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml.cli.tables import print_table
from bml.fabric import GOODPUT, rate_text
from bml.lab.bench.training.asked import Comparison
from bml.lab.bench.training.rows import FailureRow, Row

_HALF = 0.5


@dataclass(frozen=True)
class Answer:
    """What was measured: a row for each contender, bml first, and one for each time at which parts failed."""

    comparison: Comparison
    rows: list[Row]
    failures: list[FailureRow]

    def as_json(self) -> dict[str, Any]:
        """Return the answer to --json, without the seconds that it took."""
        comparison = self.comparison
        return {
            "model": comparison.model,
            "fabric": comparison.own.fabric.name,
            "servers": len(comparison.own.fabric.servers),
            "rate_bit": comparison.rate_bit,
            "goodput": GOODPUT,
            "scale": str(comparison.scale),
            "nbytes": comparison.nbytes,
            "steps": sum(1 for layer in comparison.layers if layer.nbytes),
            "overlap": comparison.overlap.value,
            "turns": comparison.turns,
            "rows": [each.as_json() for each in self.rows],
            "failures": [each.as_json() for each in self.failures],
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        }


def show(answer: Answer) -> None:
    """Print what was asked for, a table of contenders, and one of failures."""
    console = Console(markup=False, highlight=False)
    click.echo(_title(answer.comparison))
    table = Table(title="milliseconds of an iteration")
    table.add_column("who")
    table.add_column("fabric")
    for name in ("iteration", "predicted", "off", "GST", "reduction", "busy"):
        table.add_column(name, justify="right")
    for row in answer.rows:
        less = "" if row.reduction is None else f"{row.reduction:.1%}"
        times = _ms(row.iteration_s), _ms(row.predicted_s), f"{row.off:+.1%}"
        table.add_row(row.who, row.fabric, *times, _ms(row.gst_s), less, f"{row.processors:.0%}")
    print_table(table, console)
    if answer.failures:
        print_table(_failures(answer.failures), console)
    busiest = max(row.processors for row in answer.rows)
    if max(busiest, *(row.processors for row in answer.failures), 0.0) > _HALF:
        click.echo(
            "The processors were more than half busy: wires may have waited for them. Give a lower --rate."
        )
    if any(each.other_views for each in answer.failures):
        click.echo("There were more views than failures: on a busy machine NICs look slow.")
    for row in answer.rows:
        if row.views > 1:
            click.echo(f"{row.who} on {row.fabric} had {row.views} views: on a busy machine NICs look slow.")


def _title(comparison: Comparison) -> str:
    """Say what was sent: scaled gradients on slow wires are like whole ones on faster wires."""
    mib, whole_bit = comparison.nbytes / 2**20, comparison.rate_bit / comparison.scale
    sent = f"{mib:.1f} MiB of gradients" + (f", scaled to {comparison.scale}" if comparison.scale < 1 else "")
    alike = f", as whole gradients with {float(whole_bit) / 1e9:.3g} Gbit/s" if comparison.scale < 1 else ""
    return f"{comparison.model}: {sent}; NICs of {rate_text(comparison.rate_bit)}{alike}"


def _failures(rows: list[FailureRow]) -> Table:
    table = Table(title="bml when parts fail, milliseconds of an iteration")
    table.add_column("failed")
    for name in ("in", "left", "recovery", "before", "after", "predicted", "off", "busy"):
        table.add_column(name, justify="right")
    for row in rows:
        what = ", ".join(row.failures), str(row.iteration), str(row.survivors), _ms(row.recovery_s)
        after = _ms(row.after_s), _ms(row.predicted_after_s), f"{row.off_after:+.1%}"
        table.add_row(*what, _ms(row.before_s), *after, f"{row.processors:.0%}")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
