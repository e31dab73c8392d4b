"""Standard output of a command: with --json the answer alone. The command outlives its reader."""

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
    """Standard output while a command runs; see `taken`."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.answered = False
        """Whether the command has printed its answer for --json."""
        self.optional = False
        """Whether the command has done its work even if its output could not be written."""

    def answer(self, value: Any) -> None:
        """Print the answer to --json: `value` as strict JSON."""
        self.answered = True
        click.echo(strict_json(value), file=self._stream)

    def lost(self) -> OSError | None:
        """Return the error that kept output from being written; None if everything was written."""
        if self._stream is None:
            return None
        self._stream.flush()
        raw = getattr(getattr(self._stream, "buffer", None), "raw", None)
        return raw.lost if isinstance(raw, Descriptor) else None


_CURRENT: ContextVar[Output | None] = ContextVar("bml-output", default=None)


def current() -> Output:
    """Return the output of the command that runs."""
    return _CURRENT.get() or Output(None)


@contextmanager
def taken(as_json: bool, for_good: bool) -> Iterator[Output]:
    """Let standard output and error take everything that is written, even after their readers have gone.

    With `as_json` nothing but the answer reaches standard output: neither the prints of libraries and of a
    user's script, nor bytes that are written to its descriptor. With `for_good` standard output and error
    are not restored afterwards: the process ends with the command, and a script may print in its last moment.
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
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a script may print to it until the process has ended)
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
    """Open the standard streams that a shell closed with `>&-`: else the next file or socket would be one."""
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def text_of_end(error: BaseException) -> str:
    """Return the text of the error, or interrupt, with which a command ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    if isinstance(error, SystemExit):
        return f"ended with exit status {error.code}"
    return str(error)
