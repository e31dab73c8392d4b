"""The watch of one server on its neighbours: heartbeats go out, suspicions and recoveries are reported."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from bml.faults import Detector, Suspicion
from bml.faults.healing import Recovery, listened
from bml.faults.stalls import Flow, Stalls
from bml.faults.throughput import Meter, window_s
from bml.protocol.server.events import (
    Heartbeat,
    Instruction,
    LossyNics,
    OwnNicLost,
    Probe,
    Proved,
    StoodIn,
    Tell,
)
from bml.protocol.wire import messages as msg
from bml.topology import Fabric

Links = frozenset[tuple[int, int]]


def links_of(fabric: Fabric, server: int) -> Links:
    """The (peer, level) of all neighbours of a server."""
    levels = range(fabric.levels)
    return frozenset((peer, level) for level in levels for peer in fabric.neighbours(server, level))


class Watch:
    """The ears of `server` on the healthy `fabric`; see bml.faults.detector, .stalls and .healing."""

    def __init__(self, server: int, fabric: Fabric, detect_s: float, now: float):
        self.links: Links = frozenset()
        self._server = server
        self._fabric = fabric
        self._detector = Detector(server, (), detect_s, now)
        self._stalls = Stalls(detect_s)
        self._recovery = Recovery(self._detector.interval_s, proof_s=detect_s)
        self._meter = Meter(window_s(detect_s), now)
        self._epoch = 0
        self._suspicions: dict[tuple[int, int], msg.Suspect] = {}
        self._lost_at: dict[tuple[int, int], float] = {}
        self._losing: frozenset[tuple[int, int]] = frozenset()
        self._held_at: dict[int, float] = {}
        """When the stand-in of a peer was heard last."""
        self._told_held_at: dict[int, float] = {}

    @property
    def suspects(self) -> bool:
        """Whether this server suspects a neighbour, or its own NIC."""
        return bool(self._suspicions)

    @property
    def suspicions(self) -> tuple[msg.Suspect, ...]:
        """All that this server suspects."""
        return tuple(self._suspicions.values())

    def heartbeat_delays_s(self) -> dict[int, float]:
        """See Detector.delays_s."""
        return self._detector.delays_s()

    def next_deadline(self, now: float) -> float:
        """When, at the latest, `tick` is due."""
        return self._detector.next_deadline(now)

    def set_view(self, view: msg.View, links: Links, now: float) -> None:
        """Watch the links of a new view, and listen on those that are out of it."""
        self.links = links
        self._detector.set_links(links, now)
        self._stalls = Stalls(self._detector.detect_s)
        self._meter.restart(now)
        self._epoch = view.epoch
        self._suspicions.clear()
        self._lost_at.clear()
        failed = dict.fromkeys(view.failures, 1) | dict(view.failed)
        standing = {part: times for part, times in failed.items() if part in view.failures}
        self._recovery.set_links(listened(self._fabric, self._server, standing, self._detector.detect_s))

    def be_patient(self, for_s: float) -> None:
        """Tolerate so many seconds of silence before they are suspicious; 0: the detector decides alone."""
        self._detector.patience_s = for_s

    def heard(self, peer: int, level: int, now: float) -> None:
        """A sign of life of (peer, level)."""
        self._detector.heard(peer, level, now)
        self._recovery.heard(peer, level, now)

    def flows(self, flows: Mapping[tuple[int, int], Flow], now: float) -> None:
        """The kernel's state of the connections; those that are not watched are ignored."""
        watched = {link: flow for link, flow in flows.items() if link in self.links}
        self._stalls.look(watched, now)
        self._meter.look(watched)

    def handle(self, event: Proved | OwnNicLost | LossyNics | StoodIn, now: float) -> list[Instruction]:
        """Take in what was found out about NICs. This call, or the next ticks, tell the coordinator."""
        match event:
            case Proved(peer, level):
                self._recovery.proved(peer, level)
            case OwnNicLost(level, why):
                return [self.suspect(self._server, level, "own-nic", 0.0, why)]
            case LossyNics(nics):
                self._losing = frozenset(nics)
            case StoodIn(peer, level) if (peer, level) in self.links:
                self._held_at[peer] = now
                if now - self._told_held_at.get(peer, -inf) >= self._detector.detect_s / 2:
                    self._told_held_at[peer] = now
                    return [Tell(msg.Held(self._server, peer, level))]
        return []

    def tick(self, now: float) -> list[Heartbeat | Tell | Probe]:
        """Heartbeats and probes that are due, and suspicions and recoveries since the last tick."""
        done: list[Heartbeat | Tell | Probe] = []
        heartbeats = self._detector.heartbeats_due(now)
        if heartbeats or not self.links:
            done += [Heartbeat(peer, level) for peer, level in (*heartbeats, *self._recovery.links)]
        done += map(self._silence, self._detector.check(now))
        for gone in self._detector.take_withdrawn():
            suspect = self._suspicions.get((gone.peer, gone.level))
            # A broken connection stays broken, however well heartbeats come through again.
            if suspect is not None and suspect.kind == "silence":
                del self._suspicions[gone.peer, gone.level]
                done.append(Tell(msg.Withdraw(self._server, gone.peer, gone.level)))
        done += self._stalled(now)
        came, went, probes = self._recovery.check(now)
        done += [Tell(msg.Healthy(self._server, peer, level)) for peer, level in came]
        done += [Tell(msg.Relapsed(self._server, peer, level)) for peer, level in went]
        done += [Probe(peer, level) for peer, level in probes]
        return done + self._measured(now)

    def _measured(self, now: float) -> list[Tell]:
        """What the connections carried while they were busy, now and then."""
        samples = self._meter.take(now)
        moved = tuple((peer, level, nbytes, int(busy_s * 1e6) + 1) for peer, level, nbytes, busy_s in samples)
        return [Tell(msg.Measured(self._server, self._epoch, moved))] if moved else []

    def _stalled(self, now: float) -> list[Tell]:
        """Connections that stand still although their peer is heard; those that move again are withdrawn.

        Without heartbeats it is no stall: the peer's machine is dead or stopped, which its silence will say.
        """
        done: list[Tell] = []
        standing = self._stalls.standing(now)
        for (peer, level), stood_s in standing.items():
            tolerated = stood_s < self._detector.patience_s
            if (
                (peer, level) not in self._suspicions
                and not tolerated
                and self._detector.hears(peer, level, now)
            ):
                why = (
                    f"server {self._server} hears server {peer} on level {level}, but for {stood_s:.3f} s "
                    "nothing that it has sent there over their connection was acknowledged"
                )
                done.append(self.suspect(peer, level, "stall", stood_s, why))
        for (peer, level), suspect in list(self._suspicions.items()):
            # One that was not even made, or has ended, does not move again.
            if suspect.kind == "stall" and suspect.silent_s and (peer, level) not in standing:
                del self._suspicions[peer, level]
                done.append(Tell(msg.Withdraw(self._server, peer, level)))
        return done

    def lost(self, peer: int, level: int, kind: str, why: str, now: float) -> list[Tell]:
        """The connection to (peer, level) broke.

        If it broke by silence, one of the two ends is cut off. A server that hears no other peer on that NIC
        either says so, however patient it is to be: it may be that end, and no other server can tell. A
        time-out while the peer is heard is a stall: heartbeats pass and the connection does not. A time-out
        during which this server itself was stopped is no evidence, nor one of a peer whose stand-in speaks.
        """
        if (peer, level) not in self.links:
            return []  # it is out of the view
        self._lost_at[peer, level] = now
        if kind == "timeout" and (self._detector.was_away(now) or self._is_held(peer, now)):
            self._lost_at[peer, level] = -inf
            self.suspect(peer, level, "reset", 0.0, why)
            return [Tell(msg.Interrupted(self._server, peer, level))]
        if kind == "timeout" and self._detector.hears(peer, level, now):
            return [self.suspect(peer, level, "stall", 0.0, why)]
        deaf = self._detector.deaf(level, peer, now) if kind == "timeout" else []
        return [self.suspect(peer, level, "reset", 0.0, why), *map(self._silence, deaf)]

    def _is_held(self, peer: int, now: float) -> bool:
        return now - self._held_at.get(peer, -inf) <= self._detector.detect_s

    def _silence(self, found: Suspicion) -> Tell:
        return self.suspect(found.peer, found.level, "silence", found.silent_s, found.why)

    def suspect(self, peer: int, level: int, kind: str, silent_s: float, why: str) -> Tell:
        """Note a suspicion; returns the message for the coordinator."""
        ends = [end for end in (self._server, peer) if (end, level) in self._losing]
        losing = ends[0] if kind == "stall" and len(ends) == 1 else None
        suspect = msg.Suspect(self._server, peer, level, kind, silent_s, why, losing)
        self._suspicions[peer, level] = suspect
        return Tell(suspect)

    def for_new_coordinator(self, now: float) -> list[Tell]:
        """The messages for a new coordinator: all suspicions, and the links that work again.

        If there was no coordinator for so long that a peer has been heard again since its connection broke,
        the connection did not break by the peer's death.
        """
        told: list[Tell] = []
        for link, suspect in self._suspicions.items():
            lost_at = self._lost_at.get(link, now)
            back = now - lost_at > self._detector.detect_s and self._detector.hears(*link, now)
            told.append(Tell(msg.Interrupted(self._server, *link) if back else suspect))
        return told + [Tell(msg.Healthy(self._server, *link)) for link in self._recovery.trusted]
