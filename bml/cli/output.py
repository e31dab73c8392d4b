"""Standard output of a command: under --json the answer alone; no command ends because its reader is gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import click

from bml.cli.printed import strict_json
from bml.cluster.process.output import Descriptor, is_real, lasting

_STANDARD = (0, 1, 2)


class Output:
    """Standard output while a command runs, see `taken`."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.answered = False
        """Whether the command has printed its answer for --json."""
        self.optional = False
        """Whether the command has done its work even if nobody could read what it said of it."""

    def answer(self, value: Any) -> None:
        """Print what the command was asked for with --json."""
        self.answered = True
        click.echo(strict_json(value), file=self._stream)

    def lost(self) -> OSError | None:
        """Why something that was written could not be; None if all was."""
        if self._stream is None:
            return None
        self._stream.flush()
        raw = getattr(getattr(self._stream, "buffer", None), "raw", None)
        return raw.lost if isinstance(raw, Descriptor) else None


_CURRENT: ContextVar[Output | None] = ContextVar("bml-output", default=None)


def current() -> Output:
    """The output of the command that runs."""
    return _CURRENT.get() or Output(None)


@contextmanager
def taken(as_json: bool, for_good: bool) -> Iterator[Output]:
    """Have standard output and error take everything, whatever becomes of their readers.

    `as_json`: nothing but the answer reaches standard output, neither what libraries and a user's script
    print nor what is written to its descriptor. `for_good`: nothing is put back, as the process ends with the
    command: a script may print in its last moment.
    """
    _open_closed()
    before, kept = (sys.stdout, sys.stderr), os.dup(1)
    stream: TextIO | None = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and is_real(stream, 1):
        stream.flush()
        by_line = stream.line_buffering or stream.write_through
        sys.stdout = stream = lasting(kept if as_json else 1, stream.encoding, by_line=by_line)
    if is_real(sys.stderr, 2):
        sys.stderr = lasting(2, sys.stderr.encoding, by_line=True)
    if as_json:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it may be needed until the process has ended)
        os.dup2(sys.stdout.fileno(), 1)
    output = Output(stream)
    token = _CURRENT.set(output)
    try:
        yield output
    finally:
        _CURRENT.reset(token)
        if not for_good:
            if as_json:
                sys.stdout.close()
            sys.stdout, sys.stderr = before
            os.dup2(kept, 1)
            os.close(kept)


def _open_closed() -> None:
    """Open what a shell has closed with `>&-`: the next file, or socket, would be standard output."""
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
