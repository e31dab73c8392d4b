"""The transfers of a step on a network, event by event, on a clock of their own.

A connection sends one transfer after the other: of those that are ready the one of least priority, of equal
ones the one that was ready first, and of those that became ready at one time the one of the lowest number. It
shares links with other connections by max-min fairness. A transfer arrives a delay after its last byte was
sent; then those that waited for it are ready. A transfer without a connection takes no time: it stands for
"all of these have arrived".

What happens at one time happens in one order: arrivals, then starts, then new rates.

Rates are max-min fair: no connection can have more unless one that has no more than it gets less. Source:
Bertsekas, Gallager, "Data Networks", 1992, 6.5.2 (water filling). The link on which an equal share is least
gives that share to each of its connections; what they leave on their other links is shared by the rest. The
shares of links only grow while that goes on, so a heap of links may hold shares that are out of date: each is
looked at again when it comes to the top.

All compiled functions are in this module: machine code that was kept is made anew when this file changes, but
not when another one does.
"""

from __future__ import annotations

import numpy as np

from bml.lab.flows.compiled import compiled, subroutine
from bml.lab.flows.world import NOWHERE, Records, World

_AT_ONCE = 1e-12
"""Times that differ by less, relatively, are one."""
_EQUAL = 1e-12
"""Shares that differ by less, relatively, are one."""
_FEW = 2048
"""Active connections of a part up to which transfers end exactly when they end."""

LAUNCHED, LANDED, TOUCHED, STIRRED, TIMES, SOLUTIONS, LOOKS = range(7)
"""Entries of `World.number`: transfers that entered `under_way`; that left it; entries of
`touched` and of `stirred`; times at which something happened; solutions of rates; links looked at."""


@compiled
def run(world: World, delay_s: float, tolerance: float) -> float:
    """Let everything happen; return when the last transfer arrived, seconds.

    `tolerance`: where more than some thousand connections share links, a transfer ends up to this share of
    its duration early if others end then.
    """
    transfers, parts, number = world.transfers, world.parts, world.number
    for transfer in range(len(transfers)):
        if transfers[transfer].missing == 0:
            if transfers[transfer].connection == NOWHERE:
                if np.isnan(transfers[transfer].arrived):
                    _arrive(transfer, 0.0, world)
            elif transfers[transfer].key == 0:
                _enqueue(transfer, world)
    now = last = 0.0
    _settle(now, world, delay_s)
    while True:
        now = parts[parts[0].heap].soonest
        if number[LANDED] < number[LAUNCHED]:
            now = min(now, transfers[transfers[number[LANDED]].under_way].sent + delay_s)
        if now == np.inf:
            return last
        last = now
        number[TIMES] += 1
        limit = now * (1 + _AT_ONCE)
        while parts[parts[0].heap].soonest <= limit:
            _send_off(parts[0].heap, now, limit, world, tolerance)
        _settle(now, world, delay_s)


@subroutine
def _send_off(part: int, now: float, limit: float, world: World, tolerance: float) -> None:
    """The transfers of a part that have been sent by now are under way, and their connections free."""
    first, n_active = world.parts[part].first, world.parts[part].n_active
    for at in range(first, first + n_active):
        connection = world.connections[at].active
        slack = 0.0
        if n_active > _FEW:
            slack = tolerance * (now - world.transfers[world.connections[connection].sends].began)
        if world.connections[connection].ends <= limit + slack:
            _launch(world.connections[connection].sends, now, world)
            world.connections[connection].sends = -1
            world.connections[connection].ends = np.inf
            _touch(connection, world)
    _stir(part, 1, world)
    _set_soonest(part, np.inf, world)


@subroutine
def _settle(now: float, world: World, delay_s: float) -> None:
    """Let transfers arrive, connections start, until nothing more happens at this time; then set rates."""
    transfers, number = world.transfers, world.number
    limit = now * (1 + _AT_ONCE)
    before = -1
    while before != number[LAUNCHED]:
        before = number[LAUNCHED]
        while number[LANDED] < number[LAUNCHED]:
            transfer = transfers[number[LANDED]].under_way
            if transfers[transfer].sent + delay_s > limit:
                break
            number[LANDED] += 1
            _arrive(transfer, max(now, transfers[transfer].sent + delay_s), world)
        for at in range(number[TOUCHED]):
            _start(world.connections[at].touched, now, world)
    for at in range(number[TOUCHED]):
        connection = world.connections[at].touched
        world.connections[connection].is_touched = False
        _enlist(connection, now, world)
    number[TOUCHED] = 0
    for at in range(number[STIRRED]):
        _update(world.parts[at].stirred, now, world)
    number[STIRRED] = 0


@subroutine
def _arrive(transfer: int, now: float, world: World) -> None:
    """A transfer has arrived, and with it those without a connection that waited for nothing else."""
    transfers = world.transfers
    transfers[0].ahead = transfer
    height = 1
    while height:
        height -= 1
        came = transfers[height].ahead
        transfers[came].arrived = now
        for at in range(transfers[came].next_start, transfers[came].next_stop):
            waiting = world.next[at]
            transfers[waiting].missing -= 1
            if transfers[waiting].missing == 0:
                if transfers[waiting].connection == NOWHERE:
                    transfers[height].ahead = waiting
                    height += 1
                else:
                    _enqueue(waiting, world)


