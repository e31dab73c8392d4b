"""The machine of this process: what makes two processes share one, and the address for others."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path

from bml.cluster.formation.settings import Host
from bml.errors import UsageError
from bml.sharedmem.registration_page import boot_id

_ANY = "192.0.2.1"
"""An address for documentation: the route to it is the default route."""


def this_host(address: str | None) -> Host:
    """Return the machine of this process; `address`: its numeric address, None: found by the route to
    MASTER_ADDR. Processes with the same identity reach each other over loopback, and share memory.
    """
    spaces = [_number(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    memory = _number("/dev/shm")
    return Host(f"{boot_id()}/{spaces[0]}/{spaces[1]}/{memory}", address or _own_address())


def _number(path: str) -> str:
    try:
        found = Path(path).stat()
    except OSError:
        return "?"
    return f"{found.st_dev}:{found.st_ino}"


def _own_address() -> str:
    """Return the address from which this machine reaches MASTER_ADDR; loopback if it has no other.

    Raises UsageError if MASTER_ADDR has no address.
    """
    names = [name for name in (os.environ.get("MASTER_ADDR"), _ANY) if name]
    found = [_source(name) for name in names]  # MASTER_ADDR may be this machine, over loopback
    return next((each for each in found if not ip_address(each).is_loopback), found[-1])


def _source(name: str) -> str:
    """Return the address of this machine on the route to another; loopback if there is no route."""
    try:
        family, _, _, _, where = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise UsageError(f"MASTER_ADDR is {name!r}, which has no address: {error}") from None
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(where)  # no packet is sent
            return str(sock.getsockname()[0]).partition("%")[0]
        except OSError:
            return "127.0.0.1"
