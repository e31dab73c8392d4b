"""Shares by speed: how a batch is split by weights, when weights change, and that all servers agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from model_jobs import job, results

from bml.errors import StepMismatch
from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Faults
from bml.sim.programs.group import Group
from bml.sim.programs.writer import gradient
from bml.topology.errors import UsageError
from bml.train.balancing.balancer import FIRST, Balancer
from bml.train.balancing.shown import in_words, shown
from bml.train.balancing.stopwatch import PICOSECONDS, Stopwatch
from bml.train.balancing.weights import (
    GIVES_BACK_AFTER,
    MOST_PATIENCE,
    MOST_TAKES_AFTER,
    TAKES_AFTER,
    Balance,
)
from bml.train.batches import EQUAL, FULL, BatchPlan, assignment, shares, sizes, used_indices
from bml.train.collectives import Collectives
from bml.train.pending import CollectiveQueue
from bml.train.position import Mark

NINE = range(9)
BATCH = 108


# --- how a batch is split ------------------------------------------------------------------------


def test_sizes_follow_the_weights() -> None:
    half = sizes(BATCH, {server: FULL // 2 if server == 4 else FULL for server in NINE})
    assert half == {0: 13, 1: 13, 2: 13, 3: 13, 4: 6, 5: 13, 6: 13, 7: 12, 8: 12}
    assert sizes(10, {0: 1, 1: FULL}) == {0: 2, 1: 8}  # none has one alone
    assert sizes(5, {0: 1, 1: FULL, 2: FULL}) == {0: 1, 1: 2, 2: 2}  # unless there are too few
    assert sizes(2, {0: FULL, 1: 1, 2: 1}) == {0: 2, 1: 0, 2: 0}  # unless there are too few
    assert sizes(0, {0: 1, 5: 2}) == {0: 0, 5: 0}


def test_weighted_assignments_use_each_sample_once_and_are_as_near_as_whole_numbers_can_be() -> None:
    rng = np.random.default_rng(3)
    for _ in range(1000):
        base = rng.choice(64, int(rng.integers(1, 17)), replace=False).tolist()
        members = sorted({*rng.permutation(base)[: int(rng.integers(1, len(base) + 1))].tolist(), 64})
        weights = {server: int(rng.integers(1, FULL + 1)) for server in base if rng.random() < 0.8}
        indices = rng.permutation(1000)[: int(rng.integers(0, 200))]
        first = shares(indices, base, weights)
        total = sum(weights.get(server, FULL) for server in base)
        least = min(2, len(indices) // len(base))
        n_raised = sum(len(indices) * weights.get(each, FULL) < least * total for each in base)
        for server, share in first.items():
            exact = len(indices) * weights.get(server, FULL) / total
            assert exact - max(1, 2 * n_raised) <= len(share) <= max(exact + 1, least)
            assert len(share) >= least
        used = used_indices(assignment(indices, base, members, weights), recomputed=True)
        assert sorted(np.concatenate(list(used.values())).tolist()) == sorted(indices.tolist())
        assert all(
            used[each][: len(first[each])].tolist() == first[each].tolist() for each in first if each in used
        )


# --- when weights change -------------------------------------------------------------------------


def followed(balance: Balance, times: dict[int, int], most: int = 100) -> int:
    """After how many exchanges of these times the weights change; 0 if they do not."""
    for number in range(1, most + 1):
        if balance.follow(times, sorted(times), BATCH):
            return number
    return 0


def times(slow: float = 1.0, server: int = 4) -> dict[int, int]:
    return {each: int(1000 * (slow if each == server else 1.0)) for each in NINE}


def test_work_is_taken_sooner_than_it_is_given_back_and_ever_later_if_that_was_wrong() -> None:
    balance, takes, waits = Balance(), [], []
    for _ in range(5):
        takes.append(followed(balance, times(2.0)))
        assert balance.weights[4] == FULL // 2
        waits.append(followed(balance, times()))
        assert set(balance.weights.values()) == {FULL}
    assert takes == [TAKES_AFTER, 4, MOST_TAKES_AFTER, MOST_TAKES_AFTER, MOST_TAKES_AFTER]
    assert waits == [GIVES_BACK_AFTER, 8, 16, MOST_PATIENCE, MOST_PATIENCE]


def test_two_servers_give_back_as_slowly_as_nine() -> None:
    balance = Balance()
    assert followed(balance, {0: 1000, 1: 2000}) == TAKES_AFTER
    assert followed(balance, {0: 1000, 1: 1000}) == GIVES_BACK_AFTER


@pytest.mark.parametrize("patience", [GIVES_BACK_AFTER, MOST_PATIENCE])
def test_the_fastest_server_becomes_as_slow_as_the_others(patience: int) -> None:
    for n, n_samples in ((2, 320), (9, 288)):
        balance = Balance(patience=patience)
        for _ in range(TAKES_AFTER):
            balance.follow({each: 4000 if each else 1000 for each in range(n)}, range(n), n_samples)
        assert balance.weights[0] == 4 * balance.weights[1]
        for _ in range(TAKES_AFTER):
            balance.follow(dict.fromkeys(range(n), 4000), range(n), n_samples)
        assert len(set(balance.weights.values())) == 1


def test_work_is_taken_sooner_again_after_a_take_that_was_right() -> None:
    balance = Balance()
    for expected in (TAKES_AFTER, 4, MOST_TAKES_AFTER, TAKES_AFTER):
        assert followed(balance, times(2.0)) == expected
        if expected == MOST_TAKES_AFTER:
            assert not balance.follow(times(2.0), NINE, BATCH)  # it is still slow: the take was right
        assert followed(balance, times())


def test_a_server_that_joins_after_the_fastest_was_lost_has_no_more_than_others() -> None:
    balance = Balance()
    for _ in range(TAKES_AFTER):
        balance.follow({each: 4000 if each else 1000 for each in NINE}, NINE, 288)
    before = balance.among(NINE)
    now = balance.among(range(1, 10))
    assert {now[each] for each in range(1, 10)} == {FULL}
    assert (before[0], before[1]) == (FULL, FULL // 4), "a batch under way keeps its own"


def test_a_server_without_samples_gets_some_again() -> None:
    balance, n = Balance(), 3
    for speeds in ([3.0, 1.0, 1.0, 1.0], [1.0] * 4):
        for _ in range(60):
            of = sizes(n, {each: balance.weights.get(each, FULL) for each in range(4)})
            found = {each: int(1000 * speeds[each]) for each in range(4) if of[each]}
            balance.follow(found, range(4), n)
    assert of[0] == 1
    inherited = Balance({0: 16, 1: FULL, 2: FULL, 3: FULL})
    assert inherited.follow({1: 1000, 2: 1000, 3: 1000}, range(4), n)
    assert set(inherited.weights.values()) == {FULL}


def test_weights_settle_whatever_a_batch_takes_besides_its_samples() -> None:
    """In a closed loop: what is measured depends on the shares, and the shares on what is measured."""
    rng = np.random.default_rng(11)
    for case in range(60):
        n, besides_s = int(rng.integers(2, 10)), float(rng.choice([0.0, 1.0, 6.0, 30.0]))
        n_samples = int(rng.integers(2 * n, 40 * n))
        paces = np.ones(n) if case % 2 else rng.choice([1.0, 1.0, 2.0, 5.0], n)
        balance, changed_at, most_s = Balance(), [], []
        for exchange in range(100):
            of = sizes(n_samples, balance.among(range(n)))
            takes_s = [besides_s + of[each] * paces[each] for each in range(n)]
            most_s.append(max(takes_s))
            found = {each: int(1e6 * takes_s[each] / of[each]) for each in range(n)}
            if balance.follow(found, range(n), n_samples):
                changed_at.append(exchange)
        assert len(changed_at) <= (0 if case % 2 else 6), (case, changed_at)
        assert most_s[-1] <= most_s[0], "no worse than equal shares"


def test_equal_servers_with_noise_never_change() -> None:
    rng = np.random.default_rng(5)
    balance = Balance()
    for _ in range(3000):
        noisy = {server: int(1000 * rng.uniform(0.95, 1.05)) for server in NINE}
        assert not balance.follow(noisy, NINE, BATCH)
    assert set(balance.weights.values()) == {FULL}


def test_one_slow_moment_of_each_server_moves_nothing() -> None:
    balance = Balance()
    for number in range(200):  # each time another server is three times as slow
        assert not balance.follow(times(3.0, server=number % 9), NINE, BATCH)


def test_a_slow_server_with_noise_gets_its_share_once() -> None:
    rng = np.random.default_rng(6)
    balance, changes = Balance(), 0
    for _ in range(1000):
        noisy = {server: int(time * rng.uniform(0.95, 1.05)) for server, time in times(2.0).items()}
        changes += balance.follow(noisy, NINE, BATCH)
    assert changes == 1
    assert abs(balance.weights[4] - FULL // 2) <= 4


def test_a_server_that_alone_is_fast_gets_more_and_loses_it_when_it_is_like_the_others() -> None:
    balance = Balance()
    assert followed(balance, times(0.25)) == TAKES_AFTER
    assert balance.weights == {server: FULL if server == 4 else FULL // 4 for server in NINE}
    assert followed(balance, times()) > 0
    assert len(set(balance.weights.values())) == 1


def test_weights_are_measured_against_the_fastest_that_is_left() -> None:
    balance = Balance()
    followed(balance, times(0.25))
    rest = {server: 2000 for server in NINE if server != 4}
    assert not balance.follow(rest, sorted(rest), BATCH)
    assert {balance.weights[server] for server in rest} == {FULL}  # as one that joins has


def test_a_server_without_a_time_keeps_its_weight_and_one_that_comes_back_has_what_it_had() -> None:
    balance = Balance()
    followed(balance, times(2.0))
    without = {server: time for server, time in times(2.0).items() if server != 4}
    balance.follow(without, sorted(without), BATCH)  # it was lost
    balance.follow(without, NINE, BATCH)  # it is back, and not measured yet
    assert balance.weights[4] == FULL // 2


@pytest.mark.parametrize("slow", [0.1, 0.3, 0.5, 0.7])
def test_the_split_is_near_the_best_one(slow: float) -> None:
    found = times(1 / slow)
    balance = Balance()
    assert followed(balance, found)
    of = sizes(10 * BATCH, balance.weights)
    longest = max(of[server] * found[server] for server in NINE)
    assert longest <= 1.06 * 10 * BATCH * 1000 / (8 + slow)


def test_unequal_shares_are_shown() -> None:
    balance = Balance()
    followed(balance, times(2.0))
    shares = shown(BATCH, balance.weights, NINE)
    assert shares is not None
    assert sum(shares["samples"].values()) == shares["batch"] == BATCH
    assert in_words(shares) == "server 4 computes at 50% of the fastest's speed, its share is 6 of 108"
    assert shown(BATCH, balance.weights, [0, 1, 2]) is None
    assert "equally fast" in in_words(None)
    followed(balance, {server: 1000 + 200 * server for server in NINE})
    said = in_words(shown(BATCH, balance.weights, NINE))
    assert said.startswith("server 8 computes at 39%")
    assert said.endswith("; 4 more servers are slow")


# --- what is timed -------------------------------------------------------------------------------


def test_waits_and_what_follows_the_first_part_are_not_timed() -> None:
    now = [100.0]
    watch = Stopwatch(lambda: now[0])
    steps = CollectiveQueue(lambda: watch, watch)
    for _ in range(3):
        watch.start(4)
        now[0] += 2.0

        def wait() -> None:
            now[0] += 50.0

        steps.run(wait, lambda outcome: None)
        now[0] += 6.0
        watch.stop()
        now[0] += 7.0
        watch.stop()
    assert watch.take() == 2 * PICOSECONDS
    assert watch.take() == 0
    watch.start(0)
    now[0] += 1.0
    watch.stop()
    assert watch.take() == 0


# --- jobs of several servers ---------------------------------------------------------------------


def loop(session: Any, epochs: int = 8, **more: Any) -> Iterator[Any]:
    return session.batches(40, global_batch=20, epochs=epochs, seed=1, balance=True, **more)


def train(session: Any) -> Any:
    """Return the sizes of this server's shares, and the parameters."""
    w = [np.full(3, 4.0), np.full((2, 2), 5.0)]
    session.state(params=w)
    found = []
    for batch in loop(session):
        found.append(len(batch.indices))
        w[0] -= batch.allreduce(
            gradient(0, batch.indices, w), recompute=lambda indices: gradient(0, indices, w)
        )
    samples = session.samples()
    assert samples["complete"]
    return found, w[0].tolist(), samples["digest"]


