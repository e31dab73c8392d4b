"""Values that are given on the command line: odd ones are refused, and shown no longer than a line."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_LONG = re.compile(r"[^\s/]{200,}")
_SHOWN = 60


class FiniteRange(click.FloatRange):
    """A range of numbers; unlike click's own it has neither nan nor inf in it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number that can be counted with.", param, ctx)
        return number


def shortened(message: str) -> str:
    """The message, without the middle of words that nobody would read."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}…({len(word[0])} characters)", message)
