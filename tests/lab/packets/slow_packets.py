"""Packets simulated a second time, as plainly as possible: one heap of calls, and timers that really end.

It shares the paths and the numbers of the settings with `bml.lab.packets`, and none of its code. Packets are
marked above one length of the queue, without chance.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

NOBODY = -1


@dataclass
class Link:
    capacity: float
    source: int
    target: int
    busy: bool = False
    paused: bool = False
    asked: bool = False
    paused_at: float = 0.0
    paused_s: float = 0.0
    pauses: int = 0
    queue: deque = field(default_factory=deque)
    queued: float = 0.0
    held: float = 0.0
    senders: list = field(default_factory=list)


@dataclass
class Sender:
    path: list
    rank: int
    rate: float
    ready: list = field(default_factory=list)
    left: list = field(default_factory=list)
    may_send: float = 0.0
    target: float = 0.0
    alpha: float = 1.0
    counted: float = 0.0
    ends: list = field(default_factory=lambda: [0, 0])
    notifications: int = 0
    notifies: float = 0.0


@dataclass
class Packet:
    sender: Sender
    nbytes: float
    last_of: int
    hop: int = 0
    marked: bool = False


class Plain:
    """`transfers` are (connection or NOBODY, bytes, priority); `arrows` (before, after)."""

    def __init__(self, links, senders, shared, transfers, arrows, settings):
        self.links, self.senders, self.shared, self.settings = links, senders, shared, settings
        self.transfers = transfers
        self.held = [0.0] * len(shared)
        self.most_held = [0.0] * len(shared)
        self.missing = [0] * len(transfers)
        self.after = [[] for _ in transfers]
        for before, after in arrows:
            self.missing[after] += 1
            self.after[before].append(after)
        self.arrived = [math.nan] * len(transfers)
        self.now, self.calls, self.order, self.marked, self.notified = 0.0, [], itertools.count(), 0, 0
        for sender in senders:
            links[sender.path[0]].senders.append(sender)

    def at(self, time, call, *given):
        heapq.heappush(self.calls, (time, next(self.order), call, given))

    def run(self):
        woken = []
        for transfer in [at for at, missing in enumerate(self.missing) if missing == 0]:
            self.make_ready(transfer, woken)
        self.wake(woken)
        while self.calls:
            self.now, _, call, given = heapq.heappop(self.calls)
            call(*given)

    def make_ready(self, transfer, woken):
        connection, _, priority = self.transfers[transfer]
        if connection == NOBODY:
            self.arrived[transfer] = self.now
            for after in self.after[transfer]:
                self.missing[after] -= 1
                if self.missing[after] == 0:
                    self.make_ready(after, woken)
        else:
            sender = self.senders[connection]
            # Of equal priority the first one that was ready goes first, then the lower number.
            sender.ready.append((priority, self.now, transfer))
            woken.append(sender)

    def wake(self, woken):
        for sender in woken:
            if not sender.left and sender.ready:
                sender.may_send = max(sender.may_send, self.now)
                self.next_transfer(sender)
        for sender in woken:
            self.begin(sender.path[0])

    def next_transfer(self, sender):
        if sender.ready:
            sender.ready.sort()
            transfer = sender.ready.pop(0)[2]
            nbytes, size = self.transfers[transfer][1], self.settings.packet_nbytes
            whole = max(1, math.ceil(nbytes / size)) - 1
            packets = [Packet(sender, size, NOBODY) for _ in range(whole)]
            sender.left = [*packets, Packet(sender, nbytes - whole * size, transfer)]

    def begin(self, number):
        link = self.links[number]
        if link.busy or link.paused:
            return
        if link.source == NOBODY:
            waiting = [sender for sender in link.senders if sender.left]
            if not waiting:
                return
            sender = min(waiting, key=lambda each: (each.may_send, each.rank))
            if sender.may_send > self.now:
                self.at(sender.may_send, self.begin, number)
                return
            packet = sender.left.pop(0)
            if not sender.left:
                self.next_transfer(sender)
            self.count(sender, packet.nbytes)
            sender.may_send = self.now + packet.nbytes / sender.rate
        elif link.queue:
            packet = link.queue.popleft()
        else:
            return
        link.busy = True
        self.at(self.now + packet.nbytes / link.capacity, self.sent, number, packet)

    def sent(self, number, packet):
        link = self.links[number]
        link.busy = False
        if link.source != NOBODY:
            link.queued -= packet.nbytes
            self.links[packet.sender.path[packet.hop - 1]].held -= packet.nbytes
            self.held[link.source] -= packet.nbytes
            for other, into in enumerate(self.links):
                most = max(0.0, self.threshold(link.source) - 2 * self.settings.packet_nbytes)
                if into.target == link.source and into.asked and into.held <= most:
                    into.asked = False
                    self.at(self.now + self.settings.delay_s, self.resume, other)
        self.at(self.now + self.settings.delay_s, self.came, number, packet)
        self.begin(number)

    def threshold(self, switch):
        return self.settings.share * max(0.0, self.shared[switch] - self.held[switch])

    def came(self, number, packet):
        link = self.links[number]
        if link.target == NOBODY:
            self.received(packet)
            return
        packet.hop += 1
        out = self.links[packet.sender.path[packet.hop]]
        if out.queued > self.settings.mark_from and not packet.marked:
            packet.marked = True
            self.marked += 1
        out.queue.append(packet)
        out.queued += packet.nbytes
        link.held += packet.nbytes
        self.held[link.target] += packet.nbytes
        self.most_held[link.target] = max(self.most_held[link.target], self.held[link.target])
        if not link.asked and link.held > self.threshold(link.target):
            link.asked = True
            link.pauses += 1
            self.at(self.now + self.settings.delay_s, self.pause, number)
        self.begin(packet.sender.path[packet.hop])

    def pause(self, number):
        self.links[number].paused, self.links[number].paused_at = True, self.now

    def resume(self, number):
        self.links[number].paused = False
        self.links[number].paused_s += self.now - self.links[number].paused_at
        self.begin(number)

    def received(self, packet):
        sender, settings = packet.sender, self.settings
        if packet.marked and settings.dcqcn and sender.notifies <= self.now:
            sender.notifies = self.now + settings.notification_s
            self.notified += 1
            self.at(self.now + len(sender.path) * settings.delay_s, self.slow, sender)
        if packet.last_of != NOBODY:
            woken = []
            self.arrived[packet.last_of] = self.now
            for after in self.after[packet.last_of]:
                self.missing[after] -= 1
                if self.missing[after] == 0:
                    self.make_ready(after, woken)
            self.wake(woken)

    def slow(self, sender):
        gain = self.settings.gain
        sender.notifications += 1
        sender.target = sender.rate
        least = min(self.settings.least_bit / 8, self.links[sender.path[0]].capacity)
        sender.rate = max(sender.rate * (1 - sender.alpha / 2), least)
        sender.alpha = (1 - gain) * sender.alpha + gain
        sender.counted, sender.ends = 0.0, [0, 0]
        self.at(self.now + self.settings.alpha_s, self.alpha_falls, sender, sender.notifications)
        self.at(self.now + self.settings.timer_s, self.timer_ends, sender, sender.notifications)

    def alpha_falls(self, sender, since):
        if since == sender.notifications and any(map(math.isnan, self.arrived)):
            sender.alpha *= 1 - self.settings.gain
            self.at(self.now + self.settings.alpha_s, self.alpha_falls, sender, since)

    def timer_ends(self, sender, since):
        if since == sender.notifications and sender.rate < self.links[sender.path[0]].capacity:
            self.grow(sender, 0)
            self.at(self.now + self.settings.timer_s, self.timer_ends, sender, since)

    def count(self, sender, nbytes):
        sender.counted += nbytes
        is_slow = sender.rate < self.links[sender.path[0]].capacity
        if is_slow and sender.counted >= self.settings.counter_nbytes:
            sender.counted = 0.0
            self.grow(sender, 1)

    def grow(self, sender, which):
        capacity, settings = self.links[sender.path[0]].capacity, self.settings
        sender.ends[which] += 1
        if min(sender.ends) > 5:
            sender.target = min(capacity, sender.target + settings.hyper_bit / 8)
        elif max(sender.ends) >= 5:
            sender.target = min(capacity, sender.target + settings.additive_bit / 8)
        sender.rate = (sender.rate + sender.target) / 2
        if sender.rate >= 0.999 * capacity:
            sender.rate = capacity
