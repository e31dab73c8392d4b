"""The failures that a fabric can have, and their notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import TypeAlias

from bml.topology.errors import UsageError


@total_ordering
class _Broken:
    """Gives the failures of all kinds one order: servers, then links, then switches, each by number."""

    def sort_key(self) -> tuple[int, ...]:
        """Return the kind's rank followed by the failure's numbers."""
        raise NotImplementedError

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Broken):
            return NotImplemented
        return self.sort_key() < other.sort_key()


@dataclass(frozen=True)
class ServerFailure(_Broken):
    """A dead server; its NICs and cables are gone with it. Notation `server:4`."""

    server: int

    def sort_key(self) -> tuple[int, ...]:
        """Servers sort first."""
        return (0, self.server)

    def __str__(self) -> str:
        return f"server:{self.server}"


@dataclass(frozen=True)
class LinkFailure(_Broken):
    """A dead cable, or a dead NIC, which is the same fault. Notation `link:4/0` (server / level)."""

    server: int
    level: int

    def sort_key(self) -> tuple[int, ...]:
        """Links sort after servers."""
        return (1, self.server, self.level)

    def __str__(self) -> str:
        return f"link:{self.server}/{self.level}"


@dataclass(frozen=True)
class SwitchFailure(_Broken):
    """A dead switch: all its links are dead. Notation `switch:0/2` (level / group)."""

    level: int
    group: int

    def sort_key(self) -> tuple[int, ...]:
        """Switches sort last."""
        return (2, self.level, self.group)

    def __str__(self) -> str:
        return f"switch:{self.level}/{self.group}"


Failure: TypeAlias = ServerFailure | LinkFailure | SwitchFailure

_FORMS = {"server": "server:4", "link": "link:4/0 (server/level)", "switch": "switch:0/2 (level/group)"}


def parse_failure(text: str) -> Failure:
    """Read `server:4`, `link:4/0` or `switch:0/2`; `str()` of the result gives the notation back.

    Whether the fabric has such a part is checked by `Fabric.without`.

    Raises:
        UsageError: the text is no failure; the message says which part of it is wrong.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in _FORMS or not colon:
        raise UsageError(
            f"'{text}' is not a failure: write one of {', '.join(_FORMS.values())}"
            + (f"; '{kind}' is not a kind of failure" if colon else "; the colon is missing")
        )
    parts = rest.split("/")
    wanted = 1 if kind == "server" else 2
    if len(parts) != wanted:
        raise UsageError(
            f"'{text}' has {len(parts)} number(s) after the colon, a {kind} failure needs {wanted}: "
            f"write it like {_FORMS[kind]}"
        )
    numbers = [_number(part, text, kind) for part in parts]
    if kind == "server":
        return ServerFailure(numbers[0])
    if kind == "link":
        return LinkFailure(numbers[0], numbers[1])
    return SwitchFailure(numbers[0], numbers[1])


def _number(part: str, text: str, kind: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", part):
        raise UsageError(f"'{part}' in '{text}' is not a number counted from 0: write it like {_FORMS[kind]}")
    return int(part)
