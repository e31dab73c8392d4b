"""What the parts of a job tell each other once, before and after the run: specification and records."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.schedule import plan
from bml.schedule.model import DEFAULTS, Constants
from bml.transport.choice import check_transport
from bml.transport.greeting import check_traffic_class
from faults import FaultPlan
from faults.notation import KINDS
from topology import Fabric, ServerFailure, parse
from topology.errors import UsageError

Endpoint = tuple[str, int]


@dataclass(frozen=True)
class JobSpec:
    """Everything that is fixed for a job. Raises UsageError when it cannot be run.

    `min_servers`: fewer survivors stop the job; None: a view must keep more than half of the one before.
    `transport`: "tcp", "verbs" (RDMA), or "verbs,tcp", which is tcp where there is no RDMA.
    `traffic_class`: the byte that marks all packets of the job for the switches, a DSCP times 4; None: what
    `BML_TRAFFIC_CLASS` says on each machine.
    `absent` servers are not started; they may join later. `rejoin`: a server that is lost is started again.
    `constants`: of the cost model, by which all servers choose the schedule of a step of some size.
    `emulated`: name of the emulated fabric on which it runs; None: on this machine's own network.
    """

    fabric: str
    algorithm: str = "auto"
    faults: tuple[str, ...] = ()
    detect_s: float = DEFAULT_DETECT_S
    start_s: float = 60.0
    min_servers: int | None = None
    emulated: str | None = None
    transport: str = "tcp"
    traffic_class: int | None = None
    absent: tuple[int, ...] = ()
    rejoin: bool = False
    constants: Constants = DEFAULTS
    job: str = field(default_factory=lambda: f"bml-{secrets.token_hex(6)}")
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        fabric = self.parsed_fabric()
        plan(fabric, self.algorithm)
        self.fault_plan().validate(fabric)
        check_possible(self.fault_plan(), self.emulated is not None)
        self.timeouts()
        check_transport(self.transport)
        if self.traffic_class is not None:
            check_traffic_class(self.traffic_class)
        self._check_absent(fabric)
        if self.min_servers is not None and not 1 <= self.min_servers <= fabric.n_servers:
            raise UsageError(f"min_servers is {self.min_servers}, {fabric} has {fabric.n_servers} servers")

    def _check_absent(self, fabric: Fabric) -> None:
        strangers = sorted(set(self.absent) - set(fabric.servers))
        if strangers or len(set(self.absent)) == fabric.n_servers:
            raise UsageError(
                f"servers {self.absent} cannot be absent: {fabric} has {fabric.servers}, one must run"
            )
        without = fabric.without(*(ServerFailure(server) for server in self.absent))
        if not without.is_connected:
            raise UsageError(f"without servers {self.absent} the others cannot reach each other")

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job begins."""
        return tuple(server for server in self.parsed_fabric().servers if server not in self.absent)

    def for_joiner(self, again: bool) -> JobSpec:
        """What a server is told that joins; one that does so `again` is spared the faults of the plan."""
        return replace(self, faults=()) if again else self

    def parsed_fabric(self) -> Fabric:
        """The healthy fabric."""
        return parse(self.fabric)

    def fault_plan(self) -> FaultPlan:
        """The faults to be injected."""
        return FaultPlan.parse(self.faults)

    def timeouts(self) -> Timeouts:
        """All time-outs of the job."""
        return Timeouts.of(self.detect_s, self.start_s)


@dataclass(frozen=True)
class Contact:
    """Where a server can be reached: by the coordinator, and by its peers at each level."""

    server: int
    control: Endpoint
    nics: tuple[Endpoint, ...]
    transport: str = "tcp"

    def encode(self) -> str:
        """As JSON, for those who meet it later (messages.Life)."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Contact:
        """Read what `encode` made."""
        return msgspec.json.decode(text, type=cls)


Contacts = Mapping[int, Contact]


@dataclass(frozen=True)
class ServerReport:
    """What one server has to say after the run.

    `outcome` is "done", "failed" (its own training function raised: `error`, `traceback`) or "stopped"
    (the job ended with `error`). `kind` is the error's class.
    """

    server: int
    outcome: str
    value: Any
    error: str
    kind: str
    traceback: str
    digest: str
    samples: Any
    views: list[dict[str, Any]]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a process of a job lives: its own addresses, and its network namespace (None: the launcher's)."""

    nics: tuple[str, ...] = ()
    control_host: str = "127.0.0.1"
    namespace: str | None = None


def check_possible(plan: FaultPlan, emulated: bool) -> None:
    """Raise UsageError for a fault that needs real cables where there are none."""
    for fault in plan:
        if KINDS[fault.kind].emulated and not emulated:
            raise UsageError(
                f"fault '{fault}': {fault.kind} is done to real cables; bring some up with "
                "`bml fabric up` and run the job on them with --fabric-emulated"
            )


def default_nics(server: int, levels: int) -> tuple[str, ...]:
    """One loopback address per NIC, so that on one machine too every connection is bound to its own."""
    return tuple(f"127.{10 + level}.{server // 250}.{server % 250 + 1}" for level in range(levels))
