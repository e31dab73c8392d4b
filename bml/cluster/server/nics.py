"""The NICs of a server, for its status: address, carrier, and traffic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from bml.cluster.server.carrier import CarrierWatch
from bml.cluster.server.rates import Rates
from bml.faults.stalls import Flow
from bml.io.poller import Poller
from bml.predict.trouble import PeerSample
from bml.transport.interface import LinkKey, LinkStats, LinkVitals, Transport


class NicSample(NamedTuple):
    """A second of all connections of a server, and how often each NIC has lost its carrier so far."""

    at_s: float
    peers: dict[LinkKey, PeerSample]
    lost_carriers: dict[int, int]


def peer_sample(vitals_then: LinkVitals, flow_then: Flow, vitals: LinkVitals, flow: Flow) -> PeerSample:
    """What a connection did between two looks; nothing is known of one that was opened anew."""
    sent, resent = vitals.segments - vitals_then.segments, vitals.resent - vitals_then.resent
    busy_s, nbytes = flow.busy_s - flow_then.busy_s, flow.nbytes - flow_then.nbytes
    if sent < 0 or resent < 0:
        return PeerSample()
    return PeerSample(sent, resent, vitals.late_s, max(0, nbytes), max(0.0, busy_s))


class Nics:
    """Watches the NICs of `server`, one address a level; `changed(level, up, why)` hears of carriers."""

    def __init__(
        self, server: int, nics: Sequence[str], poller: Poller, changed: Callable[[int, bool, str], None]
    ):
        self._addresses = tuple(nics)
        self._changed = changed
        self._lost = [0] * len(nics)
        self._carrier = CarrierWatch(server, nics, poller, self._carrier_changed)
        self._rates = Rates(len(nics), time.monotonic())
        self._before: dict[LinkKey, tuple[LinkVitals, Flow]] = {}
        self.samples: deque[NicSample] = deque(maxlen=1)
        """The newest sample that nobody has taken."""

    def note(self, transport: Transport, now: float) -> None:
        """Note the counters of the links, if it is time to."""
        if self._rates.due(now):
            self._rates.note(transport.stats(), now)
            self._sample(transport, now)

    def status(self, stats: Mapping[LinkKey, LinkStats], now: float) -> list[dict[str, Any]]:
        """A record for each level; rates are in bytes per second."""
        carriers, traffic = self._carrier.watched, self._rates.traffic(stats, now)
        return [
            {"level": level, "address": address, "carrier": carriers.get(level), **asdict(nic)}
            for level, (address, nic) in enumerate(zip(self._addresses, traffic, strict=True))
        ]

    def _carrier_changed(self, level: int, up: bool, why: str) -> None:
        if not up:
            self._lost[level] += 1
        self._changed(level, up, why)

    def _sample(self, transport: Transport, now: float) -> None:
        """What the connections did since the last sample: once a second, some microseconds each."""
        vitals, flows = transport.vitals(), transport.flows()
        before, self._before = (
            self._before,
            {link: (each, flows[link]) for link, each in vitals.items() if link in flows},
        )
        peers = {
            link: peer_sample(*before[link], *present)
            for link, present in self._before.items()
            if link in before
        }
        self.samples.append(NicSample(now, peers, dict(enumerate(self._lost))))

    def close(self) -> None:
        """Watch no more."""
        self._carrier.close()
