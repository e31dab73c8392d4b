"""The settings of a group of ranks, and the job that they make of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from bml.cluster.spec.job import JobSpec, default_nics
from bml.cluster.spec.nics import nics_of as machine_nics
from bml.protocol.timeouts import detect_s_from
from bml.topology.errors import UsageError
from bml.transport.choice import AUTO

_ALONE = "switch:2"
"""The least fabric; a group of one rank is its server 0, and server 1 is absent."""


@dataclass(frozen=True)
class Settings:
    """How a group is formed. Those of rank 0 hold for all ranks, except for `host` and `start_s`.

    `fabric`: its notation; None: that of BML_FABRIC, else a BCube with the addresses in BML_NICS, else one
    switch.
    `transport`: see bml.cluster.spec.job.JobSpec.
    `detect_s`: seconds of silence after which a failure is suspected; None: that of BML_DETECT_S, else 0.5.
    `start_s`: how long the ranks may take to appear, in seconds.
    `min_servers`: with fewer ranks the group ends; None: that of BML_MIN_SERVERS, else 1 if all ranks share a
    host, and else more than half of the ranks of the view before (see docs/guides/ranks.md).
    `host`: the numeric address of this rank for ranks on other hosts; None: that of the route to MASTER_ADDR.
    `rejoin`: whether ranks that were started again are let in; if not, `form` raises StartError in them.
    """

    fabric: str | None = None
    transport: str = AUTO
    detect_s: float | None = None
    start_s: float = 60.0
    min_servers: int | None = None
    host: str | None = None
    rejoin: bool = True


class Host(NamedTuple):
    """The machine of a rank: its identity, and the address for ranks on other machines."""

    identity: str
    address: str


def job_of(settings: Settings, hosts: Sequence[Host], environ: Mapping[str, str] = os.environ) -> JobSpec:
    """Make the job of ranks on these hosts, one for each rank. Raises UsageError if there can be none."""
    size = len(hosts)
    one_host = len({host.identity for host in hosts}) == 1
    local = [rank for rank, host in enumerate(hosts) if ip_address(host.address).is_loopback]
    if local and not one_host and not environ.get("BML_NICS"):
        raise UsageError(
            f"rank {local[0]} knows only its address {hosts[local[0]].address}, which other machines cannot "
            "reach: give its addresses in BML_NICS (or host=)"
        )
    spec = JobSpec(
        fabric=fabric_of(settings, size, environ),
        detect_s=detect_s_from(environ) if settings.detect_s is None else settings.detect_s,
        start_s=settings.start_s,
        min_servers=_least(settings, one_host, environ),
        transport=settings.transport,
        rejoin=settings.rejoin,
        absent=(1,) if size == 1 else (),
    )
    if len(spec.servers) != size:
        raise UsageError(
            f"{spec.fabric} has {len(spec.servers)} servers, and there are {size} ranks: give BML_FABRIC (or "
            f"fabric=) with {size} servers, such as switch:{size}"
        )
    return spec.settled(one_host)


def fabric_of(settings: Settings, size: int, environ: Mapping[str, str]) -> str:
    """Return the notation of the fabric of `size` ranks. Raises UsageError if BML_NICS fits none."""
    named = settings.fabric or environ.get("BML_FABRIC")
    if size == 1:
        return _ALONE
    if named:
        return named
    levels = len(environ.get("BML_NICS", "").split(","))
    ports = round(size ** (1 / levels))
    if levels == 1:
        return f"switch:{size}"
    if ports**levels != size or ports < 2:
        raise UsageError(
            f"BML_NICS has {levels} addresses, and {size} ranks are not n^{levels} of them: no BCube "
            "has so many servers; give the fabric in BML_FABRIC"
        )
    return f"bcube:{ports}x{levels}"


def nics_of(rank: int, levels: int, host: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of a rank, one for each level; `host`: its address, None: loopback.

    Raises UsageError if those of BML_NICS cannot be.
    """
    nics = machine_nics(environ, levels, rank)
    return nics or ((host,) * levels if host is not None else default_nics(rank, levels))


def _least(settings: Settings, one_host: bool, environ: Mapping[str, str]) -> int | None:
    if settings.min_servers is not None:
        return settings.min_servers
    text = environ.get("BML_MIN_SERVERS", "")
    try:
        return int(text) if text else (1 if one_host else None)
    except ValueError:
        raise UsageError(f"BML_MIN_SERVERS is {text!r}: give a whole number") from None
