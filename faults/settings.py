"""The settings that a fault can have, such as `for=3s`: how each is read, written and checked.

A setting is read from text to a value (times in seconds, rates in bits per second, shares as a fraction) and
written back. A value that cannot be is refused with a reason that completes the sentence "'TEXT' …".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e-?[0-9]+)?)(?P<unit>ms|s)")
_RATE = re.compile(r"(?P<number>[0-9]{1,12}(\.[0-9]{1,12})?)(?P<unit>[kmg]?)bit")
_SHARE = re.compile(r"(?P<number>[0-9]{1,3}(\.[0-9]{1,4})?)%")
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST_BIT, _MOST_BIT = 8 * 10**3, 10 * 10**9
_LEAST_PERIOD_S = 0.02  # a change of an interface takes some milliseconds
_LEAST_DELAY_S, _MOST_DELAY_S = 0.001, 1.0  # less is below the clock of tc; more is silence
DIRECTIONS = ("out", "in", "both")
"""The traffic of a NIC that a fault of its cable strikes: what it sends, what it receives, or both."""
_MOST_S = 1_000_000
"""The longest time that can be given, in seconds: eleven days."""


class Settings(Mapping[str, Any]):
    """The settings of one fault by name; it never changes, so that faults can be compared and be in sets."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({})):
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        """Number of settings."""
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class Setting:
    """The form of one setting.

    Attributes:
        read: makes the value of a text; raises ValueError with the reason if the text has no such form.
        write: makes the text of a value.
        check: says what is wrong with a value; "" if nothing is.
        by_target: whether it is written with the target, before `@when`.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str] = str
    check: Callable[[Any], str] = lambda value: ""
    by_target: bool = False

    def value(self, text: str) -> Any:
        """Read and check a value. Raises ValueError with the reason."""
        value = self.read(text)
        if wrong := self.check(value):
            raise ValueError(wrong)
        return value


def read_server(text: str) -> int:
    """Read the id of a server. Raises ValueError with the reason."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("is no server, a number counted from 0")
    return int(text)


def read_seconds(text: str) -> float:
    """Read a time such as `1.5s` or `200ms`, in seconds. Raises ValueError with the reason."""
    time = _TIME.fullmatch(text)
    if time is None:
        raise ValueError("is no time; a time has a unit, like 1.5s or 200ms")
    return float(time["number"]) / (1000 if time["unit"] == "ms" else 1)


def check_time(seconds: float) -> str:
    """Say what is wrong with a time in seconds."""
    return "" if seconds <= _MOST_S else f"is too long, a time is at most {_MOST_S}s"


def write_seconds(seconds: float) -> str:
    """Write a time as the notation has it: `1.5s`."""
    return f"{seconds!r}s".replace(".0s", "s")


def _check_period(seconds: float) -> str:
    return (
        "is too short for a period, give at least 20ms" if seconds < _LEAST_PERIOD_S else check_time(seconds)
    )


def _check_delay(seconds: float) -> str:
    return "" if _LEAST_DELAY_S <= seconds <= _MOST_DELAY_S else "is no delay, from 1ms to 1s"


def _write_delay(seconds: float) -> str:
    text = f"{seconds * 1000:.12g}ms"
    return text if read_seconds(text) == seconds else write_seconds(seconds)


def _read_rate(text: str) -> int:
    found = _RATE.fullmatch(text)
    return round(Fraction(found["number"]) * _BITS[found["unit"]]) if found else 0


def _check_rate(rate_bit: int) -> str:
    return "" if _LEAST_BIT <= rate_bit <= _MOST_BIT else "is no rate, from 8kbit to 10gbit"


def _write_rate(rate_bit: int) -> str:
    for unit in ("g", "m", "k"):
        if rate_bit % _BITS[unit] == 0:
            return f"{rate_bit // _BITS[unit]}{unit}bit"
    return f"{rate_bit}bit"


def _read_share(text: str) -> float:
    found = _SHARE.fullmatch(text)
    return float(found["number"]) / 100 if found else 0.0


def _check_share(share: float) -> str:
    return "" if 0 < share <= 1 else "is no share, a number with % from 0.0001% to 100%"


def _read_direction(text: str) -> str:
    if text not in DIRECTIONS:
        raise ValueError(f"is no direction, one of {', '.join(DIRECTIONS)}")
    return text


def share_text(share: float) -> str:
    """Write a fraction as the notation has it: `5%`."""
    return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "peer": Setting(read_server, by_target=True),
        "every": Setting(read_seconds, write_seconds, _check_period),
        "delay": Setting(read_seconds, _write_delay, _check_delay),
        "rate": Setting(_read_rate, _write_rate, _check_rate),
        "share": Setting(_read_share, share_text, _check_share),
        "over": Setting(read_seconds, write_seconds, check_time),
        "direction": Setting(_read_direction),
        "for": Setting(read_seconds, write_seconds, check_time),
    }
)
"""Every setting, in the order in which they are written.

`for` means the same for all kinds: the fault lasts so long from when it strikes, then its part works again.
Without it the fault lasts to the end of the job.
"""
