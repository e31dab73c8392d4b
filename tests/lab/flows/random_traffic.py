"""Random traffic over random links, from a seed: what the oracles are asked."""

import random
from dataclasses import dataclass

import numpy as np

from bml.lab.flows.network import Network, sorted_paths
from bml.lab.flows.simulate import Conditions, play
from bml.lab.flows.traffic import Traffic


@dataclass
class Case:
    """Transfers in lists; `before[t]` are those that transfer t waits for, all of them earlier ones."""

    connection: list
    nbytes: list
    priority: list
    before: list
    paths: list
    capacity: list
    delay: float


def draw(seed, in_order=False):
    """Draw a case; `in_order`: a connection sends in the order of numbers, whatever is ready first."""
    chance = random.Random(seed)
    n_links, n_connections, n_transfers = chance.randint(2, 8), chance.randint(2, 10), chance.randint(5, 30)
    capacity = [chance.choice((1.0, 2.0, 2.5, 10 * chance.random() + 0.1)) for _ in range(n_links)]
    paths = [chance.sample(range(n_links), chance.randint(1, min(4, n_links))) for _ in range(n_connections)]
    connection, before, last = [], [], {}
    for t in range(n_transfers):
        meeting = not in_order and chance.random() < 0.15
        connection.append(-1 if meeting else chance.randrange(n_connections))
        waits = set(chance.sample(range(t), min(t, chance.randint(0, 2))))
        if in_order and connection[t] in last:
            waits.add(last[connection[t]])
        last[connection[t]] = t
        before.append(sorted(waits))
    # Whole sizes, a third of them alike, so that things happen at the same time.
    nbytes = [0.0 if c < 0 else chance.choice((4.0, 8.0, 1 + 9 * chance.random())) for c in connection]
    priority = [0 if in_order else chance.randint(0, 2) for _ in connection]
    return Case(connection, nbytes, priority, before, paths, capacity, chance.choice((0.0, 0.0, 0.25)))


def simulated(case):
    """When each transfer arrives by bml.lab.flows."""
    pairs = [(c, link) for c, path in enumerate(case.paths) for link in path]
    of, over = np.array(pairs, np.int64).T
    n = len(case.nbytes)
    ends = np.zeros(n, np.int32)
    network = Network(
        [str(link) for link in range(len(case.capacity))],
        np.array(case.capacity),
        *sorted_paths(of, over.astype(np.int32), len(case.paths), len(case.capacity)),
        np.array(case.connection, np.int32),
        *(np.zeros(len(case.paths), np.int32) for _ in range(3)),
    )
    arrows = np.array([(b, t) for t, waits in enumerate(case.before) for b in waits], np.int32).reshape(-1, 2)
    traffic = Traffic(
        ends, ends, ends, np.array(case.nbytes), np.array(case.priority, np.int32), arrows[:, 0], arrows[:, 1]
    )
    outcome = play(traffic, network, Conditions(nbytes=1.0, rate=1.0, delay_s=case.delay))
    return outcome.arrived.tolist()
