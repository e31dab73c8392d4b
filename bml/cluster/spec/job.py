"""The specification of a job, and the records that its parts exchange once, before and after the run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from numbers import Real
from typing import Any

import msgspec

from bml.cluster.spec.constants import constants_of_one_host
from bml.cluster.spec.pacing import check_pace
from bml.cluster.spec.trace import ServerTrace
from bml.faults import FaultPlan
from bml.faults.kinds import KINDS
from bml.protocol.server.learner import KEPT_NBYTES
from bml.protocol.step import slices
from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.protocol.wire.messages import Incarnation, MessageError
from bml.schedule import plan
from bml.schedule.select.model import DEFAULTS, Constants
from bml.sharedmem import StatusPageAddress, segment
from bml.sharedmem.registration_page import RegistrationPageAddress
from bml.topology import Fabric, LinkFailure, ServerFailure, SwitchFailure, parse
from bml.topology.errors import UsageError
from bml.train.keeping.settings import NO_KEEPING, Keeping
from bml.transport.choice import AUTO, check_transport
from bml.transport.handshake.traffic_class import traffic_class_of

Request = tuple[str, str]
"""A request to a running server: ("status", ""), ("metrics", ""), ("inject", fault), ("leave", why),
("record", why), ("suspects", "") or ("take-out", part)."""
Endpoint = tuple[str, int]

_MOST_KEPT_MIB = 1 << 30
_MOST_START_S = 1_000_000  # more is a mistake: eleven days


@dataclass(frozen=True)
class JobSpec:
    """The fixed settings of a job. Raises UsageError if such a job cannot run.

    `algorithm`, `faults`, `detect_s` and `start_s` (seconds) are those of bml.launch; `token` is the job's
    secret, and is never shown.
    `min_servers`: fewer survivors stop the job; None: a view must keep more than half of the one before.
    `transport`: "tcp", "shm" (the servers share the memory of one host), "verbs" (RDMA), "verbs,tcp", which
    is tcp where there is no RDMA, or "auto", which `settled` makes one of shm and tcp.
    `zero_copy`: with tcp, servers of one host read each other's payloads in memory; `settled` sets it, too.
    `traffic_class`: the byte that marks all packets of the job for the switches, a DSCP times 4; None: that
    of `BML_TRAFFIC_CLASS` on each machine.
    `absent` servers are not started; they may join later. `rejoin`: a server that is lost is started again.
    `min_start`: the job begins as soon as so many of the others are there, and these join when they come;
    None: it begins with all of them. `spares`: processes that wait for the places of lost servers.
    `constants`: of the cost model, by which all servers choose the schedule of a step of some size.
    `constants_from`: their source in words.
    `emulated`: name of the emulated fabric on which it runs; None: on this machine's own network.
    `preempt_suspects`: what a server warns of is taken out before it fails.
    `nic_rate`: bytes per second of every NIC, if known. `trace`: servers record their actions and times.
    `record`: reports bring the recordings of the flight recorders, also from servers that ended well.
    `metrics_on_ray`: the actors of servers bring their metrics to Ray's endpoint.
    `keeping`: the checkpoints that it makes, and the one with which it goes on.
    `kept_mib`: how many MiB of results a joiner keeps while it catches up (bml.protocol.server.learner).
    """

    fabric: str
    algorithm: str = "auto"
    faults: tuple[str, ...] = ()
    detect_s: float = DEFAULT_DETECT_S
    start_s: float = 60.0
    min_servers: int | None = None
    emulated: str | None = None
    transport: str = "tcp"
    zero_copy: bool = False
    traffic_class: int | None = None
    absent: tuple[int, ...] = ()
    rejoin: bool = False
    min_start: int | None = None
    spares: int = 0
    constants: Constants = DEFAULTS
    constants_from: str = "default constants, not measured here"
    nic_rate: float | None = None
    preempt_suspects: bool = False
    trace: bool = False
    record: bool = False
    metrics_on_ray: bool = False
    kept_mib: float = KEPT_NBYTES / 2**20
    keeping: Keeping = NO_KEEPING
    job: str = field(default_factory=lambda: f"bml-{secrets.token_hex(6)}")
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        fabric = self.parsed_fabric()
        object.__setattr__(self, "fabric", fabric.name)  # that of a graph from a file is read anywhere
        made = plan(fabric, self.algorithm)
        if self.algorithm == "exchange":
            made.gst()  # it says only then that it cannot work here
        self.fault_plan().validate(fabric)
        if not _is_number(self.detect_s):
            raise UsageError(f"detect_s is {self.detect_s!r}: give seconds")
        if not (_is_number(self.start_s) and 0 < self.start_s <= _MOST_START_S):
            raise UsageError(
                f"start_s is {self.start_s!r}: give the seconds that servers may take to appear, at most "
                f"{_MOST_START_S:,}"
            )
        self.timeouts()
        check_possible(self.fault_plan(), self)
        if check_transport(self.transport) == "shm" and self._unsharable():
            raise UsageError(f"the transport shm cannot be used: {self._unsharable()}; ask for tcp")
        if self.traffic_class is not None:
            traffic_class_of(self.traffic_class)
        self._check_absent(fabric)
        if not (_is_number(self.kept_mib) and 0 < self.kept_mib <= _MOST_KEPT_MIB):
            raise UsageError(
                f"kept_mib is {self.kept_mib}: give the MiB of results that a joiner may keep, at most "
                f"{_MOST_KEPT_MIB}"
            )
        if type(self.spares) is not int or not 0 <= self.spares <= fabric.n_servers:
            raise UsageError(f"spares is {self.spares!r}: give a whole number, {fabric.n_servers} at most")
        if self.min_servers is not None and self.min_servers not in range(1, fabric.n_servers + 1):
            raise UsageError(
                f"min_servers is {self.min_servers!r}: give a whole number, {fabric} has {fabric.n_servers} "
                "servers"
            )

    def piece_nbytes(self) -> int:
        """Length of a piece of a step with a priority, in bytes: see `bml.protocol.step.slices`."""
        rate = self.nic_rate or 1 / self.constants.beta_s
        return slices.piece_nbytes(rate, self.constants.alpha_s, self.parsed_fabric().levels)

    @property
    def kept_nbytes(self) -> int:
        """`kept_mib` in bytes."""
        return int(self.kept_mib * 2**20)

    def _check_absent(self, fabric: Fabric) -> None:
        strangers = sorted(set(self.absent) - set(fabric.servers))
        if strangers or len(set(self.absent)) == fabric.n_servers:
            raise UsageError(
                f"servers {self.absent} cannot be absent: {fabric} has {fabric.servers}, one must run"
            )
        without = fabric.without(*(ServerFailure(server) for server in self.absent))
        if not without.is_connected:
            raise UsageError(f"without servers {self.absent} the others cannot reach each other")
        if self.min_start is not None and self.min_start not in range(1, len(self.servers) + 1):
            raise UsageError(
                f"a job of {len(self.servers)} servers cannot begin with {self.min_start!r}: "
                "write servers=(6, 9)"
            )

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job begins."""
        return tuple(server for server in self.parsed_fabric().servers if server not in self.absent)

    def beginning_with(self, servers: Container[int]) -> JobSpec:
        """Return the specification of a job that begins with these servers: all others are absent."""
        return replace(
            self, absent=tuple(each for each in self.parsed_fabric().servers if each not in servers)
        )

    def for_joiner(self, again: bool) -> JobSpec:
        """Return the specification for a joiner; without the faults of the plan if it joins `again`."""
        return replace(self, faults=()) if again else self

    def parsed_fabric(self) -> Fabric:
        """The healthy fabric."""
        return parse(self.fabric)

    def fault_plan(self) -> FaultPlan:
        """The faults to be injected."""
        return FaultPlan.parse(self.faults)

    def settled(self, one_host: bool) -> JobSpec:
        """Return the specification with the transport decided: shm on one host if nothing needs links.

        Else it is tcp. Servers of one host make zero-copy sends to each other, unless the job wants links.
        """
        if self.transport != AUTO:
            return self
        # A user who gives NICs, marks packets, or traces links wants links.
        wanted = os.environ.get("BML_NICS") or self.traffic_class is not None or self.trace
        shared = one_host and not (wanted or self._unsharable() or segment.why_not())
        zero_copy = not (shared or self.traffic_class is not None or self._needs_wires())
        return replace(self, transport="shm" if shared else "tcp", zero_copy=zero_copy)

    def sharing_cores(self) -> JobSpec:
        """Return the specification with constants of servers that share the cores of this host."""
        return replace(self, constants=constants_of_one_host(self.constants, self.parsed_fabric().n_servers))

    def _needs_wires(self) -> str:
        """Say why all bytes must go over links; empty if they need not."""
        if self.emulated is not None:
            return "on an emulated fabric data takes the cables"
        for fault in self.fault_plan():
            if isinstance(fault.target, LinkFailure | SwitchFailure):
                return f"the fault '{fault}' strikes links, which data in shared memory does not take"
        return ""

    def _unsharable(self) -> str:
        """Say why the servers cannot use shared memory for data even on one host; empty if they can."""
        if self.emulated is None and self.algorithm != "auto":
            return f"servers that share memory use no schedule, but {self.algorithm} was asked for"
        return self._needs_wires()

    def timeouts(self) -> Timeouts:
        """All time-outs of the job."""
        return Timeouts.of(self.detect_s, self.start_s)


