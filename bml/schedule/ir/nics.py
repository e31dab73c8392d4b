"""The usable NICs of a damaged fabric, numbered: what trees are packed into and bounds are counted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

from bml.topology import Fabric, FabricError

Price = TypeVar("Price", int, float)


@dataclass(frozen=True, eq=False)
class Nics:
    """Live servers and usable NICs as small numbers; a NIC is usable if its switch joins it to another one.

    A server is named by its place among the live ones. The groups are the live switches that join at least
    two live NICs; any two members of a group are one hop apart.

    Attributes:
        fabric: what was numbered.
        servers: place -> server id.
        owner: NIC -> place of its server.
        level: NIC -> level.
        rate: NIC -> rate that it can use, in units of B: that of its link, or what all others of its group
            have together where that is less, as only they send to it and receive from it.
        group: NIC -> group.
        members: group -> NICs.
        of: place -> NICs of the server.
    """

    fabric: Fabric
    servers: tuple[int, ...]
    owner: list[int]
    level: list[int]
    rate: list[Fraction]
    group: list[int]
    members: list[list[int]]
    of: list[list[int]]

    @cached_property
    def rates(self) -> tuple[Fraction, ...]:
        """The different rates; to hash a Fraction takes a microsecond, and there are thousands of NICs."""
        return (Fraction(1),) if self.uniform else tuple(set(self.rate))

    @cached_property
    def uniform(self) -> bool:
        """Whether all usable NICs have the normal rate."""
        return all(rate == 1 for rate in self.rate)


def number_nics(fabric: Fabric) -> Nics:
    """Number the usable NICs of a fabric, switch by switch.

    Raises:
        FabricError: some live server has no usable NIC while others live, so no schedule exists.
    """
    place = {server: at for at, server in enumerate(fabric.servers)}
    nics = Nics(fabric, fabric.servers, [], [], [], [], [], [[] for _ in place])
    for level, group in fabric.switches:
        attached = fabric.attached(level, group)
        if len(attached) < 2:
            continue
        nics.members.append(list(range(len(nics.owner), len(nics.owner) + len(attached))))
        for server in attached:
            nics.of[place[server]].append(len(nics.owner))
            nics.owner.append(place[server])
            nics.level.append(level)
            nics.group.append(len(nics.members) - 1)
        links = [fabric.rate(server, level) for server in attached]
        nics.rate.extend(_usable(links) if fabric.rates else links)
    for server, own in zip(nics.servers, nics.of, strict=True):
        if not own and len(place) > 1:
            raise FabricError(f"server {server} of {fabric} is cut off: heal one of its links or remove it")
    return nics


def _usable(rates: list[Fraction]) -> list[Fraction]:
    """What each NIC of a group can use of the rate of its link."""
    whole = sum(rates, Fraction(0))
    return [min(rate, whole - rate) for rate in rates]


def cut_bound(nics: Nics) -> Fraction:
    """Lower bound on the pipelined GST in T from two kinds of cuts, the larger of the two.

    Take m > 1 live servers. Every server but the owner sends its partial of a piece, and every server but
    the owner is sent the result, so 2(m-1) times P is sent in all: no faster than 2(m-1) / (rates of all
    usable NICs). And one server alone sends P at least: its partial of what others own, the result of what
    it owns itself; the same holds for receiving: no faster than 1 / (rates of its usable NICs).
    """
    if len(nics.servers) <= 1:
        return Fraction(0)
    alone = min(sum(nics.rate[nic] for nic in own) for own in nics.of)
    return max(Fraction(2 * (len(nics.servers) - 1)) / sum(nics.rate), 1 / Fraction(alone))


def price_bound(nics: Nics, prices: Sequence[int]) -> Fraction:
    """Lower bound MST(y) / Σ r_i y_i on the pipelined GST in T of any forest, exactly; proof in `bound`.

    Prices are at least 0; if all are 0 they prove nothing.
    """
    if nics.uniform:
        budget = Fraction(sum(prices))
    else:
        budget = sum((rate * price for rate, price in zip(nics.rate, prices, strict=True)), Fraction(0))
    tree = sum(prices[nic] + prices[hub] for nic, hub in cheapest_tree(nics, prices))
    return Fraction(tree) / budget if budget else Fraction(0)


def cheapest_tree(nics: Nics, price: Sequence[Price]) -> list[tuple[int, int]]:
    """Return the edges (NIC, NIC) of a cheapest tree that joins all servers; an edge costs both its prices.

    Within a group the cheapest NIC is one end of all edges that are needed: of the three edges between
    NICs i, j and the cheapest one, that between i and j is never the cheapest.
    """
    edges: list[tuple[Price, int, int]] = []
    for members in nics.members:
        hub = min(members, key=price.__getitem__)
        edges += [(price[nic] + price[hub], nic, hub) for nic in members if nic != hub]
    edges.sort()
    part = list(range(len(nics.servers)))
    tree: list[tuple[int, int]] = []
    for _, nic, hub in edges:
        a, b = _top(part, nics.owner[nic]), _top(part, nics.owner[hub])
        if a != b:
            part[a] = b
            tree.append((nic, hub))
    return tree


def _top(part: list[int], place: int) -> int:
    while part[place] != place:
        part[place] = part[part[place]]
        place = part[place]
    return place
