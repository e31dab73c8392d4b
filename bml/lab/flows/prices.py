"""What the ports and cables of a fabric cost, so that fabrics of one size or of one price can be compared.

A price is that of a port or cable of one rate, and grows with the rate. So for the price of another fabric a
fabric can have NICs whose rate is that of the other times the ratio of their prices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from bml.topology import (
    Fabric,
    FatTree,
    Graph,
    Torus,
    UsageError,
    bcube,
    big_switch,
    fat_tree,
    parse,
    torus,
)

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_CLOSE = Fraction(1, 8)
"""Fabrics whose numbers of servers differ by less, relatively, are of one size."""
_DEPTHS = (2, 3, 4)


@dataclass(frozen=True)
class Prices:
    """In any currency, for one rate: a port of a server, a port of a switch, a cable with both its ends."""

    nic: Fraction = Fraction(1)
    port: Fraction = Fraction(1)
    cable: Fraction = Fraction(0)

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {float(getattr(self, each.name)):g}" for each in fields(self))

    def of(self, parts: Parts) -> Fraction:
        """Price of these parts."""
        return self.nic * parts.nics + self.port * parts.ports + self.cable * parts.cables


@dataclass(frozen=True)
class Parts:
    """The parts of a healthy fabric: ports of servers and switches that are wired, and cables."""

    nics: int
    ports: int
    cables: int


def read_prices(text: str) -> Prices:
    """Read prices such as `nic=1,port=2.5,cable=0.5`; those that are not named stay as they are.

    Raises:
        UsageError: the text is something else, or everything is free.
    """
    found: dict[str, Fraction] = {}
    known = [each.name for each in fields(Prices)]
    for part in text.split(",") if text.strip() else ():
        name, _, number = (each.strip() for each in part.partition("="))
        if name not in known or name in found or not _NUMBER.fullmatch(number):
            raise UsageError(f"'{part}' in '{text}' is no price: write nic=1,port=2.5,cable=0.5")
        found[name] = Fraction(number)
    prices = replace(Prices(), **found)
    if prices.of(Parts(1, 1, 1)) == 0 or (prices.nic == 0 and prices.cable == 0):
        raise UsageError(f"'{text}' makes NICs and cables free, so a torus has no price: give one of them")
    return prices


def parts_of(fabric: Fabric) -> Parts:
    """Count the parts of a fabric as if nothing were broken."""
    wiring = fabric.wiring
    nics = int((fabric.groups >= 0).sum())
    match wiring:
        case Torus():
            return Parts(nics, 0, nics // 2)
        case Graph():
            at_switches = sum(len(switch) for level in wiring.sections for switch in level if len(switch) > 2)
            return Parts(nics, at_switches, at_switches + (nics - at_switches) // 2)
        case FatTree(switch_ports):
            half = switch_ports // 2
            inner = 2 * 2 * half**3  # cables between layers have two ends each
            return Parts(nics, nics + 2 * inner, nics + inner)
        case _:
            return Parts(nics, nics, nics)


def equal_in_size(fabric: Fabric) -> Iterator[Fabric]:
    """Yield the fabric, healthy, and others that have about as many servers: of each family and depth one."""
    wanted = fabric.n_servers
    own = parse(fabric.name)
    yield own
    others = [big_switch(wanted)] if wanted > 1 else []
    ports = next(ports for ports in range(2, 1000, 2) if ports**3 // 4 >= wanted)
    others.append(fat_tree(ports, wanted))
    for build in (bcube, torus):
        for depth in _DEPTHS:
            base = round(wanted ** (1 / depth))
            if base >= (2 if build is bcube else 3) and abs(base**depth - wanted) <= _CLOSE * wanted:
                others.append(build(base, depth))
    names = {own.name}
    for other in others:
        if other.name not in names:
            names.add(other.name)
            yield other
