"""Whether a program has failed, as the handlers that run at the end of its process see it."""

import subprocess
import sys

import pytest

REPORTS = """
import atexit, contextlib, sys, threading
from bml.cluster.formation import program_end
program_end.watch()
atexit.register(lambda: print("failed" if program_end.has_failed() else "good"))
"""

CAUGHT = """
import argparse
try:
    argparse.ArgumentParser().parse_args(["--unknown"])
except SystemExit:
    pass
"""

ENDS = {
    "nothing": ("", "good"),
    "a caught exit": (CAUGHT, "good"),
    "a caught exit whose error is kept for a while": (
        "try:\n    sys.exit(2)\nexcept SystemExit as error:\n    kept = [error]\nkept.clear()",
        "good",
    ),
    "a suppressed exit in a function": (
        "def first():\n    with contextlib.suppress(SystemExit):\n        sys.exit(2)\nfirst()",
        "good",
    ),
    "a caught exit, and a good one": (CAUGHT + "sys.exit(0)", "good"),
    "a caught exit, and a bad one": (CAUGHT + "sys.exit(3)", "failed"),
    "a bad exit while one is caught": (
        "try:\n    sys.exit(0)\nexcept SystemExit:\n    sys.exit(1)",
        "failed",
    ),
    "a bad exit": ("sys.exit(2)", "failed"),
    "a bad exit in a function, with clean-up": (
        "def last():\n    try:\n        sys.exit(2)\n    finally:\n        print(end='')\nlast()",
        "failed",
    ),
    "a bad exit that is raised again": (
        "try:\n    sys.exit(2)\nexcept SystemExit:\n    raise",
        "failed",
    ),
    "a bad exit in a circle, collected by another thread": (
        """
import gc
def collects():
    threading.main_thread().join()
    gc.collect()
threading.Thread(target=collects).start()
def last():
    try:
        sys.exit(2)
    except SystemExit as error:
        mine = error
        raise
last()
""",
        "failed",
    ),
    "exit": ("exit(1)", "failed"),
    "quit in a handler of a signal": (
        "import signal\nsignal.signal(15, lambda *_: quit(1))\nsignal.raise_signal(15)",
        "failed",
    ),
    "a good exit": ("exit()", "good"),
    "a caught exit of the site": ("try:\n    exit(1)\nexcept SystemExit:\n    pass", "good"),
    "another error": ("raise ValueError", "failed"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_exit_counts_only_if_it_ended_the_program(end: str) -> None:
    program, expected = ENDS[end]
    ran = subprocess.run(
        [sys.executable, "-c", REPORTS + program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.stdout.split() == [expected], ran.stderr
