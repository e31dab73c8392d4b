"""Writes strict JSON of any value and lines that commands share, and checks if a file can be written."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bml.io.files import check_folder, write_whole
from bml.predict.words import duration, milliseconds, warned
from bml.topology.errors import FabricError, UsageError
from bml.train.balancing.throughput import SizeSummary

_DEEPEST = 50
#: Whole numbers with more bits are written as hexadecimal texts, as parsers refuse long ones.
_MOST_BITS = 1 << 12


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that every parser takes: without NaN, with texts as keys; other objects become texts."""
    return json.dumps(_plain(value, _DEEPEST), allow_nan=False, indent=indent)


def in_words(value: Any) -> str:
    """Return the value as text; for a value whose `str` fails, the name of its class."""
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except (Exception, SystemExit):  # a user's class may raise anything; also for a cycle
        return f"<{type(value).__name__}>"


def size_lines(sizes: Mapping[Any, SizeSummary]) -> list[str]:
    """Say how fast a job was with how many servers, if it had several sizes."""
    return [_size_line(size, found) for size, found in sizes.items()] if len(sizes) > 1 else []


def _size_line(size: Any, found: SizeSummary) -> str:
    said = f"with {size} servers: {found['steps']} steps"
    if found["steps_per_s"] is not None:
        said += f" in {found['seconds']:.2f} s, {found['steps_per_s']:.1f} per second"
    if found["samples_per_s"]:
        said += f", {found['samples_per_s']:.0f} samples per second"
    return said


def future_lines(now: Mapping[str, Any]) -> list[str]:
    """Say what a status says of the future."""
    found: list[str] = []
    predicted, rest = now.get("predicted"), now.get("remaining")
    if predicted:
        said = f"a step: predicted {milliseconds(predicted['step_s'])}"
        if predicted["measured_s"] is not None:
            said += f", measured {milliseconds(predicted['measured_s'])} ({predicted['steps']} steps)"
        found.append(f"{said}, from {predicted['basis']}")
    if rest:
        found.append(
            f"left: {duration(rest['seconds'])}, between {duration(rest['low_s'])} and "
            f"{duration(rest['high_s'])} nine times in ten; {rest['done']:.0%} of the loop is done"
        )
    found += [f"warning: {warned(each)}" for each in now.get("warnings", ())]
    return found


def _plain(value: Any, deep: int) -> Any:
    try:
        return _simple(value, deep)
    except (Exception, SystemExit):  # raised by a user's subclass of list or of a number
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


def without(fabric: str, failures: Iterable[str]) -> str:
    """Name a fabric and what of it has failed."""
    return " without ".join(filter(None, [fabric, ", ".join(failures)]))


def write_file(file: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises FabricError if it can no longer be written."""
    try:
        write_whole(file, text.encode())
    except OSError as error:
        raise FabricError(f"{file} could not be written: {error.strerror or error}") from None


def check_writable(path: Path | None, option: str) -> None:
    """Raise UsageError if a file cannot be written. The file keeps its content."""
    if path is None:
        return
    try:
        if not path.exists():
            check_folder(path)
        elif path.is_file() or path.is_dir():
            with path.open("a"):
                pass
        elif not os.access(
            path, os.W_OK
        ):  # if a pipe were opened and closed here, its reader would take that for the end
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from None
