"""What is to come in words, as commands and the page show it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

#: Longer times are not told apart, and timedelta cannot hold all of them.
_LONGEST_S = 100 * 365 * 86400.0


def duration(seconds: float) -> str:
    """A time that is left: `44 s`, `0:07:20`."""
    if seconds >= _LONGEST_S:
        return "100 years"
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def milliseconds(seconds: float) -> str:
    """A time of a step as it is shown."""
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 2}f} ms"


def warned(warning: Mapping[str, Any]) -> str:
    """An early warning of the status of a job."""
    return f"{warning['part']}: {warning['text']} (for {warning['for_s']:.0f} s)"
