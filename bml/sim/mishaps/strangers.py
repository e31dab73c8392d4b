"""Mishaps between servers that joined while no coordinator knows of them.

A coordinator is started with the servers that the job began with. Its successor learns of those that joined
from what the servers say to it, in whatever order that comes.
"""

from __future__ import annotations

import random

from bml.sim.mishaps.chaos import Mishap, Mishaps, When
from bml.topology import Fabric

#: Points of a run at which servers that join are on their way in, and how often each is reached.
_POINTS = {"keep": 8, "state": 2, "CaughtUp": 3}
_SUCCESSOR_AFTER_S = 0.25  # while the successor meets the servers


def draw_strangers(chance: random.Random, fabric: Fabric, absent: tuple[int, ...]) -> Mishaps:
    """The coordinator dies, and the connections between two servers that joined break before its successor.

    Nothing, where those that were `absent` at first are no neighbours.
    """
    pairs = [
        (server, peer, level)
        for server in absent
        for level in range(fabric.levels)
        for peer in fabric.neighbours(server, level)
        if peer in absent and server < peer
    ]
    if not pairs:
        return ()
    point = chance.choice(list(_POINTS))
    nth = chance.randint(1, _POINTS[point])
    crash = Mishap("coordinator-crash", (), When(point, nth, 0.0))
    after_s = [chance.uniform(0.0, _SUCCESSOR_AFTER_S) for _ in pairs]
    resets = (
        Mishap("reset", one, When(point, nth, late_s)) for one, late_s in zip(pairs, after_s, strict=True)
    )
    return (crash, *resets)


__all__ = ["draw_strangers"]
