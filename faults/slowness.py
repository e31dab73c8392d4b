"""Finds slow NICs from what senders measured: the fewest that explain every port that moves too little.

A NIC has two ports, out and in, as one direction may be slow alone. What a port carried over its connections,
by the time in which they were busy, is at most what it can carry; connections that were busy much longer than
the others waited for their other end, so the port is judged by the rest of them, if that speaks for it. All
is compared with the upper quartile of all ports, in units of their nominal rates: where everything is slow,
nothing is, and other trees would gain nothing.

A port that is too slow is explained by itself or by the other ends of its connections. A connection that its
other end judges itself by, and well, shows that end at work, and nothing else. One that its other end leaves
out puts the blame on the port. Of two ends that are both too slow, the NIC is blamed that explains most of
them (then the one that was blamed before, then that of the lower server). A port that is slow, but busy no
longer than most, delays nobody and is not blamed, but where another NIC is: trees round that one alone would
wait for it.

Equivalent cases, in which no observation can tell the truth: the two NICs of a switch with two live ports;
the last NIC of a switch whose other NICs are all slow, so that the switch is said to be slow.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple, TypeAlias

from bml.topology import Fabric, Link

MOST_HALVINGS = 5
"""The slowest rate that is planned with is 1/32: trees that use a NIC less than that are hardly found."""

SLOW_SHARE = 0.6
"""A port is slow that moves less than this share of what is planned; a wander of ±20 % leaves 0.67 of it."""

LONGER = 1.15
"""A slow port matters if it is busy so many times as long as most ports are, …"""

LONGEST = 2 / 3
"""… and at least for this part of the time of the port that is busy longest: others wait for that one."""

_ROUNDED_UP = 0.1
"""A share is rounded up to a power of two by at most so many halvings, 7 %: it is measured no better."""

_DECAY = 0.5
_FORGOTTEN = _DECAY**8
"""What is left of a measurement when it is dropped. Where a slow NIC makes steps longer than rounds, the
others are busy, and measured, in some rounds only."""

_CHANGED = 0.75
"""The latest round alone counts if a port moved less than this part of what it moved in all of them: it has
become slow since. Rates that are shared with other traffic vary more slowly than that."""

_REMEMBERED = 0.9
"""Of what most ports moved in the round before: in this one perhaps only slow ones were busy."""

Path: TypeAlias = tuple[int, int, int]
"""(sender, receiver, level): one direction of a connection."""


class Moved(NamedTuple):
    """What a path carried: `nbytes` within `busy_s` seconds."""

    nbytes: float
    busy_s: float


class Best(NamedTuple):
    """The `paths` that a port is judged by: `nbytes` in the seconds for which the longest one was busy."""

    paths: frozenset[Path]
    nbytes: float
    busy_s: float

    @property
    def per_s(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.busy_s


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """One direction of a NIC."""

    server: int
    level: int
    out: bool

    @property
    def nic(self) -> Link:
        """The NIC."""
        return self.server, self.level


class Throughput:
    """What all paths of a fabric carried, round by round: earlier rounds count half as much each."""

    def __init__(self) -> None:
        self._moved: dict[Path, Moved] = {}
        self._weight: dict[Path, float] = {}
        self._latest: Mapping[Path, Moved] = {}
        self._usual = 0.0
        self._over_s = 0.0

    def add(self, measured: Mapping[Path, Moved], over_s: float) -> None:
        """Add a round, which lasted `over_s` seconds."""
        self._over_s = _DECAY * self._over_s + over_s
        self._latest = dict(measured)
        for path in [*self._moved]:
            self._weight[path] *= _DECAY
            self._moved[path] = Moved(*(_DECAY * each for each in self._moved[path]))
            if self._weight[path] <= _FORGOTTEN and path not in measured:
                del self._moved[path], self._weight[path]
        for path, moved in measured.items():
            old = self._moved.get(path, Moved(0.0, 0.0))
            self._moved[path] = Moved(old.nbytes + moved.nbytes, old.busy_s + moved.busy_s)
            self._weight[path] = 1.0

    def clear(self) -> None:
        """Forget the paths: from now on other bytes go other ways."""
        self._moved.clear()
        self._weight.clear()
        self._over_s = 0.0

    def judge(self, fabric: Fabric, planned: Mapping[Link, int]) -> "Judgement | None":
        """Judge the NICs of the live `fabric`, which has its nominal rates; None: too little is known.

        `planned`: NIC -> by how many halvings of its nominal rate it is planned with now, if it is by any.
        """
        alive = {nic for nic in fabric.links if fabric.neighbours(*nic)}
        ports = _ports(self._moved, alive)
        if len({port.nic for port in ports}) * 2 < len(alive):
            return None
        rates = _rates(ports, fabric)
        self._usual = max(_quantile(rates.values(), 0.75), _REMEMBERED * self._usual)
        if not self._usual:
            return None  # nothing moved, as in an outage
        shares = {port: rate / self._usual for port, rate in rates.items()}
        latest = {
            port: rate / self._usual for port, rate in _rates(_ports(self._latest, alive), fabric).items()
        }
        now = {port: share for port, share in latest.items() if share < _CHANGED * shares[port]}
        return Judgement(fabric, ports, shares, shares | now, planned, self._over_s)


class Judgement:
    """The NICs at a time, of which the last `over_s` seconds are known.

    `shares`: port -> what it moves, in units of what others of its rate move.
    `now`: the same, but of the latest round alone where that was far less.
    """

    def __init__(
        self,
        fabric: Fabric,
        ports: Mapping[Port, Best],
        shares: Mapping[Port, float],
        now: Mapping[Port, float],
        planned: Mapping[Link, int],
        over_s: float,
    ):
        self.shares = shares
        self._now = now
        self._over_s = over_s
        self._fabric = fabric
        self._planned = planned
        self._ports = ports
        busy_s = [own.busy_s for own in ports.values()]
        self._long_s = max(LONGER * _quantile(busy_s, 0.25), LONGEST * max(busy_s))

    def slower(self) -> dict[Link, int]:
        """The NICs that are slower than planned, and delay others -> halvings of their nominal rate."""
        return self._explain({port for port in self._ports if self._is_low(port) and self._delays(port)})

    def slower_anyway(self) -> dict[Link, int]:
        """Those of `slower`, and others that are slower than planned but delay nobody yet.

        Not on the same switch: there NICs may look slow because all that they carry goes to a slow one.
        """
        first = self.slower()
        busy = {(level, self._fabric.group(server, level)) for server, level in first}
        low = {port for port in self._ports if self._is_low(port)}
        others = self._explain(
            {port for port in low if (port.level, self._fabric.group(*port.nic)) not in busy}
        )
        return others | first

    def _explain(self, low: set[Port]) -> dict[Link, int]:
        """The fewest NICs that explain why these ports are slow; see the module's text."""
        guilty: set[Link] = set()
        pairs: set[tuple[Link, Link]] = set()
        for port in low:
            for path in self._ports[port].paths:
                other = _ends(path)[port.out]
                if path not in self._ports[other].paths:
                    guilty.add(port.nic)
                elif other in low:
                    pairs.add((port.nic, other.nic))
        open_pairs = {pair for pair in pairs if not guilty.intersection(pair)}
        guilty |= self._cover(open_pairs)
        found = {nic: self._halvings(nic, low) for nic in self._whole_switches(guilty, low)}
        for nics in self._switches():  # a slow switch is as slow for all its ports
            if nics <= found.keys():
                found |= dict.fromkeys(nics, max(found[nic] for nic in nics))
        return {nic: halvings for nic, halvings in found.items() if halvings > self._planned.get(nic, 0)}

    def share(self, nic: Link) -> float | None:
        """The share of its nominal rate that a NIC moves, in its slower direction; None: it is not known.

        Of a NIC that is planned slow one direction alone may say that it is slow, but not that it is faster.
        """
        known = [self.shares[port] for port in _both(nic) if port in self.shares]
        least = min(known, default=None)
        if least is not None and len(known) < 2 and halvings_of(least) < self._planned.get(nic, 0):
            return None
        return least

    def busy(self, nic: Link) -> float:
        """The part of the time for which the slower direction of a NIC was busy, 0 to 1."""
        busy_s = [self._ports[port].busy_s for port in _both(nic) if port in self._ports]
        return min(1.0, max(busy_s, default=0.0) / self._over_s)

    def _is_low(self, port: Port) -> bool:
        """Whether the port moves too little of what is planned with it."""
        return self.shares[port] < SLOW_SHARE * 2.0 ** -self._planned.get(port.nic, 0)

    def _delays(self, port: Port) -> bool:
        """Whether others wait for the port."""
        return self._ports[port].busy_s >= self._long_s

    def _cover(self, open_pairs: set[tuple[Link, Link]]) -> set[Link]:
        """Greedily the NICs that explain most pairs of slow ends: a pair is explained by either."""
        chosen: set[Link] = set()
        while open_pairs:
            explains: defaultdict[Link, int] = defaultdict(int)
            for pair in open_pairs:
                for nic in pair:
                    explains[nic] += 1
            best = min(explains, key=lambda nic: (-explains[nic], -self._planned.get(nic, 0), nic))
            chosen.add(best)
            open_pairs = {pair for pair in open_pairs if best not in pair}
        return chosen

    def _whole_switches(self, guilty: set[Link], low: set[Port]) -> set[Link]:
        """The guilty, and the last NIC of each switch of which all NICs move too little."""
        found = set(guilty)
        for nics in self._switches():
            left = nics - guilty
            if len(left) == 1 and any(port.nic in left for port in low):
                found |= left
        return found

    def _switches(self) -> Iterator[set[Link]]:
        """The live NICs of each switch that has more than two of them."""
        for level, group in self._fabric.switches:
            nics = {(server, level) for server in self._fabric.attached(level, group)}
            if len(nics) > 2:
                yield nics

    def _halvings(self, nic: Link, low: set[Port]) -> int:
        return halvings_of(min(self._now[port] for port in _both(nic) if port in low))


