"""A rank of a DDP script that is killed and started again by bml torchrun ends with the others' bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "rejoining_script.py"


@pytest.mark.real
def test_a_rank_that_is_started_again_contributes_again() -> None:
    """Rank 2; test_recompute_hook_processes has the same of rank 0."""
    command = [sys.executable, "-m", "bml", "torchrun", "--nproc-per-node", "4", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, SCRIPT],
        env={**os.environ, "VICTIM": "2", "BML_DETECT_S": "30"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    ends = {int(line[1]): line[2:] for line in lines if line[:1] == ["END"]}
    times = {int(line[1]): [float(each) for each in line[2:]] for line in lines if line[:1] == ["TIMES"]}
    assert sorted(ends) == sorted(times) == [0, 1, 2, 3]
    assert len({tuple(end) for end in ends.values()}) == 1
    assert ends[0][-1] == "4", "all four contribute at the end"
    for rank, (gap_s, contributed_s, loss) in times.items():
        assert loss < 0.2
        if rank == 2:
            assert 0 < contributed_s < 60
        else:
            assert gap_s < 30.0, "the closed connection tells them, long before silence would"
