"""Scripts as strangers write them: with loaders, snapshots and evaluation, and ranks that die anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import begun, environment_in, left_of
from forked_ranks import PATIENT

torch = pytest.importorskip("torch")

import strangers_script as script  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.timeout(110)]
WITHIN_S = 90.0
N_STEPS = script.EPOCHS * script.N_SAMPLES // 4 // script.BATCH


def run(folder: Path, program: str, n_ranks: int, **environment: str) -> tuple[int, str, str]:
    """Run a script with `bml torchrun`: the status, and both outputs. It leaves no process behind."""
    command = [sys.executable, "-m", "bml", "torchrun", "--nproc-per-node", str(n_ranks), program]
    with begun(*command, cwd=folder, env=environment_in(folder, **(PATIENT | environment))) as process:
        try:
            out, err = process.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail("\n".join(process.communicate(timeout=10)))
    assert left_of(folder) == []
    return process.returncode, out, err


def ends(out: str) -> dict[int, list[str]]:
    """The words of the ranks that came to their ends."""
    lines = [words for line in out.splitlines() if (words := line[9:].split())[:1] == ["END"]]
    return {int(words[1]): words[2:] for words in lines}


@pytest.mark.parametrize(
    ("deaths", "left"),
    [
        ("0:snapshot:0,3:backward:1", [1, 2]),
        (f"0:batch:1,2:last barrier:{script.EPOCHS}", [1, 3]),
        ("1:worker:0,3:evaluation:1", [0, 2]),
    ],
)
def test_ranks_of_a_strangers_script_die_anywhere(deaths: str, left: list[int], tmp_path: Path) -> None:
    before = {name for name in os.listdir("/dev/shm") if "bml" in name}
    status, out, err = run(tmp_path, script.__file__, 4, DEATHS=deaths)
    assert status == 0, out + err
    found = ends(out)
    assert sorted(found) == left, out + err
    assert len({(digest, accuracy) for digest, _, _, _, accuracy in found.values()}) == 1
    for _, n_losses, first, last, accuracy in found.values():
        assert int(n_losses) == N_STEPS
        assert float(last) < 0.7 * float(first)
        assert float(accuracy) > 0.85
    snapshot = torch.load(tmp_path / script.SNAPSHOT)
    assert snapshot["epoch"] == script.EPOCHS - 1
    assert "2 ranks finished" in err
    assert {name for name in os.listdir("/dev/shm") if "bml" in name} <= before


ENDS_AT_ONCE = """
import torch, torch.distributed as dist
import bml.torch
dist.init_process_group("bml")
if dist.get_rank() == 0:
    dist.isend(torch.arange(100_000.0), 1)
else:
    received = torch.zeros(100_000)
    dist.recv(received, 0)
    print("received", float(received.sum()) == float(torch.arange(100_000.0).sum()), flush=True)
"""


def test_what_a_rank_sends_last_arrives_though_it_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "sends.py").write_text(ENDS_AT_ONCE)
    status, out, err = run(tmp_path, "sends.py", 2)
    assert (status, "received True" in out) == (0, True), out + err


UNEVEN = """
import os, signal, sys
import torch, torch.distributed as dist
import bml.torch
dist.init_process_group("bml")
rank, n_batches = dist.get_rank(), 20
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
for batch in range(n_batches + (rank == 1)):
    if batch == 7 and rank in (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    try:
        ddp(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        said = "StepMismatch" in str(error), "returned" in str(error)
        print("one more:", batch == n_batches, *said, flush=True)
        break
    optimizer.step()
print("left", sorted(bml.torch.contributors()), flush=True)
"""


def test_two_ranks_die_at_once_and_one_of_the_others_has_a_batch_more(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    status, out, err = run(tmp_path, "uneven.py", 4)
    assert status == 0, out + err
    assert out.count("left [0, 1]") == 2, out + err
    assert out.count("one more: True True True") == 1, out + err


HOLDS = """
import ctypes
import torch, torch.distributed as dist
import bml.torch
hold = ctypes.PyDLL(None).usleep
dist.init_process_group("bml")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

for step in range(30):
    optimizer.zero_grad()
    hold(50_000)
    ddp(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
print("END", dist.get_rank(), *bml.torch.contributors(), flush=True)
dist.destroy_process_group()
"""


def test_ranks_that_hold_the_interpreters_lock_evict_nobody(tmp_path: Path) -> None:
    """Each for 50 ms in every step, longer than all else in it."""
    (tmp_path / "holds.py").write_text(HOLDS)
    status, out, err = run(tmp_path, "holds.py", 4)
    assert status == 0, out + err
    assert ends(out) == {rank: ["0", "1", "2", "3"] for rank in range(4)}, out + err
