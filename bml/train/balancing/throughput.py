"""How fast the job went with how many servers. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypedDict

from bml.predict.pace import Pace


class Counted(NamedTuple):
    """The steps that so many servers have made, and the samples of their batches. Equal on all servers."""

    size: int
    steps: int
    samples: int


class SizeSummary(TypedDict):
    """The steps of one size: how many, the samples of their batches, and the `seconds` that steps were timed.

    A step is timed from the one before; the first is not, nor is one that others made. The rates are None if
    none was timed.
    """

    steps: int
    samples: int
    seconds: float
    steps_per_s: float | None
    samples_per_s: float | None


@dataclass(slots=True)
class _Size:
    steps: int = 0
    samples: int = 0
    timed: int = 0
    seconds: float = 0.0
    calm: int = 0
    calm_s: float = 0.0

    def summary(self) -> SizeSummary:
        rate = self.timed / self.seconds if self.seconds > 0 else None
        return SizeSummary(
            steps=self.steps,
            samples=self.samples,
            seconds=round(self.seconds, 6),
            steps_per_s=rate,
            samples_per_s=None if rate is None else rate * self.samples / self.steps,
        )


class Throughput:
    """Counts committed steps by size: the number of servers that contributed.

    One thread at a time counts steps, and one batches; any thread may ask for the summary.
    """

    def __init__(self, clock: Callable[[], float], exposed_s: Callable[[], float] = lambda: 0.0):
        self.n_own_steps = 0
        """Steps that no call of the training function asked for; nothing else here counts them."""
        self.n_recomputed = 0
        """Samples of lost servers that this one computed in their place, once for each part of a gradient."""
        self.n_samples = 0
        """Samples of the committed batches that this server took part in, of all servers."""
        self.exposed_s = exposed_s
        """Returns how long the training function was in calls that wait for steps, in seconds."""
        self.pace = Pace(clock)
        """The times of single steps."""
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._last_s: float | None = None
        self._epoch = 0

    def counted(self) -> list[Counted]:
        """What has been counted, for a server that joins. The times are those of each server."""
        return [Counted(size, found.steps, found.samples) for size, found in sorted(self._sizes.items())]

    def go_on_from(self, counted: list[Counted]) -> None:
        """Count on from what the others had counted when this server joined."""
        self._sizes = {size: _Size(steps, samples) for size, steps, samples in counted}

    def step(self, size: int, epoch: int = 0, took_part: bool = True) -> None:
        """A step of the training function was committed by so many servers, in the view `epoch`.

        A server that joins is told of some that it did not take part in.
        """
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = _Size()
        found.steps += 1
        if not took_part:
            return
        now, last_s = self._clock(), self._last_s
        if last_s is not None:
            found.timed += 1
            found.seconds += now - last_s
            if epoch == self._epoch:
                found.calm += 1
                found.calm_s += now - last_s
        self._last_s, self._epoch = now, epoch

    def batch(self, size: int, n_samples: int, took_part: bool = True) -> None:
        """A batch with so many samples was committed; its last step had so many contributors."""
        self._sizes[size].samples += n_samples
        self.n_samples += n_samples * took_part
        self.pace.shares_work = True

    def goodput(self) -> float | None:
        """Samples per second, relative to the rate of steps without failures; None: not known.

        That is the rate of the steps with the most contributors, without those in which the view changed.
        """
        sizes = [*self._sizes.items()]
        calm = [(size, found) for size, found in sizes if found.calm_s > 0 and found.samples]
        if not calm:
            return None
        _, best = max(calm, key=lambda each: each[0])
        useful = sum(found.timed * found.samples / found.steps for _, found in sizes)
        seconds = sum(found.seconds for _, found in sizes)
        return useful / seconds / (best.calm / best.calm_s * best.samples / best.steps)

    def summary(self) -> dict[int, SizeSummary]:
        """Return the summary of each size, in order."""
        return {size: found.summary() for size, found in sorted(self._sizes.items())}


def of_all(servers: Iterable[Mapping[Any, SizeSummary]]) -> dict[Any, SizeSummary]:
    """What all servers know: of each size the summary of the server that has timed most of it.

    All have counted the same steps, but each has timed those alone that it took part in.
    """
    found: dict[Any, SizeSummary] = {}
    for size, summary in sorted(chain.from_iterable(each.items() for each in servers), key=_by_size):
        known = found.setdefault(size, summary)
        if (summary["seconds"], summary["steps"]) > (known["seconds"], known["steps"]):
            found[size] = summary
    return found


def _by_size(each: tuple[Any, SizeSummary]) -> int:
    return int(each[0])  # a key of JSON is a text
