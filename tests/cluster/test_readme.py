"""The program that README.md shows runs as it stands there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import commands
import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

README = (Path(__file__).parents[2] / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_program_survives_its_kill(tmp_path: Path) -> None:
    launch = 'faults=["kill:4@step=20"]'
    assert launch in PROGRAM
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.replace(launch, f'{launch}, launcher="processes"'))
    with commands.begun(sys.executable, str(path)) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    value = ast.literal_eval(stdout.splitlines()[-1])
    assert value["error"] < 0.2
