"""All sets of so many failures of a fabric that differ, with the number of sets like each; or random ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from math import comb
from typing import NamedTuple, TypeAlias

from bml.lab.survey.likeness import Form, Likeness, likeness
from bml.topology import Fabric, Failure, FatTree, LinkFailure, ServerFailure, SwitchFailure

_Kinds: TypeAlias = dict[Form, tuple[frozenset[Failure], int]]
"""An example of each kind of set, and how many sets are like it."""


class Sets(NamedTuple):
    """Sets of so many failures.

    Attributes:
        total: how many sets there are.
        found: a set for each kind that was found, with how many sets it stands for: all of its kind, or those
            of its kind in the sample.
        exact: whether all kinds are there.
    """

    total: int
    found: tuple[tuple[frozenset[Failure], int], ...]
    exact: bool


def parts_of(fabric: Fabric) -> tuple[Failure, ...]:
    """Return what can fail and is alive: servers, links, switches, but not the inside of a Fat-Tree."""
    switches = () if isinstance(fabric.wiring, FatTree) else fabric.switches
    return (
        *(ServerFailure(server) for server in fabric.servers),
        *(LinkFailure(server, level) for server, level in fabric.links),
        *(SwitchFailure(level, group) for level, group in switches),
    )


def sets_of(fabric: Fabric, most_failures: int, n_samples: int, seed: int) -> Iterator[Sets]:
    """Yield the sets of 0, 1, ... failures: all that differ, or, of more than `n_samples`, random ones.

    A set of random ones counts as often as it, or one like it, was drawn.
    """
    parts, alike = parts_of(fabric), likeness(fabric)
    known: _Kinds | None = {(): (frozenset(), 1)}
    for n_failures in range(most_failures + 1):
        total = comb(len(parts), n_failures)
        if n_failures and known is not None:
            hopeless = n_failures > alike.most_failures or total > n_samples * alike.n_symmetries
            known = None if hopeless else _extended(parts, known, n_failures, n_samples, alike)
        if known is None and total <= n_samples:
            known = _grouped(map(frozenset, combinations(parts, n_failures)), alike)
        if known is not None:
            yield Sets(total, tuple(known.values()), True)
        else:
            chance = random.Random(f"{seed}/{n_failures}")
            drawn = (frozenset(chance.sample(parts, n_failures)) for _ in range(n_samples))
            yield Sets(total, tuple(_grouped(drawn, alike).values()), False)


def _extended(
    parts: tuple[Failure, ...], fewer: _Kinds, n_failures: int, most: int, alike: Likeness
) -> _Kinds | None:
    """Return the kinds of sets with one failure more; None if there are more than `most`.

    A set of f failures is made from f sets of f - 1, so each is counted f times.
    """
    counted: Counter[Form] = Counter()
    example: dict[Form, frozenset[Failure]] = {}
    for smaller, n_like in fewer.values():
        for part in parts:
            if part not in smaller:
                larger = smaller | {part}
                form = alike.form(larger)
                counted[form] += n_like
                example.setdefault(form, larger)
        if len(counted) > most:
            return None
    return {form: (example[form], n_ways // n_failures) for form, n_ways in counted.items()}


def _grouped(sets: Iterable[frozenset[Failure]], alike: Likeness) -> _Kinds:
    found: _Kinds = {}
    for each in sets:
        form = alike.form(each)
        first, n_times = found.get(form, (each, 0))
        found[form] = first, n_times + 1
    return found
