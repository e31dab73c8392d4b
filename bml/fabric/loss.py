"""Random loss on cables of an emulated fabric, by nftables: many kernels have no netem."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

from bml.fabric import namespace
from bml.fabric.condition import Condition, setting
from bml.fabric.layout import Cable, Layout
from bml.topology.errors import FabricError

_PARTS = 1_000_000
_NFT_S = 10.0


def check() -> None:
    """Raise FabricError if this machine cannot make loss."""
    if shutil.which("nft") is None:
        raise FabricError("loss on a cable needs nft: install nftables")


def settle(layout: Layout, cables: Iterable[Cable], condition: Condition) -> None:
    """Set the loss at both ends of these cables as `condition` says. Raises FabricError."""
    by_node: dict[str, str] = {}
    for cable in cables:
        for end in (cable.near, cable.far):
            wanted = rules(end.device, setting(cable, end, condition).lost_share)
            by_node[end.node] = by_node.get(end.node, "") + wanted
    for node, wanted in by_node.items():
        namespace.inside(layout.namespace(node), lambda wanted=wanted: _nft(wanted))  # type: ignore[misc]


def rules(device: str, share: float) -> str:
    """The commands to nft for one device: they make its table anew, or remove it if `share` is 0."""
    table = f"netdev bml-{device}"
    gone = f"table {table}\ndelete table {table}\n"
    if not share:
        return gone
    chain = f"type filter hook ingress device {device} priority 0; policy accept;"
    return f"{gone}table {table} {{ chain in {{ {chain} {_rule(share)};\n}}\n}}\n"


def _rule(share: float) -> str:
    return f"numgen random mod {_PARTS} < {max(1, round(share * _PARTS))} drop"


def _nft(rules: str) -> None:
    done = subprocess.run(
        ["nft", "-f", "-"], input=rules, capture_output=True, text=True, timeout=_NFT_S, check=False
    )
    if done.returncode != 0:
        raise FabricError(f"loss on a cable cannot be set: {done.stderr.strip()}")
