"""The addresses of this machine's NICs as `BML_NICS` gives them: IP addresses, or names of interfaces.

On clusters whose machines are alike, as in Kubernetes, the interfaces have the same names everywhere, and the
addresses are not known before.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address

import psutil

from bml.errors import UsageError

SETTING = "BML_NICS"

Interfaces = Callable[[], Mapping[str, Sequence[str]]]
"""Returns the IPv4 addresses of every interface of this machine."""


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of every interface of this machine, as the kernel orders them."""
    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in sorted(psutil.net_if_addrs().items())
    }


def nics_of(
    environ: Mapping[str, str], levels: int, server: int | None = None, interfaces: Interfaces = interfaces
) -> tuple[str, ...]:
    """Return the addresses in `BML_NICS`, one for each level; none if it is not set.

    `{n}` in it stands for the number of the `server`, from 1, if there is one.

    Raises:
        UsageError: There is another number of them, or a part is neither an address nor the name of an
            interface of this machine that has one IPv4 address.
    """
    setting = environ.get(SETTING, "").strip()
    if not setting:
        return ()
    if server is not None:
        setting = setting.replace("{n}", str(server + 1))
    parts = [part.strip() for part in setting.split(",")]
    if len(parts) != levels:
        raise UsageError(
            f"{SETTING} is {setting!r}: give an address or an interface for each of {levels} levels"
        )
    found = tuple(address_of(part, interfaces) for part in parts)
    for part, address in zip(parts, found, strict=True):
        if part != address and found.count(address) > 1:
            raise UsageError(f"{SETTING} is {setting!r}: give another interface for each level")
    return found


def address_of(part: str, interfaces: Interfaces = interfaces) -> str:
    """Return the address that a part of `BML_NICS` means. Raises UsageError, see `nics_of`."""
    if _is_address(part):
        return part
    here = interfaces()
    addresses = here.get(part)
    if addresses is None:
        known = ", ".join(here) or "none"
        raise UsageError(
            f"{SETTING} names {part!r}, which is neither an IP address nor an interface of this machine; "
            f"there are {known}"
        )
    if not addresses:
        raise UsageError(
            f"{SETTING} names the interface {part}, which has no IPv4 address: give it one (ip address add), "
            "or name another"
        )
    if len(addresses) > 1:
        raise UsageError(
            f"{SETTING} names the interface {part}, which has the addresses {', '.join(addresses)}: give the "
            "one that is meant"
        )
    return addresses[0]


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
