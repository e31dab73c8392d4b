"""What a user of `bml sim` asked for."""

from __future__ import annotations

from dataclasses import dataclass

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
