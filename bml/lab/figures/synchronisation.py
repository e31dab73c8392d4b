"""BML: its time beside that of networks with one NIC."""

from __future__ import annotations

from collections.abc import Sequence

from bml.lab.figures.figure import Basis, How, Point, figure
from bml.lab.figures.sources import BML
from bml.lab.figures.steps import by_formula, simulated
from bml.schedule import plan
from bml.schedule.select.formulas import dedicated_server
from bml.topology import big_switch, parse

FABRICS = ("bcube:3x2", "bcube:4x2", "bcube:8x2", "bcube:4x3", "bcube:3x4")


@figure(
    "gst-table",
    title="Synchronisation time by algorithm",
    unit="gradient synchronisation time in T",
    source=BML,
    about="For the N servers of each BCube: one dedicated parameter server beside N workers (2N), parameter "
    "servers on all servers, which is a mesh (2(N−1)/N), and a ring (2(N−1)/N), each with one NIC on a "
    "network that does not block; and BML with k NICs (2(N−1)/(kN)). The published values are these "
    "formulas. The dedicated server is counted stage by stage, the others are simulated without delays.",
    reading="Formula, count and simulation agree.",
    log=True,
)
def times_by_algorithm(fabrics: Sequence[str] = FABRICS) -> list[Point]:
    """Return the times of four algorithms for the servers of each BCube, in T."""
    found = []
    for name in fabrics:
        cube = parse(name)
        n = cube.n_servers
        staged = float(plan(big_switch(n + 1), "ps").gst_staged())
        known = float(dedicated_server(n))
        found.append(Point("one parameter server", name, staged, How.theory, known, Basis.formula))
        for series, fabric, algorithm in (
            ("mesh, one NIC", big_switch(n), "mesh"),
            ("ring, one NIC", big_switch(n), "ring"),
            ("BML, k NICs", cube, "bml"),
        ):
            known = by_formula(fabric, algorithm)
            ours = simulated(fabric, algorithm)
            found.append(Point(series, name, ours, How.simulation, known, Basis.formula))
    return found


@figure(
    "one-kth",
    title="BML as a share of the time with one NIC",
    unit="time of BML over that of a mesh with one NIC",
    source=BML,
    about="NICs of one rate: a BCube with k NICs a server beside parameter servers on all servers of a "
    "network with one NIC that does not block. The published value is 1/k, so 1/2 with two NICs. Both times "
    "are simulated without delays.",
    reading="The share is 1/k for any number of servers.",
)
def one_kth(fabrics: Sequence[str] = FABRICS) -> list[Point]:
    """Return the share for each BCube."""
    found = []
    for name in fabrics:
        cube = parse(name)
        share = simulated(cube, "bml") / simulated(big_switch(cube.n_servers), "mesh")
        found.append(Point("BML over mesh", name, share, How.simulation, 1 / cube.levels, Basis.formula))
    return found
