"""The two helpers of the launcher: the subreaper of the ranks, and the process that holds the store."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bml.cluster.fleets.fork_server import LONG_COPIES
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.starting import SOCKET, start_with_socket
from bml.cluster.torchrun import subreaper
from bml.cluster.torchrun.store import MOST_NBYTES, Wanted
from bml.errors import FabricError, UsageError
from bml.io.forks import close_whole

_STORE = "from bml.cluster.torchrun import store; store.main()"
_ENDS_S = 10.0
"""How long a helper may take to end once it is asked to, in seconds."""


class Helper:
    """A process that speaks JSON, one message a packet, and ends when the launcher is gone."""

    def __init__(self, arguments: Sequence[str], inherited: Sequence[int], environment: Mapping[str, str]):
        # Ctrl-C is the launcher's to handle.
        self._process, self.sock = start_with_socket(
            arguments, environment, inherited, kind=socket.SOCK_SEQPACKET
        )

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. If the process is gone, the next read shows it."""
        with suppress(OSError):
            socket.send_fds(self.sock, [json.dumps(message).encode()], list(descriptors))

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, for which it waits; None if the process is gone."""
        try:
            data = self.sock.recv(MOST_NBYTES)
        except ConnectionError:
            return None
        found: dict[str, Any] | None = json.loads(data) if data else None
        return found

    def hang_up(self) -> None:
        """Close the socket, which ends the process, and wait until it has ended. Idempotent."""
        close_whole(self.sock)
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:  # it is stopped, or stuck
            self.kill()

    def kill(self) -> None:
        """Kill the process, which has nothing to save. Idempotent."""
        close_whole(self.sock)
        self._process.kill()
        self._process.wait()


def start_subreaper(command: Sequence[str]) -> Helper:
    """Start the parent of the ranks, each of which runs `command`."""
    # Isolated from PYTHONPATH and the like; the ranks inherit these as they are.
    return Helper(["-I", subreaper.__file__, SOCKET, *command], (), {**LONG_COPIES, **os.environ})


def start_store(wanted: Wanted) -> Helper:
    """Start the process that hosts the store, or meets the other nodes in that of node 0."""
    inherited = () if wanted.listening is None else (wanted.listening,)
    environment = {**os.environ, **what_we_import()}
    return Helper(["-P", "-c", _STORE, SOCKET, wanted.argument()], inherited, environment)


def listen(host: str, port: int, node: int | None, n_nodes: int) -> socket.socket | None:
    """Return a socket that listens for the store at this address; None if another node is to host it.

    That is so on all nodes but 0. Where no node has a rank, it is the first on the machine of this address.
    Some machines know their own name as a loopback address: with several nodes it is listened everywhere
    then. Raises UsageError if the address cannot be used.
    """
    if node not in (0, None):
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"the host {host} is not known: {error.strerror or error}") from None
    at = ("", port) if n_nodes > 1 and _is_own_name(host, str(address[0])) else address[:2]
    try:
        return socket.create_server(at, family=family, backlog=1024)
    except OSError as error:
        if node is None and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        if error.errno == errno.EADDRNOTAVAIL:  # a name for this machine that is not on its own interfaces
            return _listen_everywhere(port, family)
        raise UsageError(
            f"{host}:{port} cannot be listened at: {error.strerror}; give another --master-port"
        ) from None


def _is_own_name(host: str, address: str) -> bool:
    """Whether a loopback address stands for a name by which other machines may find this one."""
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return is_loopback and host != address and host.split(".")[0] != "localhost"


def _listen_everywhere(port: int, family: int) -> socket.socket:
    try:
        return socket.create_server(("", port), family=family, backlog=1024)
    except OSError as error:
        raise FabricError(f"port {port} cannot be listened at: {error.strerror}") from None
