"""The `bml` command: one group, one module per command, one way to end with an error."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from bml.cli.bench import bench
from bml.cli.check import check_command
from bml.cli.doctor import doctor
from bml.cli.fabric import fabric
from bml.cli.inject import inject
from bml.cli.plan import plan
from bml.cli.run import run
from bml.cli.status import status
from bml.errors import BmlError, StateMismatch, UsageError


class Shell(click.Group):
    """Group whose commands may raise BmlError: its message goes to standard error, never a traceback.

    Exit status: 0 success, 2 bad usage (UsageError, or click's own), 3 a job whose servers ended with other
    parameters or ledgers than others (StateMismatch), 1 any other BmlError, 143 SIGTERM.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn what it raises on purpose into an exit status."""
        try:
            with _terminable():
                return super().invoke(ctx)
        except BmlError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2 if isinstance(error, UsageError) else 3 if isinstance(error, StateMismatch) else 1)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what a command has begun, as Ctrl-C does; another one ends it at once."""

    def terminated(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group(cls=Shell, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bml", prog_name="bml")
def main() -> None:
    """Fault-tolerant parameter synchronisation for server-centric networks.

    \b
    Example:
      bml run examples/train_digits.py --fabric bcube:3x2 --fault kill:4@step=20
      bml plan bcube:3x2 --fail server:4
    """


main.add_command(bench)
main.add_command(check_command)
main.add_command(doctor)
main.add_command(fabric)
main.add_command(inject)
main.add_command(plan)
main.add_command(run)
main.add_command(status)
