"""The process that holds the store of torchrun, or meets the other nodes in it, and where it listens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from bml.cluster.process.imports import what_we_import
from bml.cluster.process.starting import SOCKET, Helper
from bml.cluster.torchrun.store import Wanted
from bml.errors import FabricError, UsageError

_STORE = "from bml.cluster.torchrun import store; store.main()"


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
