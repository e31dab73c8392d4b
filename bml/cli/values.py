"""Values on the command line. Odd values are refused; in messages long values are shortened to a line."""

from __future__ import annotations

import math
import re
from typing import Any

import click
from click.core import ParameterSource

from bml.errors import UsageError
from bml.transport.handshake.traffic_class import traffic_class_of

_LONG = re.compile(r"[^\s/]{200,}")
_SHOWN = 60
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})", re.ASCII)


class TrafficClass(click.IntRange):
    """A traffic class: a name, or a byte."""

    name = "class"

    def __init__(self) -> None:
        super().__init__(0, 255)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        try:
            return traffic_class_of(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class ServerRange(click.ParamType[Any]):
    """How many servers a job begins with, and how many it may have: `6..9`."""

    name = "least..most"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        found = _RANGE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            self.fail(f"'{value}' is no range of servers: write it like 6..9", param, ctx)
        return int(found[1]), int(found[2])


class FiniteRange(click.FloatRange):
    """A range of numbers without nan and inf, which click's own range lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def check_with(needed: str, purpose: str, *names: str) -> None:
    """Raise UsageError if one of the options `names` is given without the option that they belong to."""
    ctx = click.get_current_context()
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and not ctx.params[needed]:
            option, other = (f"--{each.replace('_', '-')}" for each in (name, needed))
            raise UsageError(f"{option} is for {purpose}: give {other}, too")


def shortened(message: str) -> str:
    """Return the message with every word of 200 characters or more cut to its beginning."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}…({len(word[0])} characters)", message)
