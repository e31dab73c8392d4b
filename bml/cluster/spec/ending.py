"""The end of a training function: its value in a form to send, and its error as text of bounded length."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

MOST_TEXT = 64 << 10
"""Most characters of an error or a traceback; of longer ones the middle is left out."""
WRITING_S = 60.0
"""How long servers of a job with checkpoints may take to leave: each writes the whole state, in seconds."""


@dataclass(frozen=True)
class NotSent:
    """Stands for a training function's value that could not be sent."""

    why: str

    def __str__(self) -> str:
        return f"<not sent: {self.why}>"


def packed(value: Any) -> bytes | NotSent:
    """Pickle a value; if that is impossible, return an object that says why."""
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # a user's class may raise anything
        return NotSent(f"the value, of type {type(value).__name__}, cannot be pickled: {text_of(error)}")
    return dumped


def opened(sent: bytes | NotSent | None) -> Any:
    """Unpickle the value of `packed` in the launcher, or return an object that says why it cannot be."""
    if not isinstance(sent, bytes):
        return sent
    try:
        return cloudpickle.loads(sent)
    except (Exception, SystemExit) as error:  # a value must not end the launcher
        return NotSent(f"the value cannot be read by the launcher: {type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """Return the text of an error, or the name of its type if it has no text."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be made)"
    return bounded(text)


def trace_of(error: BaseException) -> str:
    """Return the traceback of an error as text."""
    try:
        return bounded("".join(traceback.format_exception(error)))
    except BaseException:
        return bounded("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__)


def bounded(text: str) -> str:
    """Return a text for every encoding that is not too long."""
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