@subroutine
def _enqueue(transfer: int, world: World) -> None:
    """A transfer is ready: put it into the queue of its connection."""
    transfers = world.transfers
    transfers[transfer].key = (np.int64(transfers[transfer].priority) << 32) | (world.number[TIMES] + 1)
    connection = transfers[transfer].connection
    first, at = world.connections[connection].queue_start, world.connections[connection].queued
    world.connections[connection].queued += 1
    while at:
        above = transfers[first + (at - 1) // 2].queue
        if not _goes_before(transfer, above, transfers):
            break
        transfers[first + at].queue = above
        at = (at - 1) // 2
    transfers[first + at].queue = transfer
    _touch(connection, world)


@subroutine
def _goes_before(one: int, other: int, transfers: Records) -> bool:
    """Whether a transfer goes before another one of its connection; of equal ones the lower number does."""
    here, there = transfers[one].key, transfers[other].key
    return bool(here < there or (here == there and one < other))


@subroutine
def _dequeue(connection: int, world: World) -> int:
    """Take the transfer that is next in a connection's queue, which is not empty."""
    transfers, first = world.transfers, world.connections[connection].queue_start
    taken = transfers[first].queue
    world.connections[connection].queued -= 1
    size, at = world.connections[connection].queued, 0
    moved = transfers[first + size].queue
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size:
            left, right = transfers[first + child].queue, transfers[first + child + 1].queue
            if _goes_before(right, left, transfers):
                child += 1
        if not _goes_before(transfers[first + child].queue, moved, transfers):
            break
        transfers[first + at].queue = transfers[first + child].queue
        at = child
    transfers[first + at].queue = moved
    return taken  # type: ignore[no-any-return]


@subroutine
def _start(connection: int, now: float, world: World) -> None:
    """Let an idle connection begin its next transfer; empty ones are sent at once."""
    connections, transfers = world.connections, world.transfers
    while connections[connection].sends < 0 and connections[connection].queued > 0:
        transfer = _dequeue(connection, world)
        transfers[transfer].began = now
        if transfers[transfer].nbytes > 0:
            connections[connection].sends = transfer
            connections[connection].left = transfers[transfer].nbytes
            connections[connection].seen = now
        else:
            _launch(transfer, now, world)


@subroutine
def _launch(transfer: int, now: float, world: World) -> None:
    """A transfer has been sent."""
    world.transfers[transfer].sent = now
    world.transfers[world.number[LAUNCHED]].under_way = transfer
    world.number[LAUNCHED] += 1


@subroutine
def _enlist(connection: int, now: float, world: World) -> None:
    """Make a connection active, or not; if it was and is, its next transfer goes as fast as the last."""
    connections, parts = world.connections, world.parts
    part, place = connections[connection].part, connections[connection].place
    first = parts[part].first
    if connections[connection].sends >= 0 and place >= 0:
        if connections[connection].ends == np.inf:
            left, rate = connections[connection].left, connections[connection].rate
            connections[connection].ends = now + left / rate
        _stir(part, 1, world)
    elif connections[connection].sends >= 0:
        connections[connection].place = parts[part].n_active
        connections[first + parts[part].n_active].active = connection
        connections[connection].rate = 0.0
        parts[part].n_active += 1
        _stir(part, 2, world)
    elif place >= 0:
        parts[part].n_active -= 1
        last = connections[first + parts[part].n_active].active
        connections[first + place].active = last
        connections[last].place = place
        connections[connection].place = -1
        connections[connection].rate = -1.0
        _stir(part, 2, world)


@subroutine
def _update(part: int, now: float, world: World) -> None:
    """Share the links of a part anew, if its active connections are others, and find its next end."""
    connections = world.connections
    first = world.parts[part].first
    stop = first + world.parts[part].n_active
    anew = world.parts[part].change == 2
    world.parts[part].change = 0
    if anew:
        for at in range(first, stop):
            connection = connections[at].active
            gone = connections[connection].rate * (now - connections[connection].seen)
            connections[connection].left = max(0.0, connections[connection].left - gone)
            connections[connection].seen = now
        _share(world, first, stop)
    soonest = np.inf
    for at in range(first, stop):
        connection = connections[at].active
        if anew:
            left, rate = connections[connection].left, connections[connection].rate
            connections[connection].ends = now + left / rate
        soonest = min(soonest, connections[connection].ends)
    _set_soonest(part, soonest, world)


@subroutine
def _touch(connection: int, world: World) -> None:
    if not world.connections[connection].is_touched:
        world.connections[connection].is_touched = True
        world.connections[world.number[TOUCHED]].touched = connection
        world.number[TOUCHED] += 1


@subroutine
def _stir(part: int, change: int, world: World) -> None:
    if world.parts[part].change == 0:
        world.parts[world.number[STIRRED]].stirred = part
        world.number[STIRRED] += 1
    world.parts[part].change = max(world.parts[part].change, change)


@subroutine
def _set_soonest(part: int, soonest: float, world: World) -> None:
    """Set the key of a part and move it to where it belongs in the heap."""
    parts = world.parts
    parts[part].soonest = soonest
    at, size = parts[part].where, len(parts)
    while at and parts[parts[(at - 1) // 2].heap].soonest > soonest:
        parts[at].heap = parts[(at - 1) // 2].heap
        parts[parts[at].heap].where = at
        at = (at - 1) // 2
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and parts[parts[child + 1].heap].soonest < parts[parts[child].heap].soonest:
            child += 1
        if parts[parts[child].heap].soonest >= soonest:
            break
        parts[at].heap = parts[child].heap
        parts[parts[at].heap].where = at
        at = child
    parts[at].heap = part
    parts[part].where = at


@subroutine
def _share(world: World, first: int, stop: int) -> None:
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
