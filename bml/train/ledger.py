"""The ledger: which samples are in which committed step. It proves that every epoch uses each sample once.

Every server keeps the whole ledger, not only its own part, as it knows which server computed which samples
(`bml.train.batches.assignment`). So the digests of all survivors must be equal, and one comparison proves it.
Memory is constant: counters for the current epoch, and one line for each finished epoch.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from bml.topology.errors import InvariantError, UsageError
from bml.train.batches import GlobalBatch, Indices


class EpochSummary(TypedDict):
    """One training epoch: its `samples` by how often they were used, and how many its batches left out.

    `steps` batches were committed. Of the samples `used_once`, `used_never` and `used_more` (than once) are
    the numbers; `left_out` are those of batches that were begun and not committed. `complete`: each was used
    exactly once.
    """

    epoch: int
    steps: int
    samples: int
    used_once: int
    used_never: int
    used_more: int
    left_out: int
    complete: bool


class LoopLedger(TypedDict):
    """One loop over batches; `complete` = every epoch so far used every sample exactly once."""

    steps: int
    epochs: list[EpochSummary]
    left_out: int
    complete: bool
    digest: str


@dataclass(slots=True)
class _OpenEpoch:
    """The current epoch: uses per sample (uint16, shape (n_samples,)), and how many samples were left out."""

    number: int
    uses: npt.NDArray[np.uint16]
    steps: int = 0
    left_out: int = 0

    def close(self) -> EpochSummary:
        never, once, more = np.bincount(np.minimum(self.uses, 2), minlength=3).tolist()
        return EpochSummary(
            epoch=self.number,
            steps=self.steps,
            samples=len(self.uses),
            used_once=once,
            used_never=never,
            used_more=more,
            left_out=self.left_out,
            complete=never == 0 and more == 0,
        )


class _Dump(msgspec.Struct):
    """A whole ledger as it is sent; `counts` has the fields of the open epoch, `last` step, batch, steps."""

    n_samples: int
    closed: list[EpochSummary]
    counts: tuple[int, bytes, int, int] | None
    last: tuple[int, tuple[int, int], int]
    chain: bytes


_decode = msgspec.msgpack.Decoder(_Dump).decode


class Ledger:
    """Counts the uses of `n_samples` samples in committed steps, with a few numpy operations per commit."""

    def __init__(self, n_samples: int) -> None:
        if n_samples < 1:
            raise UsageError(f"a ledger needs at least one sample, not {n_samples}")
        self._n_samples = n_samples
        self._closed: list[EpochSummary] = []
        self._open: _OpenEpoch | None = None
        self._last_step = -1
        self._last_batch = (-1, -1)
        self._steps = 0
        self._chain = b""

    def commit(
        self, step: int, batch: GlobalBatch, contributors: Iterable[int], used: Mapping[int, Indices]
    ) -> None:
        """Enter one committed step: `used` = server → the samples of `batch` that are in the result.

        `step` is the session's number of the batch's last step. Where parts of two batches are under way, it
        may be lower than that of the batch before. Raises InvariantError for a step or batch that was already
        entered, for samples without a contributor, and for a sample number outside the data set.
        """
        members = sorted(set(contributors))
        self._check_order(step, batch)
        self._check_contributors(step, members, used)
        indices = np.concatenate([used[server] for server in sorted(used)] or [batch.indices[:0]])
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self._n_samples:
            raise InvariantError(f"step {step} used a sample outside 0-{self._n_samples - 1}")
        self._count(batch, indices)
        self._extend_chain(step, batch, members, used)
        self._last_step, self._last_batch = step, (batch.epoch_no, batch.batch_no)
        self._steps += 1

    def leave_out(self, batch: GlobalBatch) -> None:
        """Note a batch that was drawn and will not be committed."""
        self._epoch(batch).left_out += len(batch.indices)

    def close(self) -> None:
        """Close the last epoch, as no further batch comes: only its counts are kept."""
        if self._open is not None:
            self._closed.append(self._open.close())
            self._open = None

    @property
    def steps(self) -> int:
        """How many batches were committed."""
        return self._steps

    def summary(self) -> LoopLedger:
        """Return how often the samples were used in each training epoch, also in an unfinished one."""
        epochs = [*self._closed, *([self._open.close()] if self._open else [])]
        return LoopLedger(
            steps=self._steps,
            epochs=epochs,
            left_out=sum(epoch["left_out"] for epoch in epochs),
            complete=all(epoch["complete"] for epoch in epochs),
            digest=self.digest(),
        )

    def dump(self) -> bytes:
        """Return the whole ledger as bytes, for a server that joins."""
        epoch = self._open
        counts = None if epoch is None else (epoch.number, epoch.uses.tobytes(), epoch.steps, epoch.left_out)
        last = (self._last_step, self._last_batch, self._steps)
        return msgspec.msgpack.encode(_Dump(self._n_samples, self._closed, counts, last, self._chain))

    @classmethod
    def load(cls, dumped: bytes) -> "Ledger":
        """Make a ledger of the bytes of `dump`. Raises msgspec.MsgspecError for other bytes."""
        dump = _decode(dumped)
        ledger = cls(dump.n_samples)
        ledger._closed, ledger._chain = dump.closed, dump.chain
        ledger._last_step, ledger._last_batch, ledger._steps = dump.last
        if dump.counts is not None:
            number, uses, steps, left_out = dump.counts
            ledger._open = _OpenEpoch(number, np.frombuffer(uses, np.uint16).copy(), steps, left_out)
        return ledger

    def become(self, other: "Ledger") -> None:
        """Take over all that another ledger counts: a batch that is open goes on with this one."""
        vars(self).update(vars(other))

    def digest(self) -> str:
        """Return the sha256 of the whole history (steps, batches, contributors, samples)."""
        return hashlib.sha256(self._chain).hexdigest()

    def _check_order(self, step: int, batch: GlobalBatch) -> None:
        here, last = (batch.epoch_no, batch.batch_no), self._last_batch
        if step == self._last_step or here <= last:
            raise InvariantError(
                f"step {step} (training epoch {here[0]}, batch {here[1]}) was committed after "
                f"step {self._last_step} (training epoch {last[0]}, batch {last[1]}): a step was doubled"
            )

    @staticmethod
    def _check_contributors(step: int, members: list[int], used: Mapping[int, Indices]) -> None:
        known = set(members)
        strangers = sorted(server for server in used if server not in known and len(used[server]))
        if strangers:
            raise InvariantError(
                f"step {step} used samples of servers {strangers}, contributors were {members}"
            )

    def _epoch(self, batch: GlobalBatch) -> _OpenEpoch:
        """Return the open epoch of a batch; an epoch before it is closed."""
        if self._open is None or self._open.number != batch.epoch_no:
            if self._open is not None:
                self._closed.append(self._open.close())
            self._open = _OpenEpoch(batch.epoch_no, np.zeros(self._n_samples, np.uint16))
        return self._open

    def _count(self, batch: GlobalBatch, indices: Indices) -> None:
        epoch = self._epoch(batch)
        np.add.at(epoch.uses, indices, np.uint16(1))  # unlike fancy +=, counts a doubled sample twice
        epoch.steps += 1
        # Counted by sample, not by size: a doubled sample must not hide one that was left out.
        epoch.left_out += int(np.count_nonzero(epoch.uses[batch.indices] == 0))

    def _extend_chain(
        self, step: int, batch: GlobalBatch, members: list[int], used: Mapping[int, Indices]
    ) -> None:
        """Chain one record onto the digest: a joining server needs only these 32 bytes of the history."""
        record = hashlib.sha256(self._chain)
        head = [step, batch.epoch_no, batch.batch_no, len(members), *members]
        record.update(np.asarray(head, "<i8").tobytes())
        none = batch.indices[:0]
        parts = [used.get(server, none) for server in members]
        sizes = np.array([len(part) for part in parts], "<i8")
        # One after the other: a server, how many samples it has, and these. All at once, as it is done
        # in every step and there may be a thousand servers.
        words = np.empty(2 * len(members) + int(sizes.sum()), "<i8")
        at = 2 * np.arange(len(members)) + np.cumsum(sizes) - sizes
        is_sample = np.ones(len(words), np.bool_)
        is_sample[at] = is_sample[at + 1] = False
        words[at], words[at + 1] = members, sizes
        words[is_sample] = np.concatenate([none, *parts])
        record.update(words.tobytes())
        self._chain = record.digest()
