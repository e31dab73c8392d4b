"""Training functions that raise, return early or compute without end: the errors of all, and how soon."""

from __future__ import annotations

import pytest

from bml.errors import Evicted, StepMismatch, TrainingError
from bml.sim import Mishap, Simulation, When
from bml.sim.check import ENDINGS_EVERY, JOINS_EVERY, SLOW_EVERY, Scenario
from bml.sim.judge.promises import PromiseBroken
from bml.sim.mishaps.endings import BOUND_S, KINDS, OPERATOR_S, Endings
from bml.sim.world.settings import Settings
from bml.topology import parse

SAID = "server 2 raised ValueError: by seed"


def simulate(*mishaps: Mishap, steps: int = 5, min_servers: int | None = None) -> Simulation:
    simulation = Simulation(
        parse("bcube:2x2"), 1, settings=Settings(steps=steps, min_servers=min_servers), mishaps=mishaps
    )
    simulation.run()
    return simulation


def at(point: str, nth: int = 1, after_s: float = 0.0) -> When:
    return When(point, nth, after_s)


@pytest.mark.parametrize(
    "when", [at("installed", 4), at("submit", 9), at("commit", 8), at("commit", 17)], ids=str
)
def test_an_error_is_told_to_all_with_its_server(when: When) -> None:
    simulation = simulate(Mishap("raise", (2,), when))
    errors = simulation.history.errors
    assert sorted(errors) == [0, 1, 2, 3]
    for error in errors.values():
        assert isinstance(error, TrainingError)
        assert (error.server, str(error)) == (2, SAID)


@pytest.mark.parametrize("point", ["Freeze", "Status", "Propose", "Accepted", "Install"])
def test_an_error_in_the_middle_of_a_recovery_is_told_to_all(point: str) -> None:
    asked = 4 if point == "Status" else 0
    raises = [Mishap("raise", (2,), at(point, 4 + asked + nth)) for nth in (1, 2, 3)]
    for each in raises:
        simulation = simulate(Mishap("crash", (3,), at("submit", 6)), each)
        assert {str(error) for error in simulation.history.errors.values()} == {SAID}
        assert sorted(simulation.history.errors) == [0, 1, 2]


def test_an_error_is_told_by_the_next_coordinator_if_the_first_dies() -> None:
    crash = Mishap("coordinator-crash", (), at("Ended", 1))
    simulation = simulate(Mishap("raise", (2,), at("submit", 9)), crash)
    assert len(simulation.coordinators.started) == 2
    assert {str(error) for error in simulation.history.errors.values()} == {SAID}


@pytest.mark.parametrize("server", range(4))
def test_the_others_are_told_which_server_returned_early(server: int) -> None:
    simulation = simulate(Mishap("return", (server,), at("commit", 6)))
    machine = simulation.machines[server]
    said = f"function of server {server} returned after step {machine.core.committed};"
    errors = simulation.history.errors
    assert sorted(errors) == [0, 1, 2, 3], "the server that returned learns that the job failed"
    assert all(said in str(error) for error in errors.values())
    mismatched = [each for each, error in errors.items() if isinstance(error, StepMismatch)]
    assert mismatched
    assert server not in mismatched


def test_a_long_computation_evicts_no_server_and_the_others_go_on_when_it_is_killed() -> None:
    simulation = simulate(Mishap("endless", (2,), at("submit", 9)))
    assert simulation.history.errors == {}
    assert [server for server, machine in simulation.machines.items() if machine.done] == [0, 1, 3]
    first = {step: min(times) for step, times in simulation.history.commit_at_s.items()}
    gap_s = max(first[step + 1] - first[step] for step in range(1, 5))
    assert OPERATOR_S < gap_s < OPERATOR_S + BOUND_S
    (killed,) = [line for line in simulation.history.lines if "an operator kills" in line]
    assert "server 2, which waits for the training function to bring step" in killed


def test_seeds_draw_every_kind_beside_all_else() -> None:
    seeds = [seed for seed in range(2, 400, ENDINGS_EVERY) if seed % SLOW_EVERY != 7]
    drawn = [Scenario.of(seed) for seed in seeds]
    assert {one.mishaps[-1].kind for one in drawn} == set(KINDS)
    assert {len(one.mishaps) for one in drawn} >= {1, 2, 3, 4}
    assert {bool(seed % JOINS_EVERY) for seed in seeds} == {True, False}, "also where servers join"


def test_a_wrong_error_breaks_promise_4() -> None:
    endings = Endings()
    endings.raised(2, SAID, 1.0)
    endings.check({0: TrainingError(SAID, 2)})
    for wrong in (TrainingError(SAID, 1), TrainingError("", 2), StepMismatch("step 3: ")):
        with pytest.raises(PromiseBroken, match="promise 4"):
            endings.check({0: wrong})
    endings.check_told([0, 2], {0: TrainingError(SAID, 2), 2: TrainingError(SAID, 2)})
    for other in ({2: TrainingError(SAID, 2)}, {0: Evicted("out"), 2: TrainingError(SAID, 2)}):
        with pytest.raises(PromiseBroken, match="promise 4: server 0 ends with"):
            endings.check_told([0, 2], other)
    with pytest.raises(PromiseBroken, match="promise 4: the job ended 2"):
        endings.check_bound(1, 3.0)


def test_a_joiner_may_not_be_given_another_state() -> None:
    simulation = simulate()
    simulation.promises.given(0, 3, b"one")
    with pytest.raises(PromiseBroken, match="promise 6: server 1 has another state"):
        simulation.promises.given(1, 3, b"two")


def test_a_run_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bml.sim.simulation._MOST_EVENTS", 100)
    with pytest.raises(PromiseBroken, match="promise 4: the run did not end"):
        simulate()
