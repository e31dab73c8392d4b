"""A step as a fluid: the bytes of a plan flow over ports that share their rates fairly, for some time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from bml.faults.slowness import Moved, Path, slowed
from bml.schedule import plan
from bml.schedule.ir.forest import Phase
from bml.topology import Fabric, Link

Port = tuple[int, int, bool]
"""(server, level, whether it is the one that sends)."""


def bytes_of(fabric: Fabric, planned: Mapping[Link, int], nbytes: float) -> dict[Path, float]:
    """What every path carries in one step of the plan that is made for these halvings."""
    forest = plan(slowed(fabric, planned)).forest
    found: Counter[Path] = Counter()
    for phase in Phase:
        for hops in forest.blocks(phase):
            columns = (hops.sender, hops.receiver, hops.level, forest.weight[hops.piece])
            for sender, receiver, level, weight in zip(*(each.tolist() for each in columns), strict=True):
                found[sender, receiver, level] += weight
    return {path: nbytes * weight / forest.whole for path, weight in found.items()}


def step(traffic: Mapping[Path, float], rate: Callable[[Port], float]) -> dict[Path, Moved]:
    """Let all paths begin at once; a path is busy until its last byte has arrived."""
    left, now, done = dict(traffic), 0.0, {}
    while left:
        speeds = _fair(list(left), rate)
        dt = min(left[path] / speeds[path] for path in left)
        now += dt
        left = {path: amount - speeds[path] * dt for path, amount in left.items()}
        for path in [path for path, amount in left.items() if amount <= 1e-9 * traffic[path]]:
            done[path] = Moved(traffic[path], now)
            del left[path]
    return done


def _fair(paths: list[Path], rate: Callable[[Port], float]) -> dict[Path, float]:
    """Max-min fair rates of these paths."""
    users: dict[Port, set[Path]] = {}
    for path in paths:
        for port in _ports(path):
            users.setdefault(port, set()).add(path)
    room = {port: rate(port) for port in users}
    speeds: dict[Path, float] = {}
    while users:
        tight = min(users, key=lambda port: (room[port] / len(users[port]), port))
        share = room[tight] / len(users[tight])
        for path in list(users[tight]):
            speeds[path] = share
            for port in _ports(path):
                room[port] -= share
                users[port].discard(path)
                if not users[port]:
                    del users[port]
    return speeds


def _ports(path: Path) -> tuple[Port, Port]:
    sender, receiver, level = path
    return (sender, level, True), (receiver, level, False)
