"""Simulated servers of one host: seeds that hold, and bugs of shared memory that must be found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from planted_bugs import PLANTED_IN_SHARED_MEMORY

from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Stage, Sum, standing, standings
from bml.sim import Mishap, Simulation, When
from bml.sim.check import Scenario, check, run
from bml.sim.server import sharing
from bml.sim.server.sharing import Sharing
from bml.sim.world.settings import Settings
from bml.topology import parse

MOST_SEEDS = 400


@pytest.mark.parametrize(
    "seeds",
    [
        range(15),
        *(pytest.param(range(first, first + 50), marks=pytest.mark.slow) for first in range(0, 200, 50)),
    ],
)
def test_seeds_hold_on_one_host(seeds: range) -> None:
    tally = check(seeds, shared_memory=True)
    assert not tally.broken
    assert tally.faults_injected > len(seeds)
    assert tally.steps_committed > 2 * len(seeds)
    assert tally.jobs_aborted < len(seeds) / 2  # by training functions, as a rule


def scenarios() -> Iterator[Scenario]:
    """The seeds' scenarios, and by turns a server that is frozen about when it is complete, and wakes."""
    for seed in range(MOST_SEEDS):
        yield Scenario.of(seed, shared_memory=True)
        after_s = random.Random(seed).uniform(0, 0.006)
        freeze = Mishap("freeze", (1,), When("complete", 13, after_s), 2.0)
        yield Scenario(
            seed=seed,
            fabric="bcube:2x2",
            steps=6,
            n_elements=40,
            slice_nbytes=8,
            mishaps=(freeze,),
            shared_memory=True,
        )


def fetch_after_looking(patch: pytest.MonkeyPatch) -> None:
    """The result is fetched when all have been seen COMPLETE, not before."""
    look, fetch = Sharing._look, Sharing._fetch_result

    def looks_first(sharing: Sharing, then: Any) -> None:
        of_a_post = isinstance(then, partial) and then.func == sharing._look
        then() if of_a_post else fetch(sharing, then)

    def then_fetches(sharing: Sharing, post: Post) -> None:
        low, high = standings(*post)
        there = all(low <= page.standing < high for page in sharing._pages)
        if post.stage is not Stage.COMPLETE or not there:
            look(sharing, post)
            return

        def rest() -> None:
            sharing._fetch(len(sharing._result))
            sharing._dispatch(ev.Gathered(*post))

        def half() -> None:
            sharing._fetch(len(sharing._result) // 2)
            sharing._later(0.003, rest)

        sharing._later(0.003, half)

    patch.setattr(Sharing, "_fetch_result", looks_first)
    patch.setattr(Sharing, "_look", then_fetches)


def count_later_epochs(patch: pytest.MonkeyPatch) -> None:
    """A server that stands in a later epoch is taken to have finished the step of this one."""
    patch.setattr(sharing, "standings", lambda *post: (standing(*post), 1 << 80))


def commit_before_all_are_complete(patch: pytest.MonkeyPatch) -> None:
    """A server that is complete commits at once."""
    look = Sharing._look

    def hasty(sharing: Sharing, post: Post) -> None:
        if post.stage is Stage.COMPLETE:
            sharing._dispatch(ev.Gathered(*post))
        else:
            look(sharing, post)

    patch.setattr(Sharing, "_look", hasty)


def leave_half_of_a_share_out(patch: pytest.MonkeyPatch) -> None:
    """A share is done when the first half of it is."""

    def nothing(sharing: Sharing, done: Sum, *_: Any) -> None:
        sharing._dispatch(ev.Summed(done.epoch, done.step, sharing._whole))

    patch.setattr(Sharing, "_add_rest", nothing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(fetch_after_looking, marks=pytest.mark.slow),
        count_later_epochs,
        commit_before_all_are_complete,
        leave_half_of_a_share_out,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_bug_of_shared_memory_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        broken = next(filter(None, (run(scenario).broken for scenario in scenarios())))
    assert broken.number > 0, f"the plant itself fails: {broken}"


FIRST_TRIED = {"take_a_torn_sum": 940, "leave_without_a_word": 1500}
"""Seeds shortly before those that find these bugs."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("plant", PLANTED_IN_SHARED_MEMORY, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_drawn_seeds(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    first = FIRST_TRIED[plant.__name__]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = (run(Scenario.of(seed, shared_memory=True)).broken for seed in range(first, first + 500))
        broken = next(filter(None, found), None)
    assert broken is not None
    assert broken.number in (6, 7), "the sum is wrong, or overwritten"


def test_a_frozen_server_that_wakes_disturbs_no_other() -> None:
    """Frozen while all were ready, evicted, thawed while the others are two steps further."""
    freeze = Mishap("freeze", (1,), When("complete", 13, 0.0), 2.0)
    simulation = Simulation(
        parse("bcube:2x2"),
        seed=4,
        settings=Settings(steps=6, n_elements=40, slice_nbytes=8, shared_memory=True),
        mishaps=[freeze],
    )
    simulation.run()
    assert [server for server, machine in simulation.machines.items() if machine.done] == [0, 2, 3]
    assert set(simulation.history.commits[6].values()) == {(0, 2, 3)}
