"""The result of a job, made of the reports of its servers."""

from __future__ import annotations

import reprlib
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import chain, pairwise
from typing import Any

from bml import errors
from bml.cluster.spec.ending import opened
from bml.cluster.spec.job import JobSpec, ServerReport
from bml.cluster.spec.leaving import NOT_JOINED, NOTICED
from bml.cluster.spec.trace import merged
from bml.errors import BmlError, TrainingError, UsageError
from bml.faults.outcome import never_struck, stays
from bml.train.balancing.throughput import of_all

#: Errors of one server that the caller (or bml) has made, not the training function.
_OWN = {
    "StepMismatch": errors.StepMismatch,
    "UsageError": errors.UsageError,
    "SessionBroken": errors.SessionBroken,
    "InvariantError": errors.InvariantError,
}

#: What only a server that was there can tell of a view.
_UNTOLD = {
    "kept": None,
    "recover_s": None,
    "predicted_s": None,
    "measured_s": None,
    "predicted_from": "",
}


@dataclass
class Result:
    """The outcome of a job. `launch` and `Job.wait` return it, and errors have it in their `result`."""

    spec: JobSpec
    """The specification of the job."""
    began_at_s: float = field(default_factory=time.time, kw_only=True)
    """When the launcher began it, in seconds since 1970."""
    reports: dict[int, ServerReport] = field(default_factory=dict)
    """Server -> its report at its end."""
    dead: dict[int, str] = field(default_factory=dict)
    """Server -> why it was lost."""
    left: dict[int, str] = field(default_factory=dict)
    """Server -> why it left: SIGTERM, `leave`, or its Ray node drains. It was not lost."""
    _left_before: dict[int, str] = field(default_factory=dict, repr=False)
    """Server -> why it left last, for those that were started again since."""
    _died_before: dict[int, str] = field(default_factory=dict, repr=False)
    _stayed_away: set[int] = field(default_factory=set, repr=False)
    """Server -> why it was lost, for those that were started again since."""
    abort: BmlError | None = None
    """The error with which the coordinator ended the job: perhaps no server is left to report it."""
    headless: str = ""
    """Why the job had to end though enough servers lived: Ray's head is gone. Empty if it had not."""
    struck: set[str] = field(default_factory=set)
    """Faults of the plan that struck, as texts, as far as servers could report them."""
    told: set[int] = field(default_factory=set)
    """Servers that have reported which faults struck in their last incarnation."""
    begun: set[str] = field(default_factory=set)
    """The joins (`join:4`) for which a server was started."""
    not_injected: dict[str, str] = field(default_factory=dict)
    """Fault -> why it could not be injected when its time came."""
    seen: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The views of which the launcher heard (`bml.cluster.launcher.history`)."""
    interrupted: bool = False
    """Whether Ctrl-C, SIGTERM or the end of a `with` statement ended the job before it was over."""
    recording: bytes = field(default=b"", repr=False)
    """The file for `bml replay`, of all servers that brought a recording: those that did not end well, and
    with `record` all. Empty if none did."""
    recording_lost: str = ""
    """Why the file of `record` could not be written at the end; empty if it could."""

    @property
    def gone(self) -> dict[int, str]:
        """Server -> why it was lost, or left."""
        return dict(sorted({**self.dead, **self.left}.items()))

    def lose(self, server: int, why: str, kind: str) -> None:
        """A server is gone, with a report of this kind."""
        if kind in NOT_JOINED:
            self.stays_away(server, why)
            return
        self._left_before.pop(server, None)
        self._died_before.pop(server, None)
        self._stayed_away.discard(server)
        (self.left if kind in NOTICED else self.dead)[server] = why

    def give_up(self, server: int, came: bool) -> None:
        """The job is over, and a server is not awaited any longer."""
        late, killed = "it had not come when the job ended", "it did not end after the others, and was killed"
        found, before = self._before(server)
        why = killed if came else late
        (self.dead if came else found)[server] = f"{before}; started again, {why}" if before else why

    def add_to_why(self, server: int, more: str) -> None:
        """Say more of a server that is gone."""
        found = self.left if server in self.left else self.dead
        found[server] += f"; {more}"

    def comes(self, server: int) -> None:
        """A server that may be gone is started again."""
        died, left = self.dead.pop(server, None), self.left.pop(server, None)
        self.told.discard(server)
        if server in self._stayed_away:  # it is tried again, for the same reason
            self._stayed_away.discard(server)
            return
        for before, why in ((self._died_before, died), (self._left_before, left)):
            before.pop(server, None)
            if why is not None:
                before[server] = why

    def stays_away(self, server: int, why: str) -> None:
        """A server that was started did not come: nothing was lost if it had left before."""
        found, before = self._before(server)
        self._stayed_away.add(server)
        found[server] = f"{before}; not started again yet: {why}" if before else why

    def _before(self, server: int) -> tuple[dict[int, str], str]:
        """Among which servers one was before it was started again, and why; empty if it never was there."""
        if server in self._left_before:
            return self.left, self._left_before[server]
        return self.dead, self._died_before.get(server, "")

    def __repr__(self) -> str:
        """One line: `report` has all that is known, and is long."""
        done = self._by("done")
        steps = max((report.metrics.get("steps", 0) for report in done.values()), default=0)
        known = {*self.spec.servers, *self.reports, *self.gone}
        says = f"{len(done)} of {len(known)} servers done after {steps} steps"
        lost = "".join(f", {how} {who}" for how, who in self._gone_by_how())
        value = f", value {reprlib.repr(self.value)}" if done else ""
        return f"<Result on {self.spec.fabric}: {says}{lost}{value}>"

    def open_values(self) -> None:
        """Unpickle the values of the training functions, once, when all servers have reported."""
        found = {server: opened(report.value) for server, report in self.reports.items()}
        for server, value in found.items():
            self.reports[server] = replace(self.reports[server], value=value)

    @property
    def values(self) -> dict[int, Any]:
        """Server -> the value of its training function, for servers that ended well."""
        return {server: report.value for server, report in self._by("done").items()}

    @property
    def value(self) -> Any:
        """The value of the training function on the lowest surviving server.

        A server that joined and ended before it contributed counts only if there is no other. Raises
        UsageError if no server ended well.
        """
        done = self._by("done")
        if not done:
            raise UsageError("no server has a value: none reached the end of the training function")
        return done[min([each for each in done if done[each].contributed] or done)].value

    @property
    def never_struck(self) -> dict[str, str]:
        """The faults of the plan that did not strike, as texts, each with the reason."""
        lost = stays(self._views(), self.gone, self.told)
        plan, fabric = self.spec.fault_plan(), self.spec.parsed_fabric()
        return never_struck(plan, fabric, self.struck, lost, self.begun, self.not_injected)

    @property
    def report(self) -> dict[str, Any]:
        """The whole report, ready for JSON, as `--report` writes it.

        docs/reference/formats.md has its keys.
        """
        survivors = self._survivors()
        first = max(survivors.values(), key=lambda report: report.metrics["steps"], default=None)
        resumed = self.spec.keeping.resumed
        return {
            "job": self.spec.job,
            "began_at_s": self.began_at_s,
            "version": own_version(),
            "fabric": self.spec.fabric,
            "algorithm": self.spec.algorithm,
            "faults": list(self.spec.faults),
            "never_struck": self.never_struck,
            "resumed": None if resumed is None else {"job": resumed.job, "steps": resumed.steps},
            "steps": first.metrics["steps"] if first else 0,
            "views": self._views(),
            "sizes": of_all(report.metrics.get("sizes", {}) for report in survivors.values()),
            "digests": {server: report.digest for server, report in survivors.items() if report.contributed},
            "nan": sorted({name for each in survivors.values() if each.contributed for name in each.nan}),
            "samples": first.samples if first else None,
            "outcomes": {server: report.outcome for server, report in sorted(self.reports.items())},
            "dead": dict(sorted(self.dead.items())),
            "left": dict(sorted(self.left.items())),
            "metrics": {server: report.metrics for server, report in survivors.items()},
        }

    @property
    def trace(self) -> dict[str, Any]:
        """The trace (`launch` with `trace`) for Perfetto, ready for JSON. Empty without `trace`."""
        return merged(report.trace for report in self.reports.values() if report.trace is not None)

    def check(self) -> None:
        """Raise the error that ended the job, if one did; it has this result."""
        if (failure := self.failure()) is not None:
            failure.result = self  # type: ignore[attr-defined]
            raise failure

    def failure(self) -> BmlError | None:
        """Return the error that ended the job, None if it ended well."""
        for server, report in self._by("failed").items():
            if report.kind in _OWN:
                return _OWN[report.kind](report.error)
            return TrainingError(f"{report.error}\n{report.traceback}", server)
        if self.headless and not self.values:
            return errors.FabricError(f"{self.headless}; {self._how_to_go_on()}")
        stopped = Counter((report.kind, report.error) for report in self._by("stopped").values())
        if stopped:
            (kind, text), _ = stopped.most_common(1)[0]
            known: type[BmlError] = getattr(errors, kind, BmlError)
            return known(text)
        if not self.values:
            closed = "the job was ended before a server reached the end"
            return self.abort or BmlError(f"no server reached the end: {self.gone}" if self.gone else closed)
        differ = self._differences()
        return errors.StateMismatch(differ) if differ else None

    def outcome(self, error: BaseException | None = None) -> dict[str, Any]:
        """Say how the job has ended, ready for JSON.

        `error` is that of the launcher, if it had one. docs/reference/formats.md has the keys.
        """
        of_launcher, error = error, error or self.failure()
        done, failed = self._by("done"), self._by("failed")
        steps = max((each.metrics.get("steps", 0) for each in self.reports.values()), default=0)
        lost = "".join(f"; {how}: {who}" for how, who in self._gone_by_how())
        well = f"{len(done)} servers reached the end after {steps} steps{lost}"
        # What ended the job goes before an interrupt that came while it ended.
        interrupted = error is not None and self.interrupted and of_launcher is None and not failed
        return {
            "ended_well": error is None,
            "interrupted": interrupted,
            "text": well if error is None else "it was interrupted" if interrupted else str(error),
            "kind": "" if error is None else type(error).__name__,
            "steps": steps,
        }

    def _gone_by_how(self) -> list[tuple[str, str]]:
        """Return "lost" and "left", each with its servers, if there are any."""
        found = {"lost": self.dead, "left": self.left}
        return [(how, ", ".join(map(str, sorted(servers)))) for how, servers in found.items() if servers]

    def _how_to_go_on(self) -> str:
        folder = self.spec.keeping.folder
        if not folder:
            return "without --checkpoint nothing is left to go on from"
        return f"go on with `bml run … --resume {folder}` on a Ray that works"

    def _differences(self) -> str:
        """Say in what the servers that reached the end differ; empty if they do not."""
        done = {server: report for server, report in self._by("done").items() if report.contributed}
        digests = {server: report.digest for server, report in done.items()}
        if len(set(digests.values())) > 1:
            said = ", ".join(f"{server}: {digest[:16] or 'none'}" for server, digest in digests.items())
            return (
                f"the servers ended with different parameters (sha256 {said}): all of them must change what "
                "session.state names by the same numbers"
            )
        ledgers = {server: str(report.samples) for server, report in done.items()}
        if len(set(ledgers.values())) > 1:
            return f"the servers count different samples as used: {ledgers}"
        return ""

    def _views(self) -> list[dict[str, Any]]:
        """Return all views: as survivors know them, other servers, or else the launcher.

        Where every server was started again, none of them has seen all.
        """
        survivors = self._survivors()
        reports = sorted(self.reports.values(), key=lambda each: (each.server in survivors, len(each.views)))
        seen, skipped = list(self.seen), set[int]()
        for report in reports:
            epochs = [view["epoch"] for view in report.views]
            skipped.update(*(range(before + 1, after) for before, after in pairwise(epochs)))
        began_s = next((view["at_s"] for view in seen if view["epoch"] == 1), None)
        found: dict[int, dict[str, Any]] = {}
        for view in seen:
            if view["epoch"] in skipped:  # a coordinator has proposed it, and it came not into force
                continue
            at_s = None if began_s is None else round(view["at_s"] - began_s, 6)
            found[view["epoch"]] = {**_UNTOLD, **view, "at_s": at_s}
        for view in chain.from_iterable(report.views for report in reports):
            at_s = found.get(view["epoch"], view)["at_s"] if view["at_s"] is None else view["at_s"]
            found[view["epoch"]] = {**view, "at_s": at_s}
        return [found[epoch] for epoch in sorted(found)]

    def _survivors(self) -> dict[int, ServerReport]:
        return self._by("done") or self._by("stopped")

    def _by(self, outcome: str) -> dict[int, ServerReport]:
        return {
            server: report for server, report in sorted(self.reports.items()) if report.outcome == outcome
        }


def own_version() -> str:
    """Return the version of bml."""
    try:
        return metadata.version("bml")
    except metadata.PackageNotFoundError:  # it is not installed, only on the path
        return "unknown"
