"""Ring all-reduce: partial sums go once round a ring, the results go on round it.

The ring visits all servers so that, on a healthy fabric, every hop is direct: the modular Gray code, which
adds 1 to one digit at a time (BCube, Torus), or an alternating ring on BCube, in which every server is
entered over one level and left over another. With both directions in use, half of the vector each, an
alternating ring or one on a torus loads every NIC half as much: (N-1)/N·T instead of 2(N-1)/N·T.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.drawing import Draft, blank, check_room, lay
from bml.schedule.ir.forest import Forest
from bml.topology import BCube, Fabric, Torus, UsageError

DIRECTIONS = {"one": (1,), "both": (1, -1)}
"""The words that may follow `ring:`, and the directions in which pieces go."""


@algorithm(
    "ring",
    does="round a Gray code ring; `both`: half the vector each way, on BCube with even n over a ring "
    "whose levels alternate; plain `ring` is both ways on a torus",
    damaged="the dead are skipped",
    argument="one|both",
    examples=("ring:both", "ring:one"),
)
def ring(fabric: Fabric, how: str = "") -> Forest:
    """Build a ring over the survivors; `how` is one, both, or nothing.

    Nothing means both directions on a torus and one elsewhere, as the papers compare them. A hop over a
    dead server or link is a live detour.

    Raises:
        UsageError: `how` is something else, or the fabric is too large for this.
    """
    if how not in ("", *DIRECTIONS):
        raise UsageError(f"'ring:{how}' is no ring: write ring, ring:one or ring:both")
    directions = DIRECTIONS[how or ("both" if isinstance(fabric.wiring, Torus) else "one")]
    check_room(fabric, 2 * len(directions) * len(fabric.servers))
    order = alternating_order(fabric) if how == "both" else gray_order(fabric)
    return lay(fabric, draft_ring(fabric, order, directions))


def draft_ring(fabric: Fabric, order: list[int], directions: tuple[int, ...] = (1,)) -> Draft:
    """Draw a ring through all servers of `order`, dead ones too; each live one owns a piece a direction."""
    size = len(order)
    place = np.empty(fabric.n_servers, np.int64)
    place[order] = np.arange(size)
    ring_ids, levels = np.array(order, np.int32), _edge_levels(fabric, order)
    owners = np.array([server for server in order if fabric.server_alive(server)], np.int32)
    root = np.tile(owners, len(directions))
    direction = np.repeat(np.array(directions), len(owners))[:, None]
    distance = (place[None, :] - place[root][:, None]) * direction % size
    others = distance > 0
    reduce, broadcast = blank(len(root), fabric), blank(len(root), fabric)
    for way, step in ((reduce, direction), (broadcast, -direction)):
        way.peer[:] = np.where(others, ring_ids[(place[None, :] + step) % size], way.peer)
        way.stage[:] = np.where(others, distance - 1, -1)
        # The edge between places i and i+1 has number i, whichever way it is used.
        edge = np.where(step > 0, place[None, :], (place[None, :] - 1) % size)
        way.level[:] = np.where(others, levels[edge], way.level)
    return Draft(root, np.zeros(len(root), np.int8), reduce, broadcast)


def _edge_levels(fabric: Fabric, order: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """Level of the first hop from each server of the ring to the next: the edge's own, if it is direct."""
    routes = [fabric.route(a, b) for a, b in pairwise([*order, order[0]])]
    return np.array([route[0][1] if route else 0 for route in routes], np.int8)


def gray_order(fabric: Fabric) -> list[int]:
    """All servers, dead ones too, each a neighbour of the next when nothing is broken, the last of the first.

    The modular Gray code: digit i of the m-th server is m_i - m_(i+1) mod n, with m written in base n.
    """
    if not isinstance(fabric.wiring, BCube | Torus):
        return list(range(fabric.n_servers))
    base = fabric.wiring.ports if isinstance(fabric.wiring, BCube) else fabric.wiring.size
    counting = (fabric.address(number) for number in range(fabric.n_servers))
    return [
        fabric.server_at(tuple((a - b) % base for a, b in zip(digits, (*digits[1:], 0), strict=True)))
        for digits in counting
    ]


def alternating_order(fabric: Fabric) -> list[int]:
    """Ring in which every server is entered over one level and left over another, where there is one.

    There is one on a torus (any ring) and on BCube with an even number of ports and at least two levels;
    on other fabrics this is `gray_order`.
    """
    wiring = fabric.wiring
    if not isinstance(wiring, BCube) or wiring.ports % 2 or wiring.levels < 2:
        return gray_order(fabric)
    plane = _alternating_plane(wiring.ports)
    for level in range(2, wiring.levels):
        plane = _stack(plane, wiring.ports, wiring.ports**level)
    return plane


def _alternating_plane(n: int) -> list[int]:
    """Alternating ring of two levels: staircases of two diagonals, joined to one ring in row 0.

    Staircase j runs (x, y) = (2j, 0), (2j+1, 0), (2j+1, 1), (2j+2, 1), ... (mod n). In row 0 its hop from
    2j to 2j+1 is replaced by one from 2j+1 to 2j+2, which leads into the next staircase.
    """
    ring: list[int] = []
    for start in range(0, n, 2):
        stairs = [((start + 1 + y + side) % n, y) for y in range(n) for side in (-1, 0)]
        # From (start+1, 0) up the stairs and round to (start, 0).
        walk = stairs[1:] + stairs[:1]
        ring += [x + n * y for x, y in reversed(walk)]
    return ring


def _stack(ring: list[int], n: int, high: int) -> list[int]:
    """Join n copies of an alternating ring, at distance `high`, to one that still alternates.

    Copies are joined one by one: a level-0 hop (u, v) of one and its image (u', v') become hops (u, u') and
    (v, v') of the new level. Successive joins use different hops.
    """
    hops = [(u, v) for u, v in pairwise([*ring, ring[0]]) if u // n == v // n]
    links: dict[int, list[int]] = {}
    for copy in range(n):
        for u, v in pairwise([*ring, ring[0]]):
            links.setdefault(u + copy * high, []).append(v + copy * high)
            links.setdefault(v + copy * high, []).append(u + copy * high)
    for copy in range(n - 1):
        a, b = hops[copy % 2]
        low, next_up = copy * high, (copy + 1) * high
        for base in (low, next_up):
            links[a + base].remove(b + base)
            links[b + base].remove(a + base)
        for end in (a, b):
            links[end + low].append(end + next_up)
            links[end + next_up].append(end + low)
    walk, at = [ring[0], links[ring[0]][0]], links[ring[0]][0]
    while len(walk) < len(links):
        at = next(other for other in links[at] if other != walk[-2])
        walk.append(at)
    return walk
