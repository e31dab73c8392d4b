"""Builds an emulated fabric and changes its settings by netlink: veth pairs, bridges, token buckets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from bml.fabric import bpf, namespace
from bml.fabric.condition import Condition, Setting, setting
from bml.fabric.layout import MANAGEMENT, MTU, SWITCHES, Cable, End, Layout
from bml.topology.errors import FabricError

try:
    from pyroute2 import IPRoute, NetlinkError

    from bml.fabric import queues
except ImportError:
    raise FabricError("the emulated fabric needs pyroute2: pip install 'bml[fabric]'") from None

#: All devices are in this group, so that one call removes those of a namespace.
_GROUP = 0xB31
#: The loopback device is the first of every namespace. Its alias names the fabric of the namespace.
_LOOPBACK = 1
#: The qdisc that holds classifiers, and where it holds those of arriving packets.
_CLASSIFIERS, _ARRIVING = "clsact", "ffff:fff2"
_BRIDGE = {"br_stp_state": 0, "br_mcast_snooping": 0, "br_forward_delay": 0}
_TCP = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_BRIDGE_SYSCTLS = Path("/proc/sys/net/bridge")


def build(layout: Layout, condition: Condition) -> None:
    """Make all namespaces, devices and cables; the namespaces must not exist yet. Raises FabricError."""
    try:
        for node in layout.nodes:
            namespace.create(layout.namespace(node), lambda: _mark(layout.name))
        namespace.inside(layout.namespace(SWITCHES), lambda: _make_bridges(layout))
        for node in layout.nodes:
            _make_cables(layout, node)
        for node in layout.nodes:
            namespace.inside(layout.namespace(node), lambda node=node: _configure(layout, node))  # type: ignore[misc]
        settle(layout, layout.cables, condition)
    except (NetlinkError, OSError) as error:
        raise FabricError(
            f"cannot build {layout.fabric.name} in network namespaces: {error}; it needs CAP_NET_ADMIN, "
            "CAP_SYS_ADMIN and a /proc/sys that can be written to"
        ) from error


def settle(layout: Layout, cables: Iterable[Cable], condition: Condition) -> None:
    """Set both ends of these cables as `condition` says; settings that are the same stay undisturbed.

    Raises FabricError.
    """
    by_node: dict[str, list[tuple[End, Setting]]] = {}
    for cable in cables:
        for end in (cable.near, cable.far):
            by_node.setdefault(end.node, []).append((end, setting(cable, end, condition)))
    for node, settings in by_node.items():
        space = layout.namespace(node)
        try:
            namespace.inside(space, lambda space=space, settings=settings: _settle(space, settings))  # type: ignore[misc]
        except NetlinkError as error:
            raise FabricError(f"a cable of network namespace {space} cannot be set: {error}") from error


def settle_loss(layout: Layout, cables: Iterable[Cable], condition: Condition) -> None:
    """Set the loss at both ends of these cables as `condition` says. Raises FabricError.

    A classifier drops packets where they arrive: many kernels have no netem.
    """
    by_node: dict[str, dict[str, float]] = {}
    for cable in cables:
        for end in (cable.near, cable.far):
            by_node.setdefault(end.node, {})[end.device] = setting(cable, end, condition).lost_share
    for node, shares in by_node.items():
        space = layout.namespace(node)
        try:
            namespace.inside(space, lambda space=space, shares=shares: _settle_loss(space, shares))  # type: ignore[misc]
        except NetlinkError as error:
            raise FabricError(
                f"loss on a cable of network namespace {space} cannot be set: {error}"
            ) from error


def is_ours(space: str, name: str) -> bool:
    """Whether this namespace was made for the emulated fabric `name`, by the marks of its devices."""

    def look() -> bool:
        with IPRoute() as ip:
            return any(
                link.get_attr("IFLA_GROUP") == _GROUP or link.get_attr("IFLA_IFALIAS") == _alias(name)
                for link in ip.get_links()
            )

    return namespace.inside(space, look)


def destroy(spaces: Iterable[str]) -> dict[int, str]:
    """Remove these namespaces and their devices; they are gone when it returns.

    Returns the processes (pid -> command) that are still inside: they have no network any more.
    """
    spaces = list(spaces)
    living = [each for each in spaces if namespace.is_alive(each)]
    left = namespace.processes(living)
    for each in living:
        # The kernel would keep a namespace, and all its cables, for minutes after the name is gone, while a
        # connection inside still tries to close over a dead cable.
        namespace.inside(each, _delete_devices)
    for each in spaces:
        namespace.remove(each)
    return left


def carrier(layout: Layout, server: int, level: int) -> bool:
    """Whether the NIC has a carrier."""
    end = layout.cable((server, level)).end_of(server)

    def look() -> bool:
        with IPRoute() as ip:
            found = [link for link in ip.get_links() if link.get_attr("IFLA_IFNAME") == end.device]
            if not found:
                raise _missing(layout.namespace(end.node), end.device)
            return bool(found[0].get_attr("IFLA_CARRIER"))

    return namespace.inside(layout.namespace(end.node), look)


def _alias(name: str) -> str:
    return f"emulated fabric {name} of bml"


def _mark(name: str) -> None:
    with IPRoute() as ip:
        ip.link("set", index=_LOOPBACK, ifalias=_alias(name))


def _make_bridges(layout: Layout) -> None:
    for switch in _BRIDGE_SYSCTLS.glob("bridge-nf-call-*tables"):
        switch.write_text("0")
    with IPRoute() as ip:
        for bridge in layout.bridges:
            ip.link("add", ifname=bridge, kind="bridge", mtu=MTU, group=_GROUP, **_BRIDGE)


def _make_cables(layout: Layout, node: str) -> None:
    """Make the cables whose far end is in this node; their near ends are made in their own nodes."""

    def make() -> None:
        with IPRoute() as ip:
            for cable in layout.cables:
                if cable.far.node == node:
                    with open(namespace.path_of(layout.namespace(cable.near.node))) as near:
                        device = {"ifname": cable.far.device, "mtu": MTU, "group": _GROUP}
                        peer = {**device, "ifname": cable.near.device, "net_ns_fd": near.fileno()}
                        ip.link("add", kind="veth", peer=peer, **device)

    namespace.inside(layout.namespace(node), make)


def _configure(layout: Layout, node: str) -> None:
    """Give the devices of a node their addresses or bridges, and set the node's own devices up."""
    _TCP.write_text("reno")  # others are 20-40 % slower when several flows enter one NIC
    with IPRoute() as ip:
        index = _indices(ip)
        for end in (end for cable in layout.cables for end in (cable.near, cable.far) if end.node == node):
            if end.address is not None:
                address, mask = end.address.split("/")
                ip.addr("add", index=index[end.device], address=address, prefixlen=int(mask))
            if end.bridge is not None:
                ip.link("set", index=index[end.device], master=index[end.bridge])
        if node == SWITCHES:
            ip.addr("add", index=index[MANAGEMENT], address=layout.coordinator_address, prefixlen=24)
        for device in ("lo", *(layout.bridges if node == SWITCHES else ())):
            ip.link("set", index=index[device], state="up")


