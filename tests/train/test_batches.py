import numpy as np
import pytest

from bml.topology.errors import UsageError
from bml.train.batches import BatchPlan, assignment, shares, used_indices


def test_every_sample_exactly_once_per_epoch() -> None:
    plan = BatchPlan(n_samples=1437, global_batch=288, epochs=3, seed=7)
    assert plan.batches_per_epoch == 5
    assert len(plan) == 15
    for epoch_no in range(3):
        batches = [batch for batch in plan if batch.epoch_no == epoch_no]
        assert [batch.batch_no for batch in batches] == [0, 1, 2, 3, 4]
        assert sorted(np.concatenate([batch.indices for batch in batches])) == list(range(1437))
        assert len(batches[-1].indices) == 1437 - 4 * 288


def test_the_plan_depends_on_seed_and_epoch_only() -> None:
    first, again = BatchPlan(100, 10, 2, seed=1), BatchPlan(100, 10, 2, seed=1)
    assert all((a.indices == b.indices).all() for a, b in zip(first, again, strict=True))
    assert (first.batch(3).indices != BatchPlan(100, 10, 2, seed=2).batch(3).indices).any()
    assert (first.batch(3).indices != first.batch(13).indices).any()


def test_the_order_is_the_documented_one() -> None:
    expected = np.random.Generator(np.random.PCG64((5, 1))).permutation(12)
    plan = BatchPlan(12, 6, 2, seed=5)
    assert np.concatenate([plan.batch(2).indices, plan.batch(3).indices]).tolist() == expected.tolist()


def test_batches_cannot_be_written_to() -> None:
    batch = BatchPlan(10, 5, 1).batch(0)
    with pytest.raises(ValueError, match="read-only"):
        batch.indices[0] = 3


def test_batch_larger_than_the_data_set_is_the_data_set() -> None:
    assert sorted(BatchPlan(5, 100, 1).batch(0).indices.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 1, 0), "n_samples must be at least 1"),
        ((1, 0, 1, 0), "global_batch must be at least 1"),
        ((1, 1, -1, 0), "epochs must be at least 0"),
        ((1, 1, 1, -1), "seed must be at least 0"),
    ],
)
def test_bad_numbers_are_named(numbers: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BatchPlan(*numbers)


def test_no_step_outside_the_plan() -> None:
    with pytest.raises(UsageError, match="steps 0-3, there is no step 4"):
        BatchPlan(10, 5, 2).batch(4)


def test_shares_are_contiguous_and_near_equal() -> None:
    indices = np.arange(100, 110)
    parts = shares(indices, [8, 0, 3])
    assert list(parts) == [0, 3, 8]
    assert [part.tolist() for part in parts.values()] == [
        [100, 101, 102, 103],
        [104, 105, 106],
        [107, 108, 109],
    ]
    with pytest.raises(UsageError, match="no servers"):
        shares(indices, [])


@pytest.mark.slow
def test_assignment_covers_the_batch_exactly_once_in_thousands_of_cases() -> None:
    rng = np.random.default_rng(1)
    for _ in range(4000):
        n_base = int(rng.integers(1, 17))
        base = rng.choice(64, n_base, replace=False).tolist()
        members = rng.permutation(base)[: int(rng.integers(1, n_base + 1))].tolist()
        indices = rng.permutation(1000)[: int(rng.integers(0, 80))]
        assigned = assignment(indices, base, members)
        first = shares(indices, base)
        assert list(assigned) == sorted(members)
        assert all(assigned[server].own.tolist() == first[server].tolist() for server in members)
        sizes = [len(part.extra) for part in assigned.values()]
        assert max(sizes) - min(sizes) <= 1
        used = used_indices(assigned, recomputed=True)
        assert sorted(np.concatenate(list(used.values())).tolist()) == sorted(indices.tolist())
        shuffled = assignment(indices, rng.permutation(base).tolist(), rng.permutation(members).tolist())
        assert all((shuffled[server].extra == assigned[server].extra).all() for server in members)


def test_without_loss_nothing_is_extra() -> None:
    assigned = assignment(np.arange(9), range(3), range(3))
    assert all(len(part.extra) == 0 for part in assigned.values())


def test_left_out_share_is_not_used() -> None:
    assigned = assignment(np.arange(9), range(3), [0, 2])
    kept = used_indices(assigned, recomputed=False)
    assert np.concatenate(list(kept.values())).tolist() == [0, 1, 2, 6, 7, 8]


def test_one_that_joined_since_has_no_share_of_its_own_but_helps_with_the_lost_ones() -> None:
    found = assignment(np.arange(9), (0, 1, 2), (0, 1, 9))
    assert len(found[9].own) == 0
    assert len(found[9].extra) > 0
    everything = np.concatenate([part for server in found.values() for part in server])
    assert sorted(everything.tolist()) == sorted(np.arange(9).tolist())
    assert len(assignment(np.arange(9), (0, 1), (0, 1, 9))[9].extra) == 0


def test_a_batch_cannot_be_shared_among_nobody() -> None:
    with pytest.raises(UsageError, match="no servers"):
        assignment(np.arange(9), range(3), [])
