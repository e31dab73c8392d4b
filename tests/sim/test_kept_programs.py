"""Random programs whose jobs all die: the next job goes on from the newest whole checkpoint.

Bugs planted into checkpoints are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bml.sim.programs.kept import check_all_kept
from bml.train.batches import BatchPlan
from bml.train.collectives import Collectives
from bml.train.keeping import whole_state, writer
from bml.train.keeping.keeper import Keeper
from bml.train.keeping.parts import by_key
from bml.train.ledger import Ledger
from bml.train.ledgers import Ledgers
from bml.train.position import LoopId

QUICK = range(8)
SEEDS = range(100, 700)
AT_ONCE = 75
NAMED = (1693, 2075)
"""Calls before the place of the checkpoint were made with states that differed."""
PLANTED = range(1000)
"""The search ends with the first program that finds the bug. Of the rarest bug that is one of 77."""


@pytest.mark.slow
def test_jobs_that_die_go_on_with_the_oracles_numbers() -> None:
    tally = check_all_kept((*QUICK, *NAMED))
    assert not tally.broken
    assert tally.steps_committed > 200


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
def test_many_jobs_that_die_go_on_with_the_oracles_numbers(first: int) -> None:
    tally = check_all_kept(range(first, first + AT_ONCE))
    assert not tally.broken
    assert tally.faults_injected > 1.7 * AT_ONCE


def ledgers_are_not_kept(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Ledgers, "load", lambda self, dumped: None)


def steps_are_counted_anew(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Collectives, "go_on_from", lambda self, steps, first_step: None)


def values_behind_functions_are_not_restored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(whole_state.NamedState, "load", lambda self, saved, giver="": None)


def torn_checkpoints_count(plant: pytest.MonkeyPatch) -> None:
    def newest(
        names: Sequence[str], job: str, base: int, known: object, dropped: object, keep: int, torn: object
    ) -> list[str]:
        gone = sorted(by_key(names))[:-keep]
        return [name for name in names if set(by_key([name])) <= set(gone)]

    plant.setattr(writer, "superseded", newest)


def a_checkpoint_is_made_beside_late_steps(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Collectives, "drain", lambda self: None)


def ledgers_keep_the_plan_of_a_shorter_loop(plant: pytest.MonkeyPatch) -> None:
    close, opened = Ledgers.close, Ledgers.open

    def keeps(self: Ledgers, loop: LoopId, plan: BatchPlan) -> None:
        close(self, loop, self._accounts[loop].plan if loop in self._accounts else plan)

    def open_(self: Ledgers, loop: LoopId, plan: BatchPlan) -> Ledger:
        return opened(self, loop, self._accounts[loop].plan if loop in self._accounts else plan)

    plant.setattr(Ledgers, "close", keeps)
    plant.setattr(Ledgers, "open", open_)


def every_server_decides_alone(plant: pytest.MonkeyPatch) -> None:
    is_due = Keeper.is_due
    plant.setattr(
        Keeper, "is_due", lambda self: is_due(self) and not (self.writer.is_busy and self.writer.written)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "plant",
    [
        ledgers_are_not_kept,
        steps_are_counted_anew,
        values_behind_functions_are_not_restored,
        torn_checkpoints_count,
        a_checkpoint_is_made_beside_late_steps,
        every_server_decides_alone,
        ledgers_keep_the_plan_of_a_shorter_loop,
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(check_all_kept((seed,)).broken for seed in PLANTED)
