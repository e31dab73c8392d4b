"""A signal that comes while numba compiles ends the command as at any other time."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core.codegen import JITCodeLibrary

from bml.io.signals import signals_put_off
from bml.lab.flows import compilation
from bml.lab.flows.compiled import compiled, subroutine

CODE = """
def inner(x):
    return x + 1

def outer(x):
    return inner(x) * 2
"""


@pytest.fixture(autouse=True)
def as_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_around", signals_put_off)


class Ended(BaseException):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(request.param, end)
    yield request.param
    assert signal.signal(request.param, before) is end


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Names of the functions that LLVM has compiled. At the first one the signal comes as LLVM calls back."""
    seen: list[str] = []
    finalize = JITCodeLibrary._finalize_specific

    def finalized(self: Any) -> None:
        if self.name in ("inner", "outer"):  # numba compiles some of its own for the first function
            seen.append(self.name)
            if len(seen) == 1:
                ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()
        finalize(self)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", finalized)
    return seen


def functions() -> tuple[Callable[[int], int], Callable[[int], int]]:
    """A function and one that calls it. They are in no file, so numba cannot keep what it compiles."""
    names: dict[str, Any] = {}
    exec(CODE, names)
    names["inner"] = subroutine(names["inner"])
    return names["inner"], compiled(names["outer"])


def test_it_ends_what_compiles_when_one_function_is_done(finished: list[str]) -> None:
    _, outer = functions()
    with pytest.raises(Ended):
        outer(3)
    assert finished == ["inner"]
    assert outer(3) == 8, "what was compiled is kept"


def test_in_another_thread_nothing_is_put_off(finished: list[str], number: int) -> None:
    found: list[int] = []
    _, outer = functions()
    finished.append("no signal comes")
    thread = threading.Thread(target=lambda: found.append(outer(3)))
    thread.start()
    thread.join()
    assert found == [8]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert functions()[1](3) == 8
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_commands_put_signals_off() -> None:
    text = "import bml.lab.commands.sim.command\nfrom bml.lab.flows import compilation\n"
    text += "print(compilation._around.__qualname__)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == signals_put_off.__qualname__ == "signals_put_off"
