"""Packets of a step, event by event, on a clock of their own.

A server's link takes, of the connections that have something to send, the one that may send for the longest
time: after a packet a connection may send again when that packet would be over at the connection's own rate.
So without rate control they take turns. A connection sends its transfers in the order of
`bml.lab.flows.events`.

A switch receives a packet whole, counts it to the link over which it came, marks it if the queue of its next
link is long, and puts it into that queue, first in, first out. When the last byte has left, the packet is
counted no more. Pause frames and notifications wait in no queue.

Everything on a wire arrives the same delay after it was sent, so one list, which needs no sorting, has all of
it. A second one has the links that are sending a packet of the usual size at the usual rate, as these end in
the order in which they began. Only links that send anything else, or wait until a connection may send, are in
a heap. Of what is due at one time, what arrives goes first, then the second list, then the heap.

Machine code that was kept is made anew when this file changes; see `bml.lab.packets.heaps`.
"""

from __future__ import annotations

import numpy as np

from bml.lab.flows.compiled import compiled, inlined
from bml.lab.packets.heaps import pop, push, set_due
from bml.lab.packets.world import NOBODY, Rules, World

DATA, PAUSE, RESUME, NOTIFICATION = range(4)
"""Kinds of packets."""
DONE, MORE, FULL = range(3)
"""Results of `run`: all has happened; the events asked for have; there may be too few free packets."""
FREE, N_FREE, FIRST, LAST, SENDING, SENDING_LAST = range(6)
"""Entries of `World.number`: the first free packet, and how many there are; the first and the last packet on
the wires; the first and the last link of those that are sending what is usual."""
EVENTS, CROSSED, MARKED, NOTIFIED, DISORDERED, RECEIVED, TOUCHED = range(6, 13)
"""More of them: events; packets over links; marked ones; notifications; packets out of order; packets
received; connections in `touched`."""

_FAST = 5
"""Timer or counter ends after a notification in which the rate only comes back: F of the paper."""
_WHOLE = 0.999
"""From this share of a link's capacity on, a connection has all of it."""


@compiled
def run(world: World, rules: Rules, most_events: int) -> int:
    """Let so many events happen, or all that are left; return DONE, MORE or FULL."""
    packets, links, number, clock = world.packets, world.links, world.number, world.clock
    needed = 2 * len(links) + 8
    if number[EVENTS] == 0:
        for transfer in range(len(world.transfers)):
            if world.transfers[transfer].missing == 0 and world.transfers[transfer].connection != NOBODY:
                _enqueue(transfer, world)
        for transfer in range(len(world.transfers)):
            ready = world.transfers[transfer]
            if ready.missing == 0 and ready.connection == NOBODY and np.isnan(ready.arrived):
                _arrive(transfer, world)
        _settle(world, rules)
    for _ in range(most_events):
        if number[N_FREE] < needed:
            return FULL
        due, first, sending = links[links[0].heap].due, number[FIRST], number[SENDING]
        ends = links[sending].ends if sending != NOBODY else np.inf
        arrives = packets[first].arrives if first != NOBODY else np.inf
        clock_s = min(due, ends, arrives)
        if clock_s == np.inf:
            return DONE
        number[EVENTS] += 1
        clock[0] = clock_s
        if arrives == clock_s:
            number[FIRST] = packets[first].next
            _land(first, world, rules)
        elif ends == clock_s:
            number[SENDING] = links[sending].behind
            _finish(sending, world, rules)
        else:
            _finish(links[0].heap, world, rules)
    return MORE


@inlined
def _take(kind: int, subject: int, world: World) -> int:
    """Take a free packet."""
    packet = world.number[FREE]
    made = world.packets[packet]
    world.number[FREE] = made.next
    world.number[N_FREE] -= 1
    made.kind, made.subject, made.hop, made.marked = kind, subject, 0, False
    return packet  # type: ignore[no-any-return]


@inlined
def _release(packet: int, world: World) -> None:
    world.packets[packet].next = world.number[FREE]
    world.number[FREE] = packet
    world.number[N_FREE] += 1


@inlined
def _carry(packet: int, world: World, rules: Rules) -> None:
    """Put a packet onto a wire."""
    packets, number = world.packets, world.number
    packets[packet].arrives = world.clock[0] + rules.delay_s
    packets[packet].next = NOBODY
    if number[FIRST] == NOBODY:
        number[FIRST] = packet
    else:
        packets[number[LAST]].next = packet
    number[LAST] = packet


@inlined
def _land(packet: int, world: World, rules: Rules) -> None:
    """Something has come to the end of a wire."""
    came = world.packets[packet]
    kind, subject = came.kind, came.subject
    if kind == DATA:
        link = world.path[world.connections[subject].path_start + came.hop]
        if world.links[link].target == NOBODY:
            _deliver(packet, world, rules)
        else:
            _enter(packet, link, world, rules)
    elif kind == NOTIFICATION and came.hop > 1:
        came.hop -= 1
        _carry(packet, world, rules)
    else:
        _release(packet, world)
        paused = world.links[subject]
        if kind == NOTIFICATION:
            _slow(subject, world, rules)
        elif kind == PAUSE:
            paused.paused, paused.paused_at = True, world.clock[0]
        else:
            paused.paused = False
            paused.paused_s += world.clock[0] - paused.paused_at
            _begin(subject, world, rules)


