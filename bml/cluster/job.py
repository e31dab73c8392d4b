"""What the parts of a job tell each other once, before and after the run: specification and records."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.schedule import plan
from bml.transport.choice import AUTO, check_transport
from bml.transport.shm import BoardAddress, segment
from faults import FaultPlan
from faults.notation import KINDS
from topology import Fabric, LinkFailure, SwitchFailure, parse
from topology.errors import UsageError

Endpoint = tuple[str, int]


@dataclass(frozen=True)
class JobSpec:
    """Everything that is fixed for a job. Raises UsageError when it cannot be run.

    `min_servers`: fewer survivors stop the job; None: a view must keep more than half of the one before.
    `transport`: "tcp", "shm" (the servers share the memory of one host), "verbs" (RDMA), "verbs,tcp", which
    is tcp where there is no RDMA, or "auto", which `settled` makes one of shm and tcp.
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
    job: str = field(default_factory=lambda: f"bml-{secrets.token_hex(6)}")
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        fabric = self.parsed_fabric()
        plan(fabric, self.algorithm)
        self.fault_plan().validate(fabric)
        check_possible(self.fault_plan(), self.emulated is not None)
        self.timeouts()
        if check_transport(self.transport) == "shm" and self._unsharable():
            raise UsageError(f"the transport shm cannot be used: {self._unsharable()}; ask for tcp")
        if self.min_servers is not None and not 1 <= self.min_servers <= fabric.n_servers:
            raise UsageError(f"min_servers is {self.min_servers}, {fabric} has {fabric.n_servers} servers")

    def parsed_fabric(self) -> Fabric:
        """The healthy fabric."""
        return parse(self.fabric)

    def fault_plan(self) -> FaultPlan:
        """The faults to be injected."""
        return FaultPlan.parse(self.faults)

    def settled(self, one_host: bool) -> JobSpec:
        """The same with the transport decided: shm if all are on one host and nothing needs links."""
        if self.transport != AUTO:
            return self
        shared = one_host and not (os.environ.get("BML_NICS") or self._unsharable() or segment.why_not())
        return replace(self, transport="shm" if shared else "tcp")

    def _unsharable(self) -> str:
        """Why the servers cannot use shared memory for their data even on one host; empty if they can."""
        if self.emulated is not None:
            return "on an emulated fabric data takes the cables"
        if self.algorithm != "auto":
            return f"servers that share memory need no schedule, {self.algorithm} was asked for"
        for fault in self.fault_plan():
            if isinstance(fault.target, LinkFailure | SwitchFailure):
                return f"fault '{fault}' strikes data on links, which shared memory does not take"
        return ""

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
    board: BoardAddress | None = None
    """Where its part of the memory is found that servers of one host share; None if it shares none."""


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
