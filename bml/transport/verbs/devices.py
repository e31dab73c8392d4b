"""Finds the RDMA device, port and GID of a NIC's address; reads sysfs, so it works without pyverbs."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bml.topology.errors import FabricError, UsageError

SYSFS = Path("/sys/class/infiniband")
_EMPTY_RUN = 8
"""So many empty entries in a row end a GID table; a whole table can have thousands."""


class Gid(NamedTuple):
    """A GID: an address of a port to which peers send, and its index (`place`) in the port's table."""

    device: str
    port: int
    place: int
    text: str
    kind: str


def gids(sysfs: Path = SYSFS) -> Iterator[Gid]:
    """All GIDs of all ports of this machine."""
    for device in sorted(sysfs.iterdir()) if sysfs.is_dir() else []:
        for port in sorted((device / "ports").iterdir(), key=lambda path: int(path.name)):
            yield from _gids_of(device.name, port)


def choose(address: str, setting: str | None = None, sysfs: Path = SYSFS) -> Gid:
    """The GID of the NIC with this IP address: RoCE v2 over it, or what the setting "device:index" names.

    Raises UsageError for a setting that names nothing, FabricError when there is no such RDMA NIC; its text
    says what to check.
    """
    wanted = gid_of(address)
    found = []
    for gid in gids(sysfs):
        # A port with RoCE v1 and v2 lists each address twice; only v2 is routed like IP.
        if setting is None and gid.text == wanted and gid.kind == "RoCE v2":
            return gid
        found.append(gid)
    if setting is not None:
        device, _, index = setting.partition(":")
        named = [gid for gid in found if gid.device == device]
        exact = [gid for gid in named if (str(gid.place) == index if index else gid.text == wanted)]
        if not exact:
            known = ", ".join(f"{gid.device}:{gid.place}" for gid in named or found) or "none"
            raise UsageError(f"BML_RDMA_DEVICES names {setting!r} for address {address}; there are: {known}")
        return exact[-1]
    matching = [gid for gid in found if gid.text == wanted]
    if matching:
        return matching[0]
    raise FabricError(f"no RDMA device has the address {address}: {_advice(found, sysfs)}")


def gid_of(address: str) -> str:
    """An IP address as the GID that RoCE v2 gives it; raises UsageError if it is not one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(f"not an IP address: {address!r}; give a numeric one (NICs: BML_NICS)") from None
    return (ipaddress.ip_address(f"::ffff:{address}") if ip.version == 4 else ip).exploded


def _gids_of(device: str, port: Path) -> Iterator[Gid]:
    empty = 0
    for index in count():
        text = _read(port / "gids" / str(index))
        if text.strip("0:"):
            empty = 0
            yield Gid(device, int(port.name), index, text, _read(port / "gid_attrs" / "types" / str(index)))
        else:
            empty += 1
            if empty == _EMPTY_RUN:
                return


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def no_device(sysfs: Path = SYSFS) -> str:
    """The reason why this machine has no GID at all, and what to check."""
    if sysfs.is_dir() and any(sysfs.iterdir()):
        return (
            "there are RDMA devices, but none has a GID; is the port up (rdma link), and has it an address?"
        )
    return (
        "this machine has no RDMA device (rdma link shows none); is the NIC's driver loaded, and is "
        "/sys/class/infiniband visible here? Use the transport tcp if there is no such NIC"
    )


def _advice(found: list[Gid], sysfs: Path) -> str:
    if found:
        have = ", ".join(sorted({f"{gid.device} {_address_of(gid.text)}" for gid in found}))
        return (
            f"there are {have}; give the addresses of RDMA NICs in BML_NICS, one per level, or name devices "
            "in BML_RDMA_DEVICES"
        )
    return no_device(sysfs)


def _address_of(text: str) -> str:
    ip = ipaddress.IPv6Address(text)
    return str(ip.ipv4_mapped or ip)
