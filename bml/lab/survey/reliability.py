"""The bandwidth that parts that fail and are repaired leave on average.

Parts fail independently, each after `mtbf` hours on average, and are repaired after `mttr`. So in the long
run a part is dead for the share u = mttr / (mtbf + mttr) of the time (renewal theory: only the means count),
and a given set, and nothing else, is dead for the product of u over it and of 1 - u over the rest.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import TypeAlias

from bml.lab.survey.sets import parts_of
from bml.lab.survey.survey import Survey
from bml.topology import Failure, LinkFailure, ServerFailure, UsageError

KINDS = ("server", "link", "switch")
_HOURS = {"min": 1 / 60, "h": 1.0, "d": 24.0, "y": 8766.0}
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(min|h|d|y)", re.ASCII)

_Mix: TypeAlias = tuple[int, ...]
"""How many parts of each kind are dead, in the order of KINDS."""


@dataclass(frozen=True)
class Expected:
    """What is left on average.

    Attributes:
        low, high: between these is the expected bandwidth P / GST, in units of B, a fabric that falls apart
            counting as 0. They differ by what more failures than were looked at could leave. Where rows are
            samples, their error comes on top.
        healthy: the bandwidth when nothing is dead.
        known: share of time with failures that were looked at.
        connected: share of time in which the survivors were seen to reach one another, at least.
        unknown: share of time with failures that were not looked at.
    """

    low: float
    high: float
    healthy: float
    known: float
    connected: float
    unknown: float


def read_hours(text: str, option: str) -> dict[str, float]:
    """Read `4h`, for all kinds, or `server=1y,link=90d`: hours by kind.

    Raises:
        UsageError: the text is something else, or a time is 0.
    """
    found: dict[str, float] = {}
    for item in text.split(","):
        kind, equals, time = item.rpartition("=")
        kinds = KINDS if not equals else (kind.strip(),)
        shape = _TIME.fullmatch(time.strip())
        if shape is None or not set(kinds) <= set(KINDS) or not float(shape[1]):
            raise UsageError(
                f"{option} '{text}': write a time such as 4h, or times by kind such as "
                "server=1y,link=90d,switch=5y (min, h, d, y)"
            )
        found.update({kind: float(shape[1]) * _HOURS[shape[2]] for kind in kinds})
    return found


def read_dead_shares(mtbf: str | None, mttr: str | None) -> dict[str, float] | None:
    """Read the options --mtbf and --mttr as `dead_shares` has them; None without either.

    Raises:
        UsageError: one stands without the other, cannot be read, or does not fit the other.
    """
    if (mtbf is None) != (mttr is None):
        raise UsageError("--mtbf and --mttr belong together: how long parts live, how long repairs take")
    if mtbf is None or mttr is None:
        return None
    return dead_shares(read_hours(mtbf, "--mtbf"), read_hours(mttr, "--mttr"))


def dead_shares(mtbf_h: Mapping[str, float], mttr_h: Mapping[str, float]) -> dict[str, float]:
    """Return the share of time for which a part of each kind is dead; 0 for kinds that never fail.

    Raises:
        UsageError: a kind fails and is never repaired; or some kinds are named, and one of them never fails.
    """
    if set(mtbf_h) - set(mttr_h):
        missing = ", ".join(sorted(set(mtbf_h) - set(mttr_h)))
        raise UsageError(f"--mttr says no time to repair: {missing}")
    if set(mttr_h) - set(mtbf_h) and len(mttr_h) < len(KINDS):
        extra = ", ".join(sorted(set(mttr_h) - set(mtbf_h)))
        raise UsageError(f"--mtbf says no time to a failure, and --mttr a time to repair: {extra}")
    return {kind: mttr_h[kind] / (mtbf_h[kind] + mttr_h[kind]) if kind in mtbf_h else 0.0 for kind in KINDS}


def expected(surveyed: Survey, dead_share: Mapping[str, float], most: float | None = None) -> Expected:
    """Weigh what the survey saw with the shares of time for which parts of each kind are dead.

    No set has a bandwidth of more than `most`; None: the most that all NICs of a server have together.
    """
    n_parts = Counter(map(kind_of, parts_of(surveyed.fabric)))
    seen: dict[_Mix, list[tuple[int, float, bool]]] = defaultdict(list)
    rates: dict[int, Fraction] = defaultdict(Fraction)
    for server, level in surveyed.fabric.links:
        rates[server] += surveyed.fabric.rate(server, level)
    most = float(max(rates.values(), default=0)) if most is None else most
    for row in surveyed.rows:
        for case in row.cases:
            gst = case.cost.gst
            # A server alone has nothing to wait for; all NICs at once are the most that any step can use.
            bandwidth = 0.0 if gst is None else min(most, 1 / float(gst)) if gst else most
            seen[_mix(case.failures)].append((case.n_like, bandwidth, gst is not None))
    low = connected = known = 0.0
    for mix, cases in seen.items():
        time = 1.0
        for kind, n_dead in zip(KINDS, mix, strict=True):
            u, n = dead_share[kind], n_parts[kind]
            time *= comb(n, n_dead) * u**n_dead * (1 - u) ** (n - n_dead)
        weight = sum(n_like for n_like, _, _ in cases)
        low += time * sum(n_like * bandwidth for n_like, bandwidth, _ in cases) / weight
        connected += time * sum(n_like for n_like, _, is_connected in cases if is_connected) / weight
        known += time
    unknown = max(0.0, 1.0 - known)
    healthy = surveyed.rows[0].cases[0].cost.gst
    healthy_bandwidth = 1 / float(healthy) if healthy else 0.0
    return Expected(low, low + unknown * most, healthy_bandwidth, known, connected, unknown)


def _mix(failures: Iterable[Failure]) -> _Mix:
    counted = Counter(map(kind_of, failures))
    return tuple(counted[kind] for kind in KINDS)


def kind_of(failure: Failure) -> str:
    """Return which of KINDS has failed."""
    if isinstance(failure, ServerFailure):
        return "server"
    return "link" if isinstance(failure, LinkFailure) else "switch"
