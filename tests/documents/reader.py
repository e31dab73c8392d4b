"""A reader who does what a page says: every block in order, in one folder, as a user would."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import commands
from blocks import Block, missing

from bml.fabric.network import is_up, obstacle

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 200.0
"""How long one block may take."""
_MARK = "exit-status-of-command"

# `make` is that of the project, with this interpreter in the place of an environment of its own. A command
# in the background is a job: what comes after it finds it running.
_PRELUDE = f"""
exec 2>&1
make() {{ command make -C {ROOT} -o .venv/.ready BIN={Path(sys.executable).parent} "$@"; }}
sudo() {{ "$@"; }}
until_it_runs() {{ until bml status --json 2>/dev/null | grep -q '"epoch": [1-9]'; do sleep 0.05; done; }}
"""
_SESSION = """import functools
import bml
import numpy as np

def train(session):
{body}

if __name__ == "__main__":
    print(bml.launch(train, "bcube:2x2", launcher="processes", transport="tcp"))
"""


def cannot(block: Block) -> str:
    """Why a block is not run here; empty if it is."""
    if block.marker == "needs torch" and importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'bml[torch]')"
    if block.marker == "needs root":
        return obstacle() or ("a fabric named bml is up, and is somebody's" if is_up() else "")
    return block.reason


@dataclass(frozen=True)
class Reader:
    """Somebody with an empty folder, and `bml` installed."""

    folder: Path

    def do(self, block: Block) -> None:
        """Write the file, or run the program or the commands. An AssertionError names the block's place."""
        if block.given:
            (self.folder / block.given).write_text(block.set_up)
        if block.file:
            (self.folder / block.file).write_text(block.text)
        elif block.language == "python" and block.marker == "in a session":
            self._run_program(
                block, _SESSION.format(body=textwrap.indent(f"{block.set_up}\n{block.text}", "    "))
            )
        elif block.language == "python":
            self._run_program(block, f"{block.set_up}\n{block.text}")
        elif block.commands:
            self._run_commands(block)

    def _run_program(self, block: Block, text: str) -> None:
        path = self.folder / f"block_at_line_{block.line}.py"
        path.write_text(text)
        command = f"python {path.name}"
        ((printed, status),) = self._output(block, [command])
        self._expect(block, command, "", printed, status, 0)

    def _run_commands(self, block: Block) -> None:
        said = self._output(block, [command for command, _ in block.commands])
        last = block.commands[-1][0]
        for (command, promised), (printed, status) in zip(block.commands, said, strict=True):
            found = re.fullmatch(r"ends with (\d+)", block.marker) if command == last else None
            self._expect(block, command, promised, printed, status, int(found[1]) if found else 0)

    def _expect(
        self, block: Block, command: str, promised: str, printed: str, status: int, wanted: int
    ) -> None:
        about = f"{block.place}: `{command}` ended with {status}, and printed\n{printed}"
        assert status == wanted, about
        lacking = missing(promised, printed)
        assert not lacking, f"{about}\nbut the page shows\n{lacking}"

    def _output(self, block: Block, lines: list[str]) -> list[tuple[str, int]]:
        """What each command prints, and its exit status."""
        script = [_PRELUDE]
        for line in lines:
            script.append(line)
            if line.rstrip().endswith("&"):
                script.append("until_it_runs")
            script.append(f'printf "\\n{_MARK} %s\\n" $?')
        environment = self._environment()
        with commands.begun("bash", "-c", "\n".join(script), cwd=self.folder, env=environment) as process:
            printed, _ = process.communicate(timeout=WITHIN_S)
        parts = re.split(rf"^{_MARK} (\d+)\n", printed, flags=re.MULTILINE)
        assert len(parts) == 2 * len(lines) + 1, f"{block.place}: the shell ended in it, after\n{printed}"
        return [(text, int(status)) for text, status in zip(parts[:-1:2], parts[1::2], strict=True)]

    def _environment(self) -> dict[str, str]:
        """That of a user who has nothing set, but the project on the path and a home of its own."""
        run = self.folder / ".run"
        run.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "examples").is_symlink() or (self.folder / "examples").symlink_to(ROOT / "examples")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BML_", "RAY_"))}
        return {
            **kept,
            "BML_DETECT_S": "2",  # other tests run beside it, and nobody who lives may be missed
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(run),
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "110",
        }
