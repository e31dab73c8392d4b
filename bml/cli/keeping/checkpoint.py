"""`bml checkpoint`: converts checkpoints to the format of torch.distributed.checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from bml.cli.output import current
from bml.errors import UsageError


@click.group()
def checkpoint() -> None:
    """Convert checkpoints to those of PyTorch, and back.

    The format is that of torch.distributed.checkpoint. This needs PyTorch.
    """


@checkpoint.command("export")
@click.argument("source")
@click.argument("folder")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def export(source: str, folder: str, as_json: bool) -> None:
    """Write the newest whole checkpoint to a new folder for PyTorch.

    SOURCE is the folder of the checkpoints, or a URL.

    What bml.torch.attach has named is under "model", "optimizer" and "scheduler", as PyTorch names it:
    load it with torch.distributed.checkpoint.

    \b
    Example:
      bml checkpoint export kept exported
    """
    _convert("export_checkpoint", source, folder, as_json)


@checkpoint.command("import")
@click.argument("folder")
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def import_(folder: str, target: str, as_json: bool) -> None:
    """Make a checkpoint of what `bml checkpoint export` wrote.

    It goes into a new folder, or to a URL.

    Tensors may have been changed since. `bml run --resume` goes on from it.

    \b
    Example:
      bml checkpoint import exported changed
    """
    _convert("import_checkpoint", folder, target, as_json)


def _convert(name: str, source: str, target: str, as_json: bool) -> None:
    try:
        import bml.torch
    except ImportError as error:
        raise UsageError(str(error)) from None
    convert: Callable[..., Any] = getattr(bml.torch, name)
    key = convert(source, target)
    if as_json:
        current().answer({"steps": key.steps, "job": key.job, "folder": target})
        return
    click.echo(f"{key} is in {target}")
