"""The history of a simulated run: a timeline for readers, commits and counts for checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bml.topology.errors import BmlError


@dataclass
class History:
    """`lines` is filled only if `recorded`: a run that went wrong is run again, exactly, to be told."""

    recorded: bool = True
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: step -> server -> contributors, and when, in virtual seconds.
    commits: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    commit_at_s: dict[int, list[float]] = field(default_factory=dict)
    #: The error that ended the job early for a server's user.
    errors: dict[int, BmlError] = field(default_factory=dict)

    def log(self, now_s: float, text: str) -> None:
        """Add a line to the timeline."""
        if self.recorded:
            self.lines.append(f"{now_s * 1000:10.2f} ms  {text}")

    def timeline(self, last: int = 400) -> str:
        """The last lines, oldest first."""
        left_out = max(0, len(self.lines) - last)
        head = [f"... {left_out} earlier lines"] if left_out else []
        return "\n".join([*head, *self.lines[left_out:]])
