"""FlexTree in the cost model: shapes of its tree beside a ring and recursive doubling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

from bml.lab.figures.figure import Basis, How, Point, figure
from bml.lab.figures.sources import GENMODEL
from bml.schedule import plan
from bml.schedule.select.model import DEFAULTS, Counts
from bml.topology import big_switch

SERVERS = (8, 9, 17, 24, 32, 64)
NBYTES = (4096, 2**20, 2**26)
_SIZES = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


@figure(
    "flextree",
    title="Shapes of FlexTree by number of servers and size",
    unit="modelled milliseconds of a step",
    source=GENMODEL,
    about="N servers on one switch, with the default constants of our cost model, those of 10 Gbit/s "
    "Ethernet (α 50 µs, β 0.8 ns, γ and δ 0.1 ns, ε 0.005 ns a byte). The published values are the formulas "
    "of the model for a ring, and, as we read them, for one stage of N servers; ours are counted in our "
    "schedules. The paper charges many senders at once max(w − w_t, 0)·B·ε, with a threshold w_t and the B "
    "bytes on the wire; we charge w·S·ε, for a vector of S bytes that w servers send to one. The best "
    "shape is the least of all widths whose product is N, or N−1 for a prime N with one server outside the "
    "tree. Recursive doubling sends whole vectors in log₂N rounds, for powers of two.",
    reading="The counts are those of the formulas; for one stage that says only that the schedule is what "
    "we modelled. Short vectors take one stage, whose start-ups are "
    "fewest. Long ones on many servers take narrow stages, as the price of many senders at once (ε) grows "
    "with the vector and the width. A ring has 2(N−1) start-ups, and reads and writes more memory. Measured "
    "times of the paper are not known to us.",
    log=True,
    relative=True,
)
def shapes_of_flextree(servers: Sequence[int] = SERVERS, nbytes: Sequence[int] = NBYTES) -> list[Point]:
    """Return the modelled times for N in `servers` and vectors of `nbytes` bytes, in milliseconds."""
    found = []
    counts = {n: _counts_of_shapes(n) for n in servers}
    for size, n in product(nbytes, servers):
        at = f"{size_text(size)}, N={n}"
        times = {shape: each.seconds(size) for shape, each in counts[n].items()}
        shape = min(times, key=lambda each: times[each])
        ring_ms = plan(big_switch(n), "ring").counts().seconds(size) * 1e3
        one_known, ring_known = one_stage_s(n, size) * 1e3, ring_s(n, size) * 1e3
        found += [
            Point("FlexTree, best", at, times[shape] * 1e3, How.theory, note=f"widths {shape}"),
            Point("FlexTree, one stage", at, times[str(n)] * 1e3, How.theory, one_known, Basis.reading),
            Point("ring", at, ring_ms, How.theory, ring_known, Basis.formula),
        ]
        if n & (n - 1) == 0:
            doubling_ms = doubling_counts(n).seconds(size) * 1e3
            found.append(Point("recursive doubling", at, doubling_ms, How.theory))
    return found


def shapes(servers: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the widths, from 2 to `most` and the widest first, whose product is `servers`."""
    if servers == 1:
        yield ()
    for width in range(min(servers, most or servers), 1, -1):
        if servers % width == 0:
            for narrower in shapes(servers // width, width):
                yield (width, *narrower)


def one_stage_s(n: int, nbytes: int) -> float:
    """Our reading of one stage: 2α + 2(N−1)S/N·β + (N−1)S/N·γ + (N+1)S/N·δ + S·w·ε, with w = N−1."""
    known = DEFAULTS
    wire, added, touched = 2 * (n - 1) / n, (n - 1) / n, (n + 1) / n
    each_s = wire * known.beta_s + added * known.gamma_s + touched * known.delta_s + (n - 1) * known.epsilon_s
    return 2 * known.alpha_s + nbytes * each_s


def ring_s(n: int, nbytes: int) -> float:
    """The model's formula for a ring: 2(N−1)α + 2(N−1)S/N·β + (N−1)S/N·γ + 3(N−1)S/N·δ."""
    known = DEFAULTS
    each_s = (n - 1) / n * (2 * known.beta_s + known.gamma_s + 3 * known.delta_s)
    return 2 * (n - 1) * known.alpha_s + nbytes * each_s


def doubling_counts(n: int) -> Counts:
    """Count recursive doubling on n servers, a power of two: in each round a whole vector is added."""
    rounds = n.bit_length() - 1
    each = Fraction(rounds)
    return Counts(rounds, wire=each, added=each, touched=3 * each, incast=Fraction(0))


def size_text(nbytes: int) -> str:
    """A size with its unit, such as `64 MiB`."""
    unit = next((unit for unit in _SIZES if nbytes % unit == 0), 1)
    return f"{nbytes // unit} {_SIZES.get(unit, 'B')}"


def _counts_of_shapes(n: int) -> dict[str, Counts]:
    """Count FlexTree in all shapes on n servers; the names are widths such as `8x4`."""
    found = list(shapes(n))
    if len(found) == 1 and n > 3:  # a prime
        found += shapes(n - 1)
    fabric = big_switch(n)
    names = ["x".join(map(str, widths)) for widths in found]
    return {name: plan(fabric, f"flextree:{name}").counts() for name in names}
