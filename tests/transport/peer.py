"""Another process: server 1 with one NIC. It prints its endpoint, reads server 0's, and sends long frames."""

import sys

from wires import JOB, TOKEN, Recorder, header, nic, until

from bml.transport import Poller, TcpTransport
from bml.transport.handshake.auth import Identity

SLICE_NBYTES = 64 << 10


def main() -> None:
    poller = Poller()
    transport = TcpTransport(Identity.of(TOKEN, JOB, 1), [nic(1, 0)], poller, Recorder())
    print(*transport.endpoints[0], flush=True)
    host, port = sys.stdin.readline().split()
    transport.set_peers({(0, 0): (host, int(port))})
    until(poller, lambda: transport.is_up(0, 0), "server 0")
    data = memoryview(bytes(SLICE_NBYTES))
    while True:
        if transport.queued_nbytes < 1 << 20:
            transport.send(0, 0, header(0, 0, SLICE_NBYTES), data)
        poller.poll(0.01)


if __name__ == "__main__":
    main()
