"""Launches a job, follows it to its end, and makes one result of what the servers report."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from bml import errors
from bml.cluster.fleet import Changed, Died, Fleet, Reported
from bml.cluster.job import JobSpec, ServerReport
from bml.cluster.processes import ProcessFleet
from bml.cluster.training import Train
from bml.errors import BmlError, TrainingError, UsageError

LAUNCHERS = ("ray", "processes")
#: How long servers may take to end after the job has failed, in seconds; then they are killed.
_GRACE_S = 10.0
_POLL_S = 0.2

OnChange = Callable[[dict[str, Any]], None]


@dataclass
class Result:
    """The outcome of a job.

    `values`: server -> what its training function returned; `dead`: server -> why it did not end.
    `report`: all that is known, ready for JSON: steps, views, digests, samples, metrics.
    """

    values: dict[int, Any] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> Any:
        """What the training function returned on the lowest surviving server."""
        return self.values[min(self.values)]


def launch(
    train: Train,
    fabric: str = "bcube:3x2",
    *,
    faults: Iterable[str] = (),
    launcher: str = "ray",
    address: str | None = None,
    algorithm: str = "auto",
    detect_s: float | None = None,
    min_servers: int | None = None,
    on_change: OnChange | None = None,
) -> Result:
    """Run `train(session)` on every server of `fabric` and return when all survivors are done.

    `launcher` is "ray" (a local Ray, the cluster at `address`, or the one this process belongs to) or
    "processes" (plain processes on this machine). `faults` are injected (see faults.FaultPlan).
    `detect_s`: how fast a silent failure must be noticed. `min_servers`: fewer survivors stop the job
    (default: a view must keep more than half of the one before). `on_change` is called with a snapshot
    of the job's state when it changes.

    Raises UsageError for a job that cannot be; TrainingError when a training function raised (its text
    names the server and holds the traceback); TooFewServers; StartError. Errors of a job that ran have
    an attribute `result` with what the survivors reported.
    """
    chosen = {} if detect_s is None else {"detect_s": detect_s}
    spec = JobSpec(fabric, algorithm, tuple(faults), min_servers=min_servers, **chosen)
    fleet = _fleet(spec, launcher, address)
    result = Result()
    reports: dict[int, ServerReport] = {}
    try:
        fleet.start(_pickled(train))
        _follow(fleet, spec, reports, result.dead, on_change or (lambda now: None))
    finally:
        fleet.close()
    _fill(result, spec, reports)
    _raise_failure(result, reports)
    return result


def _fleet(spec: JobSpec, launcher: str, address: str | None) -> Fleet:
    if launcher == "processes":
        if address is not None:
            raise UsageError("an address is for the ray launcher; processes run on this machine")
        return ProcessFleet(spec)
    if launcher != "ray":
        raise UsageError(f"launcher is {launcher!r}: give one of {', '.join(LAUNCHERS)}")
    from bml.cluster.ray_fleet import RayFleet  # importing Ray takes seconds

    return RayFleet(spec, address)


def _pickled(train: Train) -> bytes:
    """By value, unless it belongs to an installed package: other machines have no copy of a user's file."""
    module = sys.modules.get(getattr(train, "__module__", ""))
    source = getattr(module, "__file__", None) or ""
    if module is None or module.__name__ == "__main__" or "site-packages" in source:
        return cloudpickle.dumps(train)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(train)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _follow(
    fleet: Fleet, spec: JobSpec, reports: dict[int, ServerReport], dead: dict[int, str], on_change: OnChange
) -> None:
    """Until every server has reported or is dead, or the grace after a failure is over."""
    everybody = set(spec.parsed_fabric().servers)
    give_up_at: float | None = None
    while missing := everybody - reports.keys() - dead.keys():
        if give_up_at is not None and time.monotonic() > give_up_at:
            dead.update(dict.fromkeys(missing, f"did not end within {_GRACE_S:g} s after the job"))
            return
        for event in fleet.wait(_POLL_S):
            match event:
                case Reported(report):
                    reports[report.server] = report
                    # A frozen or cut-off server may never end by itself once the others have.
                    give_up_at = give_up_at or time.monotonic() + _GRACE_S
                case Died(server, why):
                    dead[server] = why
                case Changed(snapshot):
                    on_change(snapshot)


def _fill(result: Result, spec: JobSpec, reports: dict[int, ServerReport]) -> None:
    result.values = {server: reports[server].value for server in sorted(reports) if reports[server].outcome == "done"}
    survivors = result.values or {s: None for s in sorted(reports) if reports[s].kind != "Evicted"}
    result.dead.update({s: reports[s].error for s in reports if reports[s].kind == "Evicted"})
    first = reports[min(survivors)] if survivors else None
    result.report = {
        "fabric": spec.fabric,
        "algorithm": spec.algorithm,
        "faults": list(spec.faults),
        "steps": first.metrics["steps"] if first else 0,
        "views": first.views if first else [],
        "digests": {server: reports[server].digest for server in survivors},
        "samples": first.samples if first else None,
        "dead": dict(sorted(result.dead.items())),
        "outcomes": {server: reports[server].outcome for server in sorted(reports)},
        "metrics": {server: reports[server].metrics for server in survivors},
    }


def _raise_failure(result: Result, reports: dict[int, ServerReport]) -> None:
    failure = _failure(result, reports)
    if failure is not None:
        failure.result = result  # type: ignore[attr-defined]
        raise failure


def _failure(result: Result, reports: dict[int, ServerReport]) -> BmlError | None:
    for server in sorted(reports):
        report = reports[server]
        if report.outcome == "failed":
            text = f"{report.error}\n{report.traceback}"
            known = getattr(errors, report.kind, None)
            if known in (errors.StepMismatch, errors.InvariantError, errors.UsageError):
                return known(report.error)  # type: ignore[no-any-return,misc]
            return TrainingError(text, server)
    stopped = Counter(
        (report.kind, report.error) for report in reports.values() if report.outcome == "stopped" and report.kind != "Evicted"
    )
    if stopped:
        (kind, text), _ = stopped.most_common(1)[0]
        return getattr(errors, kind, BmlError)(text)  # type: ignore[no-any-return]
    if not result.values:
        return BmlError(f"no server ended: {result.dead}")
    return None
