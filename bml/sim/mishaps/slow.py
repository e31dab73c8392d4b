"""Mishaps of runs in which parts are slow: NICs, one direction of them, switches, the users of servers."""

from __future__ import annotations

import random

from bml.sim.mishaps.chaos import FOREVER, Mishap, Mishaps, When
from bml.sim.world.ports import Port
from bml.topology import Fabric, Link

KINDS = {"slow": 4, "slow-out": 2, "slow-in": 2, "slow-switch": 2, "busy": 2, "degrade": 2, "jitter": 1}
_USUAL_SHARE = 0.2
_USUAL_DELAY_MS = 20
_FALLS_S = 2.0  # a NIC degrades over so long
_FALLS = 4
_PERCENT = (5, 10, 20, 20, 30, 50)
_OTHERS = ("crash", "freeze", "coordinator-crash", "coordinator-freeze", "control-loss", "reset")


def draw_slow(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """None, one or two slow parts, and perhaps another mishap before or while rates are agreed on.

    The target of a slow part ends with the share of its rate, or of the speed of a server's computation, that
    is left, in percent; 20 if it is not there. That of a NIC with jitter ends with milliseconds.
    """
    found = [_slow(chance, fabric) for _ in range(chance.choice((0, 1, 1, 1, 2)))]
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        kind = chance.choice(_OTHERS)
        server, level = chance.choice([nic for nic in fabric.links if fabric.neighbours(*nic)])
        target = {"reset": (server, chance.choice(fabric.neighbours(server, level)), level)}
        point = chance.choice(("Measured", "Freeze", "Status", "Propose", "Accepted", "Install", "commit"))
        when = When(point, chance.randint(1, 4 * fabric.n_servers), chance.choice((0.0, 0.004)))
        where = () if kind.startswith("coordinator") else target.get(kind, (server,))
        for_s = detect_s * chance.uniform(0.1, 4.0) if kind.endswith("freeze") else FOREVER
        found.append(Mishap(kind, where, when, for_s))
    return tuple(found)


def _slow(chance: random.Random, fabric: Fabric) -> Mishap:
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    server, level = chance.choice([nic for nic in fabric.links if fabric.neighbours(*nic)])
    group = (level, fabric.group(server, level))
    where = {"slow-switch": group, "busy": (server,)}.get(kind, (server, level))
    for_s = chance.choice((FOREVER, FOREVER, chance.uniform(0.5, 6.0)))
    return Mishap(kind, (*where, chance.choice(_PERCENT)), When("", 0, chance.uniform(0.0, 2.0)), for_s)


def nics_of(mishap: Mishap, fabric: Fabric) -> list[Link]:
    """The NICs that a slow part slows down."""
    first, second, *_ = mishap.target
    if mishap.kind != "slow-switch":
        return [(first, second)]
    return [(server, first) for server in fabric.members(first, second)]


def share_of(mishap: Mishap) -> float:
    """The share of its rate, or of its speed, that a slow part has left."""
    n_named = 1 if mishap.kind == "busy" else 2
    return mishap.target[n_named] / 100 if len(mishap.target) > n_named else _USUAL_SHARE


def delay_s_of(mishap: Mishap) -> float:
    """How late a NIC with jitter may be: its target ends with the milliseconds."""
    return (mishap.target[2] if len(mishap.target) > 2 else _USUAL_DELAY_MS) / 1000


def falls_of(mishap: Mishap, now_s: float) -> Mishaps:
    """The slow parts, one after the other, by which the rate of a NIC falls; all end when the mishap does."""
    falls = []
    for n in range(1, _FALLS + 1):
        after_s, share = _FALLS_S * n / _FALLS, 1 - (1 - share_of(mishap)) * n / _FALLS
        if after_s < mishap.for_s:
            target = (*mishap.target[:2], round(100 * share))
            falls.append(Mishap("slow", target, When("", 0, now_s + after_s), mishap.for_s - after_s))
    return tuple(falls)


def ports_of(mishap: Mishap, fabric: Fabric) -> list[Port]:
    """The ports that a slow part slows down, or holds up."""
    directions = {"slow-out": (True,), "slow-in": (False,)}.get(mishap.kind, (True, False))
    return [(*nic, out) for nic in nics_of(mishap, fabric) for out in directions]
