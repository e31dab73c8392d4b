"""Max-min fair rates: no connection can have more unless one that has no more than it gets less.

Source: Bertsekas, Gallager, "Data Networks", 1992, 6.5.2 (water filling). The link on which an equal share is
least gives that share to each of its connections; what they leave on their other links is shared by the
rest. The shares of links only grow while that goes on, so a heap of links may hold shares that are out of
date: each is looked at again when it comes to the top.
"""

from __future__ import annotations

from bml.flows.compiled import subroutine
from bml.flows.world import LOOKS, SOLUTIONS, Records, World

_EQUAL = 1e-12
"""Shares that differ by less, relatively, are one."""


@subroutine
def share(world: World, first: int, stop: int) -> None:
    """Set the rates of the connections in the list `active`, from `first` to before `stop`: all of a part."""
    connections, links = world.connections, world.links
    size = 0
    for place in range(first, stop):
        connection = connections[place].active
        connections[connection].fixed = False
        for at in range(connections[connection].path_start, connections[connection].path_stop):
            link = world.path[at]
            if links[link].open == 0:
                links[link].left = links[link].capacity
                links[size].heap = link
                size += 1
            links[link].open += 1
    for at in range(size):
        link = links[at].heap
        links[link].least = links[link].left / links[link].open
    for at in range(size // 2 - 1, -1, -1):
        _sift(links, at, size)
    while size:
        link = links[0].heap
        world.number[LOOKS] += 1
        if links[link].open:
            now = links[link].left / links[link].open
            if now > links[link].least * (1 + _EQUAL):
                links[link].least = now
                _sift(links, 0, size)
                continue
            _fix(world, link, max(now, 0.0))
        size -= 1
        links[0].heap = links[size].heap
        _sift(links, 0, size)
    world.number[SOLUTIONS] += 1


@subroutine
def _fix(world: World, link: int, each: float) -> None:
    """Give the active connections of a link that have no rate yet this one."""
    connections, links = world.connections, world.links
    for at in range(links[link].users_start, links[link].users_stop):
        connection = world.users[at]
        if connections[connection].fixed or connections[connection].place < 0:
            continue
        connections[connection].fixed = True
        connections[connection].rate = each
        for hop in range(connections[connection].path_start, connections[connection].path_stop):
            other = world.path[hop]
            links[other].left -= each
            links[other].open -= 1


@subroutine
def _sift(links: Records, at: int, size: int) -> None:
    """Move an entry of the heap of links down to where it belongs."""
    moved = links[at].heap
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and links[links[child + 1].heap].least < links[links[child].heap].least:
            child += 1
        if links[links[child].heap].least >= links[moved].least:
            break
        links[at].heap = links[child].heap
        at = child
    links[at].heap = moved