def _settle(space: str, settings: list[tuple[End, Setting]]) -> None:
    with IPRoute() as ip:
        index = _indices(ip)
        _check_devices(space, index, (end.device for end, _ in settings))
        for end, wanted in settings:
            queues.settle(ip, index[end.device], wanted)
            ip.link("set", index=index[end.device], state="up" if wanted.up else "down")


def _settle_loss(space: str, shares: Mapping[str, float]) -> None:
    with IPRoute() as ip:
        index = _indices(ip)
        _check_devices(space, index, shares)
        for device, share in shares.items():
            if any(each.get_attr("TCA_KIND") == _CLASSIFIERS for each in ip.get_qdiscs(index[device])):
                ip.tc("del", _CLASSIFIERS, index[device])
            if share:
                ip.tc("add", _CLASSIFIERS, index[device])
                _drop(ip, index[device], share)


def _drop(ip: IPRoute, index: int, share: float) -> None:
    program = bpf.dropping(share)
    try:
        where = {"parent": _ARRIVING, "direct_action": True}
        ip.tc("add-filter", "bpf", index, ":1", fd=program, name="loss", **where)
    finally:
        os.close(program)


def _check_devices(space: str, index: Mapping[str, int], devices: Iterable[str]) -> None:
    for device in devices:
        if device not in index:
            raise _missing(space, device)


def _missing(space: str, device: str) -> FabricError:
    return FabricError(
        f"network namespace {space} has no device {device}: bml did not make the namespace, or the device "
        "was removed"
    )


def _indices(ip: IPRoute) -> dict[str, int]:
    return {link.get_attr("IFLA_IFNAME"): link["index"] for link in ip.get_links()}


def _delete_devices() -> None:
    with IPRoute() as ip:
        if any(link.get_attr("IFLA_GROUP") == _GROUP for link in ip.get_links()):
            ip.link("del", group=_GROUP)
