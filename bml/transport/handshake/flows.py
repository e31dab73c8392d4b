"""What the kernel says of a TCP connection, and how to make one stand still. Linux."""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress

from bml.faults.stalls import Flow

_INFO_NBYTES = 160
# Of struct tcp_info: retransmits, probes; unacked; bytes_acked; segs_in, notsent_bytes, data_segs_in.
_INFO = struct.Struct("=2xBB20xI92xQ12xII4xI4x")

# The socket module does not name them.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_RETURN = 0x06
_ACCEPT_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))


def flow_of(sock: socket.socket) -> Flow:
    """What the kernel knows of what was written to this connected TCP socket. Raises OSError.

    An answer is an acknowledgement that came on its own, or one that acknowledges more: what the peer sends
    carries the old one again, and says nothing about the way there.
    """
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)
    retransmits, probes, unacked, nbytes_acked, segments, notsent, with_data = _INFO.unpack(raw)
    outstanding = unacked > 0 or notsent > 0
    return Flow(outstanding, nbytes_acked + segments - with_data, retransmits + probes)


def hold(sock: socket.socket) -> None:
    """Have the kernel drop whatever arrives for this socket, acknowledgements too: an injected fault.

    TCP never sees it, so nothing is acknowledged either, and both directions stand still without a sign.
    """
    program = struct.pack("@HP", 1, ctypes.addressof(_ACCEPT_NOTHING))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def release(sock: socket.socket) -> None:
    """End `hold`; no effect on a socket that is not held."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
