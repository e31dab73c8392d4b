"""The notation of fabrics: text in, `Fabric` out, and for any other text what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from bml.topology.bcube import bcube
from bml.topology.bigswitch import big_switch
from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric
from bml.topology.fattree import fat_tree
from bml.topology.graph_file import graph_of
from bml.topology.torus import torus


class _Family(NamedTuple):
    """The notation of one family: its shape in words, as a pattern, an example, and its builder.

    The builder takes the numbers of the notation, or all of it where `takes_text`.
    """

    shape: str
    pattern: str
    example: str
    build: Callable[..., Fabric]
    takes_text: bool = False


_NUMBER = "([0-9]{1,6})"
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "bcube": _Family("ports x levels", f"{_NUMBER}x{_NUMBER}", "bcube:3x2", bcube),
        "torus": _Family("size x dimensions", f"{_NUMBER}x{_NUMBER}", "torus:4x2", torus),
        "fattree": _Family(
            "ports of a switch, or ports/servers",
            f"{_NUMBER}(?:/{_NUMBER})?",
            "fattree:10 or fattree:10/250",
            fat_tree,
        ),
        "switch": _Family("a number of servers", _NUMBER, "switch:9", big_switch),
        "graph": _Family(
            "a file, or the servers of each switch", "(.+)", "graph:0-1,1-2,2-0", graph_of, True
        ),
    }
)


def parse(text: str) -> Fabric:
    """Read a fabric: `bcube:3x2` (ports x levels), `torus:4x2`, `fattree:10/250`, `switch:9`, `graph:FILE`.

    A graph may also be written out, `graph:0-1,1-2,2-0`: see bml.topology.graph. The name of a fabric that
    was read from a file is written out, so that it needs no file elsewhere.

    Raises:
        UsageError: the text names no fabric that can be built; the message says why.
    """
    if not isinstance(text, str):
        raise UsageError(f"{text!r:.80} is not the text of a fabric, such as 'bcube:3x2'")
    name, colon, size = text.strip().partition(":")
    if name not in _FAMILIES:
        reason = f"'{name}' is not a family of fabrics" if colon else "the family and its colon are missing"
        raise UsageError(f"'{text}' is not a fabric: {reason}; write it like {_examples()}")
    family = _FAMILIES[name]
    found = re.fullmatch(family.pattern, size)
    if found is None:
        raise UsageError(f"'{size}' in '{text}' is not {family.shape}; write it like {family.example}")
    if family.takes_text:
        return family.build(size)
    return family.build(*(int(number) for number in found.groups() if number is not None))


def _examples() -> str:
    return ", ".join(f"{family.example} ({family.shape})" for family in _FAMILIES.values())
