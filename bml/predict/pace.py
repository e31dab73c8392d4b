"""What the steps of one server took, view by view. The clock is an argument.

A step lasts from the end of the one before to its own. In that time the training function computes, and
vectors are on the wires; with `allreduce_async` both at once. So it is noted, too, since when the training
thread has waited for the step, and for how long a step was over before anybody waited for it: only the first
becomes shorter when the wires are faster, and only beyond the second does a step become longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

KEPT = 256
"""Of how many steps of a view and size, the last ones, the times are kept."""
SIZES_KEPT = 256
"""Sizes of a view of which the times are kept: the newest ones."""
VIEWS_KEPT, WHOLE_VIEWS = 256, 8
"""Views that are kept, the last ones; and how many of them with the times of all steps, not medians alone."""
LEARNED = 5
"""From so many steps it is learned how long the training function computes."""
_NORMAL, _OF_MEDIAN = 1.48, 1.25
"""Deviation of a normal distribution, in median deviations; and error of a median, in errors of a mean."""
_WARM_UP = 2
"""Steps of a run in which training functions do things for the first time."""


class Took(NamedTuple):
    """A step as it was noted; times are seconds of one clock.

    `waited_s`: when the training thread began to wait last, as known at the beginning of the step;
    `waits_s`: since when it has waited at the end, None if it computes.
    """

    epoch: int
    n_servers: int
    nbytes: int
    began_s: float
    ended_s: float
    waited_s: float
    waits_s: float | None


class Boundary(NamedTuple):
    """A boundary of the training loop: the share of it that is done, and when that was.

    `epoch`: the view of the last step before it; 0 if there was none.
    """

    done: float
    at_s: float
    epoch: int


class Usual(NamedTuple):
    """Medians of the steps of one size in a view, in seconds; `error`: the relative one of `wires_s`.

    `step_s`: from step to step; `wires_s`: from the contribution to the result; `slack_s`: a step was over
    for so long before it was waited for; `exposed_s`: so long did the training thread do nothing but wait.
    """

    n_steps: int
    step_s: float
    wires_s: float
    slack_s: float
    exposed_s: float
    error: float


@dataclass
class StepTimes:
    """The steps of one view that were measured, by the size of their vectors in bytes."""

    n_servers: int
    first: StepTimes | None = None
    """The first LEARNED of them; None in that one itself."""
    counts: dict[int, int] = field(default_factory=dict)
    times: dict[int, deque[tuple[float, float, float, float]]] = field(default_factory=dict)
    n_steps: int = 0
    """How many there are."""

    def add(self, nbytes: int, *times: float) -> None:
        """Add a step with the times of `Usual`."""
        step_s, wires_s, slack_s, exposed_s = times
        if self.first is not None and self.first.n_steps < LEARNED:
            self.first.add(nbytes, *times)
        # First the times: whoever sees a size among the counts reads its times.
        self.times.setdefault(nbytes, deque(maxlen=KEPT)).append((step_s, wires_s, slack_s, exposed_s))
        self.counts[nbytes] = self.counts.get(nbytes, 0) + 1
        self.n_steps += 1
        while len(self.counts) > SIZES_KEPT:
            oldest = next(iter(self.counts))
            del self.counts[oldest], self.times[oldest]

    def shorten(self) -> None:
        """Keep the medians alone."""
        for nbytes, times in self.times.items():
            if len(times) > 1:
                _, step_s, wires_s, slack_s, exposed_s, _ = self.usual(nbytes)
                self.times[nbytes] = deque([(step_s, wires_s, slack_s, exposed_s)], maxlen=1)

    def has(self, sizes: Collection[int]) -> bool:
        """Whether there are steps of each of these sizes, in bytes."""
        return all(nbytes in self.counts for nbytes in sizes)

    def usual(self, nbytes: int) -> Usual:
        """Return the medians of the steps of a size that is there."""
        step_s, wires_s, slack_s, exposed_s = zip(*self.times[nbytes], strict=True)
        usual_s = median(wires_s)
        spread_s = _NORMAL * median(abs(each - usual_s) for each in wires_s)
        error = _OF_MEDIAN * spread_s / sqrt(len(wires_s)) / usual_s if usual_s else 0.0
        return Usual(self.counts[nbytes], median(step_s), usual_s, median(slack_s), median(exposed_s), error)

    def step_s(self, counts: Mapping[int, int]) -> float:
        """The usual time of a step, if sizes come so often: the mean of the medians of all sizes."""
        return mean_s(counts, lambda nbytes: self.usual(nbytes).step_s)


def mean_s(counts: Mapping[int, int], seconds: Callable[[int], float]) -> float:
    """Return the mean of what each size takes, by how often it came."""
    return sum(n * seconds(nbytes) for nbytes, n in counts.items()) / sum(counts.values())


class Pace:
    """Notes the steps of one session, at little cost; `look` takes in what was noted, in any one thread."""

    def __init__(self, clock: Callable[[], float]):
        self.shares_work = False
        """Whether servers share the samples of batches: with fewer of them each computes longer."""
        self.views: dict[int, StepTimes] = {}
        """Epoch -> its steps, as of the last `look`."""
        self.boundary: Boundary | None = None
        """The newest one."""
        self._clock = clock
        self._noted: deque[Took] = deque(maxlen=2 * KEPT)
        self._last: Took | None = None
        self._epoch = 0
        self._n_taken = 0
        self._waited_s = -1.0
        self._waits_s: float | None = None
        self._began = (0.0, -1.0)

    def begin(self) -> None:
        """A contribution is brought."""
        self._began = (self._clock(), self._waited_s)

    def end(self, epoch: int, n_servers: int, nbytes: int, waits: bool) -> None:
        """The step is committed, by so many servers; `waits`: its own call is what the function waits in."""
        self._epoch = epoch
        began_s, waited_s = self._began
        waits_s = began_s if waits else self._waits_s
        self._noted.append(Took(epoch, n_servers, nbytes, began_s, self._clock(), waited_s, waits_s))

    def passed(self, done: float) -> None:
        """A boundary of the training loop was passed, of which this share is done."""
        self.boundary = Boundary(done, self._clock(), self._epoch)

    def wait_begins(self) -> None:
        """The training thread waits for a step that another thread does."""
        self._waits_s = self._waited_s = self._clock()

    def wait_ends(self) -> None:
        """It goes on."""
        self._waits_s = None

    def look(self) -> None:
        """Take in what was noted since the last look."""
        while self._noted:
            took = self._noted.popleft()
            before, self._last = self._last, took
            self._n_taken += 1
            # A step that a view change interrupted says nothing of its view, nor do the first ones of a run.
            if before is None or before.epoch != took.epoch or self._n_taken <= _WARM_UP:
                continue
            self._take(before, took)

    def _take(self, before: Took, took: Took) -> None:
        steps = self.views.get(took.epoch)
        if steps is None or steps.n_servers != took.n_servers:
            steps = self.views[took.epoch] = StepTimes(took.n_servers, StepTimes(took.n_servers))
            self._forget()
        step_s, wires_s = took.ended_s - before.ended_s, took.ended_s - took.began_s
        if before.waits_s is not None:
            slack_s = 0.0
        elif took.waited_s > before.ended_s:
            slack_s = took.waited_s - before.ended_s
        else:
            slack_s = max(0.0, took.began_s - before.ended_s)
        if took.waits_s is not None:
            exposed_s = took.ended_s - max(took.waits_s, took.began_s)
        else:  # a queue of steps goes on at once, and all of it is waited for in the end
            exposed_s = wires_s if slack_s <= 0.01 * step_s else 0.0
        steps.add(took.nbytes, step_s, wires_s, slack_s, min(exposed_s, wires_s))

    def _forget(self) -> None:
        """A job may live through any number of views."""
        known = sorted(self.views)
        for epoch in known[:-VIEWS_KEPT]:
            del self.views[epoch]
        for epoch in known[:-WHOLE_VIEWS][-1:]:
            self.views[epoch].shorten()
