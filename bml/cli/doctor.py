"""`bml doctor`: what is usable on this machine and why not, and all time-outs and how they derive."""

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
from bml.cluster.launcher import jobsocket
from bml.cluster.ray import auth as ray_auth
from bml.errors import BmlError
from bml.fabric.network import obstacle
from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.sharedmem import segment
from bml.transport.verbs.devices import Gid, choose, gids, no_device
from bml.transport.verbs.settings import VerbsSettings

_LEAST_PYTHON = (3, 11)
_LEAST_SHM_NBYTES = 256 << 20
_LEAST_FILES = 1024

_MEANING = {
    "heartbeat_s": "detect_s / 5: four heartbeats may be lost before anybody is suspected",
    "proof_window_s": "detect_s / 25: after proof (a dead process), only its echoes are awaited",
    "silence_window_s": "detect_s / 4: suspicions by silence are gathered, so that all observers are heard",
    "detect_s": "the setting: silence after which a failure is suspected; it is noticed within 1.25 detect_s",
    "answer_s": "1.5 detect_s: a suspected server that does not answer in it has failed; others in 3 times",
    "connect_s": "4 detect_s: a connection that cannot be made within this counts as lost",
    "warm_up_s": "silence is borne for so long before the second step is committed: imports, first kernels",
    "start_s": "at start-up every server must have appeared within this; at least 8 detect_s",
    "orphan_s": "2 start_s: a server that needs a view and hears of no coordinator gives up",
}


@dataclass(frozen=True)
class Check:
    """One thing that may be usable: `usable`, and why or why not."""

    what: str
    usable: bool
    why: str
    needed: bool = False


@click.command()
@click.option(
    "--detect-s", type=float, default=DEFAULT_DETECT_S, show_default=True, help="Show time-outs for this."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def doctor(detect_s: float, as_json: bool) -> None:
    """Say what is usable on this machine and why not, and show all time-outs and how they derive.

    Exit status 1 if something is missing that every job needs.

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
    """Everything that is looked at, in the order in which it is shown."""
    version = platform.python_version()
    return [
        Check(
            "Python", sys.version_info >= _LEAST_PYTHON, f"{version}, 3.11 or newer is needed", needed=True
        ),
        Check("Linux", sys.platform == "linux", f"{platform.system()} {platform.release()}", needed=True),
        _cores(),
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
    remark = "; it is busy, silences will be judged more patiently" if busy > 2 * usable else ""
    return Check("processor cores", True, f"{usable} cores, load {busy:.1f}{remark}")


def _package(what: str, module: str, use: str, extra: str) -> Check:
    spec = importlib.util.find_spec(module)
    try:
        version = importlib.metadata.version(module) if spec is not None else ""
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version:
        return Check(what, True, f"{version}, for {use}")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    remark = f" ({places[0]} is something else of that name)" if places else ""
    return Check(what, False, f"not installed, needed for {use}{remark}: pip install '{extra}'")


def _ray_authentication() -> Check:
    """Who gets into the Ray that jobs would use: the cluster of RAY_ADDRESS, or one started for them."""
    what, address = "Ray asks for a token", os.environ.get("RAY_ADDRESS", "")
    if ":" in address and "://" not in address:
        return Check(what, *ray_auth.exposure(address))
    if address:
        return Check(what, False, f"not known: RAY_ADDRESS is {address}; give host:port, and that is asked")
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        why = "RAY_AUTH_MODE is disabled: whoever reaches this machine gets into the Ray of a job; unset it"
        return Check(what, False, why)
    own = "a token of its own" if ray_auth.own_settings(os.environ) else "the token that RAY_AUTH_* says"
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
    remark = "" if enough else f", have {_LEAST_FILES}: ulimit -n; beyond it nobody can join or reconnect"
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
    """Why there is no RDMA for the addresses of BML_NICS, or at all; empty if there is."""
    if importlib.util.find_spec("pyverbs") is None and found:
        devices = ", ".join(sorted({gid.device for gid in found}))
        return f"devices {devices}, but no pyverbs: pip install 'bml[rdma]'"
    addresses = [text.strip() for text in os.environ.get("BML_NICS", "").split(",") if text.strip()]
    try:
        devices_set = VerbsSettings.from_environment(os.environ).devices or (None,) * len(addresses)
        # A launcher of processes puts the server's number for {n}; the first is as good as any.
        for address, setting in zip(addresses, devices_set, strict=False):
            choose(address.replace("{n}", "1"), setting)
    except BmlError as error:
        return str(error)
    return "" if found else no_device()


def _nics() -> Check:
    setting = os.environ.get("BML_NICS", "")
    foreign = [text for text in map(str.strip, setting.split(",")) if text and not _is_own(text)]
    if foreign:
        return Check("BML_NICS", False, f"{setting}: {', '.join(foreign)} is no address of this machine")
    if setting:
        return Check("BML_NICS", True, f"{setting}: one address per level")
    return Check(
        "BML_NICS", True, "not set: all levels use the node's one address (on one machine: loopback)"
    )


def _is_own(address: str) -> bool:
    """Whether this machine has the address; one that holds for several servers is not looked at."""
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
    console.print(machine)
    times = Table(
        "time-out", "seconds", "how it derives, and what for", title="time-outs, in their safe order"
    )
    for name, why in sorted(_MEANING.items(), key=lambda item: float(getattr(timeouts, item[0]))):
        times.add_row(name, f"{getattr(timeouts, name):g}", why)
    console.print(times)