@dataclass(frozen=True)
class Contact:
    """The addresses of a server: for the coordinator, and for its peers at each level."""

    server: int
    control: Endpoint
    nics: tuple[Endpoint, ...]
    transport: str = "tcp"
    status_page: StatusPageAddress | None = None
    """The place of its part of the memory that servers of one host share; None if it shares none."""
    registration_page: RegistrationPageAddress | None = None
    """The place of its registration page for servers of its host; None if it makes no zero-copy sends."""

    def encode(self) -> str:
        """Return it as JSON, for messages.Incarnation."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Contact:
        """Decode the text of `encode`. Raises MessageError for other texts."""
        try:
            contact = _decode_contact(text)
            for host, port in (contact.control, *contact.nics):
                ip_address(host)
                if not 0 < port < 1 << 16:
                    raise ValueError(f"port {port}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MessageError(f"{text!r:.80} does not say where a server is: {error}") from None
        return contact


_decode_contact = msgspec.json.Decoder(Contact).decode

Contacts = Mapping[int, Contact]


def check_contacts(incarnations: Iterable[Incarnation], levels: int) -> None:
    """Raise MessageError unless every incarnation has an address at every level."""
    for incarnation in incarnations:
        contact = Contact.decode(incarnation.contact)
        if contact.server != incarnation.server or len(contact.nics) != levels:
            raise MessageError(f"{incarnation} has no addresses at {levels} levels")


@dataclass(frozen=True)
class ServerReport:
    """The report of one server after the run.

    `outcome` is "done", "failed" (its own training function raised: `error`, `traceback`) or "stopped"
    (the job ended with `error`). `kind` is the error's class, or one of bml.cluster.launcher.restarts.OUT.
    `value` is what its training function returned, `digest` the sha256 of its parameters, `samples` its
    ledger (bml.train.ledgers.LedgerSummary). `views`, `metrics` and `trace` are in docs/reference/formats.md.
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
    trace: ServerTrace | None = None
    contributed: bool = True
    """False for a server that joined and never contributed: its state need not equal that of the others."""
    struck: tuple[str, ...] = ()
    """The faults of the plan whose moment came while the server was there, as texts."""
    nan: tuple[str, ...] = ()
    """The names of the parameters' arrays that hold NaN at the end."""
    recording: bytes = b""
    """What its flight recorder held, packed, if the job asked for it or the server did not end well."""


