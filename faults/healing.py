"""Notices that what was broken works again, and when it has worked long enough to be trusted.

Servers go on beating over NICs that are out of the view. A NIC that is heard again must stay so for a while,
and longer every time it has failed before, lest a flapping cable interrupt the job again and again. Then a
probe must show that the path carries data too, as heartbeats alone may pass where connections stand still.
Pure: times are seconds on one monotonic clock, which the caller reads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bml.faults.detector import MISSED, Link
from bml.topology import Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure

STABLE = 2.0
"""Time for which a part that failed once must be heard before it is used again, in detect_s."""

MOST_STABLE = 64.0
"""The longest such wait, after many failures, in detect_s."""

Pairs = frozenset[tuple[int, int, int]]
"""(observer, peer, level)."""


class Changes(NamedTuple):
    """The outcome of a look at the links: those trusted from now on, those no longer, those to be probed."""

    came: list[Link]
    went: list[Link]
    probes: list[Link]


def stable_s(times_failed: int, detect_s: float) -> float:
    """Return the time to listen to a part that has failed so often; it doubles with every failure."""
    return detect_s * min(STABLE * 2.0 ** max(0, times_failed - 1), MOST_STABLE)


@dataclass(slots=True)
class _Line:
    needed_s: float
    since_s: float | None = None
    last_s: float = 0.0
    asked_s: float | None = None
    proved: bool = False
    trusted: bool = False

    def start(self, since_s: float | None) -> None:
        """Forget what was heard and proved before."""
        self.since_s, self.asked_s, self.proved = since_s, None, False


class Recovery:
    """The heartbeats that one server hears over links that are out of the view.

    `interval_s` is that of heartbeats; a probe that takes longer than `proof_s` (seconds) has failed.
    """

    def __init__(self, interval_s: float, proof_s: float) -> None:
        self._patience_s = MISSED * interval_s
        self._proof_s = proof_s
        self._lines: dict[Link, _Line] = {}

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are listened to, and on which heartbeats are to be sent."""
        return tuple(self._lines)

    @property
    def trusted(self) -> tuple[Link, ...]:
        """The links that have been heard for long enough, carried a probe, and still are heard."""
        return tuple(link for link, line in self._lines.items() if line.trusted)

    def set_links(self, needed_s: Mapping[Link, float]) -> None:
        """Listen to these links from now on, each until it was heard for that long.

        What was heard and proved of one that was listened to before still counts, lest views that follow one
        another closely keep a part out for ever; that it is trusted is told again.
        """
        old, self._lines = self._lines, {}
        for link, seconds in sorted(needed_s.items()):
            line = self._lines[link] = old.get(link) or _Line(seconds)
            line.needed_s, line.trusted = seconds, False

    def heard(self, peer: int, level: int, now: float) -> None:
        """Note a heartbeat; links that are not listened to are ignored."""
        line = self._lines.get((peer, level))
        if line is None:
            return
        if line.since_s is None or now - line.last_s > self._patience_s:
            line.start(now)
        line.last_s = now

    def proved(self, peer: int, level: int) -> None:
        """Note that the probe of this link came back whole; ignored when none was asked for."""
        line = self._lines.get((peer, level))
        if line is not None:
            line.proved = line.asked_s is not None

    def check(self, now: float) -> Changes:
        """Return what has changed; a link is to be probed once it was heard for long enough.

        One whose probe fails is heard for as long again before the next.
        """
        changes = Changes([], [], [])
        for link, line in self._lines.items():
            long_enough = self._heard_long_enough(line, now)
            if long_enough and line.asked_s is None:
                line.asked_s = now
                changes.probes.append(link)
            elif long_enough and not line.proved and now - (line.asked_s or 0.0) > self._proof_s:
                line.start(line.last_s)
            trusted = long_enough and line.proved
            if trusted != line.trusted:
                line.trusted = trusted
                (changes.came if trusted else changes.went).append(link)
        return changes

    def _heard_long_enough(self, line: _Line, now: float) -> bool:
        if line.since_s is None or now - line.last_s > self._patience_s:
            return False
        return line.last_s - line.since_s >= line.needed_s


def listened(fabric: Fabric, server: int, failed: Mapping[str, int], detect_s: float) -> dict[Link, float]:
    """The links of `server` that failures took out although both ends live: link -> how long to listen.

    `failed`: failure -> how often it has happened in this job.
    """
    whole = fabric.without(*(part for part in failed if part.startswith("server:")))
    broken = fabric.without(*failed)
    found: dict[Link, float] = {}
    for level in range(fabric.levels):
        for peer in whole.neighbours(server, level):
            if peer in broken.servers and peer not in broken.neighbours(server, level):
                parts = (
                    LinkFailure(server, level),
                    LinkFailure(peer, level),
                    SwitchFailure(level, fabric.group(server, level)),
                )
                times = max(failed.get(str(part), 0) for part in parts)
                found[peer, level] = stable_s(times, detect_s)
    return found


def healed(
    fabric: Fabric, failures: Iterable[Failure], trusted: Iterable[tuple[int, int, int]]
) -> tuple[Failure, ...]:
    """Find the links and switches among `failures` of the whole `fabric` work again.

    `trusted`: (observer, peer, level) that hear each other for long enough. A part is healed when all pairs
    that it separated, and that nothing else separates, hear each other both ways.
    """
    broken = frozenset(failures)
    pairs = frozenset(trusted)
    lost = tuple(part for part in broken if isinstance(part, ServerFailure))
    return tuple(
        part
        for part in sorted(broken)
        if not isinstance(part, ServerFailure) and _works(fabric.without(*lost), broken, part, pairs)
    )


def _works(fabric: Fabric, broken: frozenset[Failure], part: Failure, pairs: Pairs) -> bool:
    # Pairs that another failure separates too say nothing about this part, unless there are no others.
    alone = _separated(fabric.without(*(broken - {part})), part)
    needed = alone or _separated(fabric, part)
    return bool(needed) and needed <= pairs


def _separated(fabric: Fabric, part: Failure) -> Pairs:
    """The (observer, peer, level) of `fabric` that `part`, a link or a switch, would separate."""
    if isinstance(part, LinkFailure):
        server, level = part.server, part.level
        if server not in fabric.servers:
            return frozenset()
        peers = fabric.neighbours(server, level)
        return frozenset(pair for peer in peers for pair in ((server, peer, level), (peer, server, level)))
    assert isinstance(part, SwitchFailure)
    level = part.level
    return frozenset(
        (server, peer, level)
        for server in fabric.attached(level, part.group)
        for peer in fabric.neighbours(server, level)
    )
