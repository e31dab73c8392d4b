"""How near packed plans come to the proved optimum, and how long planning takes.

    python benchmarks/bench_planning.py            every case of the promises, a few minutes
    python benchmarks/bench_planning.py --quick    a sample
    python benchmarks/bench_planning.py --json     one JSON object

Times are processor time of one thread, the quickest of a few runs, because the machine may be shared.
Exits with status 1 if a promise is broken.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import combinations

from bml.schedule import Programs, Schedules, bound, bound_kind, gst, plan, verify
from bml.schedule.packed.packing import _plan, packed
from bml.schedule.select.cases import _built, _built_large
from bml.schedule.select.choice import prepare
from bml.schedule.select.model import DEFAULTS
from bml.topology import parse

SINGLE = ("bcube:3x2", "bcube:4x2", "bcube:2x3", "bcube:4x3", "bcube:3x3", "bcube:5x2")
PAIRS = ("bcube:3x2", "bcube:4x2")
RANDOM = ("bcube:4x2", "bcube:3x3", "torus:4x2")
SPEED = {"bcube:4x2": 20, "bcube:4x3": 200, "bcube:16x2": 1000, "bcube:32x2": 10000}
CACHED_MS = 2
SIZES = (4 << 10, 64 << 10, 64 << 20)
SEVERAL = {
    "bcube:3x2": (100, 200),
    "bcube:4x2": (100, 200),
    "bcube:2x3": (100, 200),
    "torus:4x2": (100, 200),
    "bcube:4x3": (500, 500),
    "bcube:8x2": (500, 500),
    "torus:4x3": (500, 500),
}
LARGE = ("bcube:32x2", "bcube:10x3", "bcube:4x5")
LARGE_MS = {(1, 3): (1000, 2000), (4, 6): (3000, 4000)}
"""From so many to so many failures -> milliseconds of planning: the median, and the worst."""


@dataclass
class Case:
    """One damaged fabric: times in T, `ratio` is gst / bound, `ms` of planning from nothing."""

    fabric: str
    gst: float
    bound: float
    kind: str
    ratio: float
    detour: float
    pieces: int
    depth: int
    ms: float


@dataclass
class Group:
    """Cases that share a promise: mean and worst ratio, and their limits."""

    name: str
    cases: int
    mean: float
    worst: float
    worst_fabric: str
    limit_mean: float
    limit_worst: float
    not_optimal_bounds: int
    slower_than_detour: int
    most_pieces_per_server: float
    deepest: int
    longest_ms: float

    @property
    def kept(self):
        return (
            self.mean <= self.limit_mean and self.worst <= self.limit_worst and self.slower_than_detour == 0
        )


@dataclass
class Speed:
    """Planning time of one case against its promise, and how long one of its like then takes.

    From memory: `plan_ms` from the healthy fabric to the plan, `program_ms` from there to the program of one
    server, the median over servers.
    """

    fabric: str
    ms: float
    limit_ms: float
    plan_ms: float
    program_ms: float
    limit_cached_ms: float

    @property
    def kept(self):
        return self.ms <= self.limit_ms and max(self.plan_ms, self.program_ms) <= self.limit_cached_ms


@dataclass
class Several:
    """From the healthy fabric to one server's program for random failures, planned from nothing.

    `failures`: from how many to how many.
    """

    fabric: str
    failures: tuple[int, int]
    nbytes: int
    cases: int
    median_ms: float
    p95_ms: float
    worst_ms: float
    limit_median_ms: float
    limit_worst_ms: float

    @property
    def kept(self):
        return self.median_ms <= self.limit_median_ms and self.worst_ms <= self.limit_worst_ms


def forget():
    """Drop all plans that were kept."""
    _plan.cache_clear()
    _built.cache_clear()
    _built_large.cache_clear()


def all_parts(fabric):
    """Every failure that a fabric can have."""
    found = [f"server:{server}" for server in fabric.servers]
    found += [f"link:{server}/{level}" for server, level in fabric.links]
    return found + [f"switch:{level}/{group}" for level, group in fabric.switches]


def survivable(fabric):
    return len(fabric.servers) > 1 and fabric.is_connected


def measure(fabric):
    """Plan a case from nothing, verify it and compare it with its bound and the paper's way."""
    forget()
    start_s = time.process_time()
    forest = packed(fabric)
    ms = (time.process_time() - start_s) * 1e3
    problems = verify(forest, fabric)
    if problems:
        raise SystemExit(f"{fabric}: {problems}")
    reached, proved = gst(forest, fabric), bound(fabric)
    if reached < proved:
        raise SystemExit(f"{fabric}: GST {reached} is below the bound {proved}, so that is wrong")
    return Case(
        str(fabric),
        float(reached),
        float(proved),
        bound_kind(fabric),
        float(reached / proved),
        float(gst(plan(fabric, "detour").forest, fabric)),
        forest.pieces,
        forest.n_stages(0),
        round(ms, 2),
    )


