"""The ends of a node's ranks: whether one is started again, and how the job ended. Pure.

A rank *finished* when its process ended with status 0, *failed* with another status, and *died* of a signal.
The end of a rank that is not started again was *survived* if a rank finished after it. The job's exit status
is 0 if a rank finished and all ends of others were survived, else that of the first end that was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_SIGNALLED = 128


@dataclass
class _Rank:
    restarts: int = 0
    code: int | None = None
    """Return code of its last process, negative for a signal; None while it runs."""
    at: int = 0
    """Which end it was, counted from 1."""
    ends: list[int] = field(default_factory=list)
    """Return codes of the processes after which it was started again."""


class Ranks:
    """The ranks of a node, from their start to the end of the last. One thread uses it."""

    def __init__(self, ranks: Iterable[int], max_restarts: int):
        self._ranks = {rank: _Rank() for rank in ranks}
        self._max_restarts = max_restarts
        self._n_ends = 0
        self._ending = False

    @property
    def running(self) -> list[int]:
        """The ranks that run."""
        return [rank for rank, each in self._ranks.items() if each.code is None]

    def restarts(self, rank: int) -> int:
        """Return how often a rank was started again."""
        return self._ranks[rank].restarts

    def stop(self) -> None:
        """No rank is started again from now on."""
        self._ending = True

    def ended(self, rank: int, code: int) -> bool:
        """The process of a rank ended with this return code, negative for a signal.

        Returns True if the rank is to be started again, and counts that. It is not where a rank of this node
        has finished: the job is coming to its end, and there may be nobody to join.
        """
        each = self._ranks[rank]
        nobody_finished = all(other.code != 0 for other in self._ranks.values())
        if code != 0 and not self._ending and nobody_finished and each.restarts < self._max_restarts:
            each.restarts += 1
            each.ends.append(code)
            return True
        self._n_ends += 1
        each.code, each.at = code, self._n_ends
        return False

    def not_started(self, rank: int) -> int:
        """A rank could not be started again, so its last end stands; returns the return code of that."""
        each = self._ranks[rank]
        each.restarts -= 1
        self._n_ends += 1
        each.code, each.at = each.ends.pop(), self._n_ends
        return each.code

    def status(self) -> int:
        """Return the exit status of the job: see the beginning of this module."""
        last = max((each.at for each in self._ranks.values() if each.code == 0), default=0)
        lost = [each for each in self._ranks.values() if each.code and each.at > last]
        if not lost:
            return 0
        code = min(lost, key=lambda each: each.at).code or 0
        return code if code > 0 else _SIGNALLED - code

    def line(self) -> str:
        """Say how the ranks ended: "rank 2 died (signal 9), 3 ranks finished". Empty if nothing happened."""
        parts = []
        for rank, each in self._ranks.items():
            if each.code:
                parts.append(f"rank {rank} {how(each.code)}")
            elif each.ends:
                parts.append(f"rank {rank} {how(each.ends[-1])} and was started again")
        if not parts:
            return ""
        n_finished = sum(each.code == 0 for each in self._ranks.values())
        return ", ".join([*parts, f"{n_finished or 'no'} rank{'s' * (n_finished != 1)} finished"])

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return for each rank how it ended, its return code (negative: a signal), and its restarts."""
        return {
            str(rank): {"end": _word(each.code), "code": each.code, "restarts": each.restarts}
            for rank, each in self._ranks.items()
        }


def how(code: int) -> str:
    """Say how a process ended that did not finish."""
    return f"died (signal {-code})" if code < 0 else f"failed (exit status {code})"


def _word(code: int | None) -> str:
    if code is None:
        return "running"
    return "finished" if code == 0 else "died" if code < 0 else "failed"
