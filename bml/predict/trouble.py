"""Which part is about to fail: trends in samples that a server takes once a second. Times are arguments.

A sample alone says little: all that a loaded machine does is late, and a network that is full loses packets.
So a NIC is compared with its own past and with the server's other NICs at the same time, and only what lasts
is a trend: `LASTING` of the last `LOOKED_AT` samples. A warning ends when nothing was seen for QUIET_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

LASTING, LOOKED_AT = 3, 5
QUIET_S = 30.0  # longer than the gaps between signs of trouble that goes on
RESENT_SHARE = 0.01
"""Share of the segments sent again from which on a NIC may be failing, …"""
RESENT_TIMES = 4.0
"""… if it is so many times that of the server's other NICs, and of its own past."""
LEAST_SEGMENTS = 50
"""In a sample with fewer segments one that is lost says nothing."""
LATE_INTERVALS, LATE_TIMES = 2.0, 2.0
"""Intervals that may pass between two heartbeats, and how many times as long as on other NICs, and before."""
LEAST_BUSY_S = 0.1
"""A NIC that was busy for less of a second says nothing of its rate."""
FALLEN_SHARE = 0.45
"""Of the usual rate of a NIC, and of what the other NICs keep of theirs; two connections may share a NIC."""
FLAPS, FLAPS_S = 2, 60.0
"""Times that the carrier may be lost within so many seconds."""
STALLED_SHARE = 0.1
"""Share of the time in which some process waited for memory (PSI), …"""
SWAPPED_PAGES_S = 500.0
"""… or pages a second that are written to swap."""
FULL_S = 30.0
"""Memory that will be full within so many seconds, as it is filling now, …"""
FREE_SHARE = 0.25
"""… if no more of it is free than this share of the most that was: a program that loads its data is none."""
HOT_C, HOTTER_C = 10.0, 1.0
"""Degrees below the temperature at which the machine stops, and by which it gets hotter in five samples."""
NONE_SLOW: Mapping[int, int] = MappingProxyType({})
_PAST = 20
_MIB = 1 << 20


class PeerSample(NamedTuple):
    """What one connection did in a second; None where that is not known.

    `resent` of `sent` segments; `late_s`: the longest time between two heartbeats; `nbytes` went in the
    `busy_s` seconds in which bytes waited.
    """

    sent: int = 0
    resent: int = 0
    late_s: float | None = None
    nbytes: int = 0
    busy_s: float = 0.0


class HostSample(NamedTuple):
    """What the machine says: shares of 0 to 1, bytes, pages a second, errors since boot, degrees Celsius.

    `headroom_c` is how far the hottest sensor is from the temperature at which the machine stops.
    """

    stalled_share: float | None = None
    swapped_pages_s: float | None = None
    free_nbytes: float | None = None
    corrected_errors: int | None = None
    headroom_c: float | None = None


@dataclass(frozen=True)
class Warning:
    """An early warning of server `server`; `level` is that of its NIC, None: the machine.

    `kind` is resent, late, falling, slow, flaps, memory, filling, errors or heat; `since_s` is on the
    caller's clock.
    """

    server: int
    level: int | None
    kind: str
    since_s: float
    text: str
    evidence: Mapping[str, float]

    @property
    def part(self) -> str:
        """The part in words: `NIC 4/0`, or `server 4`."""
        return f"server {self.server}" if self.level is None else f"NIC {self.server}/{self.level}"

    def shown(self, now: float) -> dict[str, Any]:
        """Return it ready for JSON, with its age in seconds."""
        return {
            "server": self.server,
            "level": self.level,
            "part": self.part,
            "kind": self.kind,
            "for_s": round(now - self.since_s, 1),
            "text": self.text,
            "evidence": {name: round(value, 6) for name, value in self.evidence.items()},
        }


@dataclass
class _Signs:
    """How often a sign was seen in the last samples."""

    seen: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))
    last_s: float = 0.0

    def add(self, sign: bool, now: float) -> bool:
        self.seen.append(sign)
        if sign:
            self.last_s = now
        return sum(self.seen) >= LASTING


