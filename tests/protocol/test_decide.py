"""COMMIT or RETRY, from where every survivor stands."""

import itertools

import msgspec
import pytest

from bml.protocol.coordinator.decision import decide, final_everywhere
from bml.protocol.wire.messages import Status, View


def view(epoch: int, commit: int = 0) -> View:
    return View(epoch, (0, 1, 2), (), commit, "", 0.0)


def stands(
    committed: int, complete: bool = False, installed: int = 1, accepted: View | None = None
) -> Status:
    """At `committed`, and complete in the step after it or not."""
    done = committed + 1 if complete else -1
    return Status(0, 1, 9, 9, view(installed), accepted or view(installed), committed, done, "", "")


@pytest.mark.parametrize(
    ("statuses", "commit"),
    [
        ([stands(6), stands(6), stands(6)], 6),
        ([stands(6, True), stands(6), stands(6, True)], 6),  # one is not complete: retry
        ([stands(6, True), stands(6, True), stands(6, True)], 7),  # all are: commit
        ([stands(7), stands(6, True), stands(6, True)], 7),  # one has committed: commit
        ([stands(7), stands(6, True), stands(7, True)], 7),  # ... and is complete in the next already
        ([stands(7, True), stands(7, True)], 8),
        ([stands(7, True), stands(7)], 7),
        ([stands(0)], 0),
    ],
)
def test_the_step_that_is_committed(statuses: list[Status], commit: int) -> None:
    for order in itertools.permutations(statuses):
        assert decide(order) == commit


def test_a_step_that_an_accepted_view_committed_stays_committed() -> None:
    """It may be in force somewhere: then step 7 was returned to a user there."""
    accepted = stands(6, True, accepted=view(2, commit=7))
    assert decide([accepted, stands(6, True)]) == 7


def test_complete_under_an_older_view_is_not_complete() -> None:
    """View 2 may be in force, and its try of step 7 has other contributors."""
    accepted = stands(6, True, accepted=view(2, commit=6))
    assert decide([accepted, stands(6, True)]) == 6
    assert decide([stands(6, True, installed=2), stands(6, True, installed=1)]) == 6
    assert decide([stands(6, True, installed=2), stands(6, True, installed=2)]) == 7


def test_an_abandoned_view_does_not_count_once_there_is_a_newer_one() -> None:
    old = stands(6, accepted=view(2, commit=6), installed=1)
    new = stands(6, accepted=view(3, commit=7), installed=1)
    assert decide([old, new]) == 7
    assert decide([stands(8, installed=4), new]) == 8


def test_a_view_that_retries_does_not_undo_a_commit_elsewhere() -> None:
    assert decide([stands(9, installed=3), stands(8, accepted=view(3, commit=8), installed=2)]) == 9


def test_final_elements_are_kept_if_they_are_half_of_the_vector() -> None:
    """To go on with little takes more memory than it saves time."""

    def kept(*finals: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return final_everywhere(
            [msgspec.structs.replace(stands(0), final=final, n_elements=100) for final in finals],
            0,
        )

    assert kept(((0, 50),), ((0, 60),)) == ((0, 50),)
    assert kept(((0, 50),), ((1, 60),)) == ()
    assert kept(((0, 20), (30, 70)), ((0, 100),)) == ((0, 20), (30, 70))
