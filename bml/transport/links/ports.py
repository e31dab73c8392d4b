"""The sockets of one NIC, on a port that is free for TCP and UDP, and the sizes of their send buffers."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from bml.io.forks import close_on_fork
from bml.protocol.step.slices import on_one_host
from bml.topology.errors import FabricError
from bml.transport.handshake.greeting import address_family
from bml.transport.handshake.listening import BACKLOG
from bml.transport.handshake.traffic_class import mark, of_heartbeats

SNDBUF_NBYTES = 64 << 10
"""Bytes; small, so that frames wait in the link's queue by priority, and not in the kernel in order. No more
than leave in `_QUEUE_S` seconds, but `_LEAST_SNDBUF_NBYTES`: what the kernel has taken waits in the queue of
the NIC, and the short steps of other jobs wait behind it."""
_QUEUE_S = 1.3e-3  # 16 KiB at 100 Mbit/s
_LEAST_SNDBUF_NBYTES = 16 << 10
LOOPBACK_SNDBUF_NBYTES = 128 << 10
"""Bytes, on a loopback interface. No frame waits for a wire there, and every full buffer costs two switches
between processes; but bytes that do not fit into the processor's cache are copied more slowly."""
BESIDE_SNDBUF_NBYTES = 512 << 10
"""The most bytes beside a computation, and no more than leave in `_SOON_S` seconds: a server that sleeps
until the buffer has room must first get back a core and the interpreter's lock."""
_SOON_S = 2e-3  # a server that sleeps is woken in less
_BIND_TRIES = 100


def bind_pair(address: str, name: str, traffic_class: int) -> tuple[socket.socket, socket.socket]:
    """Return a listening TCP socket and a UDP socket on the same free port of the NIC with this address.

    Raises FabricError, which names the NIC as `name`, if that is not possible.
    """
    family = address_family(address)
    for _ in range(_BIND_TRIES):
        tcp = close_on_fork(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        udp = close_on_fork(socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        try:
            tcp.bind((address, 0))
            udp.bind((address, tcp.getsockname()[1]))
            mark(tcp, traffic_class)
            mark(udp, of_heartbeats(traffic_class))
            tcp.listen(BACKLOG)
        except OSError as error:
            tcp.close()
            udp.close()
            if error.errno != errno.EADDRINUSE:
                raise FabricError(
                    f"{name}: cannot listen: {error.strerror}; check that the address is one of this machine"
                ) from error
        else:
            return tcp, udp
    raise FabricError(f"{name}: found no port that is free for both TCP and UDP")


def send_buffers(nics: Sequence[str], rate: float) -> tuple[int, int]:
    """Sizes of the kernel's send buffers in bytes: (usually, beside a computation).

    `rate` is that of a NIC in bytes per second. The kernel takes about twice as much as the size.
    """
    if on_one_host(nics):
        return LOOPBACK_SNDBUF_NBYTES, BESIDE_SNDBUF_NBYTES
    usual = min(max(_LEAST_SNDBUF_NBYTES, int(rate * _QUEUE_S)), SNDBUF_NBYTES)
    return usual, min(max(SNDBUF_NBYTES, int(rate * _SOON_S)), BESIDE_SNDBUF_NBYTES)
