"""How long servers may take to end, once the job is over: a frozen one may never end. Pure: time is given."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from bml.cluster.spec.ending import WRITING_S
from bml.cluster.spec.job import ServerReport

_GRACE_S = 10.0
"""After the first server has ended; then the others are killed."""
_OUTSIDE_S = 1.0
"""The same for servers that are no members any more."""


def give_up_at(now: float, servers: Iterable[int], members: Container[int], writes: bool) -> dict[int, float]:
    """Return until when to wait for each server. With `writes` one that left may still write its state."""
    inside_s, outside_s = (WRITING_S, WRITING_S) if writes else (_GRACE_S, _OUTSIDE_S)
    return {server: now + (inside_s if server in members else outside_s) for server in servers}


def last_members(report: ServerReport, otherwise: Container[int]) -> Container[int]:
    """Return the members of the last view that the reporting server has seen."""
    members: Container[int] = report.views[-1]["members"] if report.views else otherwise
    return members


def inside(snapshot: Mapping[str, Any], dead: Container[int], newest: Mapping[int, int]) -> list[int]:
    """Return the living members of the last view in their newest incarnations: they hear of the end.

    A view that still has a server of which the death is known says nothing about its next incarnation.
    """
    joined = snapshot["joined"]
    now = [each for each in snapshot["members"] if joined.get(each, 0) == newest.get(each, 0)]
    return [each for each in now if each not in dead]
