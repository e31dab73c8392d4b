"""Which sets of failures are alike, against isomorphism of graphs that knows nothing of digits and rings."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from math import comb

import networkx as nx
import pytest
from networkx.algorithms.isomorphism import GraphMatcher

from bml.lab.survey.likeness import likeness
from bml.lab.survey.sets import parts_of, sets_of
from bml.schedule import prove
from bml.topology import Failure, LinkFailure, ServerFailure, SwitchFailure, parse

FABRICS = ("bcube:3x2", "bcube:2x3", "switch:5", "torus:3x1")
"""Fabrics whose symmetries are all of their graph's; a torus of even rings may have more."""


def automorphisms(name: str) -> list[dict[Failure, Failure]]:
    """All maps of parts onto parts that keep what is cabled to what, found by search."""
    fabric, graph = parse(name), nx.Graph()
    for part in parts_of(fabric):
        graph.add_node(part, kind=type(part))
    for server, level in fabric.links:
        link = LinkFailure(server, level)
        graph.add_edge(link, ServerFailure(server))
        graph.add_edge(link, SwitchFailure(level, fabric.group(server, level)))
    return list(GraphMatcher(graph, graph, lambda one, other: one == other).isomorphisms_iter())


@pytest.mark.slow
@pytest.mark.parametrize("name", FABRICS)
def test_sets_of_a_form_are_those_that_a_symmetry_maps_onto_each_other(name: str) -> None:
    fabric, maps = parse(name), automorphisms(name)
    form, chance = likeness(fabric).form, random.Random(name)
    assert likeness(fabric).n_symmetries == len(maps)
    parts = parts_of(fabric)
    for _ in range(100):
        one = frozenset(chance.sample(parts, 3))
        images = {frozenset(each[part] for part in one) for each in maps}
        assert {form(image) for image in images} == {form(one)}
        # A part is replaced by one of its kind, as most random sets differ already in their kinds.
        gone = chance.choice(sorted(one))
        other = one - {gone} | {chance.choice([each for each in parts if type(each) is type(gone)])}
        assert (form(one) == form(other)) == (other in images), (one, other)


@pytest.mark.parametrize("name", [*FABRICS, "torus:3x2", "torus:2x2", "fattree:4", "fattree:4/10"])
def test_every_set_is_counted_once(name: str) -> None:
    fabric = parse(name)
    form, parts = likeness(fabric).form, parts_of(fabric)
    for n_failures, sets in enumerate(sets_of(fabric, 2, 2000, 0)):
        assert sets.exact
        assert sets.total == comb(len(parts), n_failures) == sum(n_like for _, n_like in sets.found)
        listed = [form(frozenset(each)) for each in combinations(parts, n_failures)]
        assert {form(failures): n_like for failures, n_like in sets.found} == {
            each: listed.count(each) for each in set(listed)
        }


@pytest.mark.slow
def test_three_failures_of_any_bcube_of_two_levels_are_of_127_kinds() -> None:
    for name in ("bcube:3x2", "bcube:16x2"):
        assert [len(sets.found) for sets in sets_of(parse(name), 3, 400, 0)] == [1, 3, 20, 127]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:3x2", "torus:3x2", "switch:5", "torus:4x2"])
def test_sets_that_are_alike_have_one_bound(name: str) -> None:
    fabric, chance = parse(name), random.Random(name)
    form, parts = likeness(fabric).form, parts_of(fabric)
    seen: dict[object, Fraction | None] = {}
    for _ in range(150):
        failures = frozenset(chance.sample(parts, 2))
        damaged = fabric.without(*failures)
        bound = prove(damaged).value if damaged.is_connected else None
        assert seen.setdefault(form(failures), bound) == bound, failures


def test_what_is_damaged_or_slow_has_no_symmetries() -> None:
    for fabric in (parse("bcube:3x2").without("link:0/0"), parse("bcube:3x2").with_rates({(0, 0): "1/2"})):
        assert likeness(fabric).n_symmetries == 1
        sets = list(sets_of(fabric, 2, 100, 0))
        assert [each.exact for each in sets] == [True, True, False]
        assert sum(n_like for _, n_like in sets[2].found) == 100
