"""Mishaps of the interpreter's lock: a call of C holds it, and only the stand-in of the server speaks."""

from __future__ import annotations

import random
from dataclasses import replace

from bml.protocol.timeouts import Timeouts
from bml.sim.mishaps.chaos import POINTS, Mishap, Mishaps, When
from bml.topology import Fabric

_OF_PROCESSES = ("crash", "freeze", "leave", "join", "raise", "return", "endless")
_TOO_LONG = 0.1
"""How often the lock is held for longer than the stand-in speaks, where nothing else happens."""
_BY_ALL = 0.2
"""How often all servers hold the lock and one dies meanwhile, where nothing else happens."""


def draw_held(chance: random.Random, fabric: Fabric, timeouts: Timeouts, beside: Mishaps) -> Mishaps:
    """One or two servers that hold the lock, for a moment or for long, at any event.

    Not for long beside a mishap of the network: while all others wait for one server, hardly anything is
    sent, and which NIC is broken is known by few of them.
    """
    alone, found = not beside, []
    if alone and chance.random() < _BY_ALL:
        return _by_all(chance, fabric, timeouts)
    of_network = any(not each.kind.startswith(("coordinator", "launcher", *_OF_PROCESSES)) for each in beside)
    for server in chance.sample(fabric.servers, chance.choice((1, 1, 2))):
        point = chance.choice(("submit", "complete", "commit", "commit", *POINTS))
        nth = chance.randint(1, max(1, (8 if POINTS[point] == 4 else POINTS[point]) * fabric.n_servers))
        when = When(point, nth, chance.choice((0.0, chance.uniform(0, timeouts.detect_s))))
        for_s = timeouts.detect_s * 10 ** chance.uniform(-1, 0.3 if of_network else 1.0)
        if not of_network and chance.random() < 0.5:
            for_s = chance.uniform(
                timeouts.warm_up_s, 0.8 * timeouts.hold_s
            )  # no coordinator is so patient else
        if alone and chance.random() < _TOO_LONG:
            for_s = timeouts.hold_s + timeouts.detect_s * chance.uniform(2, 10)
        found.append(Mishap("gil", (server,), when, for_s))
        if for_s > timeouts.detect_s and chance.random() < 0.6:
            found.append(_meanwhile(chance, fabric, found[-1]))
    return tuple(found)


def _meanwhile(chance: random.Random, fabric: Fabric, held: Mishap) -> Mishap:
    """A death soon after the lock was taken, so that a view needs the answer of the server that holds it."""
    when = replace(held.when, after_s=held.when.after_s + held.for_s * chance.uniform(0, 0.5))
    if chance.random() < 0.3:
        return Mishap("coordinator-crash", (), when)
    return Mishap(
        "crash", (chance.choice([each for each in fabric.servers if each not in held.target]),), when
    )


def _by_all(chance: random.Random, fabric: Fabric, timeouts: Timeouts) -> Mishaps:
    """All servers but one hold the lock, and that one dies: nobody is left to tell of the others.

    They take it at once, or one after the other, such as before and after they have answered.
    """
    dies, longest_s = chance.choice(fabric.servers), 0.8 * timeouts.hold_s
    when = When("commit", chance.randint(1, 4 * fabric.n_servers), 0.0)
    spread_s = chance.choice((0.0, 0.1, 1.0)) * timeouts.detect_s
    holds = [
        Mishap(
            "gil",
            (server,),
            replace(when, after_s=chance.uniform(0, spread_s)),
            chance.uniform(longest_s / 10, longest_s),
        )
        for server in fabric.servers
        if server != dies
    ]
    deaths = [Mishap("crash", (dies,), replace(when, after_s=chance.uniform(0, longest_s / 10)))]
    if chance.random() < 0.3:
        after_s = chance.uniform(0, longest_s / 10)
        deaths.append(Mishap("coordinator-crash", (), replace(when, after_s=after_s)))
    return (*holds, *deaths)