@inlined
def _enter(packet: int, link: int, world: World, rules: Rules) -> None:
    """A switch has received a packet: queue it for its next link."""
    entered, came = world.packets[packet], world.links[link]
    switch = world.switches[came.target]
    entered.hop += 1
    out_link = world.path[world.connections[entered.subject].path_start + entered.hop]
    out = world.links[out_link]
    over = (out.queued - rules.mark_from) / (rules.mark_all_from - rules.mark_from)
    if not entered.marked and over > 0 and (over >= 1 or _chance(world) < over * rules.most_marked):
        entered.marked = True
        world.number[MARKED] += 1
    out.queued += entered.nbytes
    out.most_queued = max(out.most_queued, out.queued)
    came.held += entered.nbytes
    switch.held += entered.nbytes
    switch.most_held = max(switch.most_held, switch.held)
    entered.next = NOBODY
    if out.head == NOBODY:
        out.head = packet
    else:
        world.packets[out.tail].next = packet
    out.tail = packet
    if not came.asked and came.held > rules.share * max(0.0, switch.shared - switch.held):
        came.asked = True
        came.pauses += 1
        switch.asking += 1
        _carry(_take(PAUSE, link, world), world, rules)
    _begin(out_link, world, rules)


@inlined
def _finish(link: int, world: World, rules: Rules) -> None:
    """A link has sent its packet, or one of its connections may send again."""
    ended = world.links[link]
    packet, ended.sends = ended.sends, NOBODY
    if packet != NOBODY:
        world.number[CROSSED] += 1
        if ended.source != NOBODY:
            _leave(packet, link, world, rules)
        _carry(packet, world, rules)
    _begin(link, world, rules)


@inlined
def _leave(packet: int, link: int, world: World, rules: Rules) -> None:
    """A packet has left a switch: let links send again that have room now."""
    left, links = world.packets[packet], world.links
    switch = world.switches[links[link].source]
    links[link].queued -= left.nbytes
    switch.held -= left.nbytes
    links[world.path[world.connections[left.subject].path_start + left.hop - 1]].held -= left.nbytes
    if switch.asking == 0:
        return
    most = max(0.0, rules.share * max(0.0, switch.shared - switch.held) - rules.hold)
    for at in range(switch.in_start, switch.in_stop):
        other = world.incoming[at]
        if links[other].asked and links[other].held <= most:
            links[other].asked = False
            switch.asking -= 1
            _carry(_take(RESUME, other, world), world, rules)


@inlined
def _begin(link: int, world: World, rules: Rules) -> None:
    """Let a link send its next packet, if it is free and not paused."""
    begun, due = world.links[link], np.inf
    if begun.sends != NOBODY:
        return
    if not begun.paused and begun.head != NOBODY:
        begun.sends = begun.head
        begun.head = world.packets[begun.head].next
    elif not begun.paused and begun.waiting > 0:
        due = world.turns[begun.first].key
        if due <= world.clock[0]:
            begun.sends = _packet(link, world, rules)
    if begun.sends != NOBODY:
        nbytes = world.packets[begun.sends].nbytes
        due = world.clock[0] + nbytes / begun.capacity
        if nbytes == rules.packet_nbytes and begun.capacity == rules.usual:
            begun.ends, due = due, np.inf
            _line_up(link, world)
    if due != begun.due:
        set_due(link, due, world.links)


@inlined
def _line_up(link: int, world: World) -> None:
    """Put a link at the end of those that are sending what is usual."""
    world.links[link].behind = NOBODY
    if world.number[SENDING] == NOBODY:
        world.number[SENDING] = link
    else:
        world.links[world.number[SENDING_LAST]].behind = link
    world.number[SENDING_LAST] = link


@inlined
def _packet(link: int, world: World, rules: Rules) -> int:
    """Make the next packet of the connection whose turn it is."""
    server = world.links[link]
    connection = pop(world.turns, server.first, server.waiting)
    server.waiting -= 1
    sender = world.connections[connection]
    transfer, nbytes = sender.sends, rules.packet_nbytes
    packet = _take(DATA, connection, world)
    made = world.packets[packet]
    made.transfer, made.number = NOBODY, sender.sent
    sender.sent += 1
    sender.left -= 1
    if sender.left == 0:
        nbytes = world.transfers[transfer].nbytes - (world.transfers[transfer].packets - 1) * nbytes
        made.transfer = transfer
        _next(connection, world)
    made.nbytes = nbytes
    _recover(connection, nbytes, server.capacity, world, rules)
    sender.may_send = world.clock[0] + nbytes / sender.rate
    if sender.sends != NOBODY:
        _wait(connection, link, world)
    return packet


