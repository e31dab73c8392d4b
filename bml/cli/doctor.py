"""`bml doctor`: shows what works on this machine, why the rest does not, and all time-outs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml.cli.output import current
from bml.cli.tables import print_table
from bml.cluster.launcher import jobsocket
from bml.cluster.ray import auth as ray_auth
from bml.cluster.spec.nics import address_of
from bml.errors import BmlError, FabricError, UsageError
from bml.fabric.network import obstacle
from bml.io.limits import check_loopback
from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.sharedmem import segment
from bml.transport.verbs.devices import Gid, choose, gids, no_device
from bml.transport.verbs.settings import VerbsSettings

_LEAST_PYTHON = (3, 11)
_LEAST_SHM_NBYTES = 256 << 20
_LEAST_FILES = 1024

_MEANING = {
    "heartbeat_s": "detect_s / 5: four heartbeats in a row may be lost before a server is suspected",
    "proof_window_s": "detect_s / 25: after proof of a death, other reports of it are awaited for so long",
    "silence_window_s": "detect_s / 4: suspicions by silence are gathered, so that all observers are heard",
    "detect_s": "the setting: silence after which a failure is suspected; it is noticed within 1.25 detect_s",
    "answer_s": "1.5 detect_s: a suspected server that does not answer has failed; others have 3 times it",
    "connect_s": "4 detect_s: a connection that cannot be made in this time counts as lost",
    "hold_s": "60 detect_s, half of orphan_s at most: a server whose interpreter's lock is held is awaited",
    "warm_up_s": "silence that is tolerated before the second step is committed: imports, first kernels",
    "start_s": "every server must have started within this time; at least 8 detect_s",
    "orphan_s": "2 start_s: a server that needs a view and hears from no coordinator gives up",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: whether it is `usable`, and why or why not."""

    what: str
    usable: bool
    why: str
    needed: bool = False
    """Whether no job can run without it."""


