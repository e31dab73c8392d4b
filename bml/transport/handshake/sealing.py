"""Sealed heartbeats: datagrams with a MAC that only a holder of the cluster's token can make. Pure."""

from __future__ import annotations

from typing import NamedTuple

from bml.transport.handshake import datagram as sealing

HEARTBEAT_NBYTES = sealing.NBYTES


class Heartbeat(NamedTuple):
    """One heartbeat: `server` tells `dest`, over its NIC of `level`, that it is alive.

    It counts for `incarnation` of its sender and `dest_incarnation` of its receiver only. `stands_in`: the
    server lives, but its loop does not turn, and its stand-in says so.
    """

    server: int
    dest: int
    level: int
    sequence: int
    incarnation: int = 0
    dest_incarnation: int = 0
    stands_in: bool = False


def seal_heartbeat(token: bytes, job: bytes, heartbeat: Heartbeat) -> bytes:
    """Return the datagram of a heartbeat, `HEARTBEAT_NBYTES` long."""
    server, dest, level, sequence, incarnation, dest_incarnation, stands_in = heartbeat
    between = server, incarnation, dest, dest_incarnation, sequence
    return sealing.sealed(token, job, stands_in, level, between)


def open_heartbeat(token: bytes, job: bytes, datagram: bytes) -> Heartbeat | None:
    """Return the heartbeat in a datagram, or None if it is not one made with this token for this job."""
    opened = sealing.opened(token, job, datagram)
    if opened is None:
        return None
    by, level, server, incarnation, dest, dest_incarnation, sequence = opened
    return Heartbeat(server, dest, level, sequence, incarnation, dest_incarnation, by == 1)