class Trouble:
    """The warnings of `server`. `interval_s` is the time between two heartbeats.

    `sample` is given what was seen since the last sample, and returns new warnings; `warnings` are those that
    stand.
    """

    def __init__(self, server: int, interval_s: float):
        self.warnings: dict[tuple[int, int | None, str], Warning] = {}
        self._server = server
        self._interval_s = interval_s
        self._resent: dict[tuple[int, int], deque[float]] = {}
        self._lateness: dict[int, deque[float]] = {}
        self._rates: dict[int, deque[float]] = {}
        self._epoch = 0
        self._signs: dict[tuple[int, int | None, str], _Signs] = {}
        self._flaps: dict[int, deque[float]] = {}
        self._host: deque[tuple[float, HostSample]] = deque(maxlen=_PAST)
        self._most_free = 0.0
        self._new: list[Warning] = []

    def sample(
        self,
        peers: Mapping[tuple[int, int], PeerSample],
        lost_carriers: Mapping[int, int],
        host: HostSample,
        epoch: int,
        now: float,
        slow: Mapping[int, int] = NONE_SLOW,
    ) -> list[Warning]:
        """Take in a second: (peer, level) -> its connection, level -> how often it lost its carrier since.

        In another view, of number `epoch`, other trees carry other bytes; `slow`: level -> by how many
        halvings of its rate the view plans with this server's NIC, of those that it plans slow.
        """
        self._new = []
        if epoch != self._epoch:
            self._epoch = epoch
            self._rates.clear()
            self._lateness.clear()
        self._look_at_resent(peers, now)
        self._look_at_late(peers, now)
        self._look_at_rates(peers, now)
        for level, times in lost_carriers.items():
            self._look_at_carrier(level, times, now)
        for level in {level for _, level in peers}:
            said = f"it runs at 1/{2 ** slow.get(level, 0)} of its rate"
            evidence = {"share": 2.0 ** -slow.get(level, 0)}
            self._sign((self._server, level, "slow"), level in slow, said, evidence, now, True)
        self._host.append((now, host))
        self._look_at_host(host, now)
        for key in [key for key in self.warnings if now - self._signs[key].last_s > QUIET_S]:
            del self.warnings[key]
        return self._new

    def recent(self, now: float) -> list[Warning]:
        """The warnings of which a sign was seen in the last samples."""
        return [each for key, each in self.warnings.items() if now - self._signs[key].last_s < LOOKED_AT]

    # --- connections -----------------------------------------------------------------------------

    def _look_at_resent(self, peers: Mapping[tuple[int, int], PeerSample], now: float) -> None:
        """Segments that were sent again; those of a sample too short to tell count with the next."""
        shares = {
            link: each.resent / each.sent for link, each in peers.items() if each.sent >= LEAST_SEGMENTS
        }
        bad = {}
        for link, share in shares.items():
            past = self._resent.setdefault(link, deque(maxlen=_PAST))
            beside = [each for other, each in shares.items() if other[1] != link[1]]
            # A NIC without others beside it has its own past alone; while that is short, it says nothing.
            usual = median(past) if len(past) >= LASTING else 0.0 if beside else inf
            others = _median(beside)
            if share >= RESENT_SHARE and share >= RESENT_TIMES * max(usual, others):
                bad[link] = share
            else:
                past.append(share)
        self._blame(bad, shares, now)

    def _look_at_late(self, peers: Mapping[tuple[int, int], PeerSample], now: float) -> None:
        """A NIC is late if all that comes over it is: a single peer may be busy, or wait for a core.

        If nothing comes over other NICs, it may be this server that is busy.
        """
        late = {link: each.late_s for link, each in peers.items() if each.late_s is not None}
        for level, own in _by_level(late).items():
            beside = [each for link, each in late.items() if link[1] != level]
            late_s = min(own)
            past = self._lateness.setdefault(level, deque(maxlen=_PAST))
            usual_s = median(past) if len(past) >= LOOKED_AT else inf
            bad = (
                len(own) > 1
                and bool(beside)
                and late_s >= LATE_INTERVALS * self._interval_s
                and late_s >= LATE_TIMES * max(_median(beside), usual_s)
            )
            if not bad:
                past.append(late_s)
            said = f"between heartbeats over it pass {late_s:.2f} s"
            self._sign((self._server, level, "late"), bad, said, {"late_s": late_s}, now)

    def _look_at_rates(self, peers: Mapping[tuple[int, int], PeerSample], now: float) -> None:
        """What a NIC sends while bytes wait, by what it sent before: how its connections share it varies."""
        kept: dict[int, float] = {}
        for level in {level for _, level in peers}:
            rate = _best_rate([each for link, each in peers.items() if link[1] == level])
            if rate is None:
                continue
            rates = self._rates.setdefault(level, deque(maxlen=_PAST))
            if len(rates) >= LOOKED_AT:
                kept[level] = rate / median(rates)
            if kept.get(level, 1.0) >= FALLEN_SHARE:
                rates.append(rate)
        for level, share in kept.items():
            others = _median((each for other, each in kept.items() if other != level), 1.0)
            bad = share < FALLEN_SHARE * min(1.0, others)
            said = f"it carries {share:.0%} of what it did"
            self._sign((self._server, level, "falling"), bad, said, {"share": share}, now)

    def _blame(
        self,
        bad: Mapping[tuple[int, int], float],
        known: Mapping[tuple[int, int], float],
        now: float,
    ) -> None:
        """Blame this server's own NIC if most of its connections are bad, else the NICs at the other ends."""
        parts: dict[tuple[int, int], float] = {}
        for level in {level for _, level in known}:
            there = [link for link in known if link[1] == level]
            found = [link for link in there if link in bad]
            if len(found) * 2 > len(there):
                parts[self._server, level] = median(bad[link] for link in found)
            else:
                parts |= {link: bad[link] for link in found}
            for part in ((self._server, level), *there):
                share = parts.get(part, 0.0)
                said = f"{share:.1%} of the segments over it were sent again"
                self._sign((*part, "resent"), part in parts, said, {"share": share}, now)

    def _look_at_carrier(self, level: int, times: int, now: float) -> None:
        lost = self._flaps.setdefault(level, deque())
        lost.extend([now] * times)
        while lost and now - lost[0] > FLAPS_S:
            lost.popleft()
        said = f"it lost its carrier {len(lost)} times within {FLAPS_S:g} s"
        self._sign((self._server, level, "flaps"), len(lost) >= FLAPS, said, {"flaps": len(lost)}, now, True)

    # --- the machine -----------------------------------------------------------------------------

    def _look_at_host(self, host: HostSample, now: float) -> None:
        me = self._server
        stalled, swapped = host.stalled_share or 0.0, host.swapped_pages_s or 0.0
        said = f"processes wait for memory {stalled:.0%} of the time, {swapped:.0f} pages a second go to swap"
        bad = stalled >= STALLED_SHARE or swapped >= SWAPPED_PAGES_S
        self._sign(
            (me, None, "memory"), bad, said, {"stalled_share": stalled, "swapped_pages_s": swapped}, now
        )
        full_s = self._full_in_s()
        if full_s is not None:
            said = f"its memory is full in {full_s:.0f} s, if it fills as it does now"
            free = host.free_nbytes or 0.0
            self._most_free = max(self._most_free, free)
            bad = full_s <= FULL_S and free <= FREE_SHARE * self._most_free
            evidence = {"full_in_s": full_s, "free_mib": free / _MIB}
            self._sign((me, None, "filling"), bad, said, evidence, now)
        errors = [each.corrected_errors for _, each in self._host if each.corrected_errors is not None]
        if errors:
            more = errors[-1] - errors[0]
            said = f"its memory corrected {more} errors in the last {len(errors)} s"
            self._sign((me, None, "errors"), more >= 2, said, {"errors": more}, now)
        if host.headroom_c is not None:
            said = f"it is {host.headroom_c:.0f} °C below the temperature at which it stops"
            bad = host.headroom_c <= HOT_C and self._cooler_c() >= HOTTER_C
            self._sign((me, None, "heat"), bad, said, {"headroom_c": host.headroom_c}, now)

    def _cooler_c(self) -> float:
        """How much cooler the machine was some samples ago, in degrees."""
        known = [each.headroom_c for _, each in self._host if each.headroom_c is not None][-LOOKED_AT:]
        return known[0] - known[-1]

    def _full_in_s(self) -> float | None:
        """When memory is full, by the rate at which it fills; None: it does not, or too little is known."""
        known = [(at, each.free_nbytes) for at, each in self._host if each.free_nbytes is not None]
        if len(known) < LOOKED_AT:
            return None
        (first_s, first), (last_s, last) = known[-LOOKED_AT], known[-1]
        # In every one of these seconds: a program that takes its memory at once and stays is none.
        steadily = all(b[1] < a[1] for a, b in zip(known[-LOOKED_AT:], known[-LOOKED_AT + 1 :], strict=False))
        return last / (first - last) * (last_s - first_s) if steadily else FULL_S * 100

    def _sign(
        self,
        key: tuple[int, int | None, str],
        seen: bool,
        text: str,
        evidence: Mapping[str, float],
        now: float,
        at_once: bool = False,
    ) -> None:
        if not seen and key not in self._signs:
            return
        signs = self._signs.setdefault(key, _Signs())
        lasts = signs.add(seen, now) or (at_once and seen)
        if seen and (lasts or key in self.warnings):
            before = self.warnings.get(key)
            made = Warning(*key, before.since_s if before else now, text, evidence)
            self.warnings[key] = made
            if before is None:
                self._new.append(made)


def _best_rate(own: list[PeerSample]) -> float | None:
    """Bytes per second of the connections of a NIC that show it at its best: others wait for their peers.

    None: too few were busy for long enough, so that it may be a peer that is slow. See bml.faults.slowness.
    """
    if sum(each.busy_s >= LEAST_BUSY_S for each in own) * 2 <= len(own):
        return None
    best, nbytes = None, 0
    for each in sorted(own, key=lambda sample: sample.busy_s):
        nbytes += each.nbytes
        if each.busy_s >= LEAST_BUSY_S:
            best = max(best or 0.0, nbytes / each.busy_s)
    return best


def _by_level(values: Mapping[tuple[int, int], float]) -> dict[int, list[float]]:
    """The values of the connections of each level."""
    return {level: [each for link, each in values.items() if link[1] == level] for _, level in values}


def _median(values: Iterable[float], default: float = 0.0) -> float:
    known = list(values)
    return median(known) if known else default
