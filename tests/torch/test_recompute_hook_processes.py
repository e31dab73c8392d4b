"""DDP with the hook that computes the samples of lost ranks, in processes that are killed in backward."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402
from recomputing_programs import BATCH_SIZE, N_SAMPLES, fault_free  # noqa: E402

pytestmark = pytest.mark.real

PROGRAM = "recomputing_programs"
SCRIPT = Path(__file__).parent / "recomputing_script.py"
N_EPOCHS = 3


def check(found: list[Any], n_ranks: int = 4, n_epochs: int = N_EPOCHS, **model_settings: bool) -> None:
    """Survivors hold the same bits, those of a run without faults to 1e-5, and no sample is missed."""
    assert len({rank["digest"] for rank in found}) == 1
    wanted = fault_free(n_ranks, n_epochs, **model_settings)
    off = torch.tensor(found[0]["parameters"], dtype=wanted.dtype) - wanted
    assert off.norm() / wanted.norm() < 1e-5
    assert off.abs().max() < 1e-5
    for rank in found:
        assert rank["samples"] == found[0]["samples"]
    ledger = found[0]["samples"]
    n_each = -(-N_SAMPLES // n_ranks)
    assert ledger["complete"]
    assert [each["used_once"] for each in ledger["epochs"]] == [n_each * n_ranks] * n_epochs
    assert ledger["steps"] == n_epochs * -(-n_each // BATCH_SIZE)


def test_a_rank_is_killed_in_backward() -> None:
    found = run_group(4, f"{PROGRAM}.train", kills={"2": 5}, n_epochs=N_EPOCHS)
    assert found.pop(2) == -9
    check(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("kills", [{}, {"0": 0}, {"0": 11, "3": 11}, {"1": 3, "2": 9}])
def test_ranks_are_killed_in_backward(kills: dict[str, int]) -> None:
    found = run_group(4, f"{PROGRAM}.train", kills=kills, n_epochs=N_EPOCHS)
    dead = [found[int(rank)] for rank in kills]
    assert dead == [-9] * len(kills)
    check([end for end in found if isinstance(end, dict)])


def test_gradients_in_another_order_of_memory_are_added_to_the_right_ones() -> None:
    found = run_group(4, f"{PROGRAM}.train", kills={"1": 3}, n_epochs=N_EPOCHS, in_channels_last=True)
    assert found.pop(1) == -9
    check(found, in_channels_last=True)


def test_buffers_that_backward_still_needs_are_left_alone() -> None:
    settings = {"has_buffers": True, "in_float64": True}
    found = run_group(4, f"{PROGRAM}.train", kills={"1": 3}, n_epochs=N_EPOCHS, **settings)
    assert found.pop(1) == -9
    check(found, **settings)


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


def test_a_rank_that_is_started_again_takes_its_samples_back(tmp_path: Path) -> None:
    """Rank 0, which begins with the coordinator; test_rejoining_processes has another one and no hook."""
    command = [sys.executable, "-m", "bml", "torchrun", "--nproc-per-node", "4", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, SCRIPT],
        env={
            **os.environ,
            "VICTIM": "0",
            "BML_DETECT_S": "30",
            "PARAMETERS": str(tmp_path / "found"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    ends = {end["rank"]: end for end in (json.loads(line) for line in lines if line.startswith("{"))}
    assert sorted(ends) == [0, 1, 2, 3]
    ends[0]["parameters"] = torch.load(tmp_path / "found").tolist()
    check([ends[rank] for rank in sorted(ends)], n_epochs=ends[0]["n_epochs"], in_float64=True)
    for rank, end in ends.items():
        assert end["contributors"] == [0, 1, 2, 3], "all four contribute at the end"
        assert rank == 0 or end["gap_s"] < 30.0, "noticed before silence would be"
