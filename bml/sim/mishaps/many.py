"""The mishaps of a simulated run of many servers."""

from __future__ import annotations

import random

from bml.sim.mishaps.chaos import Mishaps, draw_in_recovery, draw_one
from bml.topology import Fabric


def draw_many(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """One to six mishaps of single parts of a large fabric, at times in the middle of a recovery."""
    found = list(draw_in_recovery(chance, fabric, detect_s) if chance.random() < 0.4 else ())
    wanted = chance.randint(max(1, len(found)), 6)
    while len(found) < wanted:
        mishap = draw_one(chance, fabric, detect_s)
        if mishap.kind != "partition":  # that befalls up to half of the servers
            found.append(mishap)
    return tuple(found)
