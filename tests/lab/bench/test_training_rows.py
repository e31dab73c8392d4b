"""Rows of `bml bench train` from known times, what servers replay, and predictions in closed form."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from test_training_asked import LAYERS, comparison

from bml.errors import BmlError
from bml.lab.bench.training import predicted
from bml.lab.bench.training.asked import contenders, strikes
from bml.lab.bench.training.rows import Iteration, Run, compared, failure_rows, iterations, row
from bml.lab.bench.training.work import middle_step, pattern, share_of, weight, work, wrong
from bml.lab.commands.testbed.printed import Answer, show
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import SAMPLES
from bml.schedule.select.model import Constants
from bml.topology import parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

ALL = tuple(range(9))
LEFT = tuple(server for server in ALL if server != 4)
BYTES_PER_S = 100e6 / 8 * 0.954
WIRES = Constants(alpha_s=0.0, beta_s=1 / BYTES_PER_S)


def run_of(*seconds: float, contributors=None, **changes) -> Run:
    there = contributors or [ALL] * len(seconds)
    found = [Iteration(each, each / 4, who) for each, who in zip(seconds, there, strict=True)]
    return replace(Run(tuple(found), views=1, processors=0.25), **changes)


def test_an_iteration_ends_when_its_slowest_server_does():
    values = {
        0: {"ends_s": [10.0, 12.0, 14.5], "computed_s": [9.0, 11.0, 13.0], "contributors": [ALL, ALL, LEFT]},
        3: {"ends_s": [10.5, 12.5, 14.0], "computed_s": [9.5, 10.5, 13.5], "contributors": [ALL, ALL, LEFT]},
    }
    assert iterations(values) == (Iteration(2.0, 1.5, ALL), Iteration(2.0, 1.0, LEFT))


@pytest.mark.slow
def test_a_row_has_the_medians_of_all_turns_without_those_that_warm_up():
    bed = comparison(layers=LAYERS)
    expected = predicted.healthy(bed, bed.own, WIRES)
    runs = [run_of(99.0, 1.0, 2.0), run_of(77.0, 3.0, 8.0, views=3), run_of(88.0, 4.0, 9.0, processors=0.75)]
    found = row(bed, bed.own, runs, expected)
    assert (found.iteration_s, found.gst_s, found.iterations) == (3.5, 3.5 / 4, 6)
    assert (found.views, found.processors, found.reduction) == (3, 0.75, None)
    assert found.off == pytest.approx(3.5 / expected.iteration_s - 1)


@pytest.mark.slow
def test_a_reduction_is_a_part_of_the_gst_of_the_other():
    bed = comparison()
    expected = predicted.healthy(bed, bed.own, WIRES)
    rows = [row(bed, bed.own, [run_of(9.0, seconds)], expected) for seconds in (2.0, 4.0, 3.0, 1.0)]
    assert [each.reduction for each in compared(rows)] == [
        None,
        pytest.approx(0.5),
        pytest.approx(1 / 3),
        pytest.approx(-1.0),
    ]


def failing(**changes):
    bed = comparison(strikes=strikes(["server:4@6"]), iterations=3, **changes)
    times = [9.0, 1.0, 1.2, 1.1, 1.9, 2.4, 1.5, 1.6, 1.7]  # iterations 2 to 10
    there = [ALL] * 4 + [LEFT] * 5
    return bed, run_of(*times, contributors=there)


def test_a_failure_has_a_gap_and_medians_on_both_sides():
    bed, run = failing()
    assert bed.failing_iterations == len(run.iterations) + 1
    expected = predicted.failing(bed, WIRES)
    (found,) = failure_rows(bed, run, expected)
    assert (found.failures, found.iteration, found.survivors) == (["server:4"], 6, 8)
    assert (found.before_s, found.after_s) == (1.1, 1.6)
    assert found.recovery_s == pytest.approx(2.4 - 1.1)
    assert found.predicted_before_s == expected[0].iteration_s
    assert found.off_after == pytest.approx(1.6 / expected[1].iteration_s - 1)


def test_a_second_failure_is_compared_with_what_was_after_the_first():
    bed = comparison(strikes=strikes(["link:0/0@5", "server:4@9"]), iterations=2)
    times = [9.0, 1.0, 1.0, 3.0, 1.0, 2.0, 2.0, 2.5, 1.0, 5.0, 5.0]  # iterations 2 to 12
    there = [ALL] * 7 + [LEFT] * 4
    first, second = failure_rows(bed, run_of(*times, contributors=there), predicted.failing(bed, WIRES))
    assert (first.before_s, first.recovery_s, first.after_s, first.survivors) == (1.0, 2.0, 2.0, 9)
    assert (second.before_s, second.recovery_s, second.after_s, second.survivors) == (2.0, 0.5, 5.0, 8)


def test_a_failure_that_leaves_other_servers_is_no_measurement():
    bed, run = failing()
    elsewhere = replace(run.iterations[-1], contributors=LEFT[1:])
    with pytest.raises(BmlError, match=r"in iteration 10 there were .*try again with a lower --rate"):
        failure_rows(bed, replace(run, iterations=(*run.iterations[:-1], elsewhere)), [])


@pytest.mark.parametrize(
    ("fabric", "n_nics", "against"), [("bcube:3x2", 2, "ring,mesh"), ("torus:3x2", 4, "ring")]
)
def test_a_predicted_gst_is_shared_by_the_nics(fabric, n_nics, against):
    own = replace(comparison().own, fabric=parse(fabric))
    bed = comparison(layers=LAYERS[:1], own=own, against=contenders(f"{against}@switch:9", own.fabric))
    one_s = 2 * 8 / 9 * 4000 / BYTES_PER_S
    assert predicted.healthy(bed, bed.own, WIRES).exposed_s == pytest.approx(one_s / n_nics, rel=0.02)
    for each in bed.against:
        assert predicted.healthy(bed, each, WIRES).exposed_s == pytest.approx(one_s, rel=0.02)


def test_survivors_share_the_predicted_work():
    bed, _ = failing(layers=LAYERS)
    before, after = predicted.failing(bed, WIRES)
    compute_s = sum(layer.forward_s + layer.backward_s for layer in LAYERS)
    assert before.iteration_s == pytest.approx(compute_s + before.communication_s)
    assert after.iteration_s == pytest.approx(compute_s * 9 / 8 + after.communication_s)


def test_servers_replay_layers_from_the_last_to_the_first():
    found = work(LAYERS, Overlap.backward, 4)
    assert [(each.size, each.ready_s) for each in found.gradients] == [
        (5000, pytest.approx(0.3 + 0.2)),
        (1000, pytest.approx(0.3 + 0.2 + 0.1 + 0.2)),
    ]
    assert found.compute_s == pytest.approx(0.8)
    assert not found.late
    assert work(LAYERS, Overlap.none, 4).late
    assert [middle_step(found, iteration) for iteration in (1, 2, 20)] == [1, 3, 39]
    assert middle_step(work(LAYERS[::-1], Overlap.none, 4), 20) == 40


@pytest.mark.parametrize("n_servers", [2, 9, 16])
def test_the_mean_is_the_same_however_the_samples_are_split(n_servers):
    n = SAMPLES * n_servers
    each = pattern(5000)
    indices = np.random.default_rng(n).permutation(n).astype(np.int64)
    cuts = np.sort(np.random.default_rng(1).integers(0, n, n_servers - 1))
    total = np.zeros_like(each)
    for part in np.split(indices, cuts):
        total += each * weight(part)
    mean = total / np.float32(n)
    assert wrong(mean, each, n, all_of_it=True) == wrong(mean, each, n, all_of_it=False) == 0
    assert share_of(n) == n_servers


def test_wrong_elements_are_counted():
    each = pattern(5000)
    mean = each * np.float32((SAMPLES + 1) / 2)
    mean[1009] += 1
    mean[17] = np.nan
    assert wrong(mean, each, SAMPLES, all_of_it=True) == 2
    assert wrong(mean, each, SAMPLES, all_of_it=False) == 1


@pytest.mark.parametrize("n_servers", [1, 9, 16])
def test_a_mean_without_a_sample_or_of_something_else_is_wrong(n_servers):
    n = SAMPLES * n_servers
    each, other = pattern(5000, 3), pattern(5000, 4)
    mean = each * weight(np.arange(n)) / np.float32(n)
    assert wrong(mean, each, n, True, iteration=2) == 0
    assert wrong(each * weight(np.arange(1, n)) / np.float32(n), each, n, True, iteration=2) == 5000
    assert wrong(mean, each, n, True, iteration=3) == 5000, "it is that of the iteration before"
    assert wrong(mean, other, n, True, iteration=2) == 5000, "it is that of another gradient"
    doubled = each * weight(np.arange(n), 3) / np.float32(n)
    assert wrong(doubled, each, n, True, iteration=3) == 0


def test_the_answer_says_how_gradients_were_scaled_and_that_processors_were_busy(capsys):
    bed, run = failing(scale=Fraction(1, 64))
    expected = predicted.failing(bed, WIRES)
    rows = [
        row(bed, each, [run_of(9.0, 2.0, processors=0.8, views=2)], predicted.healthy(bed, each, WIRES))
        for each in bed.contenders
    ]
    answer = Answer(bed, compared(rows), failure_rows(bed, run, expected))
    show(answer)
    said = capsys.readouterr().out
    assert "scaled to 1/64" in said
    assert "as whole gradients with 6.4 Gbit/s" in said
    assert "more than half busy" in said
    assert "had 2 views" in said
    printed = answer.as_json()
    assert (printed["scale"], printed["steps"], printed["nbytes"]) == ("1/64", 2, 24_000)
    assert printed["rows"][1]["who"] == "ring"
    assert printed["failures"][0]["recovery_s"] == 1.3
