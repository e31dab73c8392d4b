"""Random training programs on the real session: they hold, and bugs planted into the session are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bml.errors import ContributorLost
from bml.sim.programs.check import check, check_all
from bml.topology import errors
from bml.train import batch, calls, collectives, pending, session, snapshot, state, vectors
from bml.train.balancing import balancer
from bml.train.balancing.throughput import Throughput
from bml.train.ledgers import Ledgers
from bml.train.operations import moving, reducing
from bml.train.position import Position
from bml.train.priority.order import Order

SEEDS = range(250)
FAST_SEEDS = range(20)
"""Those of `make test`."""
PLANTED = range(1000)


@pytest.mark.parametrize("seeds", [FAST_SEEDS, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_programs_end_with_the_oracles_numbers_or_a_named_error(seeds: range) -> None:
    tally = check_all(seeds)
    assert not tally.broken
    assert tally.faults_injected > 0.4 * len(seeds)
    assert tally.steps_committed > 12 * len(seeds)


def recompute_writes_over_the_gradient(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(batch._Part, "set_aside", lambda self: None)


def a_part_is_given_before_the_others(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(pending.Pending, "_last", property(lambda self: self))


def a_call_is_repeated(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(calls.Calls, "check", lambda self: None)


def a_torn_call_is_forgotten(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(calls.Calls, "__exit__", lambda self, *_: setattr(self, "_inside", 0))


def a_new_loop_forgets_the_ledger(plant: pytest.MonkeyPatch) -> None:
    opened = Ledgers.open

    def alone(self: Ledgers, loop: Any, plan: Any) -> Any:
        for other in [each for each in self._accounts if each != loop]:
            del self._accounts[other]
        return opened(self, loop, plan)

    plant.setattr(Ledgers, "open", alone)


def a_joiner_makes_calls_outside_of_its_loop(plant: pytest.MonkeyPatch) -> None:
    def admit(self: collectives.Collectives) -> None:
        self.n_calls += 1
        self.calls.check()

    plant.setattr(collectives.Collectives, "admit", admit)


def a_joiner_takes_the_first_loop_for_that_of_the_others(plant: pytest.MonkeyPatch) -> None:
    go_to = Position.go_to
    plant.setattr(Position, "go_to", lambda self, path: go_to(self, path[:1]))


def plans_are_not_compared(plant: pytest.MonkeyPatch) -> None:
    nowhere = vectors.Described("", 0)
    plant.setattr(Position, "described", property(lambda self: nowhere))


def a_counter_becomes_a_vector(plant: pytest.MonkeyPatch) -> None:
    made = snapshot.Snapshot

    def vectors_only(manifest: snapshot.Manifest, arrays: list[Any]) -> snapshot.Snapshot:
        manifest.arrays = [(name, dtype, shape or (1,)) for name, dtype, shape in manifest.arrays]
        return made(manifest, arrays)

    plant.setattr(snapshot, "Snapshot", vectors_only)


def errors_are_caught_round_samples(plant: pytest.MonkeyPatch) -> None:
    class Caught(errors.UsageError, ValueError):
        pass

    plant.setattr(session, "UsageError", Caught)


def narrow_integers_wrap_round(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(vectors, "_wide", lambda dtype, widened: dtype)


def a_list_of_one_is_not_copied(plant: pytest.MonkeyPatch) -> None:
    flatten = vectors.flatten

    def flat(arrays: Any, memory: Any, widened: bool = False) -> Any:
        one = isinstance(arrays, list) and len(arrays) == 1
        return flatten(arrays[0] if one else arrays, memory, widened)

    plant.setattr(reducing, "flatten", flat)


def a_lost_root_sends_nothing(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(moving, "source", lambda root, contributors: root)


def lost_servers_are_said_to_have_sent_zeros(plant: pytest.MonkeyPatch) -> None:
    table = moving._table

    def without_none(collectives: Any, call: Any, given: Any, column: Any, out: Any) -> Any:
        work, finish = table(collectives, call, given, column, out)
        zeros = np.zeros(given.shapes[0], given.dtypes[0])

        def finish_with_zeros(outcome: Any) -> Any:
            found = finish(outcome)
            return found and [zeros if each is None else each for each in found]

        return work, finish_with_zeros

    plant.setattr(moving, "_table", without_none)


def a_lost_root_breaks_the_session(plant: pytest.MonkeyPatch) -> None:
    def run(self: collectives.Collectives, work: Any, finish: Any) -> Any:
        with self.calls:
            result = self.steps.run(work, finish)
            if isinstance(result, ContributorLost):
                raise result
            return result

    plant.setattr(collectives.Collectives, "run", run)


def every_root_is_taken_for_server_0(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(moving, "checked_root", lambda root, collectives: 0)


def means_are_over_all_servers(plant: pytest.MonkeyPatch) -> None:
    divide = reducing.divide
    plant.setattr(reducing, "divide", lambda total, n, empty, out=None: divide(total, 4, empty, out))


def states_stay_different(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(session, "agree", lambda *given: None)


def a_joiner_counts_from_its_own_first_step(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Throughput, "go_on_from", lambda self, counted: None)


def values_behind_functions_are_not_given(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(state.NamedState, "load", lambda self, saved: None)


def a_share_follows_a_time_that_nobody_agreed_on(plant: pytest.MonkeyPatch) -> None:
    own_step = collectives.Collectives.own_step

    def altered(self: collectives.Collectives, call: str, *given: Any) -> Any:
        done = own_step(self, call, *given)
        if "times" in call:
            done.result[self.communicator.server] *= 2
        return done

    plant.setattr(collectives.Collectives, "own_step", altered)


def a_joiner_begins_with_equal_shares(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(balancer.Balancer, "load", lambda self, dumped: None)


def weights_are_forgotten_when_a_server_is_lost(plant: pytest.MonkeyPatch) -> None:
    def used(self: batch.Batch, contributors: Any) -> Any:
        weights = self.weights if set(self.base) <= set(contributors) else {}
        return batch.assignment(self.whole.indices, self.base, contributors, weights)

    plant.setattr(batch.Batch, "assigned", used)
    # Times are exchanged in every batch: else few programs are long enough to lose a server afterwards.
    plant.setattr(balancer, "FIRST", 1)
    plant.setattr(balancer, "EVERY", 1)


def a_server_chooses_by_what_itself_has_begun(plant: pytest.MonkeyPatch) -> None:
    own = property(lambda self: self._n_begun, lambda self, value: None)
    plant.setattr(Order, "_agreed", own, raising=False)


def a_server_drains_by_what_itself_knows_of_joiners(plant: pytest.MonkeyPatch) -> None:
    own = property(lambda self: bool(self.communicator.view.learners), lambda self, value: None)
    plant.setattr(collectives.Collectives, "wants_state", own, raising=False)


def a_batch_is_split_by_what_happens_to_be_committed(plant: pytest.MonkeyPatch) -> None:
    step = collectives.Collectives.step

    def noted(self: collectives.Collectives, *given: Any) -> Any:
        done = step(self, *given)
        self.contributors = done.contributors
        return done

    plant.setattr(collectives.Collectives, "step", noted)


def steps_are_waited_for_by_their_own_wait_alone(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(pending.CollectiveQueue, "_end", lambda self, steps: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of loops that a bug leaves
@pytest.mark.parametrize(
    "plant",
    [
        a_server_chooses_by_what_itself_has_begun,
        a_server_drains_by_what_itself_knows_of_joiners,
        a_batch_is_split_by_what_happens_to_be_committed,
        steps_are_waited_for_by_their_own_wait_alone,
        recompute_writes_over_the_gradient,
        a_part_is_given_before_the_others,
        a_call_is_repeated,
        a_torn_call_is_forgotten,
        a_new_loop_forgets_the_ledger,
        a_joiner_makes_calls_outside_of_its_loop,
        a_joiner_takes_the_first_loop_for_that_of_the_others,
        plans_are_not_compared,
        a_counter_becomes_a_vector,
        errors_are_caught_round_samples,
        narrow_integers_wrap_round,
        a_list_of_one_is_not_copied,
        a_lost_root_sends_nothing,
        lost_servers_are_said_to_have_sent_zeros,
        a_lost_root_breaks_the_session,
        every_root_is_taken_for_server_0,
        means_are_over_all_servers,
        states_stay_different,
        values_behind_functions_are_not_given,
        a_joiner_counts_from_its_own_first_step,
        a_share_follows_a_time_that_nobody_agreed_on,
        a_joiner_begins_with_equal_shares,
        weights_are_forgotten_when_a_server_is_lost,
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bml.sim.programs.group.DEADLINE_S", 2.0)
    plant(monkeypatch)
    assert any(check(seed).violations for seed in PLANTED)
