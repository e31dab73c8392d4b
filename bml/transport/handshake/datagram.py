"""The bytes of a sealed heartbeat. Pure; imports little and nothing of bml: a stand-in loads it alone."""

import hmac
import struct

VERSION = 4
"""Of heartbeats and of the handshake."""
_MAGIC = b"BMLb"
_MAC_NBYTES = 16
# magic, version, 1 of a stand-in, level, from server and its incarnation, to server and its, sequence number
_BODY = struct.Struct(">4sBBHIQIQQ")
NBYTES = _BODY.size + _MAC_NBYTES


def sealed(token: bytes, job: bytes, by: int, level: int, between: tuple[int, int, int, int, int]) -> bytes:
    """Return the datagram; `between`: server, its incarnation, receiver, its incarnation, sequence number."""
    body = _BODY.pack(_MAGIC, VERSION, by, level, *between)
    return body + _mac(token, job, body)


def opened(token: bytes, job: bytes, datagram: bytes) -> tuple[int, ...] | None:
    """Return by, level, and what was `between`; None if it was not sealed with this token for this job."""
    if len(datagram) != NBYTES:
        return None
    body = datagram[: _BODY.size]
    magic, version, *fields = _BODY.unpack(body)
    if magic != _MAGIC or version != VERSION:
        return None  # checked before the MAC, so that garbage costs little time
    return tuple(fields) if hmac.compare_digest(datagram[_BODY.size :], _mac(token, job, body)) else None


def _mac(token: bytes, job: bytes, body: bytes) -> bytes:
    return hmac.digest(token, b"bml heartbeat" + job + b"\0" + body, "sha256")[:_MAC_NBYTES]
