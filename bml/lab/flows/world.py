"""Everything that a simulation reads and changes, as few arrays of records: they are quick to compile for.

A record has the fields of one transfer, connection, link or part. Lists of them (queues, heaps) are fields,
too: the field `queue` of record i is entry i of a list, and says nothing of transfer i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""The connection of a transfer that takes no time."""

Records = NDArray[Any]

TRANSFER = np.dtype(
    [
        ("nbytes", np.float64),
        ("began", np.float64),  # seconds; NaN if that has not happened, as `sent` and `arrived`
        ("sent", np.float64),
        ("arrived", np.float64),
        ("key", np.int64),  # priority and number of the time at which it was ready; 0 before
        ("next_start", np.int64),  # those that wait for it: next[next_start:next_stop]
        ("next_stop", np.int64),
        ("connection", np.int32),  # or NOWHERE
        ("priority", np.int32),  # less goes first
        ("missing", np.int32),  # transfers that must arrive before it is ready
        ("queue", np.int32),  # list: heaps of ready transfers, a connection's from its `queue_start` on
        ("under_way", np.int32),  # list: those that were sent, in order
        ("ahead", np.int32),  # list: a stack of transfers that have just arrived
    ]
)
CONNECTION = np.dtype(
    [
        ("left", np.float64),  # bytes that it still had to send at the time `seen`
        ("seen", np.float64),
        ("ends", np.float64),  # when its transfer will have been sent
        ("rate", np.float64),  # bytes per second; negative if it is not active
        ("path_start", np.int64),  # its links: path[path_start:path_stop]
        ("path_stop", np.int64),
        ("queue_start", np.int64),
        ("part", np.int32),
        ("queued", np.int32),  # transfers in its queue
        ("sends", np.int32),  # its transfer now; -1 for none
        (
            "place",
            np.int32,
        ),  # its place in the list `active`, from the first of its part; -1 if it is not there
        ("active", np.int32),  # list: the active connections of each part, from its `first` on
        ("touched", np.int32),  # list: those that may begin something now
        ("is_touched", np.bool_),
        ("fixed", np.bool_),  # whether it has its new rate
    ]
)
LINK = np.dtype(
    [
        ("capacity", np.float64),  # bytes per second
        ("left", np.float64),  # of it, what is not given away yet
        ("least", np.float64),  # the equal share of its connections when it was last looked at
        ("users_start", np.int64),  # its connections: users[users_start:users_stop]
        ("users_stop", np.int64),
        ("open", np.int32),  # active connections that have no rate yet
        ("heap", np.int32),  # list: links by `least`
    ]
)
PART = np.dtype(
    [
        ("soonest", np.float64),  # the first of the times `ends` of its connections
        ("first", np.int64),  # where its connections begin in the list `active`
        ("n_active", np.int32),
        ("where", np.int32),  # its place in `heap`
        ("heap", np.int32),  # list: parts by `soonest`
        ("stirred", np.int32),  # list: those in which something changed now
        ("change", np.int8),  # 1 if something changed now, 2 if rates do
    ]
)


class World(NamedTuple):
    """The records, and what belongs to several of them.

    Connections that share no link, not even through others, have nothing to do with each other: they are
    in different parts.

    Attributes:
        transfers, connections, links, parts: arrays of TRANSFER, CONNECTION, LINK, PART.
        next: int32, transfers that wait for one.
        path: int32, links of connections.
        users: int32, connections of links.
        number: int64, numbers of `bml.lab.flows.events`.
    """

    transfers: Records
    connections: Records
    links: Records
    parts: Records
    next: NDArray[np.int32]
    path: NDArray[np.int32]
    users: NDArray[np.int32]
    number: NDArray[np.int64]


def blank(n_transfers: int, n_connections: int, n_links: int, n_parts: int) -> tuple[Records, ...]:
    """Make records of which nothing is known and to which nothing has happened."""
    transfers = np.zeros(n_transfers, TRANSFER)
    for field in ("began", "sent", "arrived"):
        transfers[field] = np.nan
    connections = np.zeros(n_connections, CONNECTION)
    connections["ends"], connections["rate"] = np.inf, -1.0
    connections["sends"] = connections["place"] = -1
    parts = np.zeros(n_parts, PART)
    parts["soonest"] = np.inf
    parts["where"] = parts["heap"] = np.arange(n_parts)
    return transfers, connections, np.zeros(n_links, LINK), parts