def test_a_slow_server_gets_less_and_every_sample_is_used_once() -> None:
    found = results(train, 4, Faults(paces={2: (2.0,)}))
    slow, fast = found[2][0], found[0][0]
    assert slow[:8] == [5] * 8  # two exchanges: after 4 batches and after 8
    assert slow[8:] == [3] * 8
    assert fast[8:] == [6] * 8
    assert len({(str(w), digest) for _, w, digest in found.values()}) == 1
    equal = results(train, 4)
    assert equal[2][0] == [5] * 16
    assert equal[0][1] == found[0][1]  # exact numbers: the split changes nothing


@pytest.mark.parametrize("moment", ["before", "brought", "committed"])
@pytest.mark.parametrize("call", [6, 10, 13])
def test_the_samples_of_a_lost_server_are_split_by_weights_too(call: int, moment: str) -> None:
    """Calls 6 and 10 are those after which weights change or times are exchanged, 13 is a batch's."""
    kills = {1: (call, moment)}
    faults = Faults(paces={2: (2.0,)}, kills=kills, joins=[(14, 1)], holds_for_joiners=True)
    found = results(train, 4, faults)
    assert {0, 2, 3} <= set(found)
    assert len({(str(w), digest) for _, w, digest in found.values()}) == 1
    assert max(found[2][0][10:]) < min(found[0][0][10:])


