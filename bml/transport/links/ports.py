"""The sockets of one NIC: a port free for TCP and UDP, and how much the kernel may take before it sends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from bml.io.forks import close_on_fork
from bml.protocol.step.slices import on_one_host
from bml.topology.errors import FabricError
from bml.transport.handshake.greeting import address_family, mark
from bml.transport.handshake.listening import BACKLOG

SNDBUF_NBYTES = 64 << 10
"""Small, so that what waits waits in our queue by priority and not in the kernel's in order."""
LOOPBACK_SNDBUF_NBYTES = 128 << 10
"""There nothing waits for a wire, and every full buffer costs two switches between processes; but what does
not fit into the processor's cache is copied more slowly."""
BESIDE_SNDBUF_NBYTES = 512 << 10
"""At most, beside a computation, and no more than leaves soon: a server that sleeps until it can go on has to
get back a core and the interpreter's lock."""
_SOON_S = 2e-3
_BIND_TRIES = 100


def bind_pair(address: str, name: str, traffic_class: int) -> tuple[socket.socket, socket.socket]:
    """Return a listening TCP socket and a UDP socket on the same free port of the NIC with this address.

    Raises FabricError, which calls the NIC by `name`.
    """
    family = address_family(address)
    for _ in range(_BIND_TRIES):
        tcp = close_on_fork(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        udp = close_on_fork(socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        try:
            tcp.bind((address, 0))
            udp.bind((address, tcp.getsockname()[1]))
            mark(tcp, traffic_class)
            mark(udp, traffic_class)
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
    """Sizes of the kernel's send buffers: as a rule, and beside a computation."""
    if on_one_host(nics):
        return LOOPBACK_SNDBUF_NBYTES, BESIDE_SNDBUF_NBYTES
    return SNDBUF_NBYTES, min(max(SNDBUF_NBYTES, int(rate * _SOON_S)), BESIDE_SNDBUF_NBYTES)
