"""Checkpoints by torch.distributed.checkpoint when rank 0, through which it works, is lost."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from forked_ranks import run_group

pytestmark = pytest.mark.real


def test_the_ranks_that_are_left_write_and_load_a_checkpoint(tmp_path: Path) -> None:
    found = run_group(3, "checkpoint_programs.after_a_loss", limit_s=100, folder=str(tmp_path))
    assert found.pop(0) == -9
    for rank in found:
        assert "rank 0 was lost" in rank["all"], "it works through rank 0"
        assert rank["writer"] == rank["left"] == (rank["weight"], 7)
    assert found[0]["weight"] == found[1]["weight"] != [0.0] * 6
