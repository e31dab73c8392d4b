"""Unmodified scripts of torch.distributed on backend bml, in real processes; gloo is the oracle."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group, run_groups  # noqa: E402

pytestmark = pytest.mark.real


def test_two_ranks_train_to_the_bits_of_gloo() -> None:
    ours, theirs = run_groups(2, "train", [{"backend": backend} for backend in ("bml", "gloo")])
    assert len({rank["digest"] for rank in ours + theirs}) == 1
    assert [rank["writes"] for rank in ours] == [True, False]


def test_four_ranks_train_as_with_gloo() -> None:
    ours, theirs = run_groups(4, "train", [{"backend": backend} for backend in ("bml", "gloo")])
    assert len({rank["digest"] for rank in ours}) == 1
    torch.testing.assert_close(
        torch.tensor(ours[0]["parameters"]), torch.tensor(theirs[0]["parameters"]), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_kill_end_well_and_alike(victim: int) -> None:
    found = run_group(4, "train", backend="bml", kill=victim)
    assert found.pop(victim) == -9
    left = tuple(rank for rank in range(4) if rank != victim)
    assert {rank["contributors"] for rank in found} == {left}
    assert len({rank["digest"] for rank in found}) == 1
    assert [rank["writes"] for rank in found] == [True, False, False]


@pytest.mark.serial("recovery in well under a second is what bml promises")
def test_survivors_of_a_kill_go_on_in_time() -> None:
    found = run_group(4, "train", backend="bml", kill=2)
    del found[2]
    assert max(rank["gap_s"] for rank in found) < 1.5


def test_every_way_of_ddp_ends_as_with_gloo() -> None:
    found = run_group(2, "variants", limit_s=100)
    for rank in found:
        for name, (ours, theirs) in rank.items():
            message = f"DDP {name}"
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), msg=message)


def test_forked_workers_of_a_loader_do_not_disturb() -> None:
    found = run_group(2, "with_loader", n_workers=2)
    assert found[0] == found[1]
    assert sum(found[0]) == 2 * sum(range(64))


@pytest.mark.parametrize(
    ("how", "awaited"),
    [
        ("raises", "destroyed"),
        ("raises, finally destroys", "destroyed"),
        ("orders", "destroyed"),
        ("no destroy", "returned"),
    ],
)
def test_odd_ends(how: str, awaited: str) -> None:
    found = run_group(3, "ends_oddly", how=how)
    assert [found[0], found[2]] == [awaited] * 2
    assert "ValueError: of the user" in found[1] if how.startswith("raises") else found[1] == awaited


def test_a_callback_may_wait_for_another_collective() -> None:
    assert run_group(2, "waits_in_a_callback") == [4.0, 4.0]


def test_a_graph_that_rebuilds_its_buckets_cannot_be_resumed() -> None:
    assert "without static_graph" in run_group(1, "refuses_static_graph")[0]


def test_groups_and_objects() -> None:
    objects: list[Any] = [{"rank": rank, "text": "x" * rank} for rank in range(4)]
    for rank, found in enumerate(run_group(4, "groups")):
        assert found["sum"] == (1.0 if rank < 2 else 5.0)
        assert found["objects"] == objects
        assert found["cast"] == [{"from": 2 if rank > 1 else 0}]
        assert found["scattered"] == [f"to {rank}"]
        assert found["names"] == ["bml", "bml"]


def test_objects_of_a_lost_rank_are_an_error_and_the_group_goes_on() -> None:
    lost, *ranks = run_group(3, "objects_of_a_lost_rank")
    assert lost == -9
    for first, second, third, tensor, gathered, scattered in ranks:
        assert first.startswith("ContributorLost: rank 0 was lost before all ranks had the objects")
        assert second == first
        assert third == [{"from": 1}, "more"]
        assert tensor == 1.0, "a tensor is that of the lowest rank that is left"
        assert gathered == ["x", "x", "xx"]
        assert scattered == "ContributorLost"


def test_a_new_group_with_a_lost_rank_is_a_clear_error() -> None:
    found = run_group(4, "group_with_a_lost_rank")
    assert found.pop(3) == -9
    for rank in found:
        first, total, second, again = rank
        assert "StartError" in first
        assert "3" in first
        assert "UsageError: new_group with ranks [0, 1, 2, 3], of which [3] are lost" in second
        assert float(total) == float(again) == 4.0
