"""BML without some of its parts: one dead server as published, and more failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np

from bml.lab.figures.figure import Basis, How, Point, figure
from bml.lab.figures.sources import FAULT_TOLERANT
from bml.lab.figures.steps import counted, simulated
from bml.schedule import bound, plan
from bml.topology import Fabric, bcube, parse


@figure(
    "failure-schedule",
    title="One dead server on a BCube of two levels",
    unit="gradient synchronisation time in T",
    source=FAULT_TOLERANT,
    about="Server 0 of `bcube:m x 2` is dead. The published schedule takes m²/(m²−1) T: 32/30 T with m = 4. "
    "Ours under the name `detour` is counted stage by stage, as the paper counts, and with slices that "
    "follow one another. Beside it stand our own schedule `packed` and the proved optimum. Both schedules "
    "are simulated with 57.5 MB at 40 Gbit/s, without delays, in the slices that a job takes.",
    reading="Stage by stage we have the published time exactly. The optimum is 22 % less with m = 3, 12.5 % "
    "with m = 4 and 3 % with m = 8, and `packed` reaches it: its relays add their own partial. Simulated, "
    "both take up to a third longer: a relay receives a slice whole before it sends it on, and a vector of "
    "this size has few slices, so the pipeline is short of full. The simulated ratio compares a pipeline "
    "with a time by stages.",
)
def failure_schedule(sizes: Sequence[int] = (3, 4, 5, 6, 7, 8)) -> list[Point]:
    """Return the times without server 0 for m in `sizes`, in T: counted, simulated and the least."""
    found = []
    for m in sizes:
        fabric, known, at = bcube(m, 2).without("server:0"), m * m / (m * m - 1), f"bcube:{m}x2"
        basis = Basis.value if m == 4 else Basis.formula
        staged = float(plan(fabric, "detour").gst_staged())
        played = simulated(fabric, "detour")
        found += [
            Point("detour, by stages", at, staged, How.theory, known, basis),
            Point("detour, pipelined", at, counted(fabric, "detour"), How.theory),
            Point("detour, simulated", at, played, How.simulation, known, basis),
            Point("packed", at, counted(fabric, "packed"), How.theory),
            Point("packed, simulated", at, simulated(fabric, "packed"), How.simulation),
            Point("optimum", at, float(bound(fabric)), How.theory),
        ]
    return found


@figure(
    "more-failures",
    title="More dead servers and links on bcube:4x2",
    unit="gradient synchronisation time in T",
    source=FAULT_TOLERANT,
    about="The paper says that BML degrades in a graceful way with failures of servers and links; its "
    "numbers are not known to us. Here stand the means of ten sets of dead parts, drawn at random from "
    "those that cut no server off, with slices that follow one another. The same sets are given to "
    "`detour`, `packed` and the proved optimum.",
    reading="With one to four dead servers `packed` takes about as long as with all alive, `detour` 10 to "
    "36 % longer. A dead link doubles the time of `detour`, as all that its server sends then passes one "
    "NIC; `packed` takes 7 to 17 % longer than healthy with one to four. It stays within 1 % of the "
    "optimum.",
)
def more_failures(n_dead: Sequence[int] = (0, 1, 2, 3, 4), draws: int = 10) -> list[Point]:
    """Return mean times of `bcube:4x2` with so many dead servers or links over random sets, in T."""
    found = []
    for kind in ("server", "link"):
        for n in n_dead:
            fabrics = list(damaged(parse("bcube:4x2"), kind, n, draws if n else 1))
            at = f"{n} {kind}{'s' * (n != 1)}"
            for name in ("detour", "packed"):
                value = mean(counted(fabric, name) for fabric in fabrics)
                found.append(Point(name, at, value, How.theory))
            found.append(Point("optimum", at, mean(float(bound(each)) for each in fabrics), How.theory))
    return found


def damaged(fabric: Fabric, kind: str, n_dead: int, draws: int) -> Iterator[Fabric]:
    """Yield the fabric without `n_dead` servers or links, `draws` times, if all survivors are connected."""
    chance = np.random.default_rng(n_dead)
    names = [f"server:{server}" for server in fabric.servers]
    if kind == "link":
        names = [f"link:{server}/{level}" for server, level in fabric.links]
    while draws:
        left = fabric.without(*chance.choice(names, n_dead, replace=False).tolist())
        if left.is_connected:
            draws -= 1
            yield left
