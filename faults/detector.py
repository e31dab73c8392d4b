"""Notices when a neighbour falls silent on a NIC: the failure detector of one server, without any clock.

Heartbeats go to the neighbours of every level over that level's NIC, so that a silent NIC is told from a
silent server. How long a silence may be adapts to what was heard before, after Hayashibara, Défago, Yared,
Katayama: "The φ accrual failure detector", SRDS 2004: a silence t is suspicious when -log10 P(gap > t) ≥ φ,
with gaps normally distributed, that is when t ≥ mean + z(φ) · deviation. `detect_s` bounds it on both sides:
a quiet network is never more impatient than detect_s, a loaded one never more patient than 3 · detect_s. No
silence shorter than `patience_s`, where that is set, is suspicious.

All times are seconds on one monotonic clock, which the caller reads.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import TypeAlias

from bml.topology import UsageError

Link: TypeAlias = tuple[int, int]
"""(peer, level): the neighbour `peer` as seen over this server's NIC on `level`."""

HEARTBEATS_PER_DETECT = 5
"""Heartbeats that are sent in detect_s: four may be lost or late before a peer is suspected."""

MOST_PATIENT = 3.0
"""Upper bound of the silence threshold, in detect_s."""

Z_OF_PHI_8 = 5.612
"""Standard normal quantile of φ = 8: one false suspicion in 10^8 gaps, a conservative setting."""

MISSED = 3.0
"""Heartbeats that may be missed in a row from a peer that counts as heard."""

