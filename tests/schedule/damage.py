"""Failure sets for the tests of packed trees and bounds: all single ones, all pairs, random ones by seed."""

import random
from itertools import combinations

from bml.topology import parse


def single_failures(name):
    """Every server, every link and every switch of a fabric."""
    fabric = parse(name)
    found = [f"server:{server}" for server in fabric.servers]
    found += [f"link:{server}/{level}" for server, level in fabric.links]
    return found + [f"switch:{level}/{group}" for level, group in fabric.switches]


def damaged_by(name, *failures):
    """The fabric without these, or None if its survivors are too few or cannot reach one another."""
    fabric = parse(name).without(*failures)
    return fabric if len(fabric.servers) > 1 and fabric.is_connected else None


def pairs(name):
    """Every pair of failures that leaves the survivors connected."""
    found = (damaged_by(name, *pair) for pair in combinations(single_failures(name), 2))
    return [fabric for fabric in found if fabric]


def random_sets(name, count, seed, most=6):
    """Fabrics with 1 to `most` random failures, survivors connected, the same for the same seed."""
    rng = random.Random(seed)
    possible = single_failures(name)
    found = []
    while len(found) < count:
        fabric = damaged_by(name, *rng.sample(possible, rng.randint(1, most)))
        if fabric:
            found.append(fabric)
    return found


def random_rates(fabric, seed):
    """The fabric with random rates from 1/5 to 2 on all links."""
    rng = random.Random(seed)
    return fabric.with_rates({link: f"{rng.randint(1, 10)}/5" for link in fabric.links})
