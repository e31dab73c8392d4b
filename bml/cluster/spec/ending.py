"""What a training function leaves: its value as it can travel, and its error in words of bounded length."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

MOST_TEXT = 64 << 10
"""Characters of an error or a traceback; of longer ones the middle is left out."""


@dataclass(frozen=True)
class NotSent:
    """Stands for a training function's value that could not be sent."""

    why: str

    def __str__(self) -> str:
        return f"<not sent: {self.why}>"


def packed(value: Any) -> bytes | NotSent:
    """A value, pickled; if it cannot be, what says why."""
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever the user's classes raise
        return NotSent(f"the value, of type {type(value).__name__}, cannot be pickled: {text_of(error)}")
    return dumped


def opened(sent: bytes | NotSent | None) -> Any:
    """What `packed` was given, in the launcher; if it cannot be read there, what says why."""
    if not isinstance(sent, bytes):
        return sent
    try:
        return cloudpickle.loads(sent)
    except (Exception, SystemExit) as error:  # it is not the launcher that a value ends
        return NotSent(f"the value cannot be read by the launcher: {type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """What an error says; by its type if it cannot say it."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be made)"
    return bounded(text)


def trace_of(error: BaseException) -> str:
    """The traceback of an error."""
    try:
        return bounded("".join(traceback.format_exception(error)))
    except BaseException:
        return bounded("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__)


def bounded(text: str) -> str:
    """A text that any encoding can carry and that is not too long."""
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
