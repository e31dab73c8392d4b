"""Opens the transport that a job asks for; "verbs,tcp" falls back to tcp where there is no RDMA."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bml.io.limits import NoRoom
from bml.io.memory import Memory, private_pool
from bml.io.poller import Poller
from bml.sharedmem import segment
from bml.sharedmem.pool import SharedPool
from bml.sharedmem.zero_copy import ReadInPlace, ZeroCopy, never_in_place
from bml.topology.errors import FabricError, UsageError
from bml.transport.handshake.auth import Identity
from bml.transport.interface import Handler, Transport
from bml.transport.links.settings import LinkSettings, traffic_class_of
from bml.transport.links.stand_in import StandIn
from bml.transport.links.transport import LinkTransport
from bml.transport.tcp.transport import TcpTransport
from bml.transport.verbs import VerbsSettings, VerbsTransport

_LOG = logging.getLogger(__name__)

TRANSPORTS = ("tcp", "shm", "verbs", "verbs,tcp")
"""The names of transports that a server can open; "verbs,tcp" falls back to tcp where there is no RDMA."""
AUTO = "auto"
"""A job may ask for this, too: then the launcher chooses shm or tcp (bml.cluster.spec.job)."""


StartStandIn = Callable[[float, float], StandIn]
"""Starts the stand-in of a server: the last arguments of bml.transport.links.stand_in.StandIn."""


class Opened(NamedTuple):
    """An open transport, its name, and the allocator of arrays that it moves without a copy."""

    transport: Transport
    name: str
    memory: Memory
    start_stand_in: StartStandIn
    traffic_class: int = 0
    """The byte that marks its packets for the switches."""
    devices: tuple[str, ...] = ()
    """The RDMA device, port and GID of each level; empty without RDMA."""
    fallback: str = ""
    """The reason why it is not the transport that was asked for first; empty if it is."""
    zero_copy: ZeroCopy | None = None
    """The zero-copy sends between servers of one host; None: not in this job, or not on this machine."""


def check_transport(name: str) -> str:
    """Return `name`. Raises UsageError if it names no transport."""
    if name not in (AUTO, *TRANSPORTS):
        raise UsageError(f"transport is {name!r}: give one of {' '.join((AUTO, *TRANSPORTS))}")
    return name


def open_transport(
    name: str,
    server: int,
    nics: Sequence[str],
    *,
    token: bytes,
    job: str,
    poller: Poller,
    handler: Handler,
    connect_s: float,
    incarnation: int = 0,
    nic_rate: float | None = None,
    traffic_class: int | None = None,
    zero_copy_servers: int = 0,
    read_in_place: ReadInPlace = never_in_place,
    environ: Mapping[str, str] = os.environ,
) -> Opened:
    """Open the transport of this name with the settings of the environment.

    `nic_rate` is that of every NIC in bytes per second, where it is known. `traffic_class` is the job's;
    None: that of this machine's environment. With shm the data lies in shared memory (bml.sharedmem);
    links, and with them heartbeats, are tcp's. `zero_copy_servers`: the number of servers that may make
    zero-copy sends to each other, in a job that uses tcp and wants that; else 0. `read_in_place` is asked
    for each payload that comes so.

    Raises FabricError when the NICs cannot do it, UsageError for settings that cannot be.
    """
    first, _, fallback = check_transport(name).partition(",")
    verbs = VerbsSettings.from_environment(environ)
    usual_class = traffic_class_of(environ)
    wanted_class = usual_class if traffic_class is None else traffic_class
    settings = LinkSettings(connect_s, nic_rate, traffic_class=wanted_class)
    identity = Identity.of(token, job, server, incarnation)
    why = ""
    if first == "shm":
        segment.check()
    if first == "verbs":
        try:
            rdma = VerbsTransport(identity, nics, poller, handler, settings, verbs)
            return Opened(rdma, "verbs", rdma.pool, _stand_in(identity, rdma), wanted_class, rdma.devices)
        except FabricError as error:
            if not fallback:
                raise
            why = str(error)
            _LOG.warning("server %d uses tcp instead of verbs: %s", server, why)
    zero_copy = None
    if first == "tcp" and zero_copy_servers:
        zero_copy = _open_zero_copy(token, job, server, zero_copy_servers, read_in_place)
    tcp = TcpTransport(identity, nics, poller, handler, settings, zero_copy)
    if first == "shm":
        return Opened(tcp, "shm", SharedPool(), _stand_in(identity, tcp), wanted_class)
    memory = zero_copy or private_pool()
    stand_in = _stand_in(identity, tcp)
    return Opened(tcp, "tcp", memory, stand_in, wanted_class, fallback=why, zero_copy=zero_copy)


def _stand_in(identity: Identity, transport: LinkTransport) -> StartStandIn:
    def start(heartbeat_s: float, hold_s: float) -> StandIn:
        heartbeats = [nic.heartbeats for nic in transport.nics]
        transport.stand_in = StandIn(identity, heartbeats, heartbeat_s, hold_s)
        return transport.stand_in

    return start


def _open_zero_copy(
    token: bytes, job: str, server: int, n_servers: int, read_in_place: ReadInPlace
) -> ZeroCopy | None:
    """The zero-copy sends, if this machine can share memory; else None, and the server sends all payloads."""
    reason = segment.why_not()
    if not reason:
        try:
            return ZeroCopy(token, job, server, n_servers, read_in_place)
        except (OSError, NoRoom) as error:
            reason = str(error)
    _LOG.info("server %d makes no zero-copy sends: %s", server, reason)
    return None
