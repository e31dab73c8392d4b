"""A script that cannot be loaded shows where, in the user's lines alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bml.cli import main

CASES = [
    ("import nothing_of_the_kind\n", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
    ("def train(session:\n", "SyntaxError: '(' was never closed"),
    ("def of():\n    return 1 / 0\n\nof()\n", "ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("text", "last"), CASES)
def test_no_line_of_ours_is_shown(text: str, last: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    done = CliRunner().invoke(main, ["run", str(path)])
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert lines[0] == f"Error: {path} cannot be loaded"
    assert lines[-1] == last
    places = [line for line in lines if line.startswith("  File ")]
    assert places
    assert all(f'"{path}"' in line for line in places)


INTERRUPTED = """
import builtins, os, runpy, signal, sys, time

def importing(name, *rest, real=builtins.__import__, **more):
    if name == "{imported}":
        {interrupt}
    return real(name, *rest, **more)

builtins.__import__ = importing
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["bml", "plan", "--help"]
runpy.run_module("bml", run_name="__main__")
"""


KILL = "os.kill(os.getpid(), signal.SIGINT)"
IN_A_FINALIZER = f"""
        class Finalized:
            def __del__(self):
                {KILL}
                for _ in range(1000): pass
        Finalized()
        time.sleep(60)
"""
IN_SET_NAME = f"""
        class Named:
            def __set_name__(self, *_):
                {KILL}
                for _ in range(1000): pass
        class Owner:
            name = Named()
"""


INTERRUPTS = pytest.mark.parametrize("interrupt", [KILL, IN_A_FINALIZER, IN_SET_NAME])


def interrupted(importing: str, interrupt: str) -> tuple[int, str, str]:
    """Exit status, standard output and error of `bml plan --help`, with a Ctrl-C as it imports a module."""
    text = INTERRUPTED.replace("{interrupt}", interrupt.strip()).replace("{imported}", importing)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=50
    )
    return done.returncode, done.stdout, done.stderr


@INTERRUPTS
def test_ctrl_c_while_the_command_is_imported_shows_no_line_of_ours(interrupt: str) -> None:
    assert interrupted("bml.cli", interrupt) == (1, "", "Aborted!\n")


@pytest.mark.slow
@INTERRUPTS
def test_nor_does_it_while_a_command_of_the_laboratory_is_imported(interrupt: str) -> None:
    status, out, err = interrupted("bml.lab.commands.plan.compare", interrupt)
    assert (status, out, err.lstrip("\n")) == (1, "", "Aborted!\n")  # click ends the line of the ^C


@pytest.mark.parametrize(("typed", "meant"), [("plann", "plan"), ("bnech", "bench"), ("statsu", "status")])
def test_a_command_that_is_not_there_suggests_one_that_is(typed: str, meant: str) -> None:
    done = CliRunner().invoke(main, [typed])
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.stderr


WITHIN = {
    "a finalizer": "class Ends:\n    def __del__(self): kill()\nends = Ends()\ndel ends",
    "__set_name__": "class Ends:\n    def __set_name__(self, *_): kill()\nclass Has:\n    ends = Ends()",
    "nothing": "kill()",
}


@pytest.mark.slow
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(
    ("number", "status", "says"),
    [(signal.SIGINT, 1, "Aborted!"), (signal.SIGTERM, 143, "Ended by SIGTERM."), (signal.SIGHUP, 129, "")],
)
def test_a_signal_ends_a_command_whatever_its_script_does_then(
    tmp_path: Path, number: int, status: int, says: str, within: str
) -> None:
    kill = f"import os, time\ndef kill():\n    os.kill(os.getpid(), {number})\n"
    (tmp_path / "script.py").write_text(f"{kill}{WITHIN[within]}\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "bml", "run", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (status, "", says)


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("", 1, "Error: SCRIPT ended while it was loaded, so there is no job\n"),
        ("0", 1, "Error: SCRIPT ended while it was loaded, so there is no job\n"),
        ("3", 3, ""),
        ("'give a folder'", 1, "give a folder\n"),
        ("ImportError('no such module')", 1, "no such module\n"),
    ],
)
def test_a_script_that_ends_while_it_is_loaded_says_so(
    tmp_path: Path, ends: str, status: int, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({ends})\n")
    done = CliRunner().invoke(main, ["run", str(script)])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "", says.replace("SCRIPT", str(script)))


@pytest.mark.slow
def test_a_signal_ends_a_command_though_nobody_reads_its_errors(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal\n"
        "os.set_blocking(2, False)\n"
        "try:\n"
        "    while True: os.write(2, b'x' * 4096)\n"
        "except BlockingIOError: os.set_blocking(2, True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "bml", "run", "script.py"], cwd=tmp_path, stderr=write
    ) as process:
        os.close(write)
        try:
            assert process.wait(50) == 143
        finally:
            process.kill()
            os.close(read)