def halvings_of(share: float) -> int:
    """The power of two below this share of the nominal rate, or just above it: 0.1 is 1/16, of 4 halvings.

    No share that is not slow, by SLOW_SHARE, is halved.
    A NIC that is planned faster than it is makes every step late by that factor. Of one that is planned half
    as fast others carry the rest: on `bcube:3x2` a step takes at most 1.5 % longer, 5 % for a whole switch.
    """
    if share >= SLOW_SHARE:
        return 0
    return min(MOST_HALVINGS, ceil(-log2(max(share, 2.0**-16)) - _ROUNDED_UP))


def slowed(fabric: Fabric, halvings: Mapping[Link, int]) -> Fabric:
    """Return the fabric with the rates of these NICs halved so many times. Raises UsageError for no NIC."""
    return fabric.with_rates({nic: fabric.rate(*nic) / 2**times for nic, times in halvings.items()})


def in_words(fabric: Fabric, before: Mapping[Link, int], after: Mapping[Link, int]) -> str:
    """The changes of rates, such as "NIC 4/0 runs at 1/8" or "switch 0/1 runs at 1/4"."""
    left = {
        nic: after.get(nic, 0) for nic in sorted({*before, *after}) if before.get(nic, 0) != after.get(nic, 0)
    }
    said = []
    for level, group in fabric.switches:
        nics = [(server, level) for server in fabric.attached(level, group)]
        if len(nics) > 2 and all(nic in left for nic in nics) and len({left[nic] for nic in nics}) == 1:
            said.append(_at(f"switch {level}/{group}", left[nics[0]]))
            left = {nic: halvings for nic, halvings in left.items() if nic not in nics}
    said += [_at(f"NIC {server}/{level}", halvings) for (server, level), halvings in left.items()]
    return ", ".join(said)


