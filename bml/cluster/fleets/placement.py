"""Decides on which machine of a Ray cluster each server runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bml.errors import StartError, UsageError


@dataclass(frozen=True, order=True)
class Machine:
    """A living Ray node: its address, Ray id, CPUs, whether it is the head, and its host name."""

    address: str
    node: str
    cpus: float
    is_head: bool = False
    host: str = ""


def blocks(servers: Sequence[int], machines: Sequence[Machine]) -> dict[int, str]:
    """Return the node of every server: blocks of neighbouring ids, of sizes that differ by one at most.

    Servers with neighbouring ids share a switch of level 0, so as many bytes as possible stay on a machine.
    Machines without CPUs, as heads of clusters often are, get no servers if there are others.
    """
    row = usable(machines)
    most = min(len(servers), len(row))
    return {server: row[i * most // len(servers)].node for i, server in enumerate(servers)}


def usable(machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines that offer CPUs, in order; all if none does."""
    return sorted(each for each in machines if each.cpus > 0) or sorted(machines)


def home_for(
    server: int, homes: Mapping[int, str], machines: Sequence[Machine], rack: Callable[[Machine], str]
) -> str:
    """Return another node for a server whose machine is gone; `homes` are the present nodes of all servers.

    It is one with the fewest servers; of these, one in the rack, and then one with the servers, whose ids are
    nearest. Raises StartError if there is no machine.
    """
    if not machines:
        raise StartError(
            f"no Ray node is there for server {server}: all are dead, or draining; it comes when one is added"
        )

    def distance(nodes: set[str]) -> float:
        there = [each for each, node in homes.items() if node in nodes and each != server]
        return min((abs(each - server) for each in there), default=math.inf)

    def rank(machine: Machine) -> tuple[int, float, float, Machine]:
        here = sum(node == machine.node and each != server for each, node in homes.items())
        beside = {each.node for each in machines if rack(each) == rack(machine)}
        return here, distance(beside), distance({machine.node}), machine

    return min(usable(machines), key=rank).node


@dataclass(frozen=True)
class Reservation:
    """The amounts of `CPU`, `GPU` or other resources that every server reserves of a Ray cluster.

    Raises UsageError for a value that is not an amount.
    """

    amounts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, amount in self.amounts.items():
            is_amount = isinstance(amount, int | float) and math.isfinite(amount) and amount > 0
            if not name or not is_amount:
                raise UsageError(f"a server cannot reserve {amount!r} of {name!r}: write GPU=1 or the like")

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Reservation:
        """Read `GPU=1`, `CPU=8`. Raises UsageError."""
        amounts: dict[str, float] = {}
        for text in texts:
            name, _, amount = text.partition("=")
            try:
                amounts[name] = float(amount)
            except ValueError:
                raise UsageError(f"'{text}' reserves nothing: write it like GPU=1 or CPU=8") from None
        return cls(amounts)

    def __bool__(self) -> bool:
        return bool(self.amounts)

    def __str__(self) -> str:
        return ", ".join(f"{name}={amount:g}" for name, amount in self.amounts.items())

    @property
    def options(self) -> dict[str, Any]:
        """Return them as options of a Ray actor, with 0 CPUs if none are reserved."""
        own = {name: amount for name, amount in self.amounts.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.amounts.get("CPU", 0),
            "num_gpus": self.amounts.get("GPU", 0),
            "resources": own,
        }