def test_a_server_that_joins_is_given_the_weights() -> None:
    def train(session: Any) -> Any:
        w = [np.zeros(3), np.zeros(1)]
        session.state(params=w)
        sizes, n_whole = [0], 0
        for batch in loop(session, epochs=500):
            sizes.append(len(batch.indices))
            w[0] += batch.allreduce(gradient(0, batch.indices, w))
            n_whole += batch.whole.step > 13 and len(batch.base) == 4
            if n_whole == 2:  # two batches with the server that joined
                break
        return sizes, session.samples()["digest"]

    faults = Faults(paces={2: (2.0,)}, absent=(3,), joins=[(13, 3)], holds_for_joiners=True)
    found = results(train, 4, faults)
    assert set(found) == set(range(4))
    assert len({digest for _, digest in found.values()}) == 1
    assert found[3][0][-1] > found[2][0][-1] > 0


def test_loops_of_the_same_sizes_go_on_with_their_weights_and_others_begin_with_them() -> None:
    def train(session: Any) -> list[int]:
        found = []
        for seed in range(2):
            for batch in session.batches(20, global_batch=20, epochs=8, seed=seed, balance=True):
                found.append(len(batch.indices))
                batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
                for inner in session.batches(8, global_batch=8, epochs=1, balance=True):
                    found.append(len(inner.indices))
                    inner.allreduce(gradient(0, inner.indices, [np.zeros(3), np.zeros(1)]))
        return found

    found = results(train, 2, Faults(paces={1: (4.0,)}))
    outer, inner = found[1][::2], found[1][1::2]
    assert outer[:8] == [10] * 8
    assert outer[8:] == [4] * 8
    assert inner[:8] == [4] * 8
    assert inner[8:] == [2] * 8


