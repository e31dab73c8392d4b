"""No job loads any of the laboratory. That no module imports it is a rule of test_architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = "[name for name in sys.modules if name == 'bml.lab' or name.startswith('bml.lab.')]"
TRAIN = f"""
import json, os, sys
import numpy as np

def train(session):
    session.allreduce(np.ones(3))
    return {LOADED}
"""
RUN = f"""
import json, sys
from bml.cli import main

try:
    main(sys.argv[1:])
finally:
    print(json.dumps({LOADED}), file=sys.stderr)
"""


def loaded_by(text: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{text}\nprint(json.dumps({LOADED}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    names: list[str] = json.loads(done.stdout)
    return names


@pytest.mark.parametrize("text", ["import bml", "import bml.cli", "import bml.pytest_plugin, bml.web"])
def test_imports_load_none_of_it(text: str) -> None:
    assert loaded_by(text) == []


def test_the_names_that_are_loaded_are_seen() -> None:
    assert "bml.lab.flows" in loaded_by("import bml.lab.flows.prices")


@pytest.mark.real
def test_neither_launcher_nor_servers_of_a_job_load_any(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "run", str(path), "--fabric", "bcube:2x1", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["values"] == {"0": [], "1": []}
    assert json.loads(done.stderr.splitlines()[-1]) == []
