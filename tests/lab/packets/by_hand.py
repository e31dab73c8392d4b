"""Traffic of a few transfers between named servers, and its simulation packet by packet."""

from collections.abc import Sequence

import numpy as np

from bml.lab.flows.simulate import Conditions
from bml.lab.flows.traffic import Traffic
from bml.lab.packets.settings import Settings
from bml.lab.packets.simulate import Outcome, play
from bml.topology import Fabric, parse
from bml.topology.fattree import with_seed

RATE = 5e9
"""Of every link, bytes per second."""


def transfers(
    pairs: Sequence[tuple[int, int]], shares: Sequence[float], waits: Sequence[tuple[int, int]] = ()
) -> Traffic:
    """Transfers from server to server over level 0, each with a share of the vector; (before, after)."""
    ends = np.array(pairs, np.int32).T
    level = priority = np.zeros(len(pairs), np.int32)
    before, after = np.array(waits, np.int32).reshape(-1, 2).T
    return Traffic(ends[0], level, ends[1], np.array(shares, float), priority, before, after)


def sent(traffic: Traffic, fabric: Fabric | str, nbytes: float, seed: int = 0, **settings: object) -> Outcome:
    known = with_seed(parse(fabric), seed) if isinstance(fabric, str) else fabric
    return play(traffic, known, Conditions(nbytes, RATE), Settings(**settings), seed)  # type: ignore[arg-type]
