"""Training functions that go wrong in every way, and what a job then comes to, whatever launched it.

Run as a program, `LAUNCHER NAME...`, it launches those named, and prints their outcomes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np

import bml
from bml.cluster.launcher import shutdown_grace
from bml.cluster.ray import auth as ray_auth

FABRIC, BAD, STEPS = "bcube:3x1", 1, 5
LARGE = 40 << 20
STOPPED_GRACE_S = 3.0
"""After which a launcher kills a server that has stopped, which ends by nothing else."""


class Mute(ValueError):
    def __str__(self) -> str:
        raise ValueError("no text")


class Rude(ValueError):
    def __str__(self) -> str:
        raise SystemExit(5)


class Base(BaseException):
    pass


class Locked(ValueError):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Reads:
    """A value that does something when it is read by the launcher."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.does = function, arguments

    def __reduce__(self) -> Any:
        return self.does


class Stops:
    """A value that has its process stopped when it is written."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return int, (5,)


def fails_to_read() -> None:
    raise KeyError("unreadable")


def raising(make: Callable[..., BaseException], *arguments: Any) -> Callable[[], Any]:
    def bad() -> None:
        raise make(*arguments)

    return bad


def endless() -> list[Any]:
    value: list[Any] = []
    for _ in range(200_000):
        value = [value]
    return value


def stops_while_it_reports() -> bytes:
    """The thread that reports stops its process: as it has sent what fits, or packed it for Ray."""

    def stop(frame: Any, event: str, argument: Any) -> None:
        name, sends = frame.f_code.co_name, _is_in(frame, "put")
        reports = name in ("_try", "_wait") if sends else name == "dumps"
        if event == "return" and reports and not _is_in(frame, "run_training"):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.setprofile(stop)
    return bytes(LARGE)


def _is_in(frame: Any, name: str) -> bool:
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def of_one_server(bad: Callable[[], Any]) -> Callable[[bml.Session], Any]:
    """Some steps; then one server does what is bad, and the others go on."""

    def train(session: bml.Session) -> Any:
        w = np.zeros(3)
        session.state(w=w)
        value: Any = "well"
        for step in session.steps(STEPS):
            w += session.allreduce(np.ones(3))
            if (session.server, step) == (BAD, STEPS - 2):
                value = bad()
        return value

    return train


def loads_on_two(folder: str) -> Any:
    """A function that fails to load on the server that tries first."""

    def make(first: str) -> Callable[[bml.Session], Any]:
        try:
            os.close(os.open(first, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return of_one_server(lambda: "well")
        raise ModuleNotFoundError("No module named 'only_there'")

    class Function:
        def __call__(self, session: bml.Session) -> Any:
            raise AssertionError

        def __reduce__(self) -> Any:
            return make, (os.path.join(folder, "first"),)

    return Function()


def changes_what_it_named(session: bml.Session) -> str:
    params: dict[str, Any] = {"w": np.zeros(3)}
    session.state(params=params)
    for _ in session.steps(STEPS):
        session.barrier()
    if session.server == BAD:
        params["w"] = {1: object()}
    return "well"


@dataclass(frozen=True)
class Row:
    """A function, and what a job of it comes to.

    `error`: a pattern of what the job raises, the class and its text; empty: it ends well. `values`: how what
    the servers returned that ended well begins. `dead`: those that count as dead. `grace_s`: how long servers
    may take to end after the first one, which a busy machine can draw out.
    """

    train: Callable[[str], Callable[[bml.Session], Any]]
    error: str = ""
    values: tuple[str, ...] = ()
    dead: tuple[int, ...] = ()
    grace_s: float = shutdown_grace._GRACE_S


def raises(bad: Callable[[], Any], error: str) -> Row:
    return Row(lambda folder: of_one_server(bad), f"TrainingError: server 1 raised {re.escape(error)}")


def returns(bad: Callable[[], Any], value: str) -> Row:
    return Row(lambda folder: of_one_server(bad), values=("well", value, "well"))


def dies(bad: Callable[[], Any]) -> Row:
    return Row(lambda folder: of_one_server(bad), values=("well", "well"), dead=(BAD,))


def stops(bad: Callable[[], Any]) -> Row:
    return replace(dies(bad), grace_s=STOPPED_GRACE_S)


TABLE = {
    "raises": raises(raising(KeyError, "the 7th batch"), "KeyError: 'the 7th batch'"),
    "text that raises": raises(raising(Mute), "Mute: (its text cannot be made)"),
    "text that exits": raises(raising(Rude), "Rude: (its text cannot be made)"),
    "error with a lock": raises(raising(Locked), "Locked: holds a lock"),
    "huge text": raises(raising(lambda: ValueError("x" * (17 << 20))), "ValueError: xxx"),
    "lone surrogate": raises(raising(ValueError, "\udc80"), "ValueError: \\udc80"),
    "sys.exit": raises(lambda: sys.exit(3), "SystemExit: 3"),
    "Ctrl-C": raises(raising(KeyboardInterrupt), "KeyboardInterrupt: "),
    "BaseException": raises(raising(Base, "no Exception"), "Base: no Exception"),
    "endless recursion": raises(raising(RecursionError, "too deep"), "RecursionError: too deep"),
    "result with a lock": returns(threading.Lock, "<not sent: the value, of type lock"),
    "result too deep": returns(endless, "<not sent: the value, of type list"),
    "result unreadable": returns(lambda: Reads(fails_to_read), "<not sent: the value cannot be read"),
    "result that exits": returns(lambda: Reads(sys.exit, 3), "<not sent: the value cannot be read"),
    "large result": returns(lambda: bytes(LARGE), f"{LARGE} bytes"),
    "os._exit": dies(lambda: os._exit(3)),
    "kills itself": dies(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stops itself": stops(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "stops while its result is written": stops(Stops),
    "stops while it reports": stops(stops_while_it_reports),
    "loads on two servers": Row(
        loads_on_two,
        "TrainingError: server \\d raised ImportError: the training function cannot be loaded here: "
        "ModuleNotFoundError: No module named 'only_there'",
    ),
    "state that changes its form": Row(
        lambda folder: changes_what_it_named,
        "UsageError: server 1 raised UsageError: the state 'w' has keys that are not texts: \\[1\\]",
    ),
}


def outcome(name: str, launcher: str) -> dict[str, Any]:
    """Launch one of the functions: what came of it, in words, ready for JSON."""
    shutdown_grace._GRACE_S = TABLE[name].grace_s
    with tempfile.TemporaryDirectory() as folder:
        error: Exception | None = None
        begun = time.monotonic()
        try:
            with bml.start(TABLE[name].train(folder), FABRIC, launcher=launcher, prints=False) as job:
                result = job.wait(60)
        except bml.BmlError as raised:
            error = raised
            result = getattr(raised, "result", None)
    return {
        "error": f"{type(error).__name__}: {error}"[:500] if error else "",
        "values": [_said(value) for value in result.values.values()] if result else None,
        "dead": sorted(result.dead) if result else None,
        "seconds": time.monotonic() - begun,
    }


def _said(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def main(launcher: str, *names: str) -> None:
    """Launch those named, those on Ray on one Ray."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if launcher == "ray":
        import ray

        with ray_auth.private():
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
    print(json.dumps({name: outcome(name, launcher) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
