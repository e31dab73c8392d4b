"""Simulated servers of one host: seeds that hold, and bugs of shared memory that must be found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from planted_bugs import PLANTED_IN_SHARED_MEMORY

from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Stage, standing, standings
from bml.sim import Mishap, Simulation, When
from bml.sim.check import Scenario, check, run
from bml.sim.server import sharing
from bml.sim.server.sharing import Sharing
from bml.sim.world.settings import Settings
from bml.topology import parse

MOST_SEEDS = 300


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_seeds_hold_on_one_host(first: int) -> None:
    tally = check(range(first, first + 50), shared_memory=True)
    assert not tally.broken
    assert tally.faults_injected > 50
    assert tally.steps_committed > 100
    assert tally.jobs_aborted < 25  # by training functions, as a rule


def scenarios() -> Iterator[Scenario]:
    """What the seeds stand for, and by turns a server that is frozen about when it is complete, and wakes."""
    for seed in range(MOST_SEEDS):
        yield Scenario.of(seed, shared_memory=True)
        after_s = random.Random(seed).uniform(0, 0.004)
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


def bring_home_after_looking(patch: pytest.MonkeyPatch) -> None:
    """The result is fetched when all have been seen COMPLETE, not before."""
    look = Sharing._look

    def later(sharing: Sharing, post: Post) -> None:
        low, high = standings(*post)
        there = all(low <= sharing._host.standing.get(each, 0) < high for each in sharing._members)
        if post.stage is not Stage.COMPLETE or not there:
            look(sharing, post)
            return

        def rest() -> None:
            sharing.fetch()
            sharing._dispatch(ev.Gathered(*post))

        def half() -> None:
            sharing._fetch(len(sharing._result) // 2)
            sharing._later(0.003, rest)

        sharing._later(0.003, half)

    patch.setattr(Sharing, "_fetch_result", lambda sharing, post: sharing._look(post))
    patch.setattr(Sharing, "_look", later)


def count_later_epochs(patch: pytest.MonkeyPatch) -> None:
    """Who stands in a later epoch is taken to have finished the step of this one."""
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
    add = Sharing._add

    def half(sharing: Sharing) -> None:
        whole = sharing._sum
        assert whole is not None
        sharing._sum = whole._replace(stop=(whole.start + whole.stop) // 2)
        add(sharing)

    patch.setattr(Sharing, "_add", half)


@pytest.mark.parametrize(
    "plant",
    [
        bring_home_after_looking,
        count_later_epochs,
        commit_before_all_are_complete,
        leave_half_of_a_share_out,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_bug_of_shared_memory_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert any(run(scenario).broken for scenario in scenarios())


FIRST_TRIED = {"take_a_torn_sum": 800, "leave_without_a_word": 1500}
"""Seeds shortly before those that find these bugs."""


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED_IN_SHARED_MEMORY, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_drawn_seeds(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    first = FIRST_TRIED[plant.__name__]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = (run(Scenario.of(seed, shared_memory=True)).broken for seed in range(first, first + 500))
        broken = next(filter(None, found), None)
    assert broken is not None
    assert broken.number in (6, 7), "the sum is wrong, or overwritten"


def test_a_frozen_server_that_wakes_disturbs_nobody() -> None:
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
