"""Every interleaving of a step and its recovery on a few servers, or as many as a bound allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planted_bugs import (
    return_before_the_barrier,
    skip_the_fence,
    work_on_while_frozen,
)

from bml.sim.exhaustive import Choice, Faults, Model, explore


@pytest.mark.slow
def test_all_interleavings_without_faults() -> None:
    found = explore(faults=Faults(0, 0, 0))
    assert found.complete
    assert found.broken is None
    assert found.states > 50
    assert found.ends == 1, "whatever the order, it comes to the same end"


def propose_without_one_that_lives(model: Model) -> None:
    """A view that commits the step, without a server that is only slow, is proposed and not accepted yet."""
    slow = 0
    model.make(Choice("submit", slow))
    model.make(Choice("freeze", slow))
    for kind in ("submit", "frame"):
        while chosen := next((each for each in model.choices() if each.kind == kind), None):
            model.make(chosen)
    assert [model.cores[server]._steps.standing[0] for server in model.cores] == [-1, 1, 1]
    model.make(Choice("notice", slow))
    model.make(Choice("tick"))
    for server in (1, 2):
        model.make(Choice("told", server))
        model.make(Choice("heard", server))
    assert model.coordinator.state == "proposing"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("faults", [Faults(1, 1, 0), Faults(0, 1, 1)], ids=str)
def test_a_view_that_its_coordinator_abandons_does_not_bind(faults: Faults) -> None:
    found = explore(faults=faults, most_states=1_000, first=propose_without_one_that_lives)
    assert found.broken is None, [str(choice) for choice in found.path]
    assert found.ends > 0


@pytest.mark.slow
def test_all_interleavings_of_two_servers_with_a_crash_and_a_freeze() -> None:
    found = explore("bcube:2x1", Faults(1, 1, 0, servers=(0, 1)), most_states=10_000)
    assert found.complete
    assert found.broken is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "faults", [Faults(1, 0, 0), Faults(0, 1, 0), Faults(1, 1, 0), Faults(1, 0, 1), Faults(0, 1, 1)], ids=str
)
def test_many_interleavings_with_faults(faults: Faults, seed: int) -> None:
    found = explore(faults=faults, most_states=250, seed=seed)
    assert found.broken is None, [str(choice) for choice in found.path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (return_before_the_barrier, Faults(0, 0, 0)),
        (work_on_while_frozen, Faults(1, 0, 0)),
        (skip_the_fence, Faults(1, 0, 0)),
    ],
)
def test_it_finds_planted_bugs(plant: Callable[[pytest.MonkeyPatch], None], faults: Faults) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = explore(faults=faults, most_states=4_000)
    assert found.broken is not None
    assert found.path
