"""The kernel's counters of a TCP connection, and faults that make one slow or stand still. Linux only."""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress

from bml.faults.stalls import Flow

# Of struct tcp_info: retransmits, probes; unacked; bytes_acked; segs_in, notsent_bytes, data_segs_in.
_INFO = struct.Struct("=2xBB20xI92xQ12xII4xI")
# Of the same: total_retrans; data_segs_out; dsack_dups.
_SEGMENTS = struct.Struct("=100xI52xI56xI")

# The socket module has no names for them.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_SO_MAX_PACING_RATE = 47
_NO_PACE = (1 << 64) - 1
_RETURN = 0x06
_ACCEPT_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))


def flow_of(sock: socket.socket, moved: tuple[int, float] = (0, 0.0)) -> Flow:
    """The kernel's counters of the bytes written to this connected TCP socket. Raises OSError.

    `moved` is what its link's backlog says: bytes, and the seconds that they took.

    An answer is an acknowledgement in a segment without data, or one that acknowledges more bytes. Segments
    with data of the peer repeat the last acknowledgement, and so do not show that the way there works.
    """
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    retransmits, probes, unacked, nbytes_acked, segments, notsent, with_data = _INFO.unpack(raw)
    outstanding = unacked > 0 or notsent > 0
    return Flow(outstanding, nbytes_acked + segments - with_data, retransmits + probes, *moved)


def segments_of(sock: socket.socket) -> tuple[int, int]:
    """Segments with data that this connected TCP socket has sent, and how many were lost. Raises OSError.

    Those that the peer had twice in the end were late, not lost: the kernel has asked or guessed too soon.
    """
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS.size)
    resent, segments, twice = _SEGMENTS.unpack(raw)
    return segments, max(0, resent - twice)


def hold(sock: socket.socket) -> None:
    """Inject a fault: the kernel drops every segment that arrives for this socket, also acknowledgements.

    TCP never sees them, so nothing is acknowledged either: both directions stand still, and no side is told.
    """
    program = struct.pack("@HP", 1, ctypes.addressof(_ACCEPT_NOTHING))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def release(sock: socket.socket) -> None:
    """End `hold`; no effect on a socket that is not held."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def can_pace() -> bool:
    """Whether this machine's kernel can do what `set_pace` asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", _NO_PACE))
        except OSError:
            return False
    return True


def set_pace(sock: socket.socket, nbytes_s: int | None) -> None:
    """Have the kernel send at most so many bytes a second over this TCP socket; None: as fast as it can.

    No effect where the kernel cannot, see `can_pace`.
    """
    pace = struct.pack("=Q", _NO_PACE if nbytes_s is None else nbytes_s)
    with suppress(OSError):  # the end of this connection is about to be reported
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
