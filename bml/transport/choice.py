"""Which transport a server uses: the first of a ladder that its NICs can do."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bml.transport.interface import Handler, Transport
from bml.transport.memory import Memory, PlainMemory
from bml.transport.poller import Poller
from bml.transport.shm import segment
from bml.transport.shm.pool import SharedPool
from bml.transport.tcp import TcpTransport
from bml.transport.verbs import VerbsSettings, VerbsTransport
from topology.errors import FabricError, UsageError

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
    life: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> Opened:
    """Open the transport of this name with the settings of the environment.

    With shm the data lies in shared memory (bml.transport.shm); links, and with them heartbeats, are tcp's.

    Raises FabricError when the NICs cannot do it, UsageError for settings that cannot be.
    """
    first, _, fallback = check_transport(name).partition(",")
    settings = VerbsSettings.from_environment(environ)
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
                life=life,
                settings=settings,
            )
            return Opened(verbs, "verbs", verbs.pool)
        except FabricError as error:
            if not fallback:
                raise
            _LOG.warning("server %d uses tcp instead of verbs: %s", server, error)
    tcp = TcpTransport(
        server,
        nics,
        token=token,
        job=job,
        poller=poller,
        handler=handler,
        connect_s=connect_s,
        life=life,
        traffic_class=settings.traffic_class,
    )
    if first == "shm":
        return Opened(tcp, "shm", SharedPool())
    return Opened(tcp, "tcp", PlainMemory())
