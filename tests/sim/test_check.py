"""`bml.sim.check`: seeds that hold, bugs that it must find, exact replay, short histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planted_bugs import (
    PLANTED,
    blame_the_suspected,
    retry_although_one_committed,
    return_before_the_barrier,
)

from bml.schedule import AnyProgram, Programs
from bml.sim.check import FABRICS, JOINS_EVERY, OTHER_FAMILIES, Scenario, Tally, check, report, run, shrink
from bml.sim.judge.promises import PromiseBroken
from bml.topology import parse

MOST_SEEDS = 3000

FIRST_TRIED = {
    "forget_accepted_views": 505,
    "keep_without_bound": 185,
    "share_terms": 295,
    "trust_an_open_line": 835,
    "hear_no_silence": 300,
    "work_on_while_frozen": 380,
    "let_a_joiner_forget_its_promises": 955,
    "takeover_with_the_epoch_in_force": 350,
    "lose_the_end": 1130,
    "read_terms_from_a_clock": 170,
    "give_up_the_busy": 140,
    "judge_by_one_round": 845,
    "start_from_a_state_that_overtook": 30200,
    "ignore_stalls": 195,
    "promote_a_user_that_replays": 105,
    "begin_to_replay_while_frozen": 175,
    "sleep_while_a_state_is_overtaken": 185,
    "take_a_joiner_for_a_stranger": 640,
    "never_miss_a_coordinator": 150,
}
"""Seeds shortly before those that find the rarest bugs: it is found in any order, but sooner from there."""


def assert_held(tally: Tally, n_seeds: int) -> None:
    assert not tally.broken
    assert tally.seeds == n_seeds
    assert tally.faults_injected > n_seeds
    assert tally.steps_committed > 2 * n_seeds
    assert tally.jobs_aborted < n_seeds / 2, "in every fifth a training function may raise or return early"


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_these_seeds_hold(first: int) -> None:
    assert_held(check(range(first, first + 50)), 50)


BROKE_ONCE = (24530, 26052, 29707, 30527, 36438, 37564, 52167, 62539, 72927, 97623, 102433)
"""Seeds that broke a promise before what they found was mended."""


@pytest.mark.slow
def test_seeds_that_broke_a_promise_once_hold() -> None:
    for seed in BROKE_ONCE:
        assert run(Scenario.of(seed)).broken is None


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        first = FIRST_TRIED.get(plant.__name__, 0)
        seeds = range(first, first + MOST_SEEDS)
        outcomes = (run(Scenario.of(seed)).broken for seed in seeds)
        broken = next((each for each in outcomes if each and _proves(each)), None)
    assert broken is not None


def _proves(broken: PromiseBroken) -> bool:
    """Whether it is the protocol that fails: another error in the code may be one of the plant's own."""
    return broken.number != 0 or any(name in str(broken) for name in ("InvariantError", "FrameError"))


@pytest.mark.slow
def test_a_needless_eviction_is_noticed_also_among_several_mishaps() -> None:
    with pytest.MonkeyPatch.context() as patch:
        blame_the_suspected(patch)
        outcomes = (run(Scenario.of(seed)).broken for seed in range(100, 300))
        assert any(broken is not None and broken.number == 8 for broken in outcomes)


@pytest.mark.slow
def test_a_seed_replays_exactly() -> None:
    for seed in (3, 11, 42):
        first = run(Scenario.of(seed), recorded=True).history
        run(Scenario.of(seed + 1))
        again = run(Scenario.of(seed), recorded=True).history
        assert first.lines == again.lines
        assert first.commit_at_s == again.commit_at_s
        assert run(Scenario.of(seed)).history.commit_at_s == first.commit_at_s, "recording changes nothing"


@pytest.mark.slow
def test_a_seed_may_be_run_on_any_fabric() -> None:
    scenario = Scenario.of(7, "bcube:3x2")
    assert scenario.fabric == "bcube:3x2"
    assert run(scenario).broken is None


def test_seeds_draw_every_family_and_several_min_servers() -> None:
    drawn = [Scenario.of(seed) for seed in range(400)]
    assert {one.fabric for one in drawn} == {*FABRICS, *OTHER_FAMILIES}
    assert {one.fabric.partition(":")[0] for one in drawn} == {"bcube", "torus", "switch", "fattree"}
    least = [(one.min_servers, parse(one.fabric).n_servers) for one in drawn if one.min_servers]
    assert len(least) > 40
    assert all(n // 2 < some <= n for some, n in least), "fewer than the majority gives a promise up"
    assert {some - n // 2 for some, n in least} >= {1, 2, 3}


@pytest.mark.slow
def test_seeds_hold_and_take_every_schedule_between_which_auto_chooses() -> None:
    """On damaged fabrics too: a choice that no run makes is one in which no bug is found."""
    taken: set[tuple[str, bool]] = set()

    def spied(programs: Programs, nbytes: int) -> AnyProgram:
        made = programs._schedules.for_nbytes(nbytes)
        taken.add((made.algorithm, bool(made.fabric.failures)))
        return for_nbytes(programs, nbytes)

    for_nbytes = Programs.for_nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "for_nbytes", spied)
        assert_held(check(range(100)), 100)
    damaged = {(name, True) for name in ("detour", "exchange", "mesh", "packed")}
    healthy = {(name, False) for name in ("bml", "exchange", "mesh", "packed")}
    assert taken == damaged | healthy


@pytest.mark.slow
def test_a_failing_seed_shrinks_and_still_fails() -> None:
    with pytest.MonkeyPatch.context() as patch:
        retry_although_one_committed(patch)
        seed = next(
            seed
            for seed in range(MOST_SEEDS)
            if seed % JOINS_EVERY  # those need two mishaps: a death, and the join
            and len(Scenario.of(seed).mishaps) >= 3
            and run(Scenario.of(seed)).broken
        )
        small = shrink(Scenario.of(seed))
        assert len(small.mishaps) < 3
        assert run(small).broken is not None
        for left_out in range(len(small.mishaps)):
            fewer = small.mishaps[:left_out] + small.mishaps[left_out + 1 :]
            assert run(replace(small, mishaps=fewer)).broken is None, "it can do without this one"
    assert run(small).broken is None, "the bug is in the plant"


def test_the_report_tells_the_history() -> None:
    with pytest.MonkeyPatch.context() as patch:
        return_before_the_barrier(patch)
        text = report(0)
    assert text.startswith("seed 0 on ")
    assert "promise 1: server " in text
    assert "passes the barrier of step 1" in text
    assert "installs view 1" in text
    assert " ms  " in text


def test_tallies_add_up() -> None:
    with pytest.MonkeyPatch.context() as patch:
        return_before_the_barrier(patch)
        parts = [check(range(2)), check(range(2, 4))]
    total = Tally()
    for part in reversed(parts):
        total.merge(part)
    assert total.seeds == 4
    assert total.violations == len(total.broken) > 0
    assert total.failing_seed == min(total.broken)
