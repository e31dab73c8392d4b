"""What the cost model counts in a forest, against counting edge by edge."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from bml.schedule import plan
from bml.schedule.ir.forest import Forest
from bml.schedule.select.model import counts, crowd
from bml.topology import parse


def edge_by_edge(forest: Forest) -> tuple[Fraction, Fraction, Fraction]:
    """Added, touched and incast of the busiest servers."""
    added, touched, incast = Counter[int](), Counter[int](), Counter[int]()
    for piece, weight in enumerate(forest.weight.tolist()):
        senders = Counter(
            (int(parent), int(forest.stage[piece, server]))
            for server, parent in enumerate(forest.parent[piece].tolist())
            if parent >= 0
        )
        children = Counter[int]()
        for (parent, _), count in senders.items():
            children[parent] += count
            incast[parent] += weight * crowd(count)
        for parent, count in children.items():
            added[parent] += weight * count
            touched[parent] += weight * (count + 2)
    found = (max(each.values(), default=0) for each in (added, touched, incast))
    one, two, three = (Fraction(each, forest.whole) for each in found)
    return one, two, three


@pytest.mark.parametrize("algorithm", ["bml", "ring", "packed", "mesh", "hips:ring"])
@pytest.mark.parametrize("name", ["bcube:3x2", "torus:4x2", "switch:12", "bcube:2x4"])
def test_counts_are_those_of_the_edges(name: str, algorithm: str) -> None:
    """Trees of a ring have as many stages as servers, those of others few."""
    fabric = parse(name).without("server:2") if algorithm != "bml" else parse(name)
    forest = plan(fabric, algorithm).forest
    found = counts(forest, fabric)
    assert (found.added, found.touched, found.incast) == edge_by_edge(forest)
