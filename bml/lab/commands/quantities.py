"""Sizes and rates on the command line."""

from __future__ import annotations

import re
from fractions import Fraction

from bml.topology import UsageError

_MOST_NBYTES = 10**15
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Read a size: `4096`, `4KiB` and `64MiB` (powers of 2), `10MB` and `57.5MB` (powers of 10).

    Raises:
        UsageError: the text is no size, not a whole number of bytes, or one above 10^15 bytes.
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMG]I?B)?", text.strip().upper())
    if found is None:
        raise UsageError(f"'{text}' is not a size: write it like 4096, 4KiB, 57.5MB or 1GB")
    nbytes = Fraction(found[1]) * _UNITS[found[2] or ""]
    if nbytes > _MOST_NBYTES:
        raise UsageError(f"{text} is too much: sizes of up to {_MOST_NBYTES} bytes are possible")
    if nbytes.denominator != 1:
        raise UsageError(f"{text} is {float(nbytes):g} bytes: give a size that is a whole number of them")
    return int(nbytes)


def parse_rates(texts: tuple[str, ...]) -> dict[tuple[int, int], str]:
    """Parse texts such as `4/0=1/10`: server/level=rate, the rate in units of B.

    Raises:
        UsageError: a text is something else.
    """
    found: dict[tuple[int, int], str] = {}
    for text in texts:
        link, _, rate = text.partition("=")
        shape = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", link)
        if shape is None or not rate:
            raise UsageError(f"'{text}' is not a rate: write server/level=rate, such as 4/0=1/10")
        found[int(shape[1]), int(shape[2])] = rate
    return found
