"""The `bml` command: a group with one module per command, and one way to end with an error."""

from __future__ import annotations

import errno
import io
import select
import signal
import sys
import traceback
from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, cast

import click

from bml.cli.check import check_command
from bml.cli.doctor import doctor
from bml.cli.fabric import fabric
from bml.cli.inject import inject
from bml.cli.keeping.checkpoint import checkpoint
from bml.cli.metrics.command import metrics
from bml.cli.output import taken, text_of_end
from bml.cli.recordings.replay import replay
from bml.cli.run import run
from bml.cli.status import status
from bml.cli.torchrun import own_words, torchrun
from bml.cli.values import shortened
from bml.cluster.spec.ending import text_of
from bml.errors import BmlError, StateMismatch, UsageError
from bml.io.limits import PROCESS_LIMIT, is_process_limit

#: With one of these options a command prints text, whatever other options it is given.
_SHOWS_TEXT = {"-h", "--help", "--version"}


class _Commands(UserDict[str, Any]):
    """Commands by name. One that is given as the name of its place is imported when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        found = self.data[name]
        if isinstance(found, str):
            module, _, attribute = found.rpartition(".")
            found = self.data[name] = getattr(import_module(module), attribute)
        return cast(click.Command, found)


#: Commands of the laboratory: no job needs any of it.
_LABORATORY = {
    "bench": "bml.lab.commands.bench.bench",
    "figures": "bml.lab.commands.figures.command.figures",
    "plan": "bml.lab.commands.plan.command.plan",
    "sim": "bml.lab.commands.sim.command.sim",
}


class Shell(click.Group):
    """A group of commands. The message of a BmlError goes to standard error, and never a traceback.

    Exit status: 0 success; 2 bad usage (UsageError, or click's own); 3 the servers of a job ended with
    different parameters or ledgers (StateMismatch); 1 any other BmlError, an answer that could not be
    written, or Ctrl-C; 143 SIGTERM; 129 the terminal hung up. With --json, standard output is one JSON object
    in each case: the answer, or {"error": {"kind", "text"}}.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command and end with its exit status."""
        words = set(own_words(sys.argv[1:] if args is None else args))
        as_json = "--json" in words and not words & _SHOWS_TEXT
        extra["standalone_mode"] = False
        with taken(as_json, for_good=args is None) as output, _terminable():
            status, error = self._outcome(args, *rest, **extra)
            if args is None:  # another Ctrl-C would leave behind the processes that threads are still ending
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if as_json and not output.answered:
                output.answer({"error": error or _error("UsageError", "this command has no answer in JSON")})
            lost = output.lost()
            if lost and not output.optional:
                status = status or 1
                if lost.errno != errno.EPIPE:  # a reader that closed the pipe need not be told
                    click.echo(f"Error: standard output could not be written: {lost.strerror}", err=True)
        sys.exit(status)

    def _outcome(self, *arguments: Any, **extra: Any) -> tuple[int, dict[str, str] | None]:
        """Run the command; return its exit status, and for JSON the error with which it ended."""
        try:
            return super().main(*arguments, **extra) or 0, None
        except BmlError as error:
            click.echo(f"Error: {shortened(str(error))}", err=True)
            status = 2 if isinstance(error, UsageError) else 3 if isinstance(error, StateMismatch) else 1
            return status, _error(type(error).__name__, str(error))
        except click.ClickException as error:
            shown = io.StringIO()
            error.show(shown)
            click.echo(shortened(shown.getvalue()), err=True, nl=False)
            return error.exit_code, _error("UsageError", error.format_message())
        except click.Abort:
            return _aborted()
        except SystemExit as ends:
            status = ends.code if isinstance(ends.code, int) else int(ends.code is not None)
            if ends.code is not None and not isinstance(ends.code, int):
                click.echo(ends.code, err=True)
            if status == signal.SIGTERM:  # while Ray starts, its handler of SIGTERM takes the place of ours
                status += 128
            if status == 128 + signal.SIGTERM:  # after SIGHUP there may be no terminal to tell
                _say_at_the_end("Ended by SIGTERM.")
            return status, _error("SystemExit", text_of_end(SystemExit(status)))
        except Exception as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # in a __set_name__, by Python 3.11
                return _aborted()
            if is_process_limit(error):
                click.echo(f"Error: {PROCESS_LIMIT}", err=True)
                return 1, _error("FabricError", PROCESS_LIMIT)
            traceback.print_exc()
            return 1, _error(type(error).__name__, text_of(error))


def _aborted() -> tuple[int, dict[str, str]]:
    _say_at_the_end("Aborted!")
    return 1, _error("KeyboardInterrupt", text_of_end(KeyboardInterrupt()))


def _error(kind: str, text: str) -> dict[str, str]:
    return {"kind": kind, "text": text}


def _say_at_the_end(text: str) -> None:
    """Print a line, unless it would have to wait for a reader of standard error."""
    with suppress(OSError, ValueError):  # a stream without a descriptor takes everything
        if not select.select([], [sys.stderr.fileno()], [], 0)[1]:
            return
    click.echo(text, err=True)


def terminated(number: int, frame: object) -> None:
    """Handle SIGTERM or SIGHUP: the command ends in order, or at once with the second signal."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command in order, as Ctrl-C does; a second signal ends it at once.

    If SIGHUP is ignored, as under nohup, the command outlives its terminal.
    """

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:  # under nohup SIGHUP is ignored, and stays so
            signal.signal(number, terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(
    cls=Shell, commands=_Commands(_LABORATORY), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="bml", prog_name="bml")
def main() -> None:
    """Fault-tolerant parameter synchronisation for server-centric networks.

    \b
    Example:
      bml run examples/train_digits.py --fabric bcube:3x2 --fault kill:4@step=20
      bml plan bcube:3x2 --fail server:4

    With --json every command prints one JSON object; an error is {"error": {"kind": ..., "text": ...}}.
    Exit status: 0 success, 2 bad usage, 3 the servers ended with different parameters, 143 SIGTERM,
    129 SIGHUP, 1 any other error.
    """


main.add_command(check_command)
main.add_command(checkpoint)
main.add_command(doctor)
main.add_command(fabric)
main.add_command(inject)
main.add_command(metrics)
main.add_command(replay)
main.add_command(run)
main.add_command(status)
main.add_command(torchrun)
