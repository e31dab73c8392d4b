"""Failures of a fabric as faults that a benchmark injects. Pure."""

from __future__ import annotations

from bml.topology import Failure, LinkFailure, ServerFailure


def fault_of(failure: Failure) -> str:
    """Return the fault that causes a failure: kill for a server, cut for a link; a switch keeps its name."""
    kind, _, target = str(failure).partition(":")
    renamed = {ServerFailure: "kill", LinkFailure: "cut"}.get(type(failure), kind)
    return f"{renamed}:{target}"
