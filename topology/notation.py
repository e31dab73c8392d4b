"""The notation of fabrics: text in, `Fabric` out, and for any other text what is wrong with it."""

from __future__ import annotations

import re

from topology.bcube import bcube
from topology.errors import UsageError
from topology.fabric import Fabric

_EXAMPLE = "write it like bcube:3x2 (ports x levels)"
_PLANNED = {"torus": "torus:4x2", "fattree": "fattree:10", "switch": "switch:9"}


def parse(text: str) -> Fabric:
    """Read a fabric such as `bcube:3x2` (ports x levels).

    Raises:
        UsageError: the text names no fabric that can be built; the message says why.
    """
    family, colon, size = text.strip().partition(":")
    if family in _PLANNED:
        raise UsageError(
            f"'{text}': {family} fabrics ({_PLANNED[family]}) are a known notation that is not built yet; "
            f"available now: bcube, {_EXAMPLE}"
        )
    if family != "bcube":
        reason = f"'{family}' is not a family of fabrics" if colon else "the family and its colon are missing"
        raise UsageError(f"'{text}' is not a fabric: {reason}; {_EXAMPLE}")
    shape = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size)
    if shape is None:
        raise UsageError(
            f"'{size}' in '{text}' is not ports x levels, two numbers joined by an x; {_EXAMPLE}"
        )
    return bcube(int(shape[1]), int(shape[2]))
