"""Lines about what is to come: the time of a step, the rest of the run, warnings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any


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
            f"left: {_in_words(rest['seconds'])}, between {_in_words(rest['low_s'])} and "
            f"{_in_words(rest['high_s'])} nine times in ten; {rest['done']:.0%} of the loop is done"
        )
    found += [
        f"warning: {each['part']}: {each['text']} (for {each['for_s']:.0f} s)"
        for each in now.get("warnings", ())
    ]
    return found


def milliseconds(seconds: float) -> str:
    """A time of a step as it is shown."""
    return f"{seconds * 1000:.{0 if seconds >= 0.01 else 2}f} ms"


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
