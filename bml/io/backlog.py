"""What the kernel delivers over a connection while more bytes wait for it: what rates are measured by.

Bytes per second of a connection that has nothing to send say nothing of its path. Nor does the time in which
a process that has more to send does not run: then the kernel has delivered all that it had. So a moment
counts only if bytes wait in the process, and the kernel has bytes that are not acknowledged. The time in
which the peer's window was closed does not count either: then bytes wait for the peer's process.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address

# Of struct tcp_info: bytes_acked; busy_time and rwnd_limited in µs, to the tick of the kernel's clock.
_INFO = struct.Struct("=120xQ40xQQ")


class Backlog:
    """The sums of one link, over all its connections. Linux only."""

    __slots__ = ("_began", "_busy_us", "_nbytes")

    def __init__(self) -> None:
        self._nbytes = self._busy_us = 0
        self._began: tuple[int, int] | None = None

    def note(self, sock: socket.socket, waits: bool) -> None:
        """Note that from now on bytes wait because the kernel takes no more, or not any longer."""
        try:
            self._nbytes, self._busy_us = self._sums(sock)
            self._began = _delivered(sock) if waits else None
        except OSError:  # the end of this connection is about to be reported
            self._began = None

    def moved(self, sock: socket.socket) -> tuple[int, float]:
        """Bytes that were delivered while more waited, and for how many seconds that took. Raises OSError."""
        nbytes, busy_us = self._sums(sock)
        return nbytes, busy_us / 1e6

    def _sums(self, sock: socket.socket) -> tuple[int, int]:
        if self._began is None:
            return self._nbytes, self._busy_us
        (nbytes_before, us_before), (nbytes, us) = self._began, _delivered(sock)
        return self._nbytes + nbytes - nbytes_before, self._busy_us + us - us_before


def _delivered(sock: socket.socket) -> tuple[int, int]:
    """Bytes acknowledged, and the µs in which there were others, so far. Raises OSError."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    nbytes, busy_us, closed_us = _INFO.unpack(raw)
    return nbytes, busy_us - closed_us


def stays_on_machine(sock: socket.socket) -> bool:
    """Whether both ends of a connected socket are in this network namespace: no NIC carries its bytes then.

    Raises OSError if it is not connected, or nothing can be sent to its peer any more.
    """
    peer = sock.getpeername()
    if sock.getsockname()[0] == peer[0] or ip_address(peer[0]).is_loopback:
        return True
    # The kernel sends from the peer's own address to an address that is one of this machine.
    with socket.socket(sock.family, socket.SOCK_DGRAM) as asked:
        asked.connect(peer)
        return bool(asked.getsockname()[0] == peer[0])
