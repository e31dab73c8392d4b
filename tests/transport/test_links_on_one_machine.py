"""Between servers of one machine no NIC carries anything, whatever their addresses: nothing is measured."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from wires import Wires, header

from bml.io.backlog import stays_on_machine
from bml.transport import Identity, Kind, LinkSettings

MUCH_NBYTES = 8 << 20
FAR = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has (RFC 5737, RFC 3849)."""


def own_address(family: socket.AddressFamily) -> str:
    """The address of this machine from which it would send to others; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((FAR[family], 9))
        except OSError as error:
            pytest.skip(f"this machine has no address but loopback: {error.strerror}")
        return str(sock.getsockname()[0])


class OnOneAddress(Wires):
    """Servers whose NICs all have the same address, which is not a loopback one."""

    def arguments(
        self, server: int, options: dict[str, object]
    ) -> tuple[Identity, list[str], LinkSettings, dict[str, object]]:
        identity, _, settings, rest = super().arguments(server, options)
        return identity, [own_address(socket.AF_INET)] * self.levels, settings, rest


def test_a_link_between_two_servers_of_a_machine_is_not_measured() -> None:
    """As fast as memory, it would make a healthy NIC of a server on another machine look slow."""
    own_address(socket.AF_INET)
    with OnOneAddress(2, nbytes=MUCH_NBYTES).connect() as wires:
        frame, payload = header(Kind.REDUCE, 0, MUCH_NBYTES), memoryview(bytes(MUCH_NBYTES))
        for server in (0, 1):
            wires.transports[server].send(1 - server, 0, frame, payload)
        wires.until(lambda: all(each.frames for each in wires.handlers), "both frames")
        for server in (0, 1):
            flow = wires.transports[server].flows()[1 - server, 0]
            assert (flow.nbytes, flow.busy_s) == (0, 0.0)
            assert flow.answers > 0


def ends(**at: Any) -> tuple[socket.socket, socket.socket]:
    """A connection from the address `own` to the address `peer`."""
    family = at["family"]
    with socket.create_server((at["peer"], 0), family=family) as listener:
        dialled = socket.socket(family, socket.SOCK_STREAM)
        dialled.bind((at["own"], 0))
        dialled.connect(listener.getsockname())
        return dialled, listener.accept()[0]


@pytest.mark.parametrize("family", list(FAR))
def test_an_own_address_is_known_even_if_the_other_end_has_another(family: socket.AddressFamily) -> None:
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    address = own_address(family)
    pairs = [(address, address), (loopback, address), (loopback, loopback)]
    for own, peer in pairs + [("127.77.0.1", "127.77.0.2")] * (family == socket.AF_INET):
        for sock in ends(family=family, own=own, peer=peer):
            with sock:
                assert stays_on_machine(sock), (own, peer)


def test_an_end_that_is_gone_is_an_error() -> None:
    with socket.socket() as sock, pytest.raises(OSError, match="not connected"):
        stays_on_machine(sock)
