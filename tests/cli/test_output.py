"""Standard output under --json is one JSON object whatever happens, and nobody need be able to read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cluster.launcher.result import Result
from bml.cluster.process.output import Descriptor, lasting
from bml.cluster.spec.job import JobSpec, ServerReport
from bml.errors import StartError

BML = [sys.executable, "-m", "bml"]


def strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- one JSON object ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "bcube:2x2"],
        ["plan", "bcube:2x2", "--compare"],
        ["check", "--seeds", "0:2", "--jobs", "1"],
        ["doctor"],
    ],
)
def test_what_a_command_answers_is_json(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert "error" not in strictly(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "says"),
    [
        (["plan", "torus:4"], 2, "UsageError", "torus:4x2"),
        (["plan"], 2, "UsageError", "FABRIC"),
        (["plan", "bcube:2x2", "--nonsense"], 2, "UsageError", "nonsense"),
        (["nonsense"], 2, "UsageError", "nonsense"),
        ([], 2, "UsageError", "json"),
        (["check", "--seeds", "7"], 2, "UsageError", "seeds"),
        (["doctor", "--detect-s", "nan"], 2, "UsageError", "detect_s"),
        (["status"], 1, "FabricError", "no job that this user may ask"),
        (["inject", "kill:4"], 1, "FabricError", "no job that this user may ask"),
        (["inject", "nonsense"], 2, "UsageError", "nonsense"),
        (["fabric", "status", "--name", "none"], 1, "FabricError", "none"),
        (["fabric", "cut", "nonsense"], 2, "UsageError", "nonsense"),
        (["bench"], 2, "UsageError", "allreduce"),
        (["bench", "allreduce", "--sizes", "many"], 2, "UsageError", "many"),
        (["run", "missing.py"], 2, "UsageError", "missing.py"),
    ],
)
def test_an_error_is_json_too(
    arguments: list[str], status: int, kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(main, [*arguments, "--json"])
    error = strictly(done.stdout)["error"]
    assert (done.exit_code, error["kind"]) == (status, kind), done.stderr
    assert says in error["text"]
    assert says in done.stderr, "people are told, too"


@pytest.mark.parametrize(
    ("line", "status", "kind"),
    [
        ("import a_module_that_there_is_not", 1, "TrainingError"),
        ("def train(", 1, "TrainingError"),
        ("import sys; sys.exit('no data')", 1, "SystemExit"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        ("train = 5", 2, "UsageError"),
    ],
)
def test_a_script_that_prints_and_fails_leaves_json(
    line: str, status: int, kind: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('hello')\n{line}\n" if line[:3] != "def" else line)
    done = CliRunner().invoke(main, ["run", str(script), "--launcher", "processes", "--json"])
    assert (done.exit_code, strictly(done.stdout)["error"]["kind"]) == (status, kind), done.output


def test_rays_handler_of_sigterm_is_taken_for_ours(tmp_path: Path) -> None:
    """Ray puts its own there while it starts, and exits with the number of the signal."""
    script = tmp_path / "script.py"
    lines = (
        "import os, signal, sys",
        "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))",
        "os.kill(os.getpid(), signal.SIGTERM)",
    )
    script.write_text("\n".join(lines))
    done = CliRunner().invoke(main, ["run", str(script)])
    assert (done.exit_code, done.stdout, done.stderr) == (143, "", "Ended by SIGTERM.\n")


@pytest.mark.slow
def test_lines_stay_in_order_where_output_is_unbuffered(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('first')\nos.write(1, b'second\\n')\n")
    command = [sys.executable, "-u", "-m", "bml", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "first\nsecond\n")


def test_help_is_shown_as_text() -> None:
    assert "Example:" in CliRunner().invoke(main, ["plan", "--json", "--help"]).stdout


PRINTS = """
import atexit, os, subprocess, threading
import numpy as np
print("as a module")
os.write(1, b"to the descriptor\\n")
subprocess.run(["echo", "by a child"])
atexit.register(print, "at the end")
def train(session):
    print("while it trains")
    os.system("echo by a shell")
    return session.allreduce(np.full(2, np.nan))
