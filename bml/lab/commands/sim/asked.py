"""What a user of `bml sim` asked for, and the form of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bml.schedule.select.model import Constants
from bml.topology import Fabric


@dataclass(frozen=True)
class Asked:
    """The options of the command, read.

    Attributes:
        fabric: with its failures and rates.
        failures: as they were written.
        algorithm: a name, or `auto`.
        nbytes: size of the vector.
        rate_bit: bits per second of a NIC, headers included.
        goodput: share of the rate that is payload.
        delay_s: seconds of a hop.
        slice_nbytes: the largest slice; None for that of a job.
        seeds: how many seeds of ECMP's hash to try.
        constants: those by which `auto` chooses.
    """

    fabric: Fabric
    failures: tuple[str, ...]
    algorithm: str
    nbytes: int
    rate_bit: float
    goodput: float
    delay_s: float
    slice_nbytes: int | None
    seeds: int
    constants: Constants

    @property
    def rate(self) -> float:
        """Payload of a NIC in bytes per second."""
        return self.rate_bit / 8 * self.goodput

    @property
    def whole_s(self) -> float:
        """T, the time to send the whole vector over one NIC, in seconds."""
        return self.nbytes / self.rate


@dataclass(frozen=True)
class Report:
    """The answer of `bml sim --json`.

    `gst_s` is how long the step takes, in seconds, `gst` the same in units of T = P/B; B is the rate times
    `goodput`. `planned` is the time of the busiest NIC in T, without start-ups and without what happens
    inside a Fat-Tree. `seeds` has the `gst` of each seed of ECMP's hash, that of the first is `gst`. A link
    has the bytes that it carried, their share of what it can carry in that time, and its connections. Where
    all servers do the same at all times, one `stands_for` all of them, and `links` are those of server 0.
    `planning_s` and `simulating_s` are what this command took.
    """

    fabric: str
    failures: list[str]
    algorithm: str
    why: str
    survivors: int
    nbytes: int
    rate_bit: float
    goodput: float
    delay_s: float
    gst_s: float
    gst: float
    planned: float
    seeds: list[float]
    transfers: int
    stands_for: int
    links: list[dict[str, Any]]
    planning_s: float
    simulating_s: float
