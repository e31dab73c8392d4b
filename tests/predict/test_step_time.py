"""Predictions of step times: by formula, and beside simulated steps on damaged fabrics."""

import pytest

from bml.lab.flows.simulate import Conditions, simulate
from bml.predict.pace import StepTimes
from bml.predict.step_time import Predictor, felt_s, modelled, modelled_shared
from bml.protocol.step.slices import slice_nbytes
from bml.schedule import Schedules
from bml.schedule.select.model import Constants
from bml.topology import parse

RATE = 12e6
CONSTANTS = Constants(alpha_s=3e-4, beta_s=1 / RATE, gamma_s=0.0, delta_s=0.0, epsilon_s=0.0)
MIB = 1 << 20


def view(n_servers: int, n_steps: int, computes_s: float, wires_s: float, slack_s: float = 0.0) -> StepTimes:
    found = StepTimes(n_servers, StepTimes(n_servers))
    exposed_s = 0.0 if slack_s else wires_s
    for _ in range(n_steps):
        found.add(MIB, computes_s + exposed_s + slack_s, wires_s, slack_s, exposed_s)
    return found


@pytest.mark.parametrize(
    ("fabric", "failures", "rates"),
    [
        ("bcube:3x2", (), {}),
        ("bcube:3x2", ("server:1",), {}),
        ("bcube:3x2", ("link:1/0",), {}),
        ("bcube:3x2", ("switch:0/0",), {}),
        ("bcube:3x2", (), {(1, 0): "1/4"}),
        ("bcube:3x2", (), {(1, 0): "1/16"}),
        ("bcube:4x2", ("link:1/0",), {}),
        ("bcube:2x2", ("switch:0/0",), {}),
        ("torus:3x2", ("server:1",), {}),
    ],
)
def test_the_model_is_within_a_tenth_of_a_simulated_step(
    fabric: str, failures: tuple[str, ...], rates: dict[tuple[int, int], str]
) -> None:
    damaged = parse(fabric).without(*failures)
    schedules = Schedules(damaged.with_rates(rates) if rates else damaged, "auto", CONSTANTS)
    wires = modelled(schedules, CONSTANTS, lambda nbytes: slice_nbytes(nbytes, RATE))
    simulated = simulate(schedules.for_nbytes(8 * MIB), Conditions(8 * MIB, RATE, CONSTANTS.alpha_s)).seconds
    assert wires(8 * MIB) == pytest.approx(simulated, rel=0.1)


def test_the_first_view_takes_nothing_but_computation_from_its_steps() -> None:
    for measured_s in (0.5, 4.0):
        predictor = Predictor("source")
        predictor.installed(1, lambda nbytes: 1.0)
        predictor.look({1: view(9, 5, 0.25, measured_s)}, 9, False)
        assert predictor.predictions[1].step_s == pytest.approx(1.25)


def test_a_view_is_predicted_from_the_one_before_and_not_from_its_own_steps() -> None:
    predictor = Predictor("source")
    predictor.installed(1, lambda nbytes: 1.0)
    earlier = view(9, 50, 0.25, 1.5)
    predictor.look({1: earlier}, 9, False)
    predictor.installed(2, lambda nbytes: 2.0)
    predictor.look({1: earlier, 2: view(8, 50, 0.0, 77.0)}, 8, False)
    assert predictor.predictions[2].step_s == pytest.approx(0.25 + 2.0 * 1.5)
    assert "1.50 times" in predictor.predictions[2].basis
    predictor.look({1: view(9, 50, 9.0, 9.0)}, 8, False)
    assert predictor.predictions[2].step_s == pytest.approx(3.25)


def test_fewer_servers_compute_longer_if_they_share_a_batch() -> None:
    for shares_work, computes_s in ((False, 0.8), (True, 0.9)):
        predictor = Predictor("source")
        predictor.installed(1, lambda nbytes: 1.0)
        predictor.installed(2, lambda nbytes: 1.0)
        predictor.look({1: view(9, 9, 0.8, 1.0)}, 8, shares_work)
        assert predictor.predictions[2].step_s == pytest.approx(computes_s + 1.0)


def test_hidden_wires_are_felt_beyond_the_slack() -> None:
    assert felt_s(0.5, 0.2, 0.0) == pytest.approx(0.3)
    assert felt_s(0.1, 0.2, 0.0) == 0.0
    assert felt_s(-0.5, 0.0, 0.2) == -0.2


def test_nothing_is_said_before_enough_steps() -> None:
    predictor = Predictor("source")
    predictor.installed(1, lambda nbytes: 1.0)
    predictor.look({1: view(9, 4, 0.25, 1.0)}, 9, False)
    assert not predictor.predictions


def test_what_is_shown_is_beside_what_was_measured_for_the_same_sizes() -> None:
    predictor = Predictor("source")
    predictor.installed(1, lambda nbytes: 1.0)
    steps = view(9, 5, 0.25, 1.5)
    predictor.look({1: steps}, 9, False)
    shown = predictor.predictions[1].shown(steps)
    assert (shown["step_s"], shown["measured_s"], shown["steps"]) == (1.25, 1.75, 5)
    assert predictor.predictions[1].shown(StepTimes(9))["measured_s"] is None


def test_shared_memory_is_priced_by_what_each_server_touches() -> None:
    priced = modelled_shared(4, Constants(1e-4, 0.0, 0.0, 1e-9, 0.0))
    assert priced(1_000_000) == pytest.approx(2e-4 + 1e6 * 3.25e-9)


def test_a_host_is_believed_as_far_as_its_steps_agree_where_the_rate_is_known() -> None:
    """Steps take one to three times as long as modelled: little is known of this host."""
    foretold = {}
    for known in (False, True):
        predictor, steps = Predictor("source", known), StepTimes(9, StepTimes(9))
        for wires_s in (1.0, 3.0, 1.5, 2.5, 2.0):
            steps.add(MIB, wires_s, wires_s, 0.0, wires_s)
        predictor.installed(1, lambda nbytes: 1.0)
        predictor.installed(2, lambda nbytes: 1.0)
        predictor.look({1: steps}, 9, False)
        foretold[known] = predictor.predictions[2].step_s
    assert foretold[False] == pytest.approx(2.0)
    assert 1.0 < foretold[True] < 2.0
    steady = Predictor("source", True)
    steady.installed(1, lambda nbytes: 1.0)
    steady.installed(2, lambda nbytes: 1.0)
    steady.look({1: view(9, 9, 0.0, 2.0)}, 9, False)
    assert steady.predictions[2].step_s == pytest.approx(2.0)
