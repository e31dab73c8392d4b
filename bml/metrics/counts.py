"""What a server counts for its metrics alone: times of steps, changes of views, suspicions, states sent.

Pure: times are arguments. All but `step` are called when something rare happens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from bml.metrics.samples import Distribution
from bml.metrics.table import FAILURE_BOUNDS, STEP_BOUNDS
from bml.protocol.server.history import ViewRecord
from bml.protocol.wire.messages import View


class Histogram:
    """How many values are in which bucket; `bounds` are the upper bounds of all buckets but the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound is below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def value(self) -> Distribution:
        """What it has counted by now."""
        return Distribution(list(accumulate(self.counts)), self.total)


class Counts:
    """The counts of one server. `state_sent_nbytes` and `state_received_nbytes` are training state."""

    def __init__(self) -> None:
        self.steps = Histogram(STEP_BOUNDS)
        self.noticed = Histogram(FAILURE_BOUNDS)
        self.recovered = Histogram(FAILURE_BOUNDS)
        self.views: Counter[str] = Counter()
        self.suspicions: Counter[str] = Counter()
        self.state_sent_nbytes = 0
        self.state_received_nbytes = 0
        self._last_step_s: float | None = None
        self._view: View | None = None
        self._recovered_epoch = 0
        self._steps_said = 0

    def step(self, now: float) -> None:
        """A result was given to the training function."""
        last_s, self._last_step_s = self._last_step_s, now
        if last_s is not None:
            self.steps.observe(now - last_s)

    def never_less(self, n_steps: int) -> int:
        """The steps that the training function asked for, `n_steps` as is known now; at least what was said.

        Others are known as such only after they are committed. A counter that falls is one that began anew.
        """
        self._steps_said = max(self._steps_said, n_steps)
        return self._steps_said

    def installed(self, records: Sequence[ViewRecord]) -> None:
        """A view came into force: the last of these records."""
        before, self._view = self._view, records[-1].view
        if before is None:
            self._recovered_epoch = self._view.epoch  # a beginning is no recovery
            return
        self.take_recovered(records)
        reason = reason_of(before, self._view)
        self.views[reason] += 1
        if reason in ("switch", "server", "link"):
            self.noticed.observe(self._view.noticed_s)

    def take_recovered(self, records: Sequence[ViewRecord]) -> None:
        """Count the recoveries that have ended by now."""
        for record in reversed(records):
            if record.view.epoch <= self._recovered_epoch:
                return
            if record.recover_s is not None:
                self.recovered.observe(record.recover_s)
                self._recovered_epoch = record.view.epoch
                return  # those before it were counted when the next view came, if they had ended


def reason_of(before: View, after: View) -> str:
    """What changed between two views, one after the other: one of `table.REASONS`."""
    new = {part.partition(":")[0] for part in {*after.failures} - {*before.failures}}
    mended = {part for part in {*before.failures} - {*after.failures} if not part.startswith("server:")}
    lost = {*before.members} - {*after.members}
    found = {
        "switch": "switch" in new,
        "server": "server" in new or bool(lost),
        "link": "link" in new,
        "join": not {*after.members} <= {*before.members} or not {*after.joined} <= {*before.joined},
        "caught-up": bool({*before.learners} - {*after.learners}),
        "healed": bool(mended),
        "slow": before.halvings != after.halvings,
        "other": True,
    }
    return next(reason for reason, holds in found.items() if holds)
