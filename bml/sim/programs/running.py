"""Runs the training function of every server in a thread of its own, on the real session."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from bml.sim.programs.clock import CLOCK
from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Faults, Interrupted
from bml.sim.programs.group import Group
from bml.train import session as session_module

Report = Callable[[ModelCommunicator, Any, Any, BaseException | None], None]
_OF_THE_SESSION = str(Path(session_module.__file__).parent)


def run(
    train: Callable[[Any], Any],
    servers: Iterable[int],
    faults: Faults,
    report: Report,
    begin: Callable[[Any], None] = lambda session: None,
    job: str = "job",
    is_made: Callable[[Group], None] = lambda group: None,
) -> Group:
    """Run a job to its end, and return its group of servers.

    `report` gets each server's communicator, session, value and error, in the thread of that server. `begin`
    is called with each session before the training function, `is_made` with the group before all of them.
    """
    threads: list[threading.Thread] = []

    def serve(communicator: ModelCommunicator) -> None:
        CLOCK.begin(communicator.server, faults.paces.get(communicator.server, (1.0,)), faults.batch_s)
        session, value, error = session_module.Session(communicator), None, None
        if not communicator.joins and communicator.server in faults.interrupts:
            sys.setprofile(_interrupting(faults.interrupts[communicator.server]))
        try:
            begin(session)
            value = train(session)
            session.finish()
        except BaseException as raised:
            error = raised
        sys.setprofile(None)
        report(communicator, session, value, error)
        if not communicator.is_lost:  # it may have joined again, in another thread
            group.end(communicator.server, error)
        session.close()

    def start(communicator: ModelCommunicator) -> None:
        thread = threading.Thread(
            target=serve, args=(communicator,), name=f"server-{communicator.server}", daemon=True
        )
        threads.append(thread)
        thread.start()

    def join(server: int) -> None:
        start(ModelCommunicator(group, server, joins=True))

    group = Group(servers, faults, join, job)
    is_made(group)
    for server in group.contributors:
        start(ModelCommunicator(group, server))
    for thread in threads:
        thread.join(3 * group.deadline_s)
        if thread.is_alive():
            group.violations.append(f"hang: {thread.name} did not end")
    return group


def _interrupting(n_calls: int) -> Callable[[FrameType, str, Any], None]:
    """A profile function that raises where a signal's handler could: in the n-th call in or by the session.

    Python looks for signals where a function begins and where one that is written in C has returned.
    """
    left = n_calls

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_OF_THE_SESSION):
            left -= 1
            if left == 0:
                raise Interrupted

    return look