@dataclass(frozen=True)
class Place:
    """The place of a process of a job: its addresses, and its network namespace (None: the launcher's)."""

    nics: tuple[str, ...] = ()
    control_host: str = "127.0.0.1"
    namespace: str | None = None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_possible(plan: FaultPlan, spec: JobSpec) -> None:
    """Raise UsageError for a fault that needs real cables or machines, or sockets, if there are none.

    So it does for a rate at which connections cannot be paced (see bml.cluster.spec.pacing).
    """
    takes_sockets = spec.transport in (AUTO, "tcp") and not spec.zero_copy
    for fault in plan:
        kind = KINDS[fault.kind]
        if spec.emulated is None and kind.emulated:
            raise UsageError(
                f"fault '{fault}': {fault.kind} needs real cables, or machines; run the job on an "
                "emulated fabric, with --fabric-emulated"
            )
        if spec.emulated is None and kind.both_ends and not takes_sockets:
            raise UsageError(
                f"fault '{fault}': {fault.kind} is made on sockets, which the data of this job does not "
                "take; run it with --transport tcp"
            )
        if spec.emulated is None and kind.both_ends:
            check_pace(fault, spec.parsed_fabric(), spec.detect_s)


def default_nics(server: int, levels: int) -> tuple[str, ...]:
    """Return a loopback address per NIC, so that every connection is bound to its NIC on one machine, too."""
    return tuple(f"127.{10 + level}.{server // 250}.{server % 250 + 1}" for level in range(levels))
