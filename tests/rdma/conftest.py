"""Inside the virtual machine: its NICs, faults of them, and settings for its speed."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

SETTINGS = {
    "BML_NICS": "10.7.0.{n},10.7.1.{n}",
    # Software emulation moves some 20 MB/s in all: what is under way must be through before the time-out.
    "BML_RDMA_WINDOW_NBYTES": "131072",
    "BML_RDMA_TIMEOUT": "18",
    "BML_RDMA_RETRIES": "3",
    "BML_POOL_MIB": "16",
}

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def cable(server: int, rail: int, state: str) -> None:
    """Take the far end of a NIC's cable "down" or "up", without a program that takes longer to start."""
    name = f"ps{server}r{rail}".encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))
        (flags,) = struct.unpack_from("H", answer, 16)
        flags = flags | _IFF_UP if state == "up" else flags & ~_IFF_UP
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags))


def heal(servers: int) -> None:
    for server in range(servers):
        for rail in range(2):
            cable(server, rail, "up")


@pytest.fixture(autouse=True)
def in_the_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    servers = int(os.environ.get("BML_RDMA_VM", "0"))
    if not servers:
        pytest.skip("runs in the virtual machine only: make test-rdma")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield
    heal(servers)


def fork_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of jobs be forks of this one: importing everything takes 20 s here."""
    from bml.cluster.fleets import fork_server
    from bml.cluster.process import worker

    assert worker
    real = fork_server.subprocess.Popen

    class Forked:
        def __init__(self, pid: int) -> None:
            self.pid = pid
            self.returncode: int | None = None

        def poll(self) -> int | None:
            return self.returncode

        def wait(self, timeout: float | None = None) -> int:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def popen(command: list[str], **options: object) -> object:
        if command[1:2] != ["-c"] or "fork_server" not in command[2]:
            return real(command, **options)  # type: ignore[call-overload]
        pid = os.fork()
        if pid:
            return Forked(pid)
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            descriptor = int(command[3])
            os.closerange(3, descriptor)  # as a new program would: the launcher's end above all
            os.closerange(descriptor + 1, 1 << 16)
            sys.argv = ["-c", *command[3:]]
            fork_server.main()
        finally:
            os._exit(0)

    monkeypatch.setattr(fork_server.subprocess, "Popen", popen)
