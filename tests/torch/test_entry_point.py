"""Backend bml without an import of bml, by an entry point that PyTorch 2.14 and newer reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("bml", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


@pytest.mark.real
@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="PyTorch reads the entry point from 2.14 on")
def test_no_import_is_needed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "bml [1.0, 1.0]", done.stderr
