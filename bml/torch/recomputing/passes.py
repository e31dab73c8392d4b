"""Where a rank is in its pass over a loader: the batches whose gradients are to be reduced next.

Mostly that is one batch. With `no_sync` there are several: backward reduces what was accumulated over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bml.topology.errors import UsageError
from bml.torch.recomputing.loader import LoaderShares
from bml.torch.recomputing.plan import PassLedger
from bml.train.batches import GlobalBatch


@dataclass(eq=False, slots=True)
class Drawn:
    """A batch that was drawn from the loader.

    `is_forwarded`: its loss was computed. `has_gradients`: backward was called then, and they are not reduced
    yet. `backward` is the number of the last backward pass that has reached what the model made of it; -1 if
    none is known. `is_ours` is False on a rank that joined after the batch: its own share is not in its
    gradients.
    """

    whole: GlobalBatch
    shares: LoaderShares
    is_forwarded: bool = False
    has_gradients: bool = False
    backward: int = -1
    is_ours: bool = True

    @property
    def share_size(self) -> int:
        """How many samples of it each rank has."""
        return len(self.whole.indices) // self.shares.plan.n_ranks


class Passes:
    """The passes of one rank over its loaders, and their ledger."""

    def __init__(self) -> None:
        self.ledger = PassLedger()
        self.drawn: list[Drawn] = []
        """The batches whose gradients are not reduced yet, in order."""
        self._shares: LoaderShares | None = None
        """Those of the loader that is iterated over."""
        self._n_drawn = 0
        """So many batches of the pass were drawn; a rank that joins skips them."""
        self._owed: list[int] = []
        """Batches that the others have drawn and not reduced, on a rank that joins."""
        self._resumes = False
        """Whether the open pass was given to this rank, which has not begun it."""

    def begin(self, shares: LoaderShares) -> None:
        """Begin a pass, or go on with the one that this rank was given.

        Raises UsageError if the loader differs from that of the others.
        """
        if not self._resumes:
            self.end()
            self.ledger.begin(shares.plan)
            self._n_drawn = 0
        elif self.ledger.plan != shares.plan:
            raise UsageError(
                f"this rank joins with a loader of {shares.plan}, the others have {self.ledger.plan}: make "
                "the same loader on all ranks"
            )
        self._resumes, self._shares = False, shares
        self.drawn = [self._missed(index) for index in self._owed]
        self._owed = []

    def draw(self, shares: LoaderShares, index: int) -> None:
        """Note that a batch was drawn. The one before it is left out if its loss was not computed.

        Raises UsageError if a pass over another loader has begun meanwhile.
        """
        if shares is not self._shares:
            raise UsageError(
                "another pass over a loader of this hook has begun: end one loop over "
                "hook.batches before the next begins"
            )
        self._drop_unused()
        if index < self._n_drawn:
            return  # this rank joined later
        self._n_drawn = index + 1
        self.drawn.append(Drawn(self._shares.plan.batch(self.ledger.pass_no, index), self._shares))

    def forwarded(self) -> None:
        """Note that the loss of the last batch is computed."""
        if self.drawn:
            self.drawn[-1].is_forwarded = True

    def without_gradients(self, backward: int) -> list[Drawn]:
        """The batches that get gradients in this backward pass, and have none yet.

        The loss may be of several batches. Where it is not known of which, it is that of the last one.
        """
        reached = [each for each in self.drawn if each.backward == backward >= 0] or self.drawn[-1:]
        return [each for each in reached if each.is_forwarded and not each.has_gradients]

    def with_gradients(self) -> list[Drawn]:
        """The batches whose gradients are to be reduced."""
        return [each for each in self.drawn if each.has_gradients]

    def drop_gradients(self) -> None:
        """Note that the loop has dropped the gradients that were made: those batches are left out."""
        for each in self.with_gradients():
            self.ledger.leave_out(each.whole)
        self.drawn = [each for each in self.drawn if not each.has_gradients]

    def commit(self, contributors: tuple[int, ...]) -> None:
        """Note that the gradients that were made are reduced; batches without any are left out."""
        for each in self.drawn:
            if each.has_gradients:
                self.ledger.commit(each.whole, contributors)
            else:
                self.ledger.leave_out(each.whole)
        self.drawn = []

    def finish(self) -> None:
        """Note that the loader has no more batches. Raises UsageError if the last ones were not reduced."""
        if kept := self.with_gradients():
            raise UsageError(
                f"the gradients of the last {len(kept)} batches of the loader were accumulated and not "
                "reduced: leave no_sync for the last batch"
            )
        self.end()

    def is_open(self, shares: LoaderShares) -> bool:
        """Whether the pass over this loader is the one that was begun last, and not ended."""
        return shares is self._shares

    def end(self) -> None:
        """End the pass; batches that were drawn and not reduced are left out."""
        if self._shares is not None:
            for each in self.drawn:
                self.ledger.leave_out(each.whole)
            self.ledger.end()
        self.drawn, self._shares = [], None

    def save(self) -> Any:
        """The position and the ledger, between two batches, for a rank that joins."""
        owed = [each.whole.batch_no for each in self.with_gradients()]
        return {"ledger": self.ledger.dump(), "next": self._n_drawn - 1, "owed": owed}

    def load(self, saved: Any) -> None:
        """Take what `save` returned on another rank: the batch that it had drawn last is the next here."""
        self.ledger = PassLedger.load(saved["ledger"])
        at, self._owed = int(saved["next"]), [int(each) for each in saved["owed"]]
        if self._shares is None:
            self._resumes, self._n_drawn = True, at
            return
        here = [each for each in self.drawn if each.whole.batch_no >= at]
        self._n_drawn = max(at, self._n_drawn)
        self.drawn = [*(self._missed(index) for index in self._owed), *here]
        self._owed = []

    def _missed(self, index: int) -> Drawn:
        assert self._shares is not None
        whole = self._shares.plan.batch(self.ledger.pass_no, index)
        return Drawn(whole, self._shares, is_forwarded=True, has_gradients=True, is_ours=False)

    def _drop_unused(self) -> None:
        if self.drawn and not self.drawn[-1].is_forwarded:
            self.ledger.leave_out(self.drawn.pop().whole)