@click.command()
@click.option(
    "--detect-s",
    type=float,
    default=DEFAULT_DETECT_S,
    show_default=True,
    help="Show the time-outs for this detect_s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def doctor(detect_s: float, as_json: bool) -> None:
    """Show what works on this machine, and all time-outs.

    What does not work is shown with the reason, and every time-out with how it is derived from detect_s. The
    exit status is 1 if something is missing that every job needs.

    \b
    Example:
      bml doctor --detect-s 2
    """
    timeouts = Timeouts.of(detect_s)
    checks = checks_of_this_machine()
    sound = all(check.usable for check in checks if check.needed)
    if as_json:
        current().answer(_report(checks, timeouts))
    else:
        _show(checks, timeouts)
    if not sound:
        raise click.exceptions.Exit(1)


def checks_of_this_machine() -> list[Check]:
    """Look at everything, in the order in which it is shown."""
    version = platform.python_version()
    return [
        Check(
            "Python", sys.version_info >= _LEAST_PYTHON, f"{version}, 3.11 or newer is needed", needed=True
        ),
        Check("Linux", sys.platform == "linux", f"{platform.system()} {platform.release()}", needed=True),
        _cores(),
        _loopback(),
        _package("Ray", "ray", "the launcher ray", "ray[default]"),
        _ray_authentication(),
        _package("torch", "torch", "examples/train_torch.py and the peer gloo of bml bench", "bml[torch]"),
        _shared_memory(),
        _open_files(),
        _job_folder(),
        _transport_shm(),
        _emulated_fabric(),
        _verbs(),
        _nics(),
    ]


def _cores() -> Check:
    usable, busy = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    remark = (
        "; it is busy, so the detector waits longer before it suspects a silent server"
        if busy > 2 * usable
        else ""
    )
    return Check("processor cores", True, f"{usable} cores, load {busy:.1f}{remark}")


def _loopback() -> Check:
    try:
        check_loopback()
    except FabricError as error:
        return Check("loopback", False, str(error))
    return Check("loopback", True, "servers on this machine reach each other")


def _package(what: str, module: str, use: str, extra: str) -> Check:
    spec = importlib.util.find_spec(module)
    try:
        version = importlib.metadata.version(module) if spec is not None else ""
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version:
        return Check(what, True, f"{version}, for {use}")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    remark = f" ({places[0]} is another package of that name)" if places else ""
    return Check(what, False, f"not installed, needed for {use}{remark}: pip install '{extra}'")


def _ray_authentication() -> Check:
    """Say whether the Ray that jobs would use asks for a token: the cluster of RAY_ADDRESS, or their own."""
    what, address = "Ray asks for a token", os.environ.get("RAY_ADDRESS", "")
    if ":" in address and "://" not in address:
        return Check(what, *ray_auth.exposure(address))
    if address:
        return Check(
            what,
            False,
            f"not known, as RAY_ADDRESS is {address}: set it to host:port, and that cluster is asked",
        )
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        why = "RAY_AUTH_MODE is disabled, so everyone who reaches this machine can use a job's Ray: unset it"
        return Check(what, False, why)
    own = "a token of its own" if ray_auth.own_settings(os.environ) else "the token that RAY_AUTH_TOKEN gives"
    return Check(what, True, f"a Ray that is started for a job has {own}")


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("/dev/shm", False, f"{error.strerror}: Ray is slow without it")
    enough = free >= _LEAST_SHM_NBYTES
    return Check("/dev/shm", enough, f"{free >> 20} MiB free" + ("" if enough else ": Ray wants 256 MiB"))


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES
    remark = "" if enough else f"; allow {_LEAST_FILES} (ulimit -n), else servers cannot join or reconnect"
    return Check("open files", enough, f"a process may have {soft}; a server takes some 20{remark}")


def _job_folder() -> Check:
    try:
        return Check("bml status, bml inject", True, f"jobs are found in {jobsocket.folder()}")
    except BmlError as error:
        return Check("bml status, bml inject", False, str(error))


def _emulated_fabric() -> Check:
    reason = obstacle()
    return Check("emulated fabric", reason is None, reason or "network namespaces can be made: bml fabric up")


def _transport_shm() -> Check:
    reason = segment.why_not()
    can = "servers of this host can read each other's memory: transport shm, zero-copy payloads"
    return Check("shared memory of servers", not reason, reason or can)


def _verbs() -> Check:
    found = list(gids())
    listed = ", ".join(f"{gid.device}:{gid.place} {gid.text}" for gid in found if gid.kind == "RoCE v2")
    reason = _no_verbs(found)
    if reason:
        return Check("verbs (RDMA)", False, f"{reason}; --transport verbs,tcp falls back to tcp")
    return Check("verbs (RDMA)", True, f"GIDs {listed or ', '.join(sorted({gid.device for gid in found}))}")


def _no_verbs(found: list[Gid]) -> str:
    """Say why there is no RDMA, for the addresses of BML_NICS or at all; empty if there is."""
    if importlib.util.find_spec("pyverbs") is None and found:
        devices = ", ".join(sorted({gid.device for gid in found}))
        return f"devices {devices}, but no pyverbs: pip install 'bml[rdma]'"
    try:
        addresses = _nic_addresses(os.environ.get("BML_NICS", ""))
        devices_set = VerbsSettings.from_environment(os.environ).devices or (None,) * len(addresses)
        # The launcher of processes replaces {n} by the number of the server; the first will do here.
        for address, setting in zip(addresses, devices_set, strict=False):
            choose(address.replace("{n}", "1"), setting)
    except BmlError as error:
        return str(error)
    return "" if found else no_device()


def _nic_addresses(setting: str) -> list[str]:
    """Return the addresses in BML_NICS; in those with {n}, it stays. Raises UsageError."""
    parts = [part.strip() for part in setting.split(",") if part.strip()]
    return [part if "{n}" in part else address_of(part) for part in parts]


def _nics() -> Check:
    setting = os.environ.get("BML_NICS", "")
    try:
        found = _nic_addresses(setting)
    except UsageError as error:
        return Check("BML_NICS", False, str(error))
    foreign = [text for text in found if not _is_own(text)]
    if foreign:
        return Check("BML_NICS", False, f"{setting}: {', '.join(foreign)} is not an address of this machine")
    if setting:
        return Check("BML_NICS", True, f"{setting}: one address per level, {', '.join(found)}")
    return Check(
        "BML_NICS", True, "not set: all levels use the node's one address (on one machine: loopback)"
    )


def _is_own(address: str) -> bool:
    """Whether this machine has the address. True for an address with {n}, which stands for several."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return "{n}" in address
    return True


def _report(checks: list[Check], timeouts: Timeouts) -> dict[str, Any]:
    return {
        "checks": {check.what: {"usable": check.usable, "why": check.why} for check in checks},
        "timeouts": {
            name: {"seconds": getattr(timeouts, name), "why": why} for name, why in _MEANING.items()
        },
    }


def _show(checks: list[Check], timeouts: Timeouts) -> None:
    console = Console(markup=False, highlight=False)
    machine = Table("", "usable", "why", title="this machine")
    for check in checks:
        machine.add_row(check.what, "yes" if check.usable else "no", check.why)
    print_table(machine, console)
    times = Table(
        "time-out", "seconds", "derivation and purpose", title="time-outs, in the order that makes them safe"
    )
    for name, why in sorted(_MEANING.items(), key=lambda item: float(getattr(timeouts, item[0]))):
        times.add_row(name, f"{getattr(timeouts, name):g}", why)
    print_table(times, console)
