"""What `make` installs: for a demo what jobs need, all else for what needs it; with uv where that works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def names(extra: str) -> set[str]:
    """The packages of an extra, and of those that it names."""
    found = set()
    for wanted in EXTRAS[extra]:
        if wanted.startswith("bml["):
            found |= {name for other in wanted[4:-1].split(",") for name in names(other)}
        else:
            found.add(wanted.split(">")[0])
    return found


def would_run(target: str) -> str:
    command = ["make", "--no-print-directory", "-n", "-C", str(ROOT), target, "VENV=/nowhere/venv"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "extra"),
    [
        ("demo", "demo"),
        ("demo-fabric", "demo"),
        *((each, "dev") for each in ("test", "gate", "lint", "docs")),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extra: str) -> None:
    installs = [line for line in would_run(target).splitlines() if ".ci/venv" in line]
    assert [line.split()[-1] for line in installs] == [extra]


def test_a_demo_has_no_tool_of_tests_lint_or_documents() -> None:
    assert names("demo") == {"scikit-learn", "pyroute2"}
    assert names("dev") > names("demo") | names("docs") | {"pytest", "ruff", "mypy"}


@pytest.mark.parametrize("uv", ["is not there", "works", "fails"])
def test_uv_installs_where_it_works_and_else_pip(tmp_path: Path, uv: str) -> None:
    log = tmp_path / "log"

    def program(path: Path, status: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >> {log}\nexit {status}\n')
        path.chmod(0o755)

    program(tmp_path / "venv" / "bin" / "python", 0)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    if uv != "is not there":
        program(tools / "uv", 0 if uv == "works" else 1)
    command = ["bash", str(ROOT / ".ci" / "venv"), sys.executable, str(tmp_path / "venv"), "demo"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tools)}, timeout=60, check=True, capture_output=True
    )
    said = log.read_text().splitlines()
    assert done.returncode == 0
    assert [line.split()[0] for line in said] == {
        "is not there": ["python"],
        "works": ["uv"],
        "fails": ["uv", "python"],
    }[uv]
    assert all("--editable .[demo]" in line for line in said)
    assert all("--no-compile" in line for line in said if line.startswith("python"))
