"""What commands write: strict JSON of any value, into files that can be written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bml.topology.errors import UsageError

_DEEPEST = 50


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser takes: no NaN, keys that are texts, and a text for what JSON has no word for."""
    return json.dumps(_plain(value, _DEEPEST), allow_nan=False, indent=indent)


def _plain(value: Any, deep: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple | Mapping) and deep:
        if isinstance(value, Mapping):
            return {_text(key): _plain(each, deep - 1) for key, each in value.items()}
        return [_plain(each, deep - 1) for each in value]
    return _text(value)


def _text(value: Any) -> str:
    """What a value says of itself, if it can."""
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except Exception:  # whatever a user's class raises, cycles too
        return f"<{type(value).__name__}>"


def check_writable(path: Path | None, option: str) -> None:
    """Raise UsageError if a file cannot be written, before anything else is done; what is in it stays."""
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from None
