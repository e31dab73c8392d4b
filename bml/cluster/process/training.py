"""Runs a training function on one server, from its first view to its report, under every launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from bml.cluster.process.bodies import check_ran
from bml.cluster.process.exiting import end_process
from bml.cluster.process.pickling import Train, unpack
from bml.cluster.process.remaining import Remaining
from bml.cluster.server.server import Server
from bml.cluster.spec.ending import packed, text_of, trace_of
from bml.cluster.spec.job import Contacts, ServerReport
from bml.cluster.spec.leaving import LEFT
from bml.errors import FabricError, InvariantError, StateMismatch, StepMismatch, TooFewServers, TooSlow
from bml.io.interruptible import refuse_green_threads
from bml.train.session import Session

_SWITCH_S = 0.0001
"""How long a thread of this process keeps the interpreter's lock while another waits for it. At Python's 5 ms
the loop would wait as long after every system call beside a training thread that is busy in Python."""
_AFTER_ERROR_S = 5.0
"""How long threads, executors and exit handlers may take after an error, in seconds."""


def run_training(
    server: Server, contacts: Contacts, pickled: bytes, run_exit_handlers: Callable[[], None] = lambda: None
) -> ServerReport:
    """Run a pickled training function on this server, serve the others until they are done, and report.

    It is done when what it began in threads and executors is, and then `run_exit_handlers`. An error of the
    training function, or of loading it, ends the job for all servers. It is in the report, and never raised
    here.
    """
    sys.setswitchinterval(_SWITCH_S)
    remaining = Remaining(run_exit_handlers)
    train = _loaded(pickled)  # it may import for long: no server expects heartbeats of this one yet
    server.start(contacts)
    session: Session | None = None
    value, error, trace, digest = None, None, "", ""
    nan: tuple[str, ...] = ()
    try:
        if not server.joins:
            server.wait_for_view()
        session = Session(server)
        server.keeping.apply(session)
        server.show_throughput(session.throughput)
        # Packed before the session ends: if the job is over, this may be all that can be saved.
        returned = _call(train, session)
        check_ran(returned, session, server.steps)
        value = packed(returned)
        session.finish()
        digest, nan = session.digest(), tuple(session.nan())
        remaining.finish(f"server {server.server}")
    except BaseException as raised:
        error, trace = raised, trace_of(raised)
    outcome = _outcome(server, error)
    said = f"server {server.server} raised {type(error).__name__}: {text_of(error)}" if error else ""
    server.end(outcome, said if outcome == "failed" else "")
    if session is not None:
        session.close()
    if error is not None:
        remaining.finish_within(_AFTER_ERROR_S)
    kind = _kind(server, error if outcome == "failed" else server.error)
    return ServerReport(
        server=server.server,
        outcome=outcome,
        value=value,
        error=said if outcome == "failed" else str(server.error or ""),
        kind=kind,
        traceback=trace,
        digest=digest or _last_digest(session),
        samples=session.samples() if session else None,
        views=server.view_records(),
        metrics=_metrics(server),
        trace=server.trace(),
        contributed=server.contributes,
        struck=server.struck,
        nan=nan,
        recording=server.recording(wanted=outcome != "done" and kind != LEFT),
    )


def load(pickled: bytes) -> None:
    """Import all that a pickled training function needs, in a spare; errors are left for `run_training`."""
    with suppress(Exception, SystemExit):
        unpack(pickled)


def _loaded(pickled: bytes) -> Train:
    """Return the training function; if it cannot be loaded here, return one that raises the reason."""
    try:
        train = unpack(pickled)
        refuse_green_threads()  # before this server has threads
    except BaseException as error:
        text = f"the training function cannot be loaded here: {type(error).__name__}: {text_of(error)}"
        cause = error

        def train(session: Session) -> Any:
            raise ImportError(text) from cause

    return train


def _last_digest(session: Session | None) -> str:
    """Return the digest of the parameters after an error; empty if they cannot be read any more."""
    try:
        return session.digest() if session else ""
    except Exception:
        return ""


def _call(train: Train, session: Session) -> Any:
    """Call the training function. Processes that it forks are not servers: they end where it ends."""
    process = os.getpid()
    try:
        value = train(session)
    except BaseException as error:
        if os.getpid() != process:
            end_process(error)
        raise
    if os.getpid() != process:
        end_process(None)
    return value


def _kind(server: Server, error: BaseException | None) -> str:
    """Return the error's class, or the way in which the server left without harm to the others."""
    if server.leaves and error is not None:  # without an error its function ended before it could leave
        return LEFT
    if error is not None and not server.contributes:
        return "JoinFailed" if _is_the_runtimes(error) else "NotJoined"
    return type(error).__name__


def _is_the_runtimes(error: BaseException) -> bool:
    """Whether it is an error of the runtime on this server, not of the training function or the job."""
    return isinstance(error, FabricError | InvariantError) and not isinstance(error, TooFewServers | TooSlow)


def _outcome(server: Server, error: BaseException | None) -> str:
    """Return how the run ended here: with an error of this server, by the end of the job, or well."""
    if server.error is not None and not isinstance(server.error, _OWN):
        return "stopped"  # even if the training function caught the error, to save its state
    return "done" if error is None else "failed"


_OWN = (StepMismatch, StateMismatch, InvariantError, TooSlow)
"""Errors that end the run of one server, and do not come from the end of the job."""


def _metrics(server: Server) -> dict[str, Any]:
    times, traffic = list(server.commit_at_s), server.traffic()
    gaps = np.diff(times)
    return {
        "steps": sum(size["steps"] for size in server.sizes.values()),
        "step_median_s": float(np.median(gaps)) if len(gaps) else None,
        "step_max_s": float(gaps.max()) if len(gaps) else None,
        "commit_at_s": times,
        "transport": traffic["transport"],
        "links": traffic["links"],
        "nbytes_copied": server.nbytes_copied,
        "shares": server.shares,
        "checkpoints": server.checkpoints,
        "sizes": server.sizes,
    }
