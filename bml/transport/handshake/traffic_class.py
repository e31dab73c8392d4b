"""Traffic classes: the byte that marks packets for switches, names of the usual ones, and the marking."""

from __future__ import annotations

import socket
from contextlib import suppress
from types import MappingProxyType

from bml.topology.errors import UsageError

URGENT, NORMAL, BULK = 34 << 2, 0, 8 << 2
"""DSCP AF41, unmarked, and CS1, which is IEEE 802.1Q's background: most switches know them so."""
NAMES = MappingProxyType({"urgent": URGENT, "normal": NORMAL, "bulk": BULK})

#: The queueing of Linux (pfifo_fast, fq) goes by priority, which the kernel derives from TOS bits of old.
_PRIORITY = {URGENT: 6, BULK: 2}
_MOST = 255


def traffic_class_of(given: int | str) -> int:
    """Return the byte of a traffic class: one of NAMES, or a number 0 to 255, also as a text.

    Raises UsageError for anything else.
    """
    if isinstance(given, str):
        text = given.strip().lower()
        number = NAMES.get(text, int(text) if text.isascii() and text.isdecimal() else -1)
    else:
        number = given
    if not 0 <= number <= _MOST:
        raise UsageError(
            f"traffic class is {given}: give {', '.join(NAMES)}, or 0 to {_MOST}, a DSCP times 4"
        )
    return number


def mark(sock: socket.socket, traffic_class: int) -> None:
    """Mark all packets of this socket with a traffic class; connections that it accepts have the byte, too.

    Kernels that know no priorities of sockets send them in order. Raises OSError if packets cannot be marked.
    """
    if not traffic_class:
        return
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic_class)
    if traffic_class in _PRIORITY:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY[traffic_class])


def queue_as(sock: socket.socket, listener: socket.socket) -> None:
    """Give an accepted connection the priority of its listener, which the kernel does not; see `mark`."""
    with suppress(OSError):
        priority = listener.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
        if priority:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)


def of_heartbeats(traffic_class: int) -> int:
    """Return the class of heartbeats. Those of bulk, and of all that switches take for it, are unmarked.

    A switch that serves other classes first would otherwise make a server look dead that is only slow.
    Switches go by the upper three bits.
    """
    return NORMAL if traffic_class >> 5 == BULK >> 5 else traffic_class
