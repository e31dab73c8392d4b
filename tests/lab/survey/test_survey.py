"""What a survey says, against every single set, and every subset of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations

import pytest

from bml.lab.survey.cost import Cost, cost_of, needed
from bml.lab.survey.likeness import Form, likeness
from bml.lab.survey.reliability import KINDS, dead_shares, expected, read_hours
from bml.lab.survey.sets import parts_of
from bml.lab.survey.survey import survey
from bml.schedule import plan, prove
from bml.topology import Fabric, Failure, UsageError, parse

Sets = Sequence[frozenset[Failure]]


def priced(fabric: Fabric, sets: Sets) -> Iterable[Cost]:
    return (cost_of(fabric, failures, "auto") for failures in sets)


def connectedness(fabric: Fabric, sets: Sets) -> Iterable[Cost]:
    """As `priced`, but the time is made up, of what sets that are alike have in common."""
    for failures in sets:
        damaged = fabric.without(*failures)
        time = Fraction(100 - len(damaged.links)) if damaged.is_connected else None
        yield Cost(len(damaged.servers), len(damaged.servers), time, time)


def test_a_survey_says_what_every_single_set_costs() -> None:
    fabric = parse("bcube:2x2")
    for row in survey(fabric, 3, 400, 0, partial(priced, fabric)).rows:
        sets = [frozenset(each) for each in combinations(parts_of(fabric), row.n_failures)]
        damaged = [fabric.without(*each) for each in sets]
        times = sorted(float(plan(each).gst()) for each in damaged if each.is_connected)
        assert row.exact
        assert row.n_counted == row.n_sets == len(sets)
        assert row.connected.value == pytest.approx(len(times) / len(sets))
        assert row.mean is not None
        assert row.mean.value == pytest.approx(sum(times) / len(times), rel=0.01), (
            "plans may differ by their start"
        )
        assert row.quantile(1.0) == pytest.approx(times[-1], rel=0.01)
        assert row.quantile(0.5) == pytest.approx(times[(len(times) - 1) // 2], rel=0.01)
        assert row.most_over_bound is not None
        assert 1 <= row.most_over_bound < 1.02


@pytest.mark.slow
def test_the_worst_come_first_and_have_their_bound() -> None:
    fabric = parse("bcube:3x2")
    row = survey(fabric, 2, 400, 0, partial(priced, fabric)).rows[2]
    worst = row.worst(len(row.cases))
    apart = [case for case in worst if case.cost.gst is None]
    assert worst[: len(apart)] == apart
    assert all(not fabric.without(*case.failures).is_connected for case in apart)
    assert {case.cost.largest for case in apart} == {8}
    times = [case.cost.gst for case in worst[len(apart) :] if case.cost.gst is not None]
    assert times == sorted(times, reverse=True)
    for case in worst[len(apart) :]:
        assert case.cost.bound == prove(fabric.without(*case.failures)).value


@pytest.mark.slow
def test_a_sample_holds_the_truth_in_its_interval_19_times_of_20() -> None:
    fabric = parse("bcube:3x2")
    costs = partial(connectedness, fabric)
    truth = survey(fabric, 3, 400, 0, costs).rows[3]
    assert truth.exact
    assert truth.mean is not None
    shares = means = 0
    for seed in range(40):
        row = survey(fabric, 3, 120, seed, costs).rows[3]
        assert not row.exact
        assert row.n_counted == 120
        assert row.mean is not None
        shares += row.connected.low <= truth.connected.value <= row.connected.high
        means += row.mean.low <= truth.mean.value <= row.mean.high
    # Of 40 that hold with probability 0.95, fewer than 34 do once in 300 times.
    assert min(shares, means) >= 34


def test_the_expected_bandwidth_is_the_sum_over_all_subsets() -> None:
    fabric = parse("switch:3")
    parts = parts_of(fabric)
    dead = {"server": 0.1, "link": 0.02, "switch": 0.05}
    by_kind = {"ServerFailure": "server", "LinkFailure": "link", "SwitchFailure": "switch"}
    bandwidth = connected = 0.0
    for n in range(len(parts) + 1):
        for subset in combinations(parts, n):
            time = 1.0
            for part in parts:
                share = dead[by_kind[type(part).__name__]]
                time *= share if part in subset else 1 - share
            damaged = fabric.without(*subset)
            if damaged.is_connected:
                gst = float(plan(damaged).gst())
                bandwidth += time * (1 / gst if gst else 1.0)
                connected += time
    found = expected(survey(fabric, len(parts), 1000, 0, partial(priced, fabric)), dead)
    assert found.low == pytest.approx(bandwidth)
    assert found.high == pytest.approx(bandwidth)
    assert found.connected == pytest.approx(connected)
    assert found.unknown == pytest.approx(0, abs=1e-12)
    fewer = expected(survey(fabric, 2, 1000, 0, partial(priced, fabric)), dead)
    assert fewer.low <= bandwidth <= fewer.high
    assert fewer.unknown > 0.001


def test_links_of_what_is_dead_cost_nothing_more() -> None:
    fabric = parse("bcube:3x2")
    failures = frozenset(parts_of(fabric.without()))
    assert not any("link" in str(part) for part in needed(fabric, failures))
    some = fabric.without("server:1", "link:1/0", "link:2/1", "switch:1/2").failures
    assert fabric.without(*needed(fabric, some)).links == fabric.without(*some).links


def test_times_of_failures_and_repairs() -> None:
    assert read_hours("4h", "--mttr") == {"server": 4.0, "link": 4.0, "switch": 4.0}
    assert read_hours("server=1y, link=90d", "--mtbf") == {"server": 8766.0, "link": 2160.0}
    assert dead_shares({"link": 99.0}, {"link": 1.0}) == {"server": 0.0, "link": 0.01, "switch": 0.0}
    for wrong in ("", "4", "0h", "cable=4h", "server=", "4h,", "server=4 weeks"):
        with pytest.raises(UsageError, match="--mtbf"):
            read_hours(wrong, "--mtbf")
    with pytest.raises(UsageError, match="no time to repair: server"):
        dead_shares({"server": 4.0}, {"link": 1.0})


def test_a_repair_of_what_never_fails_is_a_slip() -> None:
    assert dead_shares({"server": 4.0}, read_hours("4h", "--mttr"))["server"] == 0.5
    with pytest.raises(UsageError, match="no time to a failure, and --mttr a time to repair: link"):
        dead_shares({"server": 4.0}, {"link": 1.0, "server": 1.0})


def test_fast_links_give_the_bandwidth_that_they_have() -> None:
    fabric = parse("switch:2").with_rates({(0, 0): 10, (1, 0): 10})
    found = expected(survey(fabric, 5, 400, 0, partial(priced, fabric)), dict.fromkeys(KINDS, 0.0))
    assert found.healthy == found.low == found.high == 10


def test_all_sets_are_looked_at_where_they_are_fewer_than_the_sample() -> None:
    """Also if those of fewer failures were more: 126 sets of 4 of 9 parts, and 9 sets of 8."""
    fabric = parse("switch:4").with_rates({(0, 0): "1/2"})
    rows = survey(fabric, 8, 10, 0, partial(connectedness, fabric)).rows
    assert [row.exact for row in rows] == [True, True, *[False] * 6, True]
    assert rows[8].n_counted == rows[8].n_sets == 9


@pytest.mark.slow
def test_plans_of_sets_that_are_alike_differ_by_little() -> None:
    """Not at all in what is proved; by what packed trees are rounded by in what is planned."""
    fabric = parse("torus:4x2")
    form = likeness(fabric).form
    known: dict[Form, Cost] = {}
    for part in parts_of(fabric)[::5]:
        failures = frozenset([part])
        found = cost_of(fabric, failures, "auto")
        like = known.setdefault(form(failures), found)
        assert (like.survivors, like.largest, like.bound) == (found.survivors, found.largest, found.bound)
        assert like.gst is not None
        assert found.gst is not None
        assert abs(found.gst / like.gst - 1) <= Fraction(1, 100)


def test_more_failures_than_parts() -> None:
    fabric = parse("switch:2")
    with pytest.raises(UsageError, match="5 parts, 6 of them cannot fail"):
        survey(fabric, 6, 400, 0, partial(priced, fabric))
