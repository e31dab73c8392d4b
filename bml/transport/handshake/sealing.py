"""Sealed heartbeats: datagrams with a MAC that only a holder of the cluster's token can make. Pure."""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from bml.transport.handshake.auth import VERSION

_HEARTBEAT_MAGIC = b"BMLb"
_HEARTBEAT_MAC_NBYTES = 16
# magic, version, reserved, level, from server and its incarnation, to server and its, sequence number
_HEARTBEAT = struct.Struct(">4sBBHIQIQQ")
HEARTBEAT_NBYTES = _HEARTBEAT.size + _HEARTBEAT_MAC_NBYTES


class Heartbeat(NamedTuple):
    """One heartbeat: `server` tells `dest`, over its NIC of `level`, that it is alive.

    It counts for `incarnation` of its sender and `dest_incarnation` of its receiver only.
    """

    server: int
    dest: int
    level: int
    sequence: int
    incarnation: int = 0
    dest_incarnation: int = 0


def seal_heartbeat(token: bytes, job: bytes, heartbeat: Heartbeat) -> bytes:
    """Return the datagram of a heartbeat, `HEARTBEAT_NBYTES` long."""
    server, dest, level, sequence, incarnation, dest_incarnation = heartbeat
    body = _HEARTBEAT.pack(
        _HEARTBEAT_MAGIC, VERSION, 0, level, server, incarnation, dest, dest_incarnation, sequence
    )
    return body + _heartbeat_mac(token, job, body)


def open_heartbeat(token: bytes, job: bytes, datagram: bytes) -> Heartbeat | None:
    """Return the heartbeat in a datagram, or None if it is not one made with this token for this job."""
    if len(datagram) != HEARTBEAT_NBYTES:
        return None
    body = datagram[: _HEARTBEAT.size]
    magic, version, _, level, server, incarnation, dest, dest_incarnation, sequence = _HEARTBEAT.unpack(body)
    if magic != _HEARTBEAT_MAGIC or version != VERSION:
        return None  # checked before the MAC, so that garbage costs little time
    if not hmac.compare_digest(datagram[_HEARTBEAT.size :], _heartbeat_mac(token, job, body)):
        return None
    return Heartbeat(server, dest, level, sequence, incarnation, dest_incarnation)


def _heartbeat_mac(token: bytes, job: bytes, body: bytes) -> bytes:
    return hmac.digest(token, b"bml heartbeat" + job + b"\0" + body, "sha256")[:_HEARTBEAT_MAC_NBYTES]
