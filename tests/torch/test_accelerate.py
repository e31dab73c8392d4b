"""A script with Hugging Face's Accelerate: it takes the process group that is there, and survives a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import begun, environment_in, left_of
from forked_ranks import PATIENT

pytest.importorskip("torch")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

SCRIPT = """
import hashlib, os, signal
import torch
import bml.torch

torch.distributed.init_process_group("bml")
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(7)
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x = torch.randn(96, 8)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for epoch in range(8):
    for number, (x, y) in enumerate(data):
        if (rank, epoch, number) == (0, 3, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = ((model(x) - y) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(accelerator.gather(loss.detach()).mean()))
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
backend, digest = torch.distributed.get_backend(), hashlib.sha256(weights).hexdigest()
learned = losses[-1] < losses[0] / 4
print("END", rank, backend, accelerator.num_processes, len(losses), learned, digest, flush=True)
"""


def test_a_script_with_accelerate_goes_on_without_a_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "bml", "torchrun", "--nproc-per-node", "3", "script.py"]
    with begun(*command, cwd=tmp_path, env=environment_in(tmp_path, **PATIENT)) as process:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail("\n".join(process.communicate(timeout=10)))
    assert left_of(tmp_path) == []
    assert process.returncode == 0, out + err
    ends = sorted(line[line.index("END") :].split()[1:] for line in out.splitlines() if " END " in line)
    assert [end[0] for end in ends] == ["1", "2"], out + err
    assert len({tuple(end[1:]) for end in ends}) == 1, out
    assert ends[0][1:5] == ["bml", "3", "8", "True"]
