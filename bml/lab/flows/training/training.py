"""What is asked of a simulated training, and what it takes: layers, parts between failures, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bml.errors import TooFewServers, UsageError
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import Layer
from bml.topology import Fabric

DETECT_S = 0.02
"""From a failure to its diagnosis: of a killed process, a cable without carrier or a dead switch, measured on
emulated cables (docs/explanation/laboratory.md). What only falls silent takes 0.63 s."""
VIEW_S = 0.05
"""From there to the next step: measured there, 0.03 to 0.06 s."""


@dataclass(frozen=True)
class Part:
    """A part of a training: from iteration `since` on, which is 0 in the first one, this is left.

    `failures` are those that struck then, as they were written.
    """

    since: int
    fabric: Fabric
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        layers: in the order of the forward pass; their times are those of a server of speed 1 with all there.
        iterations: how many, at least 1.
        parts: in order; the first one has `since` 0.
        overlap, by_need: see `bml.lab.flows.training.iterations`.
        slow: server -> how many times as long it computes.
        detect_s, view_s: seconds from a failure to its diagnosis, and from there to the next step.
        sharers: servers whose work an iteration is; None: those of the first part.
    """

    layers: Sequence[Layer]
    iterations: int
    parts: Sequence[Part]
    overlap: Overlap = Overlap.backward
    by_need: bool = True
    slow: Mapping[int, float] | None = None
    detect_s: float = DETECT_S
    view_s: float = VIEW_S
    sharers: int | None = None

    def work_of(self, fabric: Fabric) -> float:
        """How many times as long as in the layers' times the slowest server computes in an iteration."""
        sharers = self.sharers or len(self.parts[0].fabric.servers)
        slow = self.slow or {}
        return sharers / len(fabric.servers) * max(slow.get(server, 1.0) for server in fabric.servers)

    def check(self) -> None:
        """Raise UsageError if a part never comes, TooFewServers if too few servers are left in one."""
        for part in self.parts:
            if not part.since < self.iterations:
                raise UsageError(
                    f"{', '.join(part.failures)} after {part.since} iterations never strikes: the "
                    f"training has {self.iterations}"
                )
        for before, part in pairwise(self.parts):
            had, left = len(before.fabric.servers), len(part.fabric.servers)
            if 2 * left <= had:
                raise TooFewServers(
                    f"{', '.join(part.failures)} after {part.since} iterations leaves {left} of {had} "
                    "servers, and a job ends unless more than half are left"
                )


@dataclass(frozen=True)
class ViewTimes:
    """What a view took. Times are seconds.

    `iteration_s` is an iteration in the long run; of it `compute_s` the slowest server computes, and in
    `exposed_s` it waits for the wires, which take `communication_s` for all gradients. `seconds` is the whole
    view, with `lost_s` until the failures at its beginning were noticed and the view had changed.
    """

    view: int
    since: int
    iterations: int
    failures: list[str]
    survivors: int
    algorithms: list[str]
    iteration_s: float
    compute_s: float
    exposed_s: float
    communication_s: float
    lost_s: float
    seconds: float
