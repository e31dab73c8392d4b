"""HiPS: its times on BCube and torus beside flat algorithms, and how much shorter they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bml.lab.figures.figure import Basis, How, Point, ends, figure
from bml.lab.figures.sources import HIPS
from bml.lab.figures.steps import by_formula, counted, simulated
from bml.topology import Fabric, Torus, big_switch, parse

SIZES = (4, 8, 16)
DEPTHS = (2, 3, 4)
NAMES = {"mesh": "mesh", "ring": "ring", "ring:both": "ring, both ways", "hips": "HiPS"}
"""Our name of an algorithm, and that of the figures."""
_MOST_FLAT = 256
"""Servers up to which flat schedules are counted."""
_MOST_RELAYED = 64
"""Servers up to which a mesh is counted on a torus, where most pairs need relays."""
_MOST_SIMULATED = 256
"""Servers up to which HiPS is simulated on a torus; on a BCube one server stands for all."""
_MOST_COUNTED = 4096
"""Servers up to which HiPS is counted on a torus; 65,536 would take 20 s."""

_RANGES = {"BCube": (-37.5, -61.9), "torus": (-49.6, -66.4)}
"""Published least and most reductions, in percent."""
_ABSTRACT = {"mesh": -73.0, "ring": -75.0}
"""Published reductions against algorithms with parameter servers and with rings, in percent."""


@figure(
    "gst-bcube",
    title="HiPS and flat algorithms on BCube",
    unit="gradient synchronisation time in T",
    source=HIPS,
    about="T is the time to send the whole vector over one NIC. `bcube:4x2` has n = 4 ports and h = 2 "
    "levels. The published values are the paper's formulas at each size; a ring both ways is our own "
    "construction. HiPS is simulated, with meshes inside its groups; the flat algorithms are counted in "
    "schedules that were built and verified, up to 256 servers.",
    reading="Formula, count and simulation agree. A ring that uses both directions of both levels is as "
    "fast as HiPS at h = 2, and falls behind with more levels.",
)
def gst_on_bcube(sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> list[Point]:
    """Return the times of four algorithms for n in `sizes` and h in `depths`, in T."""
    flat = ("mesh", "ring", "ring:both")
    return [point for fabric in _fabrics("bcube", sizes, depths) for point in _times(fabric, flat)]


@figure(
    "gst-torus",
    title="HiPS and flat algorithms on torus",
    unit="gradient synchronisation time in T",
    source=HIPS,
    about="`torus:4x2` has rings of n = 4 in h = 2 dimensions; B is the rate of one cable in one direction. "
    "The published values are the paper's formulas. HiPS is simulated up to 256 servers, and counted in a "
    "sample of its trees, which are all alike, up to 4096. Rings on a torus use both directions.",
    reading="Formula, count and simulation agree. What a mesh takes grows with n, as most of its pairs are "
    "far apart. HiPS on `torus:16x4` has 65,536 servers, and is not counted here.",
)
def gst_on_torus(sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> list[Point]:
    """Return the times of three algorithms for n in `sizes` and h in `depths`, in T."""
    flat = ("mesh", "ring")
    return [point for fabric in _fabrics("torus", sizes, depths) for point in _times(fabric, flat)]


def _fabrics(family: str, sizes: Sequence[int], depths: Sequence[int]) -> Iterator[Fabric]:
    return (parse(f"{family}:{n}x{h}") for n in sizes for h in depths)


def _times(fabric: Fabric, flat: Sequence[str]) -> Iterator[Point]:
    for algorithm in (*flat, "hips"):
        ours, how = _hips(fabric) if algorithm == "hips" else (None, How.theory)
        relayed = algorithm == "mesh" and isinstance(fabric.wiring, Torus)
        if algorithm != "hips" and fabric.n_servers <= (_MOST_RELAYED if relayed else _MOST_FLAT):
            ours = counted(fabric, algorithm)
        note = "" if ours is not None else "too large to be counted here"
        if algorithm == "ring:both":
            yield Point(NAMES[algorithm], fabric.name, ours, how, note=note)
        else:
            published = by_formula(fabric, algorithm)
            yield Point(NAMES[algorithm], fabric.name, ours, how, published, Basis.formula, note)


def _hips(fabric: Fabric) -> tuple[float | None, How]:
    is_torus = isinstance(fabric.wiring, Torus)
    if not is_torus or fabric.n_servers <= _MOST_SIMULATED:
        return simulated(fabric, "hips" if is_torus else "bml"), How.simulation
    return (counted(fabric, "hips") if fabric.n_servers <= _MOST_COUNTED else None), How.theory


@figure(
    "hips-reductions",
    title="How much less than a flat algorithm HiPS takes",
    unit="percent, less time is negative",
    source=HIPS,
    about="Against a mesh over all servers, which is what parameter servers on all servers do, and against "
    "a ring, on the same fabric; and against either on a Fat-Tree of as many servers with one NIC, taken "
    "not to block. n = 4, 8, 16 and h = 2, 3, 4. The published values are −37.5 … −61.9 % on BCube and "
    "−49.6 … −66.4 % on torus, of simulated trainings of VGG (NS-3) of which we know the ranges only, and "
    "−73 % and −75 % of the paper's abstract, against parameter servers and rings. A ring on BCube goes "
    "one way here, and takes what the Fat-Tree takes.",
    reading="Ours are closed formulas of the synchronisation alone, the ranges are of whole simulated "
    "trainings: where computation takes time, they save less than the formula. We do not know which sizes "
    "and which flat algorithm belong to their ends, so each stands beside all. The least on BCube is that of "
    "a mesh on `bcube:4x2`, −37.50 %; the other end of the range is near to `bcube:8x3`, −61.98 %, so the "
    "range may leave out larger fabrics. The ends for torus are near to rings at h = 2 and h = 3, "
    "−50 % and −66.7 %. The abstract's values are near to the most of our sizes, −73.3 % and −75.0 % on "
    "`bcube:16x4`. Against a ring that goes both ways on a BCube of two "
    "levels, HiPS saves nothing.",
)
def reductions(sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> list[Point]:
    """Return how much less HiPS takes than flat algorithms: at each size, least and most, in percent."""
    found = []
    for family, published in _RANGES.items():
        fabrics = list(_fabrics(family.lower(), sizes, depths))
        for flat in ("mesh", "ring", "Fat-Tree"):
            series = f"{family} against {flat}"
            values = [_reduction(fabric, flat) for fabric in fabrics]
            found += [
                Point(series, fabric.name.partition(":")[2], value, How.theory)
                for fabric, value in zip(fabrics, values, strict=True)
            ]
            found += ends(series, values, How.theory, published)
            if family == "BCube" and flat in _ABSTRACT:
                note = "beside the most of our sizes; the abstract does not say on which fabric"
                known = _ABSTRACT[flat]
                found.append(Point(series, "abstract", min(values), How.theory, known, Basis.value, note))
    return found


def _reduction(fabric: Fabric, flat: str) -> float:
    """Compare HiPS with a flat algorithm, or with either on one switch of as many servers, in percent."""
    elsewhere = flat == "Fat-Tree"
    other = by_formula(big_switch(fabric.n_servers), "mesh") if elsewhere else by_formula(fabric, flat)
    return (by_formula(fabric, "hips") / other - 1) * 100
