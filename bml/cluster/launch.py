"""Launches a job and follows it to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle

from bml.cluster.emulated import EmulatedFleet
from bml.cluster.fleet import Changed, Died, Fleet, Reported
from bml.cluster.job import JobSpec, ServerReport
from bml.cluster.processes import ProcessFleet
from bml.cluster.result import Result
from bml.cluster.training import Train
from bml.errors import UsageError
from bml.fabric import DEFAULT_NAME
from bml.protocol.timeouts import DEFAULT_DETECT_S

LAUNCHERS = ("ray", "processes")
#: How long servers may take to end once the first has ended, in seconds; then they are killed.
_GRACE_S = 10.0
_EVICTED_GRACE_S = 1.0
_POLL_S = 0.2

OnChange = Callable[[dict[str, Any]], None]


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
    emulated: bool | str = False,
    prints: bool = True,
    on_change: OnChange | None = None,
) -> Result:
    """Run `train(session)` on every server of `fabric` and return when all survivors are done.

    `launcher` is "ray" (a local Ray, the cluster at `address`, or the one this process belongs to) or
    "processes" (plain processes on this machine). `faults` are injected (see faults.FaultPlan).
    `detect_s`: how fast a silent failure must be noticed. `min_servers`: fewer survivors stop the job
    (default: a view must keep more than half of the one before). `emulated`: the servers, as processes,
    live on the emulated fabric of this name (True: "bml") that is up on this machine, and cables really
    break. `prints`: show what the training functions print. `on_change` is called with a snapshot of the
    job's state when it changes.

    Raises UsageError for a job that cannot be; TrainingError when a training function raised (its text
    names the server and holds the traceback); TooFewServers; StartError. Errors of a job that ran have
    an attribute `result` with what the survivors reported.
    """
    spec = JobSpec(
        fabric,
        algorithm,
        tuple(faults),
        detect_s=DEFAULT_DETECT_S if detect_s is None else detect_s,
        min_servers=min_servers,
        emulated=DEFAULT_NAME if emulated is True else emulated or None,
    )
    fleet = _fleet(spec, launcher, address, prints)
    result = Result(spec)
    try:
        fleet.start(_pickled(train))
        _follow(fleet, spec, result, on_change or (lambda now: None))
    finally:
        fleet.close()
    failure = result.failure()
    if failure is not None:
        failure.result = result  # type: ignore[attr-defined]
        raise failure
    return result


def _fleet(spec: JobSpec, launcher: str, address: str | None, prints: bool) -> Fleet:
    if launcher == "processes":
        if address is not None:
            raise UsageError("an address is for the ray launcher; processes run on this machine")
        return ProcessFleet(spec, prints) if spec.emulated is None else EmulatedFleet(spec, prints)
    if launcher != "ray":
        raise UsageError(f"launcher is {launcher!r}: give one of {', '.join(LAUNCHERS)}")
    if spec.emulated is not None:
        raise UsageError("the emulated fabric is for plain processes yet: give the launcher processes")
    from bml.cluster.ray_fleet import RayFleet  # importing Ray takes seconds

    return RayFleet(spec, address, prints)


def _pickled(train: Train) -> bytes:
    """By value, unless it belongs to an installed package: other machines have no copy of a user's file."""
    module = sys.modules.get(getattr(train, "__module__", ""))
    source = getattr(module, "__file__", None) or ""
    pickled: bytes
    if module is None or module.__name__ == "__main__" or "site-packages" in source:
        pickled = cloudpickle.dumps(train)
        return pickled
    cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(train)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _follow(fleet: Fleet, spec: JobSpec, result: Result, on_change: OnChange) -> None:
    """Until every server has reported or is dead, or the grace after the first end is over."""
    give_up_at: dict[int, float] = {}
    missing = set(spec.parsed_fabric().servers)
    while missing:
        for event in fleet.wait(_POLL_S):
            match event:
                case Reported(report) if report.kind == "Evicted":
                    result.dead[report.server] = report.error
                case Reported(report):
                    result.reports[report.server] = report
                    give_up_at = give_up_at or _patience(missing, report)
                case Died(server, why):
                    result.dead[server] = why
                case Changed(snapshot):
                    on_change(snapshot)
        missing -= result.reports.keys() | result.dead.keys()
        for server in [each for each in missing if time.monotonic() > give_up_at.get(each, float("inf"))]:
            result.dead[server] = "did not end after the others had; it was killed"
            missing.discard(server)


def _patience(servers: set[int], first: ServerReport) -> dict[int, float]:
    """Until when to wait for each server once the first has ended: a frozen one may never end."""
    members = first.views[-1]["members"] if first.views else servers
    now = time.monotonic()
    return {server: now + (_GRACE_S if server in members else _EVICTED_GRACE_S) for server in servers}
