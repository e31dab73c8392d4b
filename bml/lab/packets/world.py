"""Everything that a simulation of packets reads and changes, as few arrays of records.

As in `bml.lab.flows.world`, lists are fields, too: the field `queue` of record i is entry i of a list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NOBODY = -1
"""No packet, no transfer, or no switch: a link begins or ends at a server."""

Records = NDArray[Any]

PACKET = np.dtype(
    [
        ("arrives", np.float64),  # seconds, while it is on a wire
        ("nbytes", np.float64),
        ("next", np.int32),  # the one behind it: in a queue, on the wires, or among free records
        ("subject", np.int32),  # a connection; a link if this is a pause frame
        ("transfer", np.int32),  # the one that it ends, or NOBODY
        ("number", np.int32),  # in its connection
        ("hop", np.int32),  # its link in the path; of a notification the links that are left
        ("kind", np.int8),
        ("marked", np.bool_),
    ]
)
TRANSFER = np.dtype(
    [
        ("nbytes", np.float64),
        ("arrived", np.float64),  # seconds; NaN before
        ("next_start", np.int64),  # those that wait for it: next[next_start:next_stop]
        ("next_stop", np.int64),
        ("connection", np.int32),  # or NOBODY
        ("priority", np.int32),  # less goes first
        ("missing", np.int32),  # transfers that must arrive before it is ready
        ("packets", np.int32),
        ("ahead", np.int32),  # list: a stack of transfers that have just arrived
    ]
)
CONNECTION = np.dtype(
    [
        ("path_start", np.int64),  # its links: path[path_start:path_stop]
        ("path_stop", np.int64),
        ("queue_start", np.int64),  # where its transfers begin in `World.queue`
        ("queued", np.int32),  # transfers in its queue
        ("sends", np.int32),  # its transfer now, or NOBODY
        ("left", np.int32),  # packets of it that were not sent yet
        ("sent", np.int32),  # packets, of all its transfers
        ("received", np.int32),
        ("rank", np.int32),  # of connections of a NIC that may send at one time the least goes first
        ("touched", np.int32),  # list: those that have something to send again
        ("is_touched", np.bool_),
        ("may_send", np.float64),  # from when on, seconds
        ("rate", np.float64),  # bytes per second, as `target`
        ("target", np.float64),
        ("alpha", np.float64),
        ("alpha_falls", np.float64),  # when alpha is next reduced, seconds
        ("rate_grows", np.float64),  # when the timer next ends, seconds
        ("counted", np.float64),  # bytes since the byte counter last ended
        ("timer_ends", np.int32),
        ("counter_ends", np.int32),
        ("notifies", np.float64),  # the time from which on the receiver may send another notification
    ]
)
LINK = np.dtype(
    [
        ("capacity", np.float64),  # bytes per second
        ("due", np.float64),  # when its packet has been sent, or it may send again; infinite for neither,
        ("ends", np.float64),  # or if this says when its packet has been sent
        ("queued", np.float64),  # bytes that wait for it in its switch, its packet now included
        ("most_queued", np.float64),
        ("held", np.float64),  # bytes that came over it and are in the switch at its end
        ("paused_at", np.float64),  # seconds
        ("paused_s", np.float64),
        ("first", np.int64),  # where its connections begin in `World.turns`, if it is a server's
        ("waiting", np.int32),  # connections there
        ("source", np.int32),  # switches, or NOBODY for a server
        ("target", np.int32),
        ("sends", np.int32),  # its packet now, or NOBODY
        ("head", np.int32),  # its queue
        ("tail", np.int32),
        ("pauses", np.int32),  # how often the switch at its end has paused it
        ("where", np.int32),  # its place in `heap`
        ("heap", np.int32),  # list: links by `due`
        ("behind", np.int32),  # the link that began after this one to send what is usual
        ("asked", np.bool_),  # whether the switch at its end wants it paused
        ("paused", np.bool_),  # whether it is
    ]
)
SWITCH = np.dtype(
    [
        ("shared", np.float64),  # bytes of its buffer that ports share
        ("held", np.float64),  # bytes in it
        ("most_held", np.float64),
        ("in_start", np.int64),  # links to it: incoming[in_start:in_stop]
        ("in_stop", np.int64),
        ("asking", np.int32),  # links that it wants paused
    ]
)


ENTRY = np.dtype([("key", np.float64), ("rank", np.int64), ("item", np.int32)])
"""Of a heap, in which the least key goes first, of equal ones the least rank, then the least item."""


class Rules(NamedTuple):
    """How packets are sent, marked and paused: `bml.lab.packets.settings.Settings` for compiled code.

    Attributes: those of Settings, rates in bytes per second; `hold` is the bytes below the threshold at
    which a link may send again, `usual` the capacity of most links.
    """

    usual: float

    packet_nbytes: float
    delay_s: float
    share: float
    hold: float
    mark_from: float
    mark_all_from: float
    most_marked: float
    dcqcn: bool
    gain: float
    alpha_s: float
    timer_s: float
    counter_nbytes: float
    notification_s: float
    additive: float
    hyper: float
    least: float


class World(NamedTuple):
    """The records, and what belongs to several of them.

    Attributes:
        packets, transfers, connections, links, switches: arrays of PACKET, TRANSFER, and so on.
        queue: of ENTRY, the ready transfers of connections; the keys are priorities.
        turns: of ENTRY, the connections of each server's link that have something to send; the keys are
            seconds, from when on they may send.
        next: int32, transfers that wait for one.
        path: int32, links of connections.
        incoming: int32, links to switches.
        number: int64, numbers of `bml.lab.packets.events`.
        clock: float64 [2], time now, and when the last transfer arrived, seconds.
        chance: uint64 [1], the state of the generator of random numbers.
    """

    packets: Records
    transfers: Records
    connections: Records
    links: Records
    switches: Records
    queue: Records
    turns: Records
    next: NDArray[np.int32]
    path: NDArray[np.int32]
    incoming: NDArray[np.int32]
    number: NDArray[np.int64]
    clock: NDArray[np.float64]
    chance: NDArray[np.uint64]
