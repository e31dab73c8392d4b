"""Faults of ranks: which process gets which signal when. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from bml.errors import UsageError
from bml.faults import AtTime, Fault
from bml.topology import ServerFailure

_CAN = "bml torchrun can kill and freeze ranks: kill:2@t=10s, freeze:2@t=10s,for=3s"


@dataclass(frozen=True, order=True)
class Strike:
    """A rank is killed, frozen or let go `at_s` seconds after the ranks were started."""

    at_s: float
    rank: int
    act: str
    """kill, freeze or thaw."""
    fault: str


def strikes_of(texts: Iterable[str], world_size: int) -> list[Strike]:
    """Return what faults do to the ranks of a job, in the order of time.

    Raises UsageError for a text that is no fault, and for a fault that a launcher of processes cannot apply.
    """
    found = []
    for text in texts:
        fault = Fault.parse(text)
        if fault.kind not in ("kill", "freeze") or not isinstance(fault.target, ServerFailure):
            raise UsageError(f"'{text}' is no fault of a process: {_CAN}")
        if not isinstance(fault.trigger, AtTime):
            raise UsageError(
                f"'{text}' needs a time, as the launcher does not see steps; it counts from the start of the "
                f"ranks. {_CAN}"
            )
        rank, at_s = fault.target.server, fault.trigger.t_s
        if rank >= world_size:
            raise UsageError(f"'{text}' strikes rank {rank}, but the ranks are 0 to {world_size - 1}")
        found.append(Strike(at_s, rank, fault.kind, str(fault)))
        if fault.kind == "freeze" and fault.duration_s is not None:
            found.append(Strike(at_s + fault.duration_s, rank, "thaw", str(fault)))
    return sorted(found)


class Strikes:
    """The strikes on the ranks of one node that are still to come, and the ranks that are frozen."""

    def __init__(self, strikes: Iterable[Strike], ranks: Container[int]):
        self._ahead = sorted(strike for strike in strikes if strike.rank in ranks)
        self._frozen: set[int] = set()
        self.never: list[str] = []
        """Faults that found no process that they could strike."""

    def due(self, now_s: float, running: Container[int]) -> list[Strike]:
        """Return the strikes on running ranks whose time has come, `now_s` after the start of the ranks."""
        found = []
        while self._ahead and self._ahead[0].at_s <= now_s:
            strike = self._ahead.pop(0)
            if strike.act == "thaw" and strike.rank not in self._frozen:
                continue  # it was killed meanwhile
            if strike.rank not in running:
                self.never.append(strike.fault)
                continue
            if strike.act == "freeze":
                self._frozen.add(strike.rank)
            elif strike.act == "thaw":
                self._frozen.discard(strike.rank)
            found.append(strike)
        return found

    def ended(self, rank: int) -> None:
        """The process of a rank has ended: it is not frozen any more."""
        self._frozen.discard(rank)

    def wait_s(self, now_s: float) -> float | None:
        """Return how long it is until the next strike; None if there is none."""
        return max(0.0, self._ahead[0].at_s - now_s) if self._ahead else None

    def for_good(self, running: Iterable[int]) -> list[int]:
        """Return the running ranks if all of them are frozen and nothing lets them go, else nothing."""
        ranks = list(running)
        thawed = {strike.rank for strike in self._ahead if strike.act == "thaw"}
        return ranks if all(rank in self._frozen - thawed for rank in ranks) else []

    def rest(self) -> list[str]:
        """Return the faults whose time has not come, and those that found no process."""
        return [*self.never, *(strike.fault for strike in self._ahead if strike.act != "thaw")]
