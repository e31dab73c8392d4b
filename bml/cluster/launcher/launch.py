"""`bml.start` and `bml.launch`: start a job, and follow it to its end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar

from bml.cluster.emulated.fleet import EmulatedFleet
from bml.cluster.emulated.ray_nodes import OnStart
from bml.cluster.fleets.fleet import Fleet
from bml.cluster.fleets.placement import Reservation
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.fleets.racks import Racks
from bml.cluster.launcher.callbacks import News, Teller
from bml.cluster.launcher.metrics import NO_ENDPOINT, ON_RAY, Endpoint, NoEndpoint, address_of
from bml.cluster.launcher.recorder import file_to_write
from bml.cluster.launcher.result import Result
from bml.cluster.launcher.running import Job
from bml.cluster.process.bodies import refuse_bodies
from bml.cluster.process.pickling import Train, pack
from bml.cluster.ray.quiet import quiet_ray
from bml.cluster.spec.constants import load_constants
from bml.cluster.spec.job import JobSpec
from bml.errors import UsageError
from bml.fabric import DEFAULT_NAME
from bml.faults import Fault
from bml.io.interruptible import refuse_green_threads
from bml.protocol.server.learner import KEPT_NBYTES
from bml.protocol.timeouts import detect_s_from
from bml.topology import parse
from bml.train.keeping.settings import EVERY, KEEP, Keeping, Path
from bml.transport.choice import AUTO
from bml.transport.handshake.traffic_class import traffic_class_of

P = ParamSpec("P")
R = TypeVar("R")

LAUNCHERS = ("ray", "processes")
KEPT_MIB = KEPT_NBYTES / 2**20
START_S = 60.0
"""How long servers may take to appear, if nothing else is asked for."""


def start(
    train: Train,
    fabric: str = "bcube:3x2",
    *,
    faults: str | Fault | Iterable[str | Fault] = (),
    launcher: str = "ray",
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    topology: Path | Mapping[str, list[str]] | None = None,
    algorithm: str = "auto",
    detect_s: float | None = None,
    start_s: float = START_S,
    min_servers: int | None = None,
    emulated: bool | str = False,
    transport: str = AUTO,
    traffic_class: int | str | None = None,
    servers: tuple[int, int] | None = None,
    absent: Iterable[int] = (),
    spares: int = 0,
    rejoin: bool = False,
    preempt_suspects: bool = False,
    trace: bool = False,
    record: Path | None = None,
    metrics: int | str | None = None,
    checkpoint: Path | None = None,
    every: int = EVERY,
    keep: int = KEEP,
    resume: Path | None = None,
    kept_mib: float = KEPT_MIB,
    prints: bool = True,
    on_change: News | None = None,
    on_start: OnStart | None = None,
) -> Job:
    """Start a job and return it while it runs; the arguments are those of `launch`::

        with bml.start(train, fabric="bcube:3x2", launcher="processes") as job:
            job.inject("kill:4")
            print(job.status()["servers"][0]["waits_for"])
            result = job.wait()

    At the end of the `with` statement the job is ended. Raises UsageError for a job that cannot be,
    StartError if not all servers appeared in time, FabricError if the machine or Ray cannot start them.
    """
    if not callable(train):
        raise UsageError(f"{train!r:.80} cannot be called: give the training function, train(session)")
    refuse_green_threads()
    refuse_bodies(train)
    file = None if record is None else file_to_write(record)
    constants, constants_from = load_constants()
    texts = [faults] if isinstance(faults, str | Fault) else faults
    spec = JobSpec(
        fabric,
        algorithm,
        tuple(map(str, texts)),
        detect_s=detect_s_from(os.environ) if detect_s is None else detect_s,
        start_s=start_s,
        min_servers=min_servers,
        emulated=DEFAULT_NAME if emulated is True else emulated or None,
        transport=transport,
        traffic_class=None if traffic_class is None else traffic_class_of(traffic_class),
        spares=spares,
        rejoin=rejoin,
        preempt_suspects=preempt_suspects,
        constants=constants,
        constants_from=constants_from,
        trace=trace,
        record=record is not None,
        metrics_on_ray=metrics == ON_RAY,
        kept_mib=kept_mib,
        keeping=Keeping.of(checkpoint, every, keep, resume),
        **sizes(fabric, servers, tuple(absent)),
    )
    reserves = Reservation(resources or {})
    teller = Teller(on_change)
    starting = _say_nothing if on_start is None else partial(teller.say, on_start)
    pickled = pack(train)  # before Ray or a fabric is started, as this may raise
    if begins := str(spec.keeping):
        starting(begins)
    racks = _racks(topology, launcher, spec)
    endpoint = _endpoint(metrics, launcher)
    try:
        if endpoint.url:
            starting(f"metrics are served at {endpoint.url}")
        fleet = _fleet(spec, launcher, address, reserves, racks, prints, starting)
    except BaseException:
        endpoint.close()
        raise
    job = Job(fleet, fleet.spec, launcher, teller, file, endpoint)
    job.begin(pickled)
    return job


def _endpoint(metrics: int | str | None, launcher: str) -> Endpoint | NoEndpoint:
    if metrics == ON_RAY and launcher != ON_RAY:
        raise UsageError("metrics at Ray's endpoint are for the launcher ray: give a port, such as 9400")
    return NO_ENDPOINT if metrics in (None, ON_RAY) else Endpoint(address_of(metrics))


def _same_arguments(as_of: Callable[P, Job]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of another, except for the type of its result."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.signature(as_of).replace(return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


@_same_arguments(as_of=start)
def launch(*arguments: Any, **options: Any) -> Result:
    """Run `train(session)` on every server of `fabric` and return when all survivors are done.

    Args:
        train: The training function. It is given a `Session`, and what it returns is in `Result.values`.
        fabric: How the servers are wired: the notation of `bml.topology.parse`.
        faults: Faults to inject, and when: texts of the notation `bml.faults.Fault`, or a `FaultPlan`.
        launcher: "ray" (a local Ray, the cluster at `address`, or the one this process belongs to) or
            "processes" (plain processes on this machine).
        address: Of the head of a running Ray cluster, such as "10.0.0.1:6379". Default: `RAY_ADDRESS`.
        resources: Amounts that every server reserves of a Ray cluster, such as {"GPU": 1, "CPU": 8}. Without
            it servers see no GPU where Ray hides those that are not reserved, and are spread evenly.
        topology: Racks of a Ray cluster's machines, {"rack-1": ["10.0.0.1", "node-2"]}, or a file with them.
        algorithm: Of the schedule (`bml plan`). "auto" chooses by the size of each step.
        detect_s: Seconds of silence after which a failure is suspected: it is noticed within 1.25 times as
            long, and within 3.25 times where heartbeats are often late. Default: `BML_DETECT_S`, else 0.5.
        start_s: Seconds that servers may take to appear.
        min_servers: With fewer survivors the job stops. Default: more than half of the view before.
        emulated: Name of an emulated fabric of this machine for the servers: cables really break. True is
            "bml", which is made for the job if it is not up. On "ray" every server is a Ray node there.
        transport: "tcp", "shm" (servers share one host's memory), "verbs" (RDMA), "verbs,tcp" (RDMA where
            there is any) or "auto": shm on one host if nothing needs links (an algorithm, faults of links or
            switches, an emulated fabric, a traffic class, a trace, BML_NICS), else tcp.
        traffic_class: Marks packets for the queues of NICs and switches: "urgent" goes before other jobs,
            "bulk" after them, "normal" is unmarked; or a DSCP times 4. Default: `BML_TRAFFIC_CLASS`.
        servers: (6, 9): begin as soon as six servers are there; others join later, nine in all. Default: all.
        absent: Servers that are not started; they may join later (`job.inject("join:4")`).
        spares: So many processes wait, with all imports done, to take the places of servers that are lost.
        rejoin: A server that is lost is started again and joins.
        preempt_suspects: Of what a server gives an early warning, a server leaves, and a NIC is not used.
        trace: Servers record their actions and times, see `Result.trace`.
        record: File for `bml replay`, written at every view change and the end; see `Result.recording`.
        metrics: Port or "HOST:PORT" for Prometheus, see `Job.metrics_url`; "ray": at Ray's own endpoint.
        checkpoint: Folder to which the servers write checkpoints, see `Session.checkpoint`.
        every, keep: Steps between two checkpoints, and how many stay.
        resume: Folder from whose newest whole checkpoint the job goes on, on any fabric; every server must
            see it. If it is that of `checkpoint`, it may have none.
        kept_mib: MiB of results that a joiner keeps while it catches up; if more come, it gets a later state.
        prints: Show the prints of the training functions.
        on_change: Is called with a snapshot of the job's state (see `Job.status`) when it changes. Without
            it every view after the first is a warning in the log `bml.cluster`.
        on_start: Is called with a line about every part whose start takes long.

    `on_change` and `on_start` are called in another thread, one call after the other. They may take their
    time, and the job goes on meanwhile: a slow function gets only the newest snapshot of a view, but every
    view, in order, while it is no more than 1,000 behind. An exception in them ends the job, and is raised.
    Once the job is over, calls that are still to come are waited for, up to 10 s.
    Errors of a job that ran have an attribute `result` with the reports of the survivors.

    Raises:
        UsageError: The job cannot be, or the training functions made calls that cannot be (`StepMismatch`,
            `SessionBroken`).
        StartError: Not all servers appeared in time.
        TrainingError: A training function raised; the text names the server and holds the traceback.
        TooFewServers: Fewer servers are left than `min_servers`.
        StateMismatch: The servers ended with different parameters, or count different samples as used.
        FabricError: The machine, Ray or the network cannot run the job.
        BmlError: No server reached the end.
    """
    with start(*arguments, **options) as job:
        return job.wait()


def sizes(fabric: str, servers: tuple[int, int] | None, absent: tuple[int, ...]) -> dict[str, Any]:
    """Return the settings of JobSpec for the least and the most servers of a job; the last ones are absent.

    Raises UsageError unless that many can be there.
    """
    if servers is None:
        return {"absent": absent}
    there = [server for server in parse(fabric).servers if server not in absent]
    if not (isinstance(servers, tuple) and len(servers) == 2 and all(type(each) is int for each in servers)):
        raise UsageError(f"servers is {servers!r:.80}: give the least and the most, like (6, 9)")
    least, most = servers
    if not 1 <= least <= most <= len(there):
        raise UsageError(f"a job on {fabric} cannot have {least} to {most} servers: there are {len(there)}")
    return {"absent": (*absent, *there[most:]), "min_start": least}


def _racks(topology: Path | Mapping[str, list[str]] | None, launcher: str, spec: JobSpec) -> Racks:
    """Return the racks of the machines. Raises UsageError for a file or a mapping that is no topology."""
    if topology is None:
        return Racks()
    if launcher != "ray" or spec.emulated is not None:
        raise UsageError(
            "a topology is that of a Ray cluster: with processes, or an emulated fabric, give none"
        )
    if isinstance(topology, Mapping):
        return Racks.parse(topology)
    try:
        return Racks.load(open(topology, encoding="utf-8").read())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the topology {topology} cannot be read: {error}") from None


def _fleet(
    spec: JobSpec,
    launcher: str,
    address: str | None,
    reserves: Reservation,
    racks: Racks,
    prints: bool,
    on_start: OnStart,
) -> Fleet:
    if launcher not in LAUNCHERS:
        raise UsageError(f"launcher is {launcher!r}: give one of {', '.join(LAUNCHERS)}")
    if address is not None and launcher == "processes":
        raise UsageError("an address is for the launcher ray: the launcher processes runs on this machine")
    if reserves and (launcher == "processes" or spec.emulated is not None):
        raise UsageError(
            "resources are reserved of a Ray cluster: with processes, or an emulated fabric, give none"
        )
    if spec.spares and spec.emulated is not None and launcher == "ray":
        raise UsageError(
            "on the emulated fabric each Ray actor has a node of its own, and a spare would have none: with "
            "spares take the launcher processes; with Ray, --rejoin starts lost servers again"
        )
    if spec.min_start is not None and spec.emulated is not None and launcher == "ray":
        raise UsageError(
            "on the emulated fabric each Ray actor has a node of its own, which is always there: with "
            "--servers take the launcher processes, or begin with --absent"
        )
    if spec.emulated is not None:
        if address is not None:
            raise UsageError("on the emulated fabric the job starts a Ray of its own: give no address")
        return EmulatedFleet(spec, launcher, prints, on_start)
    if launcher == "processes":
        return ProcessFleet(spec, prints)
    with quiet_ray():
        from bml.cluster.ray.fleet import RayFleet  # importing Ray takes seconds

    return RayFleet(spec, address, prints, reserves, racks=racks)


def _say_nothing(_: str) -> None:
    """The `on_start` of a user who gave none."""
