"""Simulated steps send what the servers' own programs send, and nothing before what it needs has come."""

import random

import numpy as np
import pytest
from every_algorithm import SPELLINGS
from program_transfers import Names, transfers_of
from sampled import first

from bml.lab.flows.network import wire
from bml.lab.flows.simulate import Conditions, play, traffic_of
from bml.schedule import plan
from bml.schedule.ir.exchange import ExchangeProgram
from bml.topology import FabricError, UsageError, parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

FABRICS = (
    "switch:2", "switch:5", "bcube:2x2", "bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:2x1", "torus:5x1",
    "torus:3x2", "torus:4x2", "fattree:4", "fattree:4/5",
)  # fmt: skip
ROUNDS, PER_ROUND = 25, 20
NBYTES, RATE = 1e6, 25e6


def drawn(chance):
    """A plan of any algorithm that works on a fabric with up to four parts dead and some links slow."""
    while True:
        fabric = parse(chance.choice(FABRICS))
        parts = [f"server:{each}" for each in fabric.servers]
        parts += [f"link:{server}/{level}" for server, level in fabric.links]
        parts += [f"switch:{level}/{group}" for level, group in fabric.switches]
        links = chance.sample(fabric.links, chance.choice((0, 0, 1, 2)))
        damaged = fabric.with_rates({link: f"1/{chance.randint(2, 10)}" for link in links})
        damaged = damaged.without(*chance.sample(parts, chance.choice((0, 1, 1, 2, 3, 4))))
        try:
            made = plan(damaged, chance.choice(SPELLINGS))
            made.build()
        except (FabricError, UsageError):
            continue
        if damaged.is_connected and len(damaged.servers) > 1:
            return made


def of_programs(made, n_slices, names):
    """The numbers of all slices' transfers, and the size of the largest piece, as the programs have them."""
    programs = {server: made.program(server) for server in made.fabric.servers}
    needed = transfers_of(programs, made.is_plain_bml)
    facts, needs = [], []
    for turn in range(n_slices):
        start = len(facts)
        for each in needed:
            # Results of a slice go before its partial sums, and those before the next slice.
            hop = each.sender, each.level, each.receiver
            facts.append((*hop, 2 * turn + (each.phase == 0), scaled(each.share / n_slices)))
            needs.append([start + need for need in each.needs])
    return names.of(facts, needs), heaviest(next(iter(programs.values())))


def scaled(share):
    """A share as a whole number that rounding does not change."""
    return round(float(share) * 1e9)


def heaviest(program):
    """The largest piece as a share of the vector."""
    if isinstance(program, ExchangeProgram):
        return 1.0
    if program.cumulative is None:
        return 1 / program.pieces
    return max(np.diff(program.cumulative)) / program.cumulative[-1]


def of_traffic(traffic, names):
    """The numbers of simulated transfers, and which ones each of them waits for, meetings left out."""
    waits = [set() for _ in range(traffic.n_nodes)]
    for before, after in zip(traffic.before.tolist(), traffic.after.tolist(), strict=True):
        waits[after].add(before)
    behind = {}

    def through(node):
        """What a node waits for; for a meeting, those that meet there stand."""
        if node not in behind:
            found = set()
            for other in waits[node]:
                found |= {other} if traffic.sender[other] >= 0 else through(other)
            behind[node] = found
        return behind[node]

    nodes = [node for node in range(traffic.n_nodes) if traffic.sender[node] >= 0]
    place = {node: at for at, node in enumerate(nodes)}
    columns = zip(traffic.sender.tolist(), traffic.level.tolist(), traffic.receiver.tolist(), strict=True)
    rest = zip(traffic.priority.tolist(), traffic.share.tolist(), strict=True)
    every = [(*hop, priority, scaled(share)) for hop, (priority, share) in zip(columns, rest, strict=True)]
    needs = [[place[other] for other in through(node)] for node in nodes]
    return names.of([every[node] for node in nodes], needs), {node: through(node) for node in nodes}


def check(seed):
    """Compare one plan."""
    chance, names = random.Random(seed), Names()
    made, n_slices = drawn(chance), chance.choice((1, 1, 3))
    said = f"{made.algorithm} on {made.fabric}, {n_slices} slices"
    wanted, largest = of_programs(made, n_slices, names)
    asked = Conditions(NBYTES, RATE, slice_nbytes=NBYTES * largest / n_slices, whole=True)
    traffic, _ = traffic_of(made, asked)
    found, needs = of_traffic(traffic, names)
    outcome = play(traffic, wire(traffic, made.fabric, RATE), asked)
    for node, before in needs.items():
        for other in before:
            assert outcome.began[node] >= outcome.arrived[other] * (1 - 1e-9), f"too early: {said}"
    assert found == wanted, said


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("number", first(3, range(ROUNDS)))
def test_random_plans(number):
    for seed in range(number * PER_ROUND, (number + 1) * PER_ROUND):
        check(seed)
