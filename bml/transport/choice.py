"""Which transport a server uses: the first of a ladder that its NICs can do."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bml.io.limits import NoRoom
from bml.io.memory import Memory, private_pool
from bml.io.poller import Poller
from bml.sharedmem import segment
from bml.sharedmem.pool import SharedPool
from bml.sharedmem.zero_copy import ReadInPlace, ZeroCopy, never_in_place
from bml.topology.errors import FabricError, UsageError
from bml.transport.interface import Handler, Transport
from bml.transport.tcp.transport import TcpTransport
from bml.transport.verbs import VerbsSettings, VerbsTransport

_LOG = logging.getLogger("bml.transport")

TRANSPORTS = ("tcp", "shm", "verbs", "verbs,tcp")
"""What a server can be told to use; "verbs,tcp" falls back to tcp where there is no RDMA."""
AUTO = "auto"
"""What may be asked for beside them: the launcher takes shm or tcp, see bml.cluster.medium."""


class Opened(NamedTuple):
    """A transport, its name, and where arrays come from that it moves without a copy."""

    transport: Transport
    name: str
    memory: Memory
    traffic_class: int = 0
    """Byte that marks its packets for the switches."""
    devices: tuple[str, ...] = ()
    """The RDMA device, port and GID of each level, if there are any."""
    fallback: str = ""
    """Why it is not the transport that was asked for first."""
    zero_copy: ZeroCopy | None = None
    """By which servers of one host read each other's payloads; None: not in this job, or not here."""


def check_transport(name: str) -> str:
    """Return it; raises UsageError for what is no transport."""
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
    settings = VerbsSettings.from_environment(environ)
    if traffic_class is not None:
        settings = replace(settings, traffic_class=traffic_class)
    why = ""
    if first == "shm":
        segment.check()
    if first == "verbs":
        try:
            verbs = VerbsTransport(
                server,
                nics,
                token=token,
                job=job,
                poller=poller,
                handler=handler,
                connect_s=connect_s,
                incarnation=incarnation,
                settings=settings,
            )
            return Opened(verbs, "verbs", verbs.pool, settings.traffic_class, verbs.devices)
        except FabricError as error:
            if not fallback:
                raise
            why = str(error)
            _LOG.warning("server %d uses tcp instead of verbs: %s", server, why)
    zero_copy = (
        _open_zero_copy(token, job, server, zero_copy_servers, read_in_place)
        if first == "tcp" and zero_copy_servers
        else None
    )
    tcp = TcpTransport(
        server,
        nics,
        token=token,
        job=job,
        poller=poller,
        handler=handler,
        connect_s=connect_s,
        incarnation=incarnation,
        nic_rate=nic_rate,
        traffic_class=settings.traffic_class,
        zero_copy=zero_copy,
    )
    if first == "shm":
        return Opened(tcp, "shm", SharedPool(), settings.traffic_class)
    memory = zero_copy or private_pool()
    return Opened(tcp, "tcp", memory, settings.traffic_class, fallback=why, zero_copy=zero_copy)


def _open_zero_copy(
    token: bytes, job: str, server: int, n_servers: int, read_in_place: ReadInPlace
) -> ZeroCopy | None:
    """What this machine can do; without it the server sends all payloads."""
    reason = segment.why_not()
    if not reason:
        try:
            return ZeroCopy(token, job, server, n_servers, read_in_place)
        except (OSError, NoRoom) as error:
            reason = str(error)
    _LOG.info("server %d makes no zero-copy sends: %s", server, reason)
    return None