def summarise(name, fabrics, limit_mean, limit_worst, show):
    """Measure a group of fabrics and print its worst case, or all of them."""
    cases = []
    for fabric in fabrics:
        cases.append(measure(fabric))
        if show:
            print_case(cases[-1])
    worst = max(cases, key=lambda case: case.ratio)
    servers = [len(fabric.servers) for fabric in fabrics]
    group = Group(
        name,
        len(cases),
        sum(case.ratio for case in cases) / len(cases),
        worst.ratio,
        worst.fabric,
        limit_mean,
        limit_worst,
        sum(case.kind != "optimum" for case in cases),
        sum(case.gst > case.detour * (1 + 1e-12) for case in cases),
        max(case.pieces / count for case, count in zip(cases, servers, strict=True)),
        max(case.depth for case in cases),
        max(case.ms for case in cases),
    )
    return group, cases


def groups(quick):
    """Yield every promise: its name, its fabrics, and the limits of the mean and of the worst ratio."""
    for name in SINGLE:
        healthy = parse(name)
        found = [healthy.without(failure) for failure in all_parts(healthy)]
        yield f"{name} single", found[:: 7 if quick else 1], 1.02, 1.02
    for name in PAIRS:
        healthy = parse(name)
        found = [healthy.without(*pair) for pair in combinations(all_parts(healthy), 2)]
        found = [fabric for fabric in found if survivable(fabric)]
        yield f"{name} pairs", found[:: 40 if quick else 1], 1.05, 1.15
    for name in RANDOM:
        yield f"{name} random 1-6", random_sets(name, 25 if quick else 500, (1, 6)), 1.05, 1.15
        yield f"{name} slow NICs", slowed_sets(name, 25 if quick else 500), 1.05, 1.15
    for name in LARGE:
        yield f"{name} random 1-6", random_sets(name, 2 if quick else 6, (1, 6)), 1.02, 1.03


def random_sets(name, count, failures):
    """Fabrics with from so many to so many failures, always the same ones."""
    rng = random.Random(1)
    healthy, found = parse(name), []
    possible = all_parts(healthy)
    while len(found) < count:
        fabric = healthy.without(*rng.sample(possible, rng.randint(*failures)))
        if survivable(fabric):
            found.append(fabric)
    return found


def slowed_sets(name, count):
    """Fabrics with 0 to 6 failures and 1 to 6 slow NICs, of 0.1 to 0.9 of the rate of the others."""
    rng = random.Random(1)
    healthy, found = parse(name), []
    possible = all_parts(healthy)
    while len(found) < count:
        slow = rng.sample(healthy.links, rng.randint(1, 6))
        rated = healthy.with_rates({link: f"{rng.randint(1, 9)}/10" for link in slow})
        fabric = rated.without(*rng.sample(possible, rng.randint(0, 6)))
        if survivable(fabric):
            found.append(fabric)
    return found