"""


@pytest.mark.real
def test_a_script_that_prints_wherever_it_can_leaves_json(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    command = [*BML, "run", str(tmp_path / "prints.py"), "--launcher", "processes", "--fabric", "bcube:2x1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert strictly(done.stdout)["values"] == {"0": "[nan nan]", "1": "[nan nan]"}


# --- readers that go away ----------------------------------------------------------------------------


def test_a_stream_whose_reader_has_gone_takes_everything() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(os.dup(write), "wb") as closed, open("/dev/full", "wb") as full:
        for file in (closed, full):
            stream = lasting(file.fileno(), "latin-1", by_line=True)
            print("a line …", file=stream)
            stream.write("x" * 100_000)
            stream.flush()
            raw = stream.buffer.raw  # type: ignore[attr-defined]
            assert isinstance(raw, Descriptor)
            assert raw.lost is not None
    os.close(write)


def test_a_stream_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    stream = lasting(write, "latin-1", by_line=True)
    reader = subprocess.Popen(["wc", "-c"], stdin=read, stdout=subprocess.PIPE)
    os.close(read)
    print("x" * 1_000_000 + "…", file=stream)
    os.close(write)
    assert reader.communicate(timeout=20)[0].split() == [str(1_000_000 + len("\\u2026\n")).encode()]


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_an_error(form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*BML, "plan", "bcube:2x2", *form],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: standard output could not be written: No space left on device\n"


@pytest.mark.slow
def test_a_command_without_standard_streams_ends_well() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *BML, "plan", "bcube:2x2"], timeout=60, check=False
    )
    assert done.returncode == 0


@pytest.mark.slow
def test_letters_that_the_terminal_does_not_have_are_escaped() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*BML, "plan", "bcube:2x2", "--bytes", "4KiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\\xb5s" in done.stdout


# --- reports -----------------------------------------------------------------------------------------


def ran(value: Any) -> Result:
    reports = {
        server: ServerReport(server, "done", value, "", "NoneType", "", "", None, [], {"steps": 1})
        for server in (0, 1)
    }
    return Result(JobSpec("bcube:2x1"), reports)


class Over:
    """A job that is over, with this result."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def __enter__(self) -> Over:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left of it."""

    def wait(self) -> Result:
        return self._result


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text("def train(session): pass\n")
    return str(tmp_path / "script.py")


def test_a_job_that_never_ran_leaves_a_report(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **settings: object) -> Result:
        raise StartError("server 1 did not start in time")

    monkeypatch.setattr(sys.modules["bml.cli.run"], "start", fails)
    report = tmp_path / "report.json"
    done = CliRunner().invoke(main, ["run", script, "--report", str(report), "--json"])
    assert done.exit_code == 1
    error = {"kind": "StartError", "text": "server 1 did not start in time"}
    assert strictly(done.stdout) == strictly(report.read_text()) == {"error": error}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_report_that_cannot_be_written_any_more_costs_nothing_else(
    form: list[str], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["bml.cli.run"], "start", lambda *_, **settings: Over(ran({"loss": 0.5})))
    done = CliRunner().invoke(main, ["run", script, "--report", "/dev/full", "--trace", "/dev/full", *form])
    assert done.exit_code == 1
    for option in ("--report", "--trace"):
        assert f"Error: {option} /dev/full could not be written: No space left on device" in done.stderr
    if form:
        assert strictly(done.stdout)["values"] == {"0": {"loss": 0.5}, "1": {"loss": 0.5}}
    else:
        assert "result: loss 0.5" in done.stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_recording_that_could_not_be_written_costs_the_status(
    form: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, file = ran({"loss": 0.5}), tmp_path / "job.bmlrec"
    result.recording, result.recording_lost = b"held", f"the recording cannot be written to {file}: No space"
    monkeypatch.setattr(sys.modules["bml.cli.run"], "start", lambda *_, **settings: Over(result))
    done = CliRunner().invoke(main, ["run", script, "--record", str(file), *form])
    assert done.exit_code == 1
    assert f"Error: --record: {result.recording_lost}" in done.stderr
    assert "the last inputs" not in done.stderr
    result.recording_lost = ""
    done = CliRunner().invoke(main, ["run", script, "--record", str(file), *form])
    assert done.exit_code == 0
    assert f"the last inputs of the servers are in {file}" in done.stderr


class Mute:
    def __str__(self) -> str:
        raise SystemExit("no text")


def test_a_summary_shows_values_of_any_kind(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"[/x]": "[bold", "mute": Mute(), "lone": "\udc80", "loss": 0.25}
    monkeypatch.setattr(sys.modules["bml.cli.run"], "start", lambda *_, **settings: Over(ran(value)))
    done = CliRunner().invoke(main, ["run", script])
    assert done.exit_code == 0, done.output
    assert "result: [/x] [bold, mute <Mute>, lone \\udc80, loss 0.2500" in done.stdout
