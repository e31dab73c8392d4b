"""DDP with the hook that computes the samples of lost ranks, in processes that are killed in backward."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402
from recomputing_programs import BATCH_SIZE, N_EPOCHS, fault_free  # noqa: E402

pytestmark = pytest.mark.real

PROGRAM = "recomputing_programs"


def check(found: list[Any], n_ranks: int) -> None:
    """Survivors hold the same bits, those of a run without faults to 1e-5, and no sample is missed."""
    assert len({rank["digest"] for rank in found}) == 1
    wanted = fault_free(n_ranks)
    off = torch.tensor(found[0]["parameters"]) - wanted
    assert off.norm() / wanted.norm() < 1e-5
    assert off.abs().max() < 1e-5
    for rank in found:
        assert rank["samples"] == found[0]["samples"]
    ledger = found[0]["samples"]
    n_each = -(-250 // n_ranks)
    assert ledger["complete"]
    assert [each["used_once"] for each in ledger["epochs"]] == [n_each * n_ranks] * N_EPOCHS
    assert ledger["steps"] == N_EPOCHS * -(-n_each // BATCH_SIZE)


@pytest.mark.smoke
def test_a_rank_is_killed_in_backward() -> None:
    found = run_group(4, f"{PROGRAM}.train", kills={"2": 5})
    assert found.pop(2) == -9
    check(found, 4)


@pytest.mark.parametrize("kills", [{}, {"0": 0}, {"0": 11, "3": 11}, {"1": 3, "2": 9}])
def test_ranks_are_killed_in_backward(kills: dict[str, int]) -> None:
    found = run_group(4, f"{PROGRAM}.train", kills=kills)
    dead = [found[int(rank)] for rank in kills]
    assert dead == [-9] * len(kills)
    check([end for end in found if isinstance(end, dict)], 4)


def test_every_way_of_ddp_ends_as_without_the_hook() -> None:
    for rank in run_group(2, f"{PROGRAM}.ways"):
        for name, (hooked, plain) in rank.items():
            torch.testing.assert_close(torch.tensor(hooked), torch.tensor(plain), msg=f"DDP {name}")


def test_wrong_use_of_the_hook_is_said_as_it_is() -> None:
    ((second, ddp, raised, number),) = run_group(1, f"{PROGRAM}.refusals")
    assert "the model takes no communication hook, it may have one already" in second
    assert ddp.startswith("UsageError: loss(model, samples) called the DistributedDataParallel")
    assert raised == "KeyError: 'of the user'"
    assert number.startswith("UsageError: loss(model, samples) must return one number as a tensor")
