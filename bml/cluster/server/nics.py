"""The NICs of a server, for its status: address, carrier, and traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bml.cluster.server.carrier import CarrierWatch
from bml.cluster.server.rates import Rates
from bml.io.poller import Poller
from bml.transport.interface import LinkKey, LinkStats, Transport


class Nics:
    """Watches the NICs of `server`, one address a level; `changed(level, up, why)` hears of carriers."""

    def __init__(
        self, server: int, nics: Sequence[str], poller: Poller, changed: Callable[[int, bool, str], None]
    ):
        self._addresses = tuple(nics)
        self._carrier = CarrierWatch(server, nics, poller, changed)
        self._rates = Rates(len(nics), time.monotonic())

    def note(self, transport: Transport, now: float) -> None:
        """Note the counters of the links, if it is time to."""
        if self._rates.due(now):
            self._rates.note(transport.stats(), now)

    def status(self, stats: Mapping[LinkKey, LinkStats], now: float) -> list[dict[str, Any]]:
        """A record for each level; rates are in bytes per second."""
        carriers, traffic = self._carrier.watched, self._rates.traffic(stats, now)
        return [
            {"level": level, "address": address, "carrier": carriers.get(level), **asdict(nic)}
            for level, (address, nic) in enumerate(zip(self._addresses, traffic, strict=True))
        ]

    def close(self) -> None:
        """Watch no more."""
        self._carrier.close()
