"""What a server counts for its metrics, without a clock or a socket."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec.structs
import pytest

from bml.faults.detector import Suspicion
from bml.metrics.counts import Counts, Histogram, reason_of
from bml.metrics.table import REASONS, SUSPICION_KINDS
from bml.protocol.server.history import ViewRecord
from bml.protocol.wire.messages import Incarnation, Rate, View

FIRST = View(1, (0, 1, 2, 3), ("server:5",), 0, "start", 0.0)


def after(before: View, **changes: Any) -> View:
    return msgspec.structs.replace(before, **{"epoch": before.epoch + 1, **changes})


def record(view: View, recover_s: float | None = None) -> ViewRecord:
    return ViewRecord(view, 10.0, 11.0, recover_s)


def test_a_histogram_counts_like_a_plain_count() -> None:
    bounds, chance = (0.1, 0.5, 1.0), random.Random(3)
    values = [chance.choice([0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 9.0]) for _ in range(500)]
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    cumulative, total = histogram.value
    assert cumulative == [*(sum(value <= bound for value in values) for bound in bounds), len(values)]
    assert total == pytest.approx(sum(values))


def test_a_step_is_timed_from_the_one_before() -> None:
    counts = Counts()
    for now in (5.0, 5.25, 6.25):
        counts.step(now)
    assert counts.steps.value.cumulative[-1] == 2
    assert counts.steps.value.total == pytest.approx(1.25)


CHANGES: dict[str, View] = {
    "server": after(FIRST, members=(0, 1, 2), failures=("server:3", "server:5")),
    "link": after(FIRST, failures=("link:2/0", "server:5")),
    "switch": after(FIRST, members=(0, 1), failures=("server:5", "switch:0/1")),
    "join": after(FIRST, members=(0, 1, 2, 3, 5), failures=(), learners=(5,)),
    "slow": after(FIRST, rates=(Rate(2, 0, halvings=1, times=1),)),
    "other": after(FIRST, reason="new coordinator"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_the_reason_of_a_change(reason: str) -> None:
    assert reason_of(FIRST, CHANGES[reason]) == reason


def test_the_reasons_of_parts_that_come_back() -> None:
    joined = CHANGES["join"]
    assert reason_of(joined, after(joined, learners=())) == "caught-up"
    assert reason_of(CHANGES["link"], after(CHANGES["link"], failures=("server:5",))) == "healed"
    again = after(joined, joined=(Incarnation(5, 2, ""),))
    assert reason_of(joined, again) == "join", "a server that died and joined within one change"
    evicted = after(FIRST, members=(0, 1, 2))
    assert reason_of(FIRST, evicted) == "server", "it lives, and is no member any more"


def test_every_change_counts_once_and_failures_are_timed() -> None:
    counts, views = Counts(), [FIRST]
    records = [record(FIRST, 0.5)]
    counts.installed(records)
    assert counts.views.total() == 0
    for step in range(20):
        kill = step % 2 == 0
        failures = ("link:2/0", "server:5") if kill else ("server:5",)
        views.append(after(views[-1], failures=failures, noticed_s=0.3 if kill else 0.0))
        records.append(record(views[-1]))
        counts.installed(records)
        records[-1] = replace(records[-1], recover_s=0.2)
    counts.take_recovered(records)
    counts.take_recovered(records)  # asked twice: counted once
    assert counts.views == {"link": 10, "healed": 10}
    assert set(counts.views) <= set(REASONS)
    assert counts.noticed.value.cumulative[-1] == 10
    assert counts.noticed.value.total == pytest.approx(3.0)
    assert counts.recovered.value.cumulative[-1] == 20, "the start is no recovery"
    assert counts.recovered.value.total == pytest.approx(4.0)


def test_a_view_without_a_commit_has_not_recovered() -> None:
    counts = Counts()
    records = [record(FIRST, 0.1), record(after(FIRST)), record(after(after(FIRST)), 0.7)]
    for at in (1, 2, 3):
        counts.installed([*records[: at - 1], record(records[at - 1].view)])
    counts.take_recovered(records)
    assert counts.recovered.value.cumulative[-1] == 1
    assert counts.recovered.value.total == pytest.approx(0.7)


def test_the_kinds_of_suspicions_are_those_of_the_detector() -> None:
    for kind in SUSPICION_KINDS:
        assert f"`{kind}`" in (Suspicion.__doc__ or "")


def test_the_count_of_steps_never_falls() -> None:
    """A step that the training function did not ask for is committed before it is known to be one."""
    counts = Counts()
    said = [
        counts.never_less(committed - own) for committed, own in [(7, 0), (8, 0), (8, 1), (9, 1), (10, 1)]
    ]
    assert said == [7, 8, 8, 8, 9]
