"""Which samples the ranks of a DDP job have in a batch of their loaders, and which of them were used.

Samples are numbered by their places in the order of the samplers: rank r of a pass with n samples a rank has
the places r n .. r n + n - 1, in the order in which it loads them. A sampler that gives a sample twice gives
it two places.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

import msgspec
import numpy as np

from bml.train.batches import GlobalBatch, Indices, assignment, used_indices
from bml.train.ledger import EpochSummary, Ledger, LoopLedger


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """One pass: every one of `n_ranks` ranks loads `n_samples`, in batches of `batch_size`.

    With `drop_last` samples that fill no batch are not loaded.
    """

    n_ranks: int
    n_samples: int
    batch_size: int
    drop_last: bool

    @property
    def n_used(self) -> int:
        """How many samples a rank loads."""
        return self.n_samples - (self.n_samples % self.batch_size if self.drop_last else 0)

    @property
    def n_places(self) -> int:
        """How many samples all ranks load."""
        return self.n_ranks * self.n_used

    def batch(self, pass_no: int, index: int) -> GlobalBatch:
        """The places of all ranks in their batches number `index`, those of rank 0 first."""
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.n_used)
        places = np.concatenate([np.arange(start, stop) + rank * self.n_used for rank in range(self.n_ranks)])
        return GlobalBatch(index, pass_no, index, places)


class _Dump(msgspec.Struct):
    """What is left of finished passes, and the pass that is open, as they are sent."""

    steps: int
    closed: list[EpochSummary]
    chain: bytes
    plan: tuple[int, int, int, bool] | None
    ledger: bytes


_decode = msgspec.msgpack.Decoder(_Dump).decode


class PassLedger:
    """Which places were used in each pass over a loader; alike on all ranks."""

    def __init__(self) -> None:
        self._plan: LoaderPlan | None = None
        self._ledger: Ledger | None = None
        self._closed: list[EpochSummary] = []
        self._steps = 0
        """Batches that were committed in finished passes."""
        self._chain = b""

    @property
    def plan(self) -> LoaderPlan | None:
        """That of the open pass."""
        return self._plan

    @property
    def pass_no(self) -> int:
        """The number of the open pass, from 0."""
        return len(self._closed)

    def begin(self, plan: LoaderPlan) -> None:
        """Begin a pass; one that is open ends."""
        self.end()
        self._plan, self._ledger = plan, Ledger(max(plan.n_places, 1))

    def end(self) -> None:
        """End the pass that is open, if there is one."""
        if self._plan is None or self._ledger is None:
            return
        self._ledger.close()
        found = self._ledger.summary()
        if found["epochs"]:
            (summary,) = found["epochs"]
        else:
            n = self._plan.n_places
            summary = EpochSummary(
                epoch=self.pass_no,
                steps=0,
                samples=n,
                used_once=0,
                used_never=n,
                used_more=0,
                left_out=0,
                complete=not n,
            )
        self._closed.append(summary)
        self._steps += found["steps"]
        self._chain = self._extended()
        self._plan = self._ledger = None

    def commit(self, batch: GlobalBatch, contributors: tuple[int, ...]) -> None:
        """Enter a batch whose samples are in a sum: these ranks computed them, those of lost ranks too."""
        assert self._plan is not None
        assert self._ledger is not None
        assigned = assignment(batch.indices, range(self._plan.n_ranks), contributors)
        used = used_indices(assigned, recomputed=True)
        self._ledger.commit(batch.step, batch, contributors, used)

    def leave_out(self, batch: GlobalBatch) -> None:
        """Enter a batch without which the loop goes on."""
        assert self._ledger is not None
        self._ledger.leave_out(batch)

    def summary(self) -> LoopLedger:
        """How often the places were used, in each pass."""
        found = self._ledger.summary() if self._ledger is not None else None
        epochs = [*self._closed, *(found["epochs"] if found else [])]
        return LoopLedger(
            steps=self._steps + (found["steps"] if found else 0),
            epochs=epochs,
            left_out=sum(each["left_out"] for each in epochs),
            complete=all(each["complete"] for each in epochs),
            digest=self._extended().hex(),
        )

    def dump(self) -> bytes:
        """All of it as bytes, for a rank that joins."""
        plan = None if self._plan is None else astuple(self._plan)
        return msgspec.msgpack.encode(
            _Dump(self._steps, self._closed, self._chain, plan, self._ledger.dump() if self._ledger else b"")
        )

    @classmethod
    def load(cls, dumped: bytes) -> PassLedger:
        """The ledger that `dump` was called on. Raises msgspec.MsgspecError for other bytes."""
        found, made = _decode(dumped), cls()
        made._steps, made._closed, made._chain = found.steps, found.closed, found.chain
        if found.plan is not None:
            made._plan, made._ledger = LoaderPlan(*found.plan), Ledger.load(found.ledger)
        return made

    def _extended(self) -> bytes:
        """The digest of all passes, the open one too."""
        if self._ledger is None:
            return self._chain
        return hashlib.sha256(f"{self._plan} {self._ledger.digest()}".encode() + self._chain).digest()


def extra_of(batch: GlobalBatch, n_ranks: int, contributors: tuple[int, ...], rank: int) -> Indices:
    """The places of lost ranks that `rank` computes, if these contribute; none if it is not one of them."""
    mine = assignment(batch.indices, range(n_ranks), contributors).get(rank)
    return batch.indices[:0] if mine is None else mine.extra