_WINDOW = 100
_LEAST_GAPS = 5


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What `observer` noticed about `peer` on `level`, and why. `silent_s`: how long the peer was silent.

    `kind` is one of `silence` (heartbeats stayed away), `reset` (a connection broke), `stall` (a connection
    stands still though heartbeats pass), `own-nic` (the observer's own NIC has no carrier; peer = observer),
    `no-answer` (the peer did not answer outside the fabric; level -1). `losing`: for a stall, the server at
    whose NIC segments are lost, if the observer knows.
    """

    observer: int
    peer: int
    level: int
    kind: str
    silent_s: float
    why: str
    losing: int | None = None


@dataclass(slots=True)
class _Line:
    """The state of one link: when it was last heard, the gaps before that, what follows from them."""

    last_s: float
    threshold_s: float
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    suspicion: Suspicion | None = None

    def suspect_at_s(self, patience_s: float) -> float:
        """When the silence becomes suspect. Deadline and check must not round it differently."""
        return self.last_s + max(self.threshold_s, patience_s)


class Detector:
    """The failure detector of server `observer` for its `links`, a set of (peer, level).

    The loop that owns it calls `heard` for anything that arrives over a link (data counts as well), sends
    what `heartbeats_due` returns, reports what `check` returns, and waits no longer than `next_deadline`.
    After a pause of the loop itself (the process was stopped, the machine overloaded) the time of the pause
    is not held against the peers. Raises UsageError when `detect_s` is not positive.
    """

    def __init__(self, observer: int, links: Iterable[Link], detect_s: float, now: float) -> None:
        if not 0 < detect_s < float("inf"):
            raise UsageError(f"detect_s must be a positive number of seconds, it is {detect_s}")
        self.observer = observer
        self.detect_s = detect_s
        self.interval_s = detect_s / HEARTBEATS_PER_DETECT
        self.patience_s = 0.0
        self._lines: dict[Link, _Line] = {}
        self._withdrawn: dict[Link, Suspicion] = {}
        self._last_check_s = now
        self._back_s = -inf
        self._next_heartbeat_s = now
        self.set_links(links, now)

    @property
    def suspected(self) -> tuple[Suspicion, ...]:
        """The suspicions that stand."""
        return tuple(line.suspicion for line in self._lines.values() if line.suspicion)

    def set_links(self, links: Iterable[Link], now: float) -> None:
        """Watch these links from now on, because a new view began.

        What was learnt about a link that stays is kept, but every silence counts from now: a peer may have
        been out of the old view, and silences that began together must end together, for a coordinator
        that gathers what all observers say within a short window. Suspicions belong to the view in which
        they were raised.
        """
        self._forgive_own_pause(now)
        old = self._lines
        self._lines = {link: old.get(link) or _Line(now, self.detect_s) for link in sorted(set(links))}
        for line in self._lines.values():
            line.suspicion, line.last_s = None, now
        self._withdrawn.clear()

    def heard(self, peer: int, level: int, now: float) -> None:
        """Note that something arrived from the peer over that level; ignored when it is not watched."""
        self._forgive_own_pause(now)
        line = self._lines.get((peer, level))
        if line is None or now < line.last_s:
            return
        gap_s, line.last_s = now - line.last_s, now
        if line.suspicion:
            self._withdrawn[peer, level], line.suspicion = line.suspicion, None
        # Data arrives between heartbeats; its short gaps say nothing about how late a heartbeat can be.
        if gap_s >= self.interval_s / 2:
            line.gaps.append(gap_s)
            line.threshold_s = self._threshold_s(line.gaps)

    def hears(self, peer: int, level: int, now: float) -> bool:
        """Whether the peer was heard over that level within the last few heartbeats."""
        line = self._lines.get((peer, level))
        return line is not None and line.suspicion is None and now - line.last_s <= MISSED * self.interval_s

    def delays_s(self) -> dict[int, float]:
        """By level, by how much the latest of the last heartbeats of any peer was late, in seconds."""
        found: dict[int, float] = {}
        for (_, level), line in self._lines.items():
            latest_s = max(line.gaps, default=0.0) - self.interval_s
            found[level] = max(found.get(level, 0.0), latest_s)
        return found

    def was_away(self, now: float) -> bool:
        """Whether its loop has not run for more than detect_s until now, or an interval ago at most."""
        self._forgive_own_pause(now)
        return now - self._back_s <= self.interval_s

    def heartbeats_due(self, now: float) -> list[Link]:
        """The links on which a heartbeat is to be sent now: all of them, once an interval, else none."""
        if now < self._next_heartbeat_s:
            return []
        late = now - self._next_heartbeat_s >= self.interval_s
        self._next_heartbeat_s = (now if late else self._next_heartbeat_s) + self.interval_s
        return list(self._lines)

    def check(self, now: float) -> list[Suspicion]:
        """The links that became suspect; each is returned once, until it is heard or a new view begins."""
        self._forgive_own_pause(now)
        self._last_check_s = now
        late = [link for link, line in self._lines.items() if now >= line.suspect_at_s(self.patience_s)]
        return self._raise(late, self.patience_s, now)

    def deaf(self, level: int, besides: int, now: float) -> list[Suspicion]:
        """Suspicions of all neighbours on `level` but `besides`, if patience alone lets their silence pass.

        None if any of them was heard lately: then this server's own NIC works.
        """
        self._forgive_own_pause(now)
        others = {link: line for link, line in self._lines.items() if link[1] == level and link[0] != besides}
        if any(now < line.suspect_at_s(0.0) for line in others.values()):
            return []
        return self._raise(others, 0.0, now)

    def _raise(self, links: Iterable[Link], patience_s: float, now: float) -> list[Suspicion]:
        """Suspect those of these links that are not suspected yet."""
        raised = []
        for peer, level in links:
            line = self._lines[peer, level]
            if line.suspicion is None:
                allowed_s = max(line.threshold_s, patience_s)
                line.suspicion = self._suspect(peer, level, now - line.last_s, allowed_s)
                self._withdrawn.pop((peer, level), None)
                raised.append(line.suspicion)
        return raised

    def take_withdrawn(self) -> list[Suspicion]:
        """The suspicions that were raised and are withdrawn because the peer was heard again; each once."""
        taken = list(self._withdrawn.values())
        self._withdrawn.clear()
        return taken

    def next_deadline(self, now: float) -> float:
        """The time (same clock, never before `now`) when heartbeats are due or a silence becomes suspect."""
        patience_s = self.patience_s
        silences = [line.suspect_at_s(patience_s) for line in self._lines.values() if line.suspicion is None]
        return max(now, min([self._next_heartbeat_s, *silences]))

    def _forgive_own_pause(self, now: float) -> None:
        """Take the time in which this loop did not run off the silence of the others.

        What arrived meanwhile is still unread. After a long pause every line starts afresh; after a short one
        an interval of it counts, lest a loop that is always a little late never suspects a peer.
        """
        gap_s = now - self._last_check_s
        if gap_s <= self.interval_s:
            return
        self._last_check_s = now
        if gap_s > self.detect_s:
            self._back_s = now
        forgiven_s = gap_s if gap_s > self.detect_s else gap_s - self.interval_s
        for line in self._lines.values():
            line.last_s = now if gap_s > self.detect_s else min(now, line.last_s + forgiven_s)

    def _threshold_s(self, gaps: deque[float]) -> float:
        """Mean + z(φ) · deviation of the gaps, within detect_s and 3 · detect_s; detect_s until 5 gaps."""
        if len(gaps) < _LEAST_GAPS:
            return self.detect_s
        if max(gaps) * (1 + Z_OF_PHI_8 / 2) <= self.detect_s:
            return self.detect_s  # a deviation is half of the range at most: no need to find it
        mean_s = sum(gaps) / len(gaps)
        deviation_s = sqrt(sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps))
        return min(max(self.detect_s, mean_s + Z_OF_PHI_8 * deviation_s), MOST_PATIENT * self.detect_s)

    def _suspect(self, peer: int, level: int, silent_s: float, threshold_s: float) -> Suspicion:
        why = (
            f"server {self.observer} heard nothing from server {peer} on level {level} for {silent_s:.3f} s "
            f"(allowed {threshold_s:.3f} s, detect_s {self.detect_s:g} s)"
        )
        return Suspicion(self.observer, peer, level, "silence", silent_s, why)
