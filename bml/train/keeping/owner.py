"""Which job a folder of checkpoints belongs to: the one that came last.

A job that still runs though its supervisor has taken it for dead would remove what its successor writes. So
each job notes its name in the folder, with a number above all others there: `000002-bml-5b0c1e.bmljob`. A job
that sees a later one neither writes nor removes anything there any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bml.train.keeping.files import Files

_NAME = re.compile(r"(\d{6,})-(.+)\.bmljob")


def _owners(names: Iterable[str]) -> list[tuple[int, str]]:
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted((int(each[1]), each[2]) for each in found)


def owner(names: Iterable[str]) -> str:
    """The job that came last; empty if none has noted its name."""
    return owners[-1][1] if (owners := _owners(names)) else ""


def former(names: Iterable[str]) -> list[str]:
    """The notes of jobs before it."""
    return [_note(*each) for each in _owners(names)[:-1]]


def claim(files: Files, job: str) -> None:
    """Note that this job is the last one; idempotent. Raises OSError if the folder cannot be written."""
    owners = _owners(files.names())
    if job not in (each for _, each in owners):
        files.write(_note(1 + max((number for number, _ in owners), default=0), job), ())


def _note(number: int, job: str) -> str:
    return f"{number:06d}-{job}.bmljob"
