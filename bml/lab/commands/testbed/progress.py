"""What commands that measure show on standard error: what is going on, and whether the machine is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bml.lab.bench.contest import busy


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show on standard error, in one line, what is going on: the function that is given is called with it."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting")
        yield lambda text: shown.update(task, description=text)


def warn_if_busy() -> None:
    """Say on standard error if other processes keep this machine busy."""
    warning = busy()
    if warning:
        click.echo(f"Warning: {warning}", err=True)
