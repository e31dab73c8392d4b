"""The rows of a benchmark of trainings, from times that servers saw and times that were predicted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from bml.errors import BmlError
from bml.lab.bench.training.asked import WARM_UP, Comparison, Contender, Strike
from bml.lab.flows.training.training import ViewTimes


@dataclass(frozen=True)
class Iteration:
    """An iteration of all servers, in seconds, and the servers whose samples are in its gradients.

    `seconds` is from the end of the one before to its own end, each on the slowest server; `gst_s` of that
    is from the end of backward until all gradients are sums.
    """

    seconds: float
    gst_s: float
    contributors: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """A run: its iterations from the second one on, and what else is known of it.

    `views` counts the views, and `processors` is the share of this machine's processor time that was used
    meanwhile, by all but processes of low priority.
    """

    iterations: tuple[Iteration, ...]
    views: int
    processors: float


@dataclass(frozen=True)
class Row:
    """A contender. Times are seconds.

    `iteration_s` and `gst_s` are medians over `iterations` iterations of all turns: an iteration, and of it
    what follows the end of backward until all gradients are sums. `predicted_s` and `predicted_gst_s` are
    those of the model of networks. `off` is what the measured iteration is longer than predicted, as a part
    of it. `reduction` is by how much less the GST of bml is, as a part of this contender's; None for bml.
    `compute_s` is the computation that is replayed. `views` and `processors` are as in `Run`, the most of all
    turns.
    """

    who: str
    model: str
    fabric: str
    iteration_s: float
    gst_s: float
    predicted_s: float
    predicted_gst_s: float
    off: float
    reduction: float | None
    compute_s: float
    iterations: int
    algorithms: list[str]
    views: int
    processors: float

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON: times in whole microseconds, shares with four digits."""
        return _as_json(self)


@dataclass(frozen=True)
class FailureRow:
    """What failures in one iteration cost bml. Times are seconds.

    `before_s` and `after_s` are medians of the iterations before, since the failure before that, and after.
    `recovery_s` is how much longer the iteration in which they struck took than one before, the next one
    if that was longer. `predicted_before_s` and `predicted_after_s` are those of the model of networks, in
    which the `survivors` share the work; `off_after` compares the last two, as `Row.off`. `other_views`
    counts views of the run that no failure asked for: in them times are those of other wires.
    """

    who: str
    model: str
    fabric: str
    failures: list[str]
    iteration: int
    survivors: int
    recovery_s: float
    before_s: float
    after_s: float
    predicted_before_s: float
    predicted_after_s: float
    off_after: float
    other_views: int
    processors: float

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON, as `Row.as_json`."""
        return _as_json(self)


def iterations(values: Mapping[int, Mapping[str, Any]]) -> tuple[Iteration, ...]:
    """Return the iterations from the second one on. `values`: server -> what its `replay` returned.

    The servers have seen the same iterations: those of servers that were lost are not in it.
    """
    ends_s = [max(each) for each in zip(*(value["ends_s"] for value in values.values()), strict=True)]
    computed_s = [max(each) for each in zip(*(value["computed_s"] for value in values.values()), strict=True)]
    contributors = next(iter(values.values()))["contributors"]
    return tuple(
        Iteration(end_s - before_s, end_s - backward_s, tuple(there))
        for (before_s, end_s), backward_s, there in zip(
            pairwise(ends_s), computed_s[1:], contributors[1:], strict=True
        )
    )


def row(comparison: Comparison, contender: Contender, runs: Sequence[Run], predicted: ViewTimes) -> Row:
    """Make the row of a contender from all its turns, without `reduction`, which needs two contenders."""
    counted = [each for run in runs for each in run.iterations[WARM_UP - 1 :]]
    iteration_s = statistics.median(each.seconds for each in counted)
    return Row(
        who=contender.who,
        model=comparison.model,
        fabric=contender.fabric.name,
        iteration_s=iteration_s,
        gst_s=statistics.median(each.gst_s for each in counted),
        predicted_s=predicted.iteration_s,
        predicted_gst_s=predicted.exposed_s,
        off=iteration_s / predicted.iteration_s - 1,
        reduction=None,
        compute_s=predicted.compute_s,
        iterations=len(counted),
        algorithms=predicted.algorithms,
        views=max(run.views for run in runs),
        processors=max(run.processors for run in runs),
    )


def compared(rows: Sequence[Row]) -> list[Row]:
    """Give all rows but the first, that of bml, their `reduction`."""
    own, *others = rows
    return [own, *(replace(each, reduction=1 - own.gst_s / each.gst_s) for each in others)]


def failure_rows(comparison: Comparison, run: Run, predicted: Sequence[ViewTimes]) -> list[FailureRow]:
    """Make a row for each time at which something fails, of bml alone.

    Raises:
        BmlError: other servers contributed after a failure than it leaves: one was lost besides, or the
            failure struck elsewhere.
    """
    ends = [*(strike.iteration - 1 for strike in comparison.strikes[1:]), comparison.failing_iterations]
    found, begin = [], WARM_UP
    for number, (strike, end) in enumerate(zip(comparison.strikes, ends, strict=True)):
        left = comparison.failing().parts[number + 1].fabric.servers
        before_s = _median_s(run, begin, strike.iteration - 1)
        begin = strike.iteration + 1
        _check_contributors(run, begin, end, left, strike)
        after_s, expected_s = _median_s(run, begin, end), predicted[number + 1].iteration_s
        struck_s = max(each.seconds for each in _between(run, strike.iteration - 1, begin))
        found.append(
            FailureRow(
                who=comparison.own.who,
                model=comparison.model,
                fabric=comparison.own.fabric.name,
                failures=[str(failure) for failure in strike.failures],
                iteration=strike.iteration,
                survivors=len(left),
                recovery_s=struck_s - before_s,
                before_s=before_s,
                after_s=after_s,
                predicted_before_s=predicted[number].iteration_s,
                predicted_after_s=expected_s,
                off_after=after_s / expected_s - 1,
                other_views=max(0, run.views - 1 - len(comparison.strikes)),
                processors=run.processors,
            )
        )
    return found


def _between(run: Run, begin: int, end: int) -> Sequence[Iteration]:
    """Return the iterations `begin` to `end` - 1, counted from 0; a run has none with the number 0."""
    return run.iterations[begin - 1 : end - 1]


def _median_s(run: Run, begin: int, end: int) -> float:
    return statistics.median(each.seconds for each in _between(run, begin, end))


def _check_contributors(run: Run, begin: int, end: int, left: Sequence[int], strike: Strike) -> None:
    for number, each in enumerate(_between(run, begin, end), begin + 1):
        if each.contributors != tuple(left):
            raise BmlError(
                f"after {', '.join(map(str, strike.failures))} in iteration {strike.iteration} servers "
                f"{tuple(left)} should be left, and in iteration {number} there were {each.contributors}: "
                "on a busy machine a server may be taken for dead, so try again with a lower --rate"
            )


def _as_json(row: Row | FailureRow) -> dict[str, Any]:
    return {key: _rounded(key, value) for key, value in asdict(row).items()}


def _rounded(key: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 6 if key.endswith("_s") else 4)
