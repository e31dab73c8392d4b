"""Pause frames on a Fat-Tree and on a BCube, and how long steps take packet by packet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from bml.lab.figures.figure import Basis, How, Point, figure
from bml.lab.figures.sources import HIPS_OR_LATER
from bml.lab.figures.steps import DELAY_S, NBYTES, RATE
from bml.lab.flows.simulate import Conditions, traffic_of
from bml.lab.flows.traffic import Traffic
from bml.lab.packets.settings import Settings
from bml.lab.packets.simulate import Outcome, play
from bml.schedule import plan
from bml.topology import parse
from bml.topology.fattree import with_seed

_FAT_TREE_MS, _BCUBE_MS = 22.9, 11.46
"""Published theoretical times, in milliseconds."""
_SHUFFLE_SEED = 0

IN_ORDER = ("HiPS, bcube:16x2", "ring, fattree:10", "HiPS over its tiers, fattree:10", "mesh, fattree:10")
SHUFFLED = ("ring, fattree:10 shuffled", "HiPS over its tiers, fattree:10 shuffled")
_ALGORITHMS = {"HiPS": "bml", "ring": "ring", "HiPS over its tiers": "hips:tiers", "mesh": "mesh"}
CONTROLS = {"DCQCN": True, "no rate control": False}

_SETTING = (
    "57.5 MB of parameters and 40 Gbit/s, as published, and 1 µs a cable; packets of 4 KiB, 375 KB of buffer "
    "for each port of a switch. *Shuffled*: servers are at random places, so that neighbours in a ring or a "
    "tier are not near each other. One seed of paths, marks and turns"
)


@figure(
    "pauses",
    title="Pause frames on Fat-Tree and BCube",
    unit="thousands of pauses in a step",
    source=HIPS_OR_LATER,
    about=f"{_SETTING}. Counted is how often a switch paused a link (PFC). Published is a distribution with "
    "two curves, of a mesh on a Fat-Tree, with thousands of pauses, and of HiPS on BCube, with none; we have "
    "no number of the first.",
    reading="A mesh on the Fat-Tree pauses links more than 100,000 times, with rate control as without: each "
    "server has 249 connections, of which each sends so little that slowing it down changes nothing. HiPS on "
    "BCube pauses none. So far that is the claim. But a ring in order pauses none on a Fat-Tree either, and "
    "with rate control rings and HiPS over tiers pause few links, and take longer instead (`packet-times`). "
    "How many pauses there are depends on the buffers: [simulation](../reference/simulation.md#pauses) has a "
    "sweep.",
)
def pauses(cases: Sequence[str] = (*IN_ORDER, *SHUFFLED)) -> list[Point]:
    """Return pauses of a step in thousands, with and without rate control."""
    return list(_points(cases, 1))


@figure(
    "packet-times",
    title="Steps on Fat-Tree and BCube, packet by packet",
    unit="milliseconds of a step",
    source=HIPS_OR_LATER,
    about=f"{_SETTING}. The published values are theory, that of `fat-tree-bcube`, of servers in order; for "
    "servers at random places there is none.",
    reading="On BCube packets take what theory and flows say. On the Fat-Tree a mesh takes 1.4 times what "
    "theory says, and 1.3 times what flows say (`fat-tree-bcube`): a pause also stops packets that go "
    "elsewhere. Rate control does not help here: DCQCN begins by halving rates, and takes milliseconds to "
    "find them again, as long as a stage of a step. With servers at random places rings and HiPS take 3 to 6 "
    "times as long as theory says for servers in order, as their traffic goes through the core, where paths "
    "collide.",
)
def packet_times(cases: Sequence[str] = (*IN_ORDER, *SHUFFLED)) -> list[Point]:
    """Return the times of a step in milliseconds, with and without rate control."""
    return list(_points(cases, 0))


def _points(cases: Sequence[str], which: int) -> Iterator[Point]:
    for case in cases:
        for control, is_on in CONTROLS.items():
            ours = played(case, is_on)[which]
            known: float | None = _BCUBE_MS if "bcube" in case else _FAT_TREE_MS
            if case in SHUFFLED:
                known = None
            note = ""
            if which:
                known = 0.0 if "bcube" in case else None
                note = "published: thousands" if case.startswith("mesh") else ""
            basis = Basis.none if known is None else Basis.value
            yield Point(case, control, ours, How.packets, known, basis, note)


@cache
def played(case: str, dcqcn: bool) -> tuple[float, float]:
    """Simulate a case of IN_ORDER or SHUFFLED; return milliseconds of a step, and thousands of pauses."""
    outcome = outcome_of(case, Settings(delay_s=DELAY_S, dcqcn=dcqcn))
    return outcome.seconds * 1e3, int(outcome.pauses.sum()) / 1e3


def outcome_of(case: str, settings: Settings, seed: int = 0) -> Outcome:
    """Simulate a case of IN_ORDER or SHUFFLED; `seed` is that of paths, marks and turns."""
    name, _, where = case.partition(", ")
    fabric = with_seed(parse(where.partition(" ")[0]), seed)
    conditions = Conditions(NBYTES, RATE, whole=True)
    traffic, _ = traffic_of(plan(fabric, _ALGORITHMS[name]), conditions)
    if where.endswith("shuffled"):
        traffic = elsewhere(traffic, fabric.n_servers)
    return play(traffic, fabric, conditions, settings, seed)


def elsewhere(traffic: Traffic, n_servers: int) -> Traffic:
    """Return the same traffic with all servers at other places, drawn from one seed; they have one NIC."""
    place = np.random.default_rng(_SHUFFLE_SEED).permutation(n_servers).astype(np.int32)
    sends = traffic.sender >= 0
    return replace(
        traffic,
        sender=np.where(sends, place[traffic.sender], traffic.sender),
        receiver=np.where(sends, place[traffic.receiver], traffic.receiver),
    )
