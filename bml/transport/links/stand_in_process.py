"""The process of a stand-in: it sends heartbeats for a server that lives and whose loop does not turn.

It is started as a file, in an interpreter without site packages. As every server starts one it imports
little: no signal, socket, pathlib or typing, and of bml datagram.py alone. Arguments: the descriptor of the
channel to its server, that of the page (the nanoseconds of the last turn), and those of the NICs' sockets.
The first message says what heartbeats need, each later one to whom they go.
"""

import mmap
import os
import select
import sys
import time
from _signal import (  # type: ignore[import-not-found]
    SIG_IGN,
    SIGHUP,
    SIGINT,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    signal,
)
from _socket import socket

_TOO_LATE = 1.5
"""A turn is late after so many heartbeats."""
_GONE = b"TtZX"
"""The states of /proc/PID/stat in which a process is stopped or dead."""
_DYING = 0x4 | 0x200 | 0x400
"""The flags there of one that ends, writes its core, or was killed: to free its memory takes a while."""


def main(channel: int, page: int, *nics: int) -> None:
    """Run until the server hangs up, or its kernel does so for it."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "handshake"))
    from datagram import sealed  # type: ignore[import-not-found]

    for number in (SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2):  # it ends with its server, and not before
        signal(number, SIG_IGN)
    sockets = [socket(fileno=nic) for nic in nics]
    turned = mmap.mmap(page, 8, prot=mmap.PROT_READ)
    process = os.getppid()
    first = os.read(channel, 1 << 16).decode().split()
    token, job = map(bytes.fromhex, first[:2])
    me, incarnation = map(int, first[2:4])
    interval_s, hold_s = map(float, first[4:])
    lines: list[list[str]] = []
    news = select.poll()
    news.register(channel, select.POLLIN)
    while True:
        if news.poll(interval_s * 1000):
            message = os.read(channel, 1 << 20)
            if not message:
                return
            lines = [line.split() for line in message.decode().splitlines() if line]
            continue
        late_s = (time.monotonic_ns() - int.from_bytes(turned[:8], sys.byteorder)) / 1e9
        if not _TOO_LATE * interval_s <= late_s <= hold_s or _is_gone(process):
            continue
        for level, peer, its_incarnation, host, port in lines:
            between = me, incarnation, int(peer), int(its_incarnation), time.monotonic_ns()
            heartbeat = sealed(token, job, 1, int(level), between)
            _send(sockets[int(level)], heartbeat, (host, int(port)))


def _send(nic: socket, heartbeat: bytes, to: tuple[str, int]) -> None:
    try:
        nic.sendto(heartbeat, to)
    except OSError:
        return  # the NIC is down


def _is_gone(process: int) -> bool:
    """Whether it is stopped, dying or dead."""
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b") ")[2].split()
    except OSError:
        return True
    return fields[0] in _GONE or bool(int(fields[6]) & _DYING)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