def speed(name, limit_ms, runs):
    """Plan one failure of each kind from nothing, then one of its like from memory."""
    healthy = parse(name)
    last = healthy.n_servers - 1
    for first, like in (
        ("server:0", f"server:{last}"),
        ("link:0/0", f"link:{last}/1"),
        ("switch:0/0", "switch:1/1"),
    ):
        fabric = healthy.without(first)
        anew = []
        for _ in range(runs):
            forget()
            start_s = time.process_time()
            packed(fabric)
            anew.append((time.process_time() - start_s) * 1e3)
        plans, programs = [], []
        for server in range(0, last, max(1, last // 40)):
            steps_s = []
            for _ in range(5):
                start_s = time.process_time()
                made = plan(healthy.without(like))
                made.build()
                planned_s = time.process_time()
                if made.fabric.server_alive(server):
                    made.program(server)
                steps_s.append((planned_s - start_s, time.process_time() - planned_s))
            best = [min(column) * 1e3 for column in zip(*steps_s, strict=True)]
            plans.append(best[0])
            programs.append(best[1])
        found = statistics.median(plans), statistics.median(programs)
        yield Speed(str(fabric), min(anew), limit_ms, *found, CACHED_MS)


def several(name, failures, nbytes, limits_ms, count):
    """Plan for several failures from nothing, as a running job does."""
    times_ms = []
    for fabric in random_sets(name, count, failures):
        forget()
        dead = fabric.failures
        start_s = time.process_time()
        damaged = parse(name).without(*dead)
        Programs(Schedules(damaged), damaged.servers[0]).for_nbytes(nbytes)
        times_ms.append((time.process_time() - start_s) * 1e3)
    times_ms.sort()
    median, p95 = (times_ms[int(part * (count - 1))] for part in (0.5, 0.95))
    return Several(name, failures, nbytes, count, median, p95, times_ms[-1], *limits_ms)


def jobs(quick):
    """Yield what running jobs plan: the arguments of `several`."""
    for name, limits_ms in SEVERAL.items():
        for nbytes in SIZES:
            yield name, (2, 6), nbytes, limits_ms, 10 if quick else 100
    for name in LARGE:
        for failures, limits_ms in LARGE_MS.items():
            yield name, failures, SIZES[-1], limits_ms, 5 if quick else 20


def print_case(case):
    print(
        f"{case.fabric:64} {case.gst:7.4f} {case.bound:7.4f} {case.ratio:7.4f} {case.detour:7.4f} "
        f"{case.pieces:6d} {case.depth:5d} {case.ms:9.1f}",
        flush=True,
    )


def print_group(group):
    print(
        f"{group.name:24} {group.cases:6d} {group.mean:7.4f} {group.worst:7.4f} "
        f"(<= {group.limit_mean}, {group.limit_worst}) {group.slower_than_detour:6d} "
        f"{group.most_pieces_per_server:7.1f} {group.deepest:6d} {group.longest_ms:9.1f}  "
        f"{'kept' if group.kept else 'MISSED'}  worst: {group.worst_fabric}",
        flush=True,
    )


def print_speed(row):
    print(
        f"{row.fabric:36} {row.ms:9.1f} ms (<= {row.limit_ms})  from memory: plan {row.plan_ms:5.2f} ms, "
        f"program {row.program_ms:5.2f} ms (<= {row.limit_cached_ms})  {'kept' if row.kept else 'MISSED'}",
        flush=True,
    )


def print_several(row):
    few, many = row.failures
    print(
        f"{row.fabric:12} {row.nbytes:9} bytes, {row.cases} sets of {few}-{many} failures: "
        f"median {row.median_ms:6.1f} ms (<= {row.limit_median_ms}), 95 % {row.p95_ms:6.1f}, "
        f"worst {row.worst_ms:6.1f} (<= {row.limit_worst_ms})  {'kept' if row.kept else 'MISSED'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of the cases")
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    show = not options.json
    if show:
        print(
            f"{'cases':24} {'number':>6} {'mean':>7} {'worst':>7}  {'':14} {'>detour':>6} {'pieces':>7} depth"
        )
    results, cases, speeds, planned = [], [], [], []
    for name, fabrics, mean, worst in groups(options.quick):
        group, measured = summarise(name, fabrics, mean, worst, options.all and show)
        results.append(group)
        cases += measured
        if show:
            print_group(group)
    for name, limit_ms in SPEED.items():
        if options.quick and limit_ms > 1000:
            continue
        for row in speed(name, limit_ms, 5 if limit_ms < 1000 else 1):
            speeds.append(row)
            if show:
                print_speed(row)
    for arguments in jobs(options.quick):
        planned.append(several(*arguments))
        if show:
            print_several(planned[-1])
    forget()
    start_s = time.process_time()
    plans = prepare(parse("bcube:4x3"), "auto", DEFAULTS)
    ahead_ms = (time.process_time() - start_s) * 1e3
    if show:
        print(f"all single failures of bcube:4x3 planned ahead: {plans} plans, {ahead_ms:.0f} ms")
    else:
        print(
            json.dumps(
                {
                    "groups": [{**asdict(group), "kept": group.kept} for group in results],
                    "speed": [{**asdict(row), "kept": row.kept} for row in speeds],
                    "several": [{**asdict(row), "kept": row.kept} for row in planned],
                    "cases": [asdict(case) for case in cases],
                }
            )
        )
    sys.exit(0 if all(item.kept for item in [*results, *speeds, *planned]) else 1)


if __name__ == "__main__":
    main()