@inlined
def _deliver(packet: int, world: World, rules: Rules) -> None:
    """A server has received a packet; at most so often it notifies the sender of marks."""
    came, number = world.packets[packet], world.number
    receiver, transfer = world.connections[came.subject], came.transfer
    number[RECEIVED] += 1
    number[DISORDERED] += came.number != receiver.received
    receiver.received += 1
    if came.marked and rules.dcqcn and receiver.notifies <= world.clock[0]:
        receiver.notifies = world.clock[0] + rules.notification_s
        number[NOTIFIED] += 1
        back = _take(NOTIFICATION, came.subject, world)
        world.packets[back].hop = receiver.path_stop - receiver.path_start
        _carry(back, world, rules)
    _release(packet, world)
    if transfer != NOBODY:
        _arrive(transfer, world)
        _settle(world, rules)


@inlined
def _arrive(transfer: int, world: World) -> None:
    """A transfer has arrived, and with it those without a connection that waited for nothing else."""
    transfers = world.transfers
    world.clock[1] = world.clock[0]
    transfers[0].ahead = transfer
    height = 1
    while height:
        height -= 1
        came = transfers[height].ahead
        transfers[came].arrived = world.clock[0]
        for at in range(transfers[came].next_start, transfers[came].next_stop):
            waiting = world.next[at]
            transfers[waiting].missing -= 1
            if transfers[waiting].missing == 0:
                if transfers[waiting].connection == NOBODY:
                    transfers[height].ahead = waiting
                    height += 1
                else:
                    _enqueue(waiting, world)


@inlined
def _enqueue(transfer: int, world: World) -> None:
    """A transfer is ready: put it into the queue of its connection."""
    ready, number = world.transfers[transfer], world.number
    sender = world.connections[ready.connection]
    push(world.queue, sender.queue_start, sender.queued, float(ready.priority), number[EVENTS], transfer)
    sender.queued += 1
    if sender.sends == NOBODY and not sender.is_touched:
        sender.is_touched = True
        world.connections[number[TOUCHED]].touched = ready.connection
        number[TOUCHED] += 1


@inlined
def _settle(world: World, rules: Rules) -> None:
    """Let connections that have something to send again begin: first all of them, then their links."""
    connections, number = world.connections, world.number
    for at in range(number[TOUCHED]):
        sender = connections[connections[at].touched]
        sender.is_touched = False
        sender.may_send = max(sender.may_send, world.clock[0])
        _next(connections[at].touched, world)
        _wait(connections[at].touched, world.path[sender.path_start], world)
    for at in range(number[TOUCHED]):
        _begin(world.path[connections[connections[at].touched].path_start], world, rules)
    number[TOUCHED] = 0


@inlined
def _next(connection: int, world: World) -> None:
    """Let a connection send its next transfer, if there is one."""
    sender = world.connections[connection]
    sender.sends = NOBODY
    if sender.queued > 0:
        sender.sends = pop(world.queue, sender.queue_start, sender.queued)
        sender.queued -= 1
        sender.left = world.transfers[sender.sends].packets


@inlined
def _wait(connection: int, link: int, world: World) -> None:
    """Let a connection wait for its turn on its server's link."""
    server, sender = world.links[link], world.connections[connection]
    push(world.turns, server.first, server.waiting, sender.may_send, sender.rank, connection)
    server.waiting += 1


@inlined
def _slow(connection: int, world: World, rules: Rules) -> None:
    """A notification has come: reduce the rate (DCQCN's reaction point)."""
    sender, now = world.connections[connection], world.clock[0]
    capacity = world.links[world.path[sender.path_start]].capacity
    _recover(connection, 0.0, capacity, world, rules)
    if sender.alpha_falls <= now:
        sender.alpha *= (1 - rules.gain) ** (1 + int((now - sender.alpha_falls) / rules.alpha_s))
    sender.target = sender.rate
    sender.rate = max(sender.rate * (1 - sender.alpha / 2), min(rules.least, capacity))
    sender.alpha = (1 - rules.gain) * sender.alpha + rules.gain
    sender.alpha_falls, sender.rate_grows = now + rules.alpha_s, now + rules.timer_s
    sender.counted, sender.timer_ends, sender.counter_ends = 0.0, 0, 0


@inlined
def _recover(connection: int, nbytes: float, capacity: float, world: World, rules: Rules) -> None:
    """Let a reduced rate grow for the timers that have ended by now, and for bytes that are sent."""
    sender = world.connections[connection]
    sender.counted += nbytes
    while sender.rate < capacity:
        if sender.rate_grows <= world.clock[0]:
            sender.rate_grows += rules.timer_s
            sender.timer_ends += 1
        elif sender.counted >= rules.counter_nbytes:
            sender.counted = 0.0
            sender.counter_ends += 1
        else:
            return
        if min(sender.timer_ends, sender.counter_ends) > _FAST:
            sender.target = min(sender.target + rules.hyper, capacity)
        elif max(sender.timer_ends, sender.counter_ends) >= _FAST:
            sender.target = min(sender.target + rules.additive, capacity)
        rate = (sender.target + sender.rate) / 2
        sender.rate = rate if rate < _WHOLE * capacity else capacity


@inlined
def _chance(world: World) -> float:
    """Draw a number from 0 to below 1: xorshift64* (Vigna, 2016)."""
    x = world.chance[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    world.chance[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0
