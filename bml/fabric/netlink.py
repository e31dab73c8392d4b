"""Builds and sets an emulated fabric by netlink: veth pairs, bridges, token buckets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from bml.fabric import namespace
from bml.fabric.condition import BURST_NBYTES, Condition, Setting, setting
from bml.fabric.layout import MANAGEMENT, MTU, SWITCHES, Cable, End, Layout, belongs
from topology.errors import FabricError

try:
    from pyroute2 import IPRoute, NetlinkError
except ImportError:
    raise FabricError("the emulated fabric needs pyroute2: pip install 'bml[fabric]'") from None

_GONE_S = 10.0
_POLL_S = 0.005
# Handles of the root qdisc: one of another kind needs another.
_TBF, _BLACKHOLE = 0x10000, 0x20000
_BRIDGE = {"br_stp_state": 0, "br_mcast_snooping": 0, "br_forward_delay": 0}
_TCP = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_BRIDGE_SYSCTLS = Path("/proc/sys/net/bridge")


def build(layout: Layout, condition: Condition) -> None:
    """Make all of it; the namespaces must not exist yet."""
    try:
        for room in layout.rooms:
            namespace.create(layout.namespace(room))
        namespace.inside(layout.namespace(SWITCHES), lambda: _make_bridges(layout))
        for room in layout.rooms:
            _make_cables(layout, room)
        for room in layout.rooms:
            namespace.inside(layout.namespace(room), lambda room=room: _furnish(layout, room))  # type: ignore[misc]
        settle(layout, layout.cables, condition)
    except NetlinkError as error:
        raise FabricError(f"cannot build {layout.fabric.name} in network namespaces: {error}") from error


def settle(layout: Layout, cables: Iterable[Cable], condition: Condition) -> None:
    """Set both ends of these cables to what `condition` says; what is so already stays undisturbed."""
    by_room: dict[str, list[tuple[End, Setting]]] = {}
    for cable in cables:
        for end in (cable.near, cable.far):
            by_room.setdefault(end.room, []).append((end, setting(cable, end, condition)))
    for room, settings in by_room.items():
        namespace.inside(layout.namespace(room), lambda settings=settings: _settle(settings))  # type: ignore[misc]


def destroy(name: str) -> dict[int, str]:
    """Remove every namespace of this fabric and wait until its cables are gone.

    Returns the processes that are still inside (pid -> command): they have no network any more.
    """
    own = [each for each in namespace.names() if belongs(each, name)]
    switches = f"{name}-{SWITCHES}"
    left = namespace.processes(own)
    if left:
        for each in own:
            namespace.inside(each, _delete_links)
    for each in own:
        if each != switches:
            namespace.remove(each)
    if switches in own:
        namespace.inside(switches, _wait_until_unplugged)
        namespace.remove(switches)
    return left


def carrier(layout: Layout, server: int, level: int) -> bool:
    """Whether the NIC has a carrier."""
    end = layout.cable((server, level)).end_of(server)

    def look() -> bool:
        with IPRoute() as ip:
            (link,) = ip.get_links(ifname=end.device)
            return bool(link.get_attr("IFLA_CARRIER"))

    return namespace.inside(layout.namespace(end.room), look)


def _make_bridges(layout: Layout) -> None:
    for switch in _BRIDGE_SYSCTLS.glob("bridge-nf-call-*tables"):
        switch.write_text("0")
    with IPRoute() as ip:
        for bridge in layout.bridges:
            ip.link("add", ifname=bridge, kind="bridge", mtu=MTU, **_BRIDGE)


def _make_cables(layout: Layout, room: str) -> None:
    """Make the cables whose far end is in this room; their near ends are born where they belong."""

    def make() -> None:
        with IPRoute() as ip:
            for cable in layout.cables:
                if cable.far.room == room:
                    with open(namespace.path_of(layout.namespace(cable.near.room))) as near:
                        peer = {"ifname": cable.near.device, "mtu": MTU, "net_ns_fd": near.fileno()}
                        ip.link("add", ifname=cable.far.device, kind="veth", mtu=MTU, peer=peer)

    namespace.inside(layout.namespace(room), make)


def _furnish(layout: Layout, room: str) -> None:
    """Give the devices of a room their addresses or bridges, and take the room's own devices up."""
    _TCP.write_text("reno")  # others are 20-40 % slower when several flows enter one NIC
    with IPRoute() as ip:
        index = _indices(ip)
        for end in (end for cable in layout.cables for end in (cable.near, cable.far) if end.room == room):
            if end.address is not None:
                address, mask = end.address.split("/")
                ip.addr("add", index=index[end.device], address=address, prefixlen=int(mask))
            if end.bridge is not None:
                ip.link("set", index=index[end.device], master=index[end.bridge])
        if room == SWITCHES:
            ip.addr("add", index=index[MANAGEMENT], address=layout.coordinator_address, prefixlen=24)
        for device in ("lo", *(layout.bridges if room == SWITCHES else ())):
            ip.link("set", index=index[device], state="up")


def _settle(settings: list[tuple[End, Setting]]) -> None:
    with IPRoute() as ip:
        index = _indices(ip)
        for end, wanted in settings:
            if wanted.rate_bit == 0:
                # Says "sent" and drops: the sender notices nothing. Part of every kernel that has tbf.
                ip.tc("replace", "blackhole", index[end.device], _BLACKHOLE)
            elif wanted.rate_bit is not None:
                rate, limit = wanted.rate_bit // 8, wanted.queue_nbytes
                ip.tc("replace", "tbf", index[end.device], _TBF, rate=rate, burst=BURST_NBYTES, limit=limit)
            ip.link("set", index=index[end.device], state="up" if wanted.up else "down")


def _indices(ip: IPRoute) -> dict[str, int]:
    return {link.get_attr("IFLA_IFNAME"): link["index"] for link in ip.get_links()}


def _delete_links() -> None:
    with IPRoute() as ip:
        for device, index in _indices(ip).items():
            if device != "lo":
                ip.link("del", index=index)


def _wait_until_unplugged() -> None:
    """The kernel takes cables apart in the background; the last ones are those to the switches."""
    deadline = time.monotonic() + _GONE_S
    with IPRoute() as ip:
        while any(link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "veth" for link in ip.get_links()):
            if time.monotonic() > deadline:
                raise FabricError(f"cables are still there {_GONE_S:g} s after their servers went; try again")
            time.sleep(_POLL_S)
