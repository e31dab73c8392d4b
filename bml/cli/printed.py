"""What commands write: strict JSON of any value, into files that can be written."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bml.topology.errors import UsageError

_DEEPEST = 50
#: Longer whole numbers are written as text, in hexadecimal: parsers refuse them, Python's over 4,300 digits.
_MOST_BITS = 1 << 12


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser takes: no NaN, keys that are texts, and a text for what JSON has no word for."""
    return json.dumps(_plain(value, _DEEPEST), allow_nan=False, indent=indent)


def in_words(value: Any) -> str:
    """What a value says of itself, if it can."""
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except (Exception, SystemExit):  # whatever a user's class raises, cycles too
        return f"<{type(value).__name__}>"


def _plain(value: Any, deep: int) -> Any:
    try:
        return _simple(value, deep)
    except (Exception, SystemExit):  # of a user's class that is a list or a number in its own way
        return in_words(value)


def _simple(value: Any, deep: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return in_words(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MOST_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple | Mapping) and deep:
        if isinstance(value, Mapping):
            return {in_words(key): _plain(each, deep - 1) for key, each in value.items()}
        return [_plain(each, deep - 1) for each in value]
    return in_words(value)


def check_writable(path: Path | None, option: str) -> None:
    """Raise UsageError if a file cannot be written, before anything else is done; what is in it stays."""
    if path is None:
        return
    try:
        if not path.exists():
            target = path.resolve()  # where a link leads that leads nowhere yet
            target.touch(exist_ok=False)
            target.unlink()
        elif path.is_file() or path.is_dir():
            with path.open("a"):
                pass
        elif not os.access(path, os.W_OK):  # the reader of a pipe would take it for the end that it is closed
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from None
