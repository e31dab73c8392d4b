"""`bml.torch.attach` with tensors on a device: the bits of host memory, whatever the device's streams do.

The device is a fake one under torch itself (see late_tensors), so the programs run in a process of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.utils.backend_registration")
if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch takes no device that is written in Python", allow_module_level=True)

SCRIPT = Path(__file__).parent / "late_programs.py"
PROGRAMS = re.findall(r"(?m)^@program\ndef (\w+)", SCRIPT.read_text())
N_PROCESSES = 4
"""PyTorch takes seconds to import, so some programs share a process."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.timeout(500)
@pytest.mark.parametrize("share", range(N_PROCESSES))
def test_every_program_holds_on_a_device_that_is_late(share: int) -> None:
    names = PROGRAMS[share::N_PROCESSES]
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *names], capture_output=True, text=True, timeout=480, check=False
    )
    assert found.returncode == 0, found.stderr
    ends = {line["name"]: line["failed"] for line in map(json.loads, found.stdout.splitlines())}
    assert [*ends] == names
    assert len(PROGRAMS) == SCRIPT.read_text().count("@program\n") > N_PROCESSES
    failed = {name: error for name, error in ends.items() if error}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
