"""Acts on a server's NICs and connections, for servers whose cables are not real.

Several faults may hold one NIC, or one connection, at a time: it works again when the last of them has ended.
"""

from __future__ import annotations

import logging
import random
from math import inf

from bml.cluster.injection.actuators import Actuators
from bml.cluster.injection.registry import on_server
from bml.faults import Fault
from bml.faults.kinds import JITTER_S
from bml.protocol.server import events as ev
from bml.topology import LinkFailure
from bml.transport.handshake.flows import can_pace

_LOG = logging.getLogger(__name__)


@on_server("blackhole", "switch", does="silences the NIC")
def silence(fault: Fault, actuators: Actuators) -> None:
    """Drop everything on the NIC; for a switch each of its servers does so."""
    _hold(_level(fault), fault.duration_s, actuators)


@on_server("cut", does="silences the NIC and notices it")
def cut(fault: Fault, actuators: Actuators) -> None:
    """Drop everything on the NIC, and tell the core that it has no carrier."""
    level = _level(fault)
    _hold(level, fault.duration_s, actuators)
    actuators.dispatch(ev.OwnNicLost(level, f"NIC {actuators.server}/{level} has no carrier"))


@on_server("flap", does="silences the NIC again and again")
def flap(fault: Fault, actuators: Actuators) -> None:
    """Drop everything on the NIC in the first half of every period."""
    level, half_s, poller = _level(fault), fault.period_s / 2, actuators.poller
    until_s = inf if fault.duration_s is None else poller.now_s() + fault.duration_s

    def begin() -> None:
        left_s = until_s - poller.now_s()
        if left_s > 0:
            _hold(level, min(half_s, left_s), actuators)
            poller.after(2 * half_s, begin)

    begin()


@on_server("slow", does="paces connections of the NIC")
def slow(fault: Fault, actuators: Actuators) -> None:
    """Have this server's kernel send slowly: over the slow NIC, or to the server that has it.

    Connections cannot share a rate, so each has an equal part of it.
    """
    level, nic, transport = _level(fault), fault.target, actuators.transport
    assert isinstance(nic, LinkFailure)
    if not can_pace():  # this machine's kernel is another one than the launcher's
        _LOG.error("%s was not injected: this kernel cannot pace connections", fault)
        return
    peers = actuators.fabric.neighbours(nic.server, level)
    nbytes_s = max(1, fault.settings["rate"] // 8 // max(1, len(peers)))  # a NIC may have no peer
    is_own = nic.server == actuators.server
    if fault.direction == ("in" if is_own else "out"):
        return
    ends = [transport.pace(peer, level, nbytes_s) for peer in (peers if is_own else (nic.server,))]
    if fault.duration_s is not None:
        for end in ends:
            actuators.poller.after(fault.duration_s, end)


@on_server("jitter", does="lets the NIC stand still again and again")
def jitter(fault: Fault, actuators: Actuators) -> None:
    """Hold up what the NIC carries for random times, a third of the time; nothing is lost."""
    level, poller, holds = _level(fault), actuators.poller, actuators.holds
    delay_s = fault.settings.get("delay", JITTER_S)
    until_s = inf if fault.duration_s is None else poller.now_s() + fault.duration_s
    chance = random.Random(f"{fault} on server {actuators.server}")
    part = ("still", level)

    def begin() -> None:
        if poller.now_s() < until_s:
            if holds.take(part):
                actuators.transport.stand_still(level)
            poller.after(chance.uniform(0, delay_s), end)

    def end() -> None:
        if holds.let_go(part):
            actuators.transport.go_on(level)
        poller.after(chance.uniform(0, 2 * delay_s), begin)

    begin()


@on_server("stall", does="stops the data of its connection, not its heartbeats")
def stall(fault: Fault, actuators: Actuators) -> None:
    """Have this server's own kernel drop what the connection brings: cables know no connections."""
    level, transport, holds = _level(fault), actuators.transport, actuators.holds
    assert isinstance(fault.target, LinkFailure)
    assert fault.peer is not None
    peer = fault.peer if fault.target.server == actuators.server else fault.target.server

    def end() -> None:
        if holds.let_go((peer, level)):
            transport.unstall(peer, level)

    if holds.take((peer, level)):
        transport.stall(peer, level)
    if fault.duration_s is not None:
        actuators.poller.after(fault.duration_s, end)


def _level(fault: Fault) -> int:
    assert fault.level is not None
    return fault.level


def _hold(level: int, duration_s: float | None, actuators: Actuators) -> None:
    """Silence the NIC of a level for so long, or for the rest of the job."""

    def end() -> None:
        if actuators.holds.let_go(level):
            actuators.transport.unsilence(level)

    if actuators.holds.take(level):
        actuators.transport.silence(level)
    if duration_s is not None:
        actuators.poller.after(duration_s, end)
