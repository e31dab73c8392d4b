"""The queues at one end of a cable: a token bucket with the rate, in it a queue for each class of packets.

Packets are told apart by the class selector of their DSCP (its upper three bits), in the order of 802.1Q: all
from 2 on come first, unmarked ones (0) next, background (1) last. A queue that has sent less than a tenth of
the rate comes before those that have sent more: no class stands still. Where the kernel cannot tell classes
apart (it needs sch_htb and cls_u32), there is one queue for all.
"""

from __future__ import annotations

import errno

from pyroute2 import IPRoute, NetlinkError
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_pfifo

from bml.fabric.condition import BURST_NBYTES, Setting

# Handles of the qdiscs at a device: each kind needs its own.
_TBF, _BLACKHOLE, _CLASSES, _FIRST_QUEUE = 0x10000, 0x20000, 0x30000, 0x100000
_KIND = "htb"
_ALL = _CLASSES + 1
_URGENT, _NORMAL, _BACKGROUND = range(3)
#: In this order: the first that matches the first word of the IP header decides.
_FILTERS = (
    (_NORMAL, "0x00000000/0x00e00000+0"),
    (_BACKGROUND, "0x00200000/0x00e00000+0"),
    (_URGENT, "0x0/0x0+0"),
)
_IP = 0x0800
#: Bytes per second: the token bucket limits the rate, and the classes below it never do.
_UNLIMITED = 5 * 10**9
_LEAST_SHARE = 10
_PACKET_NBYTES = 1600
_QUANTUM_NBYTES = 1 << 16

plugins.setdefault("bfifo", sched_pfifo)  # pyroute2 has no bfifo: both have a limit as their only option


def settle(ip: IPRoute, index: int, wanted: Setting) -> None:
    """Give the device with this index the queues of `wanted`; queues that are the same stay undisturbed."""
    if wanted.rate_bit == 0:
        # It reports packets as sent and drops them. Every kernel with tbf has it.
        ip.tc("replace", "blackhole", index, _BLACKHOLE)
    elif wanted.rate_bit is not None:
        rate, limit = wanted.rate_bit // 8, wanted.queue_nbytes
        ip.tc("replace", "tbf", index, _TBF, rate=rate, burst=wanted.burst_nbytes, limit=limit)
        ip.link("set", index=index, gso_max_size=wanted.segment_nbytes)
        try:
            _divide(ip, index, rate, limit)
        except NetlinkError as error:
            if error.code != errno.ENOENT:
                raise


def _divide(ip: IPRoute, index: int, rate: int, limit: int) -> None:
    """Make or change the queues in the token bucket of `rate` bytes per second, of `limit` bytes each."""
    new = not any(each["handle"] == _CLASSES for each in ip.get_qdiscs(index))
    if new:
        ip.tc("add", _KIND, index, _CLASSES, parent=_TBF + 1, default=_queue(_NORMAL) & 0xFFFF)
        _class(ip, index, _ALL, _CLASSES, _UNLIMITED, BURST_NBYTES, 0)
    for number in (_URGENT, _NORMAL, _BACKGROUND):
        _class(ip, index, _queue(number), _ALL, rate // _LEAST_SHARE, _PACKET_NBYTES, number)
        handle = _FIRST_QUEUE * (number + 1)
        ip.tc("replace", "bfifo", index, handle, parent=_queue(number), limit=limit)
    if new:
        for order, (number, key) in enumerate(_FILTERS, 1):
            match = {"protocol": _IP, "prio": order, "target": _queue(number), "keys": [key]}
            ip.tc("add-filter", "u32", index, parent=_CLASSES, **match)


def _class(ip: IPRoute, index: int, handle: int, parent: int, rate: int, burst: int, prio: int) -> None:
    """Make or change a class that has `rate` bytes per second for certain, and what the others leave."""
    bounds = {"rate": rate, "burst": burst, "ceil": _UNLIMITED, "cburst": BURST_NBYTES}
    ip.tc("replace-class", _KIND, index, handle, parent=parent, prio=prio, quantum=_QUANTUM_NBYTES, **bounds)


def _queue(number: int) -> int:
    """The handle of a class."""
    return _CLASSES + 0x10 + number