def test_more_servers_than_samples() -> None:
    def train(session: Any) -> int:
        n = 0
        for batch in session.batches(3, global_batch=3, epochs=20, balance=True):
            n += len(batch.indices)
            batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
        return n

    assert sum(results(train, 4, Faults(paces={0: (3.0,)})).values()) == 60


def test_a_loop_that_is_left_early_and_one_without_balance_leave_no_trace() -> None:
    def train(session: Any) -> list[int]:
        for batch in loop(session):
            batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
            if batch.epoch_no == 6:
                break
        found = []
        for batch in session.batches(40, global_batch=20, epochs=1):
            found.append(len(batch.indices))
            batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
        return found

    assert results(train, 4, Faults(paces={2: (2.0,)}))[2] == [5, 5]


def test_small_batches_at_the_ends_of_epochs_make_no_server_slow() -> None:
    def train(session: Any) -> list[int]:
        found = []
        for batch in session.batches(67, global_batch=64, epochs=40, seed=1, balance=True):
            if len(batch.whole.indices) == 64:
                found.append(len(batch.indices))
            batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
        return found

    for found in results(train, 4, Faults(batch_s=6.0)).values():
        assert found == [16] * 40
    assert results(train, 4, Faults(batch_s=6.0, paces={2: (4.0,)}))[2][-1] < 8


def test_data_sets_smaller_than_a_batch_are_balanced_too() -> None:
    def train(session: Any) -> int:
        for batch in session.batches(20, global_batch=1000, epochs=10, balance=True):
            batch.allreduce(gradient(0, batch.indices, [np.zeros(3), np.zeros(1)]))
        return len(batch.indices)

    assert results(train, 2, Faults(paces={1: (4.0,)})) == {0: 16, 1: 4}


def test_a_joiner_on_its_way_to_the_others_exchanges_no_times() -> None:
    collectives = Collectives(ModelCommunicator(Group(range(1), Faults(), lambda server: None), 0))
    balancer, plan = Balancer(collectives), BatchPlan(40, 20, 9)
    for _ in range(FIRST):
        balancer.next_batch(plan)
    before = balancer.dump()
    collectives.position.go_to((Mark(0, FIRST, str(plan)), Mark(0, 3, "steps(5)")))
    assert balancer.next_batch(plan) == EQUAL
    assert balancer.dump() == before, "the others have counted this batch"
    assert not collectives.throughput.n_own_steps


def test_servers_that_do_not_all_balance_are_told() -> None:
    def train(session: Any) -> None:
        for batch in session.batches(8, global_batch=8, epochs=2, balance=session.server == 1):
            batch.allreduce(np.ones(3))

    assert any(isinstance(end, StepMismatch) for end in job(train, 2).values())


def test_balance_is_true_or_false() -> None:
    def train(session: Any) -> None:
        next(session.batches(8, global_batch=8, epochs=1, balance=1))

    with pytest.raises(UsageError, match="balance must be True or False, it is 1"):
        results(train, 2)
