"""Sets of failures that are alike: a symmetry of the healthy wiring maps one onto the other.

A set gets a form that all sets like it share, so those that differ can be counted without listing the others.
The symmetries are all of a BCube (values of a digit are renamed, levels change places), of a torus (turned,
reflected, dimensions change places) and of one switch or a full Fat-Tree (servers, edge switches, pods are
renamed). On any other wiring every set is like itself alone.

Sets that are alike have the same survivors and the same least time. Their plans may differ by what packed
trees are rounded by, less than 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import permutations, product
from math import factorial, inf
from typing import Any, NamedTuple, TypeAlias

from bml.topology import (
    BCube,
    BigSwitch,
    Fabric,
    Failure,
    FatTree,
    LinkFailure,
    ServerFailure,
    SwitchFailure,
    Torus,
)

Form: TypeAlias = tuple[Any, ...]
"""Equal for two sets of failures exactly if a symmetry maps one onto the other."""


_MOST_ORDERS = 2_000
"""A form is the least of so many at most: with more failures, or levels, to look for it takes too long."""


class Likeness(NamedTuple):
    """How sets of up to `most_failures` failures of a fabric are compared, and how many symmetries that uses.

    Any larger set counts as like itself alone.
    """

    form: Callable[[Collection[Failure]], Form]
    n_symmetries: int
    most_failures: float

    def compares(self, n_failures: int) -> bool:
        """Whether sets of so many failures are compared at all."""
        return self.n_symmetries > 1 and n_failures <= self.most_failures


def likeness(fabric: Fabric) -> Likeness:
    """Return how sets of failures of this fabric are compared.

    On a fabric that is damaged already, or has links of several rates, no two sets are taken to be alike.
    """
    wiring = fabric.wiring
    if fabric.failures or fabric.rates:
        return Likeness(_itself, 1, inf)
    match wiring:
        case BCube():
            orders = factorial(wiring.levels)
            n_symmetries = factorial(wiring.ports) ** wiring.levels * orders
            return _limited(partial(_of_digits, wiring), n_symmetries, lambda n: factorial(n) * orders)
        case BigSwitch():
            return _limited(partial(_of_digits, wiring), factorial(wiring.ports), factorial)
        case Torus():
            orders = factorial(wiring.dimensions) * 2**wiring.dimensions
            n_symmetries = wiring.size**wiring.dimensions * orders
            return _limited(partial(_of_torus, wiring), n_symmetries, lambda n: n * orders)
        case FatTree() if wiring.n_servers == wiring.switch_ports**3 // 4 and not wiring.dead:
            half, pods = wiring.switch_ports // 2, wiring.switch_ports
            n_symmetries = factorial(half) ** (half * pods) * factorial(half) ** pods * factorial(pods)
            return _limited(partial(_of_tree, wiring), n_symmetries, factorial)
    return Likeness(_itself, 1, inf)


def _limited(
    form: Callable[[Collection[Failure]], Form], n_symmetries: int, n_orders: Callable[[int], int]
) -> Likeness:
    """Compare sets of so few failures that `n_orders` of their number are not too many."""
    most = 0
    while most < _MOST_ORDERS and n_orders(most + 1) <= _MOST_ORDERS:
        most += 1

    def limited(failures: Collection[Failure]) -> Form:
        return form(failures) if len(failures) <= most else _itself(failures)

    return Likeness(limited, n_symmetries, most)


def _itself(failures: Iterable[Failure]) -> Form:
    return tuple(sorted(failures))


def _of_digits(wiring: BCube | BigSwitch, failures: Iterable[Failure]) -> Form:
    """Rename the values of each digit in the order in which they come, levels and failures in every order.

    A switch has every value of its own level's digit: -1.
    """
    rows = []
    for failure in failures:
        match failure:
            case ServerFailure(server):
                rows.append((0, -1, wiring.address(server)))
            case LinkFailure(server, level):
                rows.append((1, level, wiring.address(server)))
            case SwitchFailure(level, group):
                digits = list(wiring.address(wiring.members(level, group)[0]))
                digits[level] = -1
                rows.append((2, level, tuple(digits)))
    rows.sort()
    return min(
        _renamed(ordered, levels)
        for levels in permutations(range(wiring.levels))
        for ordered in permutations(rows)
    )


def _renamed(rows: tuple[tuple[int, int, tuple[int, ...]], ...], levels: tuple[int, ...]) -> Form:
    names: list[dict[int, int]] = [{-1: -1} for _ in levels]
    return tuple(
        (
            kind,
            -1 if own < 0 else levels.index(own),
            *(names[level].setdefault(digits[level], len(names[level]) - 1) for level in levels),
        )
        for kind, own, digits in rows
    )


def _of_tree(wiring: FatTree, failures: Iterable[Failure]) -> Form:
    """Rename pods, edge switches of a pod, places of an edge switch, failures in every order."""
    rows = []
    for failure in sorted(failures):
        assert not isinstance(failure, SwitchFailure)
        place, edge, pod = wiring.address(failure.server)
        rows.append((isinstance(failure, LinkFailure), (pod,), (pod, edge), (pod, edge, place)))
    return min(_named(ordered) for ordered in permutations(rows))


def _named(rows: tuple[tuple[Any, ...], ...]) -> Form:
    names: dict[tuple[int, ...], int] = {}
    return tuple((kind, *(names.setdefault(at, len(names)) for at in path)) for kind, *path in rows)


_Placed: TypeAlias = tuple[int, int, int, tuple[int, ...]]
"""(kind, dimension, direction, coordinates) of a failure on a torus; -1 and 0 if it has no direction."""


def _of_torus(wiring: Torus, failures: Iterable[Failure]) -> Form:
    """Move each failure to the origin in turn, with dimensions in every order and each reflected or not."""
    rows = [_placed(wiring, failure) for failure in failures]
    if not rows:
        return ()
    forms = []
    for order in permutations(range(wiring.dimensions)):
        for signs in product((1, -1), repeat=wiring.dimensions):
            turned = [_turned(wiring.size, row, order, signs) for row in rows]
            for *_, origin in turned:
                forms.append(tuple(sorted(_moved(wiring.size, row, origin) for row in turned)))
    return min(forms)


def _placed(wiring: Torus, failure: Failure) -> _Placed:
    match failure:
        case ServerFailure(server):
            return 0, -1, 0, wiring.address(server)
        case LinkFailure(server, level):
            dimension = level // wiring.colours
            ahead = wiring.step(server, dimension, 1)[1] == level
            return 1, dimension, 1 if ahead else -1, wiring.address(server)
        case SwitchFailure(level, group):
            dimension = level // wiring.colours
            ends = wiring.members(level, group)
            first = next(end for end in ends if wiring.step(end, dimension, 1)[1] == level)
            return 2, dimension, 1, wiring.address(first)


def _turned(size: int, row: _Placed, order: tuple[int, ...], signs: tuple[int, ...]) -> _Placed:
    kind, dimension, direction, at = row
    where = [at[old] * signs[old] % size for old in order]
    if dimension < 0:
        return kind, dimension, direction, tuple(where)
    new = order.index(dimension)
    if kind == 2:
        # A cable is named by its end with the lower coordinate, which is the other one once it is reflected.
        if signs[dimension] < 0:
            where[new] = (where[new] - 1) % size
        return kind, new, direction, tuple(where)
    return kind, new, direction * signs[dimension], tuple(where)


def _moved(size: int, row: _Placed, origin: tuple[int, ...]) -> _Placed:
    kind, dimension, direction, at = row
    return kind, dimension, direction, tuple((x - o) % size for x, o in zip(at, origin, strict=True))
