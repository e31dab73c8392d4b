"""The training function of every server: it sleeps as long as the model computes, and sums gradients."""

from __future__ import annotations

import time
from typing import Any

from bml.lab.bench.training.work import Work, pattern, share_of, weight, wrong
from bml.lab.flows.training.layers import SAMPLES
from bml.train.batch import Batch
from bml.train.batches import Indices
from bml.train.session import Session


def replay(work: Work, session: Session) -> dict[str, Any]:
    """Replay the iterations; return what this server saw, by iteration.

    `computed_s` and `ends_s` are times of the clock that all processes of a machine share, when backward had
    ended and when all gradients were sums. `contributors` are the servers whose samples are in them, and
    `wrong` is the number of wrong elements that were found.
    """
    return _Replay(work, session).run()


class _Replay:
    """One server's iterations."""

    def __init__(self, work: Work, session: Session):
        self._work = work
        self._session = session
        self._patterns = [pattern(each.size, number) for number, each in enumerate(work.gradients)]
        self._gradients = [session.empty(each.size) for each in work.gradients]
        self._recomputed: tuple[int, bytes] | None = None
        self._computed_s: list[float] = []
        self._ends_s: list[float] = []
        self._contributors: list[tuple[int, ...]] = []
        self._wrong = 0

    def run(self) -> dict[str, Any]:
        n = SAMPLES * self._session.n_servers
        last = self._work.iterations - 1
        for batch in self._session.batches(n, global_batch=n, epochs=self._work.iterations):
            means = self._iterate(batch)
            self._contributors.append(self._session.contributors)
            number = batch.epoch_no
            for mean, each in zip(means, self._patterns, strict=True):
                self._wrong += wrong(mean, each, n, number in (0, last), number)
        return {
            "computed_s": self._computed_s,
            "ends_s": self._ends_s,
            "contributors": self._contributors,
            "wrong": self._wrong,
        }

    def _iterate(self, batch: Batch) -> list[Any]:
        """Compute one iteration and return the means. Times are kept on a schedule: no delay adds up."""
        began_s, share = time.monotonic(), share_of(len(batch.indices))
        for number in range(len(self._gradients)):
            self._gradients[number][:] = self._patterns[number] * weight(batch.indices, batch.epoch_no)
        handles = []
        for number, each in enumerate(self._work.gradients):
            due_s = self._work.compute_s if self._work.late else each.ready_s
            _sleep_until(began_s + share * due_s)
            if number == 0 and self._work.late:
                self._computed_s.append(time.monotonic())
            handles.append(self._begin(batch, number))
        if not self._work.late:
            _sleep_until(began_s + share * self._work.compute_s)
            self._computed_s.append(time.monotonic())
        means = [handle.wait() for handle in handles]
        self._ends_s.append(time.monotonic())
        return means

    def _begin(self, batch: Batch, number: int) -> Any:
        def recompute(lost: Indices) -> Any:
            """Compute lost samples: the first gradient that needs them pays for all."""
            asked = (batch.epoch_no, lost.tobytes())
            if self._recomputed != asked:
                self._recomputed = asked
                time.sleep(share_of(len(lost)) * self._work.compute_s)
            return self._patterns[number] * weight(lost, batch.epoch_no)

        return batch.allreduce_async(self._gradients[number], recompute)


def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
