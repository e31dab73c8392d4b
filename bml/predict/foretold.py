"""What the servers of a job say of the future, as one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def foretold(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return `predicted` and `remaining` of the server that has measured most, and the `warnings` of all.

    A part of which several servers warn for the same reason is named once, by the one that has seen it first.
    """
    known = [answer for _, answer in sorted(answers.items()) if answer.get("predicted")]
    best = max(known, key=lambda answer: answer["predicted"]["steps"], default={})
    rest = [answer for _, answer in sorted(answers.items()) if answer.get("remaining")]
    warnings: dict[tuple[int, int, str], dict[str, Any]] = {}
    for _, answer in sorted(answers.items()):
        for each in answer.get("warnings", ()):
            key = each["server"], -1 if each["level"] is None else each["level"], each["kind"]
            if key not in warnings or each["for_s"] > warnings[key]["for_s"]:
                warnings[key] = each
    return {
        "predicted": best.get("predicted"),
        "remaining": (best if best.get("remaining") else rest[0] if rest else {}).get("remaining"),
        "warnings": [warnings[key] for key in sorted(warnings)],
    }
