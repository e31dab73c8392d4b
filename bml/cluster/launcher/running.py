"""A running job: `Job` shows its state, injects faults, waits for its end, and ends it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from bml.cluster.fleets.fleet import (
    Changed,
    Died,
    Fleet,
    FleetEvent,
    Headless,
    NotInjected,
    Patience,
    Reported,
)
from bml.cluster.launcher import outcomes
from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.history import History
from bml.cluster.launcher.jobsocket import OUTCOME_S, JobSocket
from bml.cluster.launcher.join_manager import JoinManager, server_of
from bml.cluster.launcher.metrics import NO_ENDPOINT, Endpoint, NoEndpoint
from bml.cluster.launcher.recorder import Recorder
from bml.cluster.launcher.restarts import OUT
from bml.cluster.launcher.result import Result
from bml.cluster.launcher.shutdown_grace import give_up_at, inside, last_members
from bml.cluster.launcher.suspects import let_suspects_go
from bml.cluster.process.at_exit import AtExit
from bml.cluster.spec.ending import WRITING_S
from bml.cluster.spec.job import JobSpec, check_possible
from bml.errors import FabricError, UsageError, job_error
from bml.faults import AtOnce, AtStep, Fault, FaultPlan
from bml.io.interruptible import POLL_S, Aside, Event
from bml.io.signals import signals_put_off
from bml.predict.foretold import foretold

_LOG = logging.getLogger(__name__)

#: How long servers may take to answer: a frozen one never does, and on a loaded machine it may take seconds
#: until one acts.
_STATUS, _INJECT = Patience(1.0), Patience(1.0, 5.0)
#: How long the user's functions are waited for, in seconds, when the job is over, and when it is ended.
_TOLD_S = 10.0
_ENDED_TOLD_S = 1.0  # how long callbacks may go on when the job was ended from outside


class Job:
    """A running job, as `bml.start` returns it.

    Use it in a `with` statement: at its end the job is ended too. A thread of its own follows the job, so the
    caller's thread is free to look at the job and to inject faults. The thread runs no code of the user, and
    starts no servers, so that it can start another coordinator at any time.
    """

    def __init__(
        self,
        fleet: Fleet,
        spec: JobSpec,
        launcher: str,
        teller: Teller,
        record: Path | None = None,
        metrics: Endpoint | NoEndpoint = NO_ENDPOINT,
    ):
        self.spec = spec
        self._fleet = fleet
        self._launcher = launcher
        self._teller = teller
        self._history = History()
        self._result = Result(spec, seen=self._history.all_views)
        self._recorder = Recorder(spec, fleet.ask, record)
        self._join_manager = JoinManager(
            fleet.join, fleet.spares, self._result, self._is_here, lambda: self._is_over
        )
        self._metrics, self.metrics_url = metrics, metrics.url
        """The address at which Prometheus finds its metrics; "" if they are not served."""
        metrics.serve(fleet, self._result, self._join_manager)
        self._snapshot: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._begun, self._ending, self._over, self._closed = (Event() for _ in range(4))
        self._one_closes = threading.Lock()
        self._values_read = False
        self._thread = threading.Thread(target=self._run, name=f"follow-{spec.job}", daemon=True)
        self._socket: JobSocket | None = None
        self._give_up_at: dict[int, float] = {}
        # Two interrupts, one just after the other, end `close` before it has begun.
        self._at_exit = AtExit(self._end)

    @property
    def name(self) -> str:
        """The name by which `bml status --job` and `bml inject --job` find it."""
        return self.spec.job

    @property
    def running(self) -> bool:
        """Whether a server still runs."""
        return self._thread.ident is not None and not self._over.is_set()

    def begin(self, train: bytes) -> None:
        """Start all processes and follow them; return once the first view is in force or the job over."""
        try:
            self._fleet.start(train)
            late = {*self.spec.servers} - {*self._fleet.spec.servers}
            self.spec = self._result.spec = self._fleet.spec
            self._join_manager.await_late(late)
            self._socket = JobSocket.open(self.spec.job, self._serve)
            with signals_put_off():
                self._thread.start()
            let_suspects_go(self.spec, self._fleet.ask, self._over)
            while not self._begun.wait(POLL_S):
                pass
        except BaseException as error:
            self.close()
            error.result = self._result  # type: ignore[attr-defined]
            raise

    def status(self) -> dict[str, Any]:
        """Return the state of the job, ready for JSON.

        It has the last snapshot of the coordinator, and under `servers` the present state of every server, or
        `{"answers": False}` for a server that does not answer within a second. The keys are in
        docs/reference/formats.md.
        """
        asked = self._fleet.ask(("status", ""), _STATUS) if self.running else {}
        answers = {server: said for server, said in asked.items() if "error" not in said}
        expected = self._join_manager.expected if self.running else ()
        return {
            "job": self.name,
            "fabric": self.spec.fabric,
            "algorithm": self.spec.algorithm,
            "launcher": self._launcher,
            "emulated": self.spec.emulated,
            "running": self.running,
            **self._snapshot,
            **foretold(answers),
            "servers": {**{server: {"answers": False} for server in expected}, **answers},
            "ended": {server: report.outcome for server, report in sorted(self._result.reports.items())},
            "lost": dict(sorted(self._result.dead.items())),
            "left": dict(sorted(self._result.left.items())),
            "awaited": self._join_manager.to_come,
            "absent": self._join_manager.never_there,
            "spares": self._fleet.spares.left,
            "views": self._history.views,
            "events": self._history.events,
        }

    def outcome(self, within_s: float = 0.0) -> dict[str, Any]:
        """Say how the job has ended, ready for JSON; {} if it still runs after `within_s` seconds."""
        if not self._is_over_by(time.monotonic() + within_s):
            return {}
        return self._result.outcome(self._error or self._teller.error)

    def inject(self, spec: str | Fault) -> dict[str, Any]:
        """Inject one fault: `kill:4`, `freeze:2,for=3s`, `switch:0/2`; later with `@step=9` or `@t=2s`.

        Times count from now. Returns `{"fault", "job", "done"}`, where `done` has a text for every server
        that acts. Raises UsageError if it is not a fault of this fabric, and for a `join` of a server that is
        in the job at its moment, if that is now or past. Raises FabricError if no server can apply it within
        5 seconds.
        """
        fault = Fault.parse(str(spec), at_once=True)
        plan = FaultPlan((fault,))
        plan.validate(self.spec.parsed_fabric())
        check_possible(plan, self.spec)
        if not self.running:
            raise FabricError(f"the job {self.name} has ended")
        if fault.kind == "join" and self._is_here(server_of(fault)) and self._is_due(fault):
            raise UsageError(
                f"'{fault}': server {server_of(fault)} is in the job; it can join when it is out of the "
                "view (see bml status)"
            )
        answers = self._fleet.ask(("inject", str(fault)), _INJECT)
        wrong = [answer["error"] for answer in answers.values() if "error" in answer]
        if wrong:
            raise UsageError(wrong[0])
        done = [answers[server]["done"] for server in sorted(answers) if answers[server]["done"]]
        if not done:
            raise FabricError(
                f"no server can apply {fault}: {sorted(answers)} answered, gone are "
                f"{sorted(self._result.gone) or 'none'}; one that did not answer applies it when it wakes"
            )
        self._history.note("fault", f"injected: {fault}", time.time())
        return {"fault": str(fault), "job": self.name, "done": done}

    def dump(self, path: str | None = None) -> dict[str, Any]:
        """Write what the servers' flight recorders hold to a file, for `bml replay`.

        To `path`, else to the file of `record` (see `launch`), else to one in ~/.local/state/bml, where ten
        files stay. Returns `{"file", "job", "servers"}`: the servers that have answered within 5 seconds.
        Raises FabricError if none has, or the file cannot be written, UsageError if `path` is no plain file.
        """
        return self._recorder.dump("asked for", None if path is None else Path(path))

    def _is_here(self, server: int) -> bool:
        """Whether a server is in the view, as far as is known."""
        return server in self._snapshot.get("members", ()) and server not in self._result.gone

    def _is_due(self, fault: Fault) -> bool:
        """Whether a fault without a phase strikes at once: servers say in which step they are."""
        match fault.trigger:
            case AtOnce():
                return True
            case AtStep(step):
                answers = self._fleet.ask(("status", ""), _STATUS).values()
                return any(answer.get("step", 0) > step for answer in answers)
            case _:
                return False

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait for the end of the job; returns its result, or raises the error that ended it (see `launch`).

        Raises FabricError if it still runs after `timeout_s` seconds; the job goes on then.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not self._is_over_by(until_s):
            raise FabricError(f"the job {self.name} still runs after {timeout_s:g} s; see bml status")
        self._teller.drain(_TOLD_S)
        self.close()
        self._read_values()
        self._result.recording, self._result.recording_lost = self._recorder.data, self._recorder.lost
        error = self._error or self._teller.error
        if error is not None:
            raise error
        outcomes.tell(self._result)
        self._result.check()
        return self._result

    def leave(self) -> None:
        """Let all servers leave at their next boundaries, each with a checkpoint if the job makes any.

        Returns when all have left, or after 60 seconds. Ctrl-C in the `with` statement of a job with
        checkpoints does it, too, and so does SIGTERM to `bml run`.
        """
        with signals_put_off():  # an interrupted handler of logs may keep its lock
            _LOG.warning("the servers of %s leave, with checkpoints; interrupt again to end it", self.name)
        if self.running:
            self._result.interrupted = True
            self._fleet.ask(("leave", "the job was asked to end"), _STATUS)
        if self._is_over_by(time.monotonic() + WRITING_S) and (left := self.spec.keeping.left()):
            _LOG.warning("%s", left)

    def _is_over_by(self, until_s: float) -> bool:
        while not self._over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            self._over.wait(min(left_s, POLL_S))
        return self._over.is_set()

    def _read_values(self) -> Result:
        """Unpickle the training functions' values, once: the user's code, not for the thread that follows."""
        with self._one_closes:
            if not self._values_read:
                self._result.open_values()
                self._values_read = True
        return self._result

    def close(self) -> None:
        """End every process of the job and leave nothing behind. Idempotent; raises errors of doing so.

        A thread does that, so Ctrl-C ends only the wait for it. It goes on, and the next call waits for it,
        or at the latest Python at the end of the program.
        """
        if not self._closed.is_set():
            Aside(self._end, "bml-closing", or_here=True).result()
        self._teller.close(_ENDED_TOLD_S)

    def _end(self) -> None:
        """End the job for `close`. Each part can be repeated, after an error or by another thread."""
        self._result.interrupted |= self.running
        self._ending.set()
        with self._one_closes:
            if not self._closed.is_set():
                self._end_all()
            self._closed.set()
            self._at_exit.cancel()

    def _end_all(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._join_manager.close()
        self._metrics.close()
        self._fleet.close()
        self._recorder.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if self.spec.keeping.folder and kind in (KeyboardInterrupt, SystemExit):
                self.leave()
        finally:
            self.close()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                error.result = self._read_values()  # type: ignore[union-attr]

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request from the job's socket."""
        match request.get("do"):
            case "inject":
                return self.inject(str(request.get("fault", "")))
            case "status":
                return self.status()
            case "dump":
                return self.dump()
            case "outcome":
                return self.outcome(OUTCOME_S)
        known = "for its status and outcome, for a dump, and to inject a fault"
        raise UsageError(f"a job can be asked {known}, not {request!r:.80}")

    # --- following -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()
            self._begun.set()

    def _follow(self) -> None:
        """Follow the job until every server has reported or is gone, or the grace after the end is over."""
        result = self._result
        missing = set(self.spec.servers)
        while missing and not self._ending.is_set():
            for event in self._fleet.wait(POLL_S):
                self._heard(event, missing)
            if self._teller.error is not None:
                raise self._teller.error
            self._join_manager.start(missing)
            missing -= result.reports.keys() | result.gone.keys()
            now = time.monotonic()
            for server in [each for each in missing if now > self._give_up_at.get(each, math.inf)]:
                result.give_up(server, came=server not in self._join_manager.to_come)
                missing.discard(server)

    def _heard(self, event: FleetEvent, missing: set[int]) -> None:
        result = self._result
        self._history.heard(event, time.time())
        if isinstance(event, Reported):
            result.struck.update(event.report.struck)
            result.told.add(event.report.server)
            self._recorder.add(event.report.recording)
        match event:
            case Reported(report) if report.kind in OUT:
                result.lose(report.server, report.error, report.kind)
                self._join_manager.lost(report.server, report.kind)
            case Reported(report):
                if not result.reports and not result.headless:
                    self._wait_for(missing, last_members(report, missing))
                result.reports[report.server] = report
            case NotInjected(fault, why):
                result.not_injected[fault] = why
            case Died(server, why):
                result.dead[server] = why
                self._join_manager.lost(server)
            case Headless(why, within_s):
                result.headless = why
                self._fleet.ask(("leave", why), _STATUS)  # those who do not know it
                self._give_up_at = dict.fromkeys(missing, time.monotonic() + within_s)
            case Changed(snapshot):
                self._snapshot = snapshot
                members = inside(snapshot, result.gone, self._join_manager.incarnations)
                self._join_manager.seen(snapshot, members)
                if self._is_over and not self._give_up_at:  # perhaps no server is left to report it
                    self._wait_for(missing, members)
                    result.abort = job_error(**snapshot["abort"]) if snapshot["abort"] else None
                if snapshot["epoch"]:
                    self._begun.set()
                self._recorder.changed(snapshot["epoch"])
                self._teller.tell(snapshot)

    def _wait_for(self, missing: Iterable[int], members: Container[int]) -> None:
        """Wait for these servers a little longer, as the job is over."""
        writes = bool(self.spec.keeping.folder)
        now, late = time.monotonic(), {*missing}.intersection(self._join_manager.awaited)
        self._give_up_at = give_up_at(now, missing, members, writes) | give_up_at(now, late, members, False)

    @property
    def _is_over(self) -> bool:
        """Whether servers have ended, or the coordinator has: a joiner would not be let in any more."""
        result = self._result
        return bool(result.reports or result.headless) or self._snapshot.get("state") == "stopped"
