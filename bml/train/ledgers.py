"""The ledgers of all loops over batches: one per loop, kept until the job ends, and sent to joiners."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from bml.train.batches import BatchPlan
from bml.train.ledger import EpochSummary, Ledger
from bml.train.position import LoopId


class LoopSummary(TypedDict):
    """One loop over batches: how many `batches` its plan has, how many `steps` were committed, its epochs.

    `end` is how it ended: "whole", "left after 7 of 40 batches", or "open". `complete` is True if it was run
    to its end and each of its epochs used every sample exactly once. `left_out` counts samples of batches
    that were begun and not committed.
    """

    loop: str
    batches: int
    steps: int
    end: str
    epochs: list[EpochSummary]
    left_out: int
    complete: bool


class LedgerSummary(TypedDict):
    """All loops over batches, ready for JSON. Equal values of `digest` mean equal ledgers.

    `steps` and `left_out` are sums over the loops; `complete` is True if all of them are.
    """

    steps: int
    loops: list[LoopSummary]
    left_out: int
    complete: bool
    digest: str


@dataclass(slots=True)
class _Account:
    plan: BatchPlan
    ledger: Ledger
    end: str = "open"

    def summary(self) -> LoopSummary:
        found = self.ledger.summary()
        return LoopSummary(
            loop=str(self.plan),
            batches=len(self.plan),
            steps=found["steps"],
            end=self.end,
            epochs=found["epochs"],
            left_out=found["left_out"],
            complete=self.end == "whole" and found["complete"],
        )


class _Dump(msgspec.Struct):
    """One account as it is sent."""

    loop: LoopId
    plan: BatchPlan
    ledger: bytes
    end: str


_decode = msgspec.msgpack.Decoder(list[_Dump]).decode


class Ledgers:
    """One account per loop, in the order in which the loops began."""

    def __init__(self) -> None:
        self._accounts: dict[LoopId, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, loop: LoopId, plan: BatchPlan) -> Ledger:
        """Return the ledger of a loop that begins, or that goes on on a server that was given its ledger.

        A job that goes on from a checkpoint may have made the loop longer.
        """
        account = self._accounts.setdefault(loop, _Account(plan, Ledger(plan.n_samples)))
        account.plan = plan
        return account.ledger

    def close(self, loop: LoopId, plan: BatchPlan) -> None:
        """Close the account of a loop that was left. It is whole if every batch of its plan was committed."""
        account = self._accounts.get(loop)
        if account is None:
            return
        account.plan = plan
        account.ledger.close()
        steps, batches = account.ledger.steps, len(account.plan)
        account.end = "whole" if steps == batches else f"left after {steps} of {batches} batches"

    def summary(self) -> LedgerSummary:
        """Return the summary of all ledgers."""
        loops = [account.summary() for account in self._accounts.values()]
        return LedgerSummary(
            steps=sum(loop["steps"] for loop in loops),
            loops=loops,
            left_out=sum(loop["left_out"] for loop in loops),
            complete=all(loop["complete"] for loop in loops),
            digest=self.digest(),
        )

    def digest(self) -> str:
        """Return the sha256 over the histories of all loops: equal on all survivors."""
        sha = hashlib.sha256()
        for loop, account in self._accounts.items():
            sha.update(f"{loop} {account.plan} {account.end} {account.ledger.digest()}\n".encode())
        return sha.hexdigest()

    def dump(self) -> bytes:
        """Return all ledgers as bytes, for a server that joins."""
        return msgspec.msgpack.encode(
            [
                _Dump(loop, account.plan, account.ledger.dump(), account.end)
                for loop, account in self._accounts.items()
            ]
        )

    def load(self, dumped: bytes) -> None:
        """Take over the bytes of `dump`; ledgers of open loops go on. Raises msgspec.MsgspecError for others.

        A loop around the one that takes the state may have a batch that is not committed yet.
        """
        before, self._accounts = self._accounts, {}
        for dump in _decode(dumped):
            account = before.get(dump.loop, _Account(dump.plan, Ledger(dump.plan.n_samples)))
            account.ledger.become(Ledger.load(dump.ledger))
            self._accounts[dump.loop] = _Account(dump.plan, account.ledger, dump.end)