def _at(part: str, halvings: int) -> str:
    return f"{part} runs at 1/{2**halvings}" if halvings else f"{part} runs at its full rate again"


def _both(nic: Link) -> tuple[Port, Port]:
    return Port(*nic, True), Port(*nic, False)


def _ends(path: Path) -> tuple[Port, Port]:
    sender, receiver, level = path
    return Port(sender, level, True), Port(receiver, level, False)


def _ports(moved: Mapping[Path, Moved], alive: Set[Link]) -> dict[Port, Best]:
    """What the ports of these NICs are judged by."""
    own: defaultdict[Port, list[Path]] = defaultdict(list)
    for path in sorted(moved):
        ends = _ends(path)
        if all(port.nic in alive for port in ends):
            for port in ends:
                own[port].append(path)
    return {port: _best(each, moved) for port, each in own.items()}


def _rates(ports: Mapping[Port, Best], fabric: Fabric) -> dict[Port, float]:
    """Bytes per second of each port, in units of its nominal rate."""
    return {port: own.per_s / float(fabric.rate(*port.nic)) for port, own in ports.items()}


def _best(own: Iterable[Path], moved: Mapping[Path, Moved]) -> Best:
    """Judge a port by some of its connections, those that took the least time, at its best.

    How far the busy times of connections overlap is not known; they are taken to overlap wholly, so that a
    port that is well does not look slow.
    """
    best, nbytes, taken = Best(frozenset(), 0.0, 1.0), 0.0, list[Path]()
    for path in sorted(own, key=lambda each: moved[each].busy_s):
        nbytes += moved[path].nbytes
        taken.append(path)
        if nbytes >= best.per_s * moved[path].busy_s:
            best = Best(frozenset(taken), nbytes, moved[path].busy_s)
    return best


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
