"""An attacker without the token relays handshakes from a dead server's address: every server refuses them."""

from __future__ import annotations

import socket

import pytest
from relays import Relay
from wires import JOB, TOKEN, Recorder, Wires, header, heartbeat, nic, over, polled

from bml.protocol.wire.frame import pack
from bml.transport import Kind
from bml.transport.handshake.auth import NONCE_NBYTES, DialerHandshake, Hello, Role
from bml.transport.handshake.sealing import Heartbeat, seal_heartbeat

FORGED = pack(header(Kind.TOKEN))
LEVELS = 2


@pytest.mark.parametrize("knows", ["connected", "expected", "not yet"])
def test_no_attacker_becomes_server_0_on_a_data_port(knows: str) -> None:
    """Server 1 is dead; what server 0 says to its address is relayed to server 2, in all its states."""
    with Wires(3, LEVELS) as wires:
        dead, victim = wires.transports[1], wires.transports[2]
        seat = dead.endpoints[0]
        if knows == "connected":
            wires.connect()
        elif knows == "expected":
            victim.set_peers({(0, 0): wires.transports[0].endpoints[0]})
        wires.transports[0].set_peers({})
        dead.close()
        with Relay(seat, victim.endpoints[0], FORGED) as relay:
            wires.transports[0].set_peers({(1, 0): seat})
            wires.until(lambda: relay.relayed, "a server dialled the dead one")
            polled(wires.poller, 0.2)
        assert len(relay.relayed[0].said) > 100, "server 0 proved itself"
        assert victim._parking._sockets == {}
        assert not victim.is_up(0, 0)
        assert wires.handlers[2].admitted == []
        assert wires.handlers[2].frames == []
        assert not wires.transports[0].is_up(1, 0)
        for server in (0, 2):
            wires.transports[server].set_peers({(2 - server, 0): wires.transports[2 - server].endpoints[0]})
        wires.until(lambda: victim.is_up(0, 0), "the real server 0")
        wires.transports[0].send(2, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[2].frames, "a frame of the real server 0")


def test_no_server_is_relayed_to_another_level_or_back_to_itself() -> None:
    with Wires(2, LEVELS, connect_s=0.5) as wires:
        zero, one = wires.transports
        with socket.create_server((nic(7, 0), 0)) as free:
            seat = free.getsockname()
        for victim in (one.endpoints[1], zero.endpoints[0], one.endpoints[0]):
            zero.set_peers({})
            with Relay(seat, victim, FORGED) as relay:
                zero.set_peers({(1, 0): seat})  # it was told a wrong address, or another process has taken it
                wires.until(lambda r=relay: r.relayed, "a server dials")  # type: ignore[misc]
                polled(wires.poller, 0.1)
            for transport, handler in zip(wires.transports, wires.handlers, strict=True):
                assert transport._parking._sockets == {}
                assert handler.admitted == []
            assert not zero.is_up(1, 0)


def test_a_recorded_handshake_opens_no_port_again() -> None:
    """Not of the same server, not of another one, not of its next incarnation."""
    with Wires(3, 1) as wires:
        again = wires.make(2, Recorder(), incarnation=7)
        wires.transports.append(again)
        me = Hello(Role.DATA, JOB.encode(), 0, 0)
        target = wires.transports[2].endpoints[0]

        def heard(sock: socket.socket, nbytes: int) -> bytes:
            sock.setblocking(False)
            data = bytearray()

            def came() -> bool:
                try:
                    data.extend(sock.recv(nbytes - len(data)))
                except BlockingIOError:
                    return False
                return len(data) == nbytes

            wires.until(came, f"{nbytes} bytes")
            return bytes(data)

        with calling(target) as sock:
            dialer = DialerHandshake(TOKEN, me, b"n" * NONCE_NBYTES, 2)
            dialer.start(sock.getsockname(), target)
            said = dialer.feed(heard(sock, dialer.wants_nbytes))
            sock.sendall(said)
            dialer.feed(heard(sock, dialer.wants_nbytes))
            assert dialer.done, dialer.error
            source = sock.getsockname()
        wires.until(lambda: not wires.transports[2]._parking._sockets, "it is gone")
        for transport in wires.transports[1:]:
            with calling(transport.endpoints[0], source) as sock:  # from the very address
                sock.sendall(said + FORGED)
                wires.until(lambda s=sock: over(s), "it is hung up on")  # type: ignore[misc]
            assert transport._parking._sockets == {}
        assert [handler.admitted for handler in wires.handlers] == [[], [], []]


def calling(target: tuple[str, int], source: tuple[str, int] = ("127.0.0.1", 0)) -> socket.socket:
    """A connection from an address that may be used again at once."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(source)
    sock.connect(target)
    return sock


def test_heartbeats_that_were_overheard_never_count_again() -> None:
    """Not after its server has connected anew, nor for a later incarnation at its address, at either end."""
    with Wires(2, 1) as wires, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((nic(0, 0), 0))
        target, heartbeats = wires.transports[1].endpoints[0], wires.transports[1].nics[0].heartbeats
        heard = wires.handlers[1].heard_from
        recorded = [seal_heartbeat(TOKEN, JOB.encode(), Heartbeat(0, 1, 0, number)) for number in range(1, 6)]
        wires.transports[1].set_peers({(0, 0): sock.getsockname()})
        for datagram in recorded:
            sock.sendto(datagram, target)
        wires.until(lambda: len(heard) == 5, "they are new")
        _connect_as_server_0(wires, sock.getsockname())
        for datagram in recorded:
            sock.sendto(datagram, target)
        wires.until(lambda: heartbeats.rejected == 5, "they are old, even after a connection")
        wires.transports[1].set_peers({(0, 0): sock.getsockname()}, {0: 7})
        for datagram in (*recorded, seal_heartbeat(TOKEN, JOB.encode(), Heartbeat(0, 1, 0, 99, 7, 3))):
            sock.sendto(datagram, target)
        wires.until(
            lambda: heartbeats.rejected == 11,
            "they are of an incarnation, or for an incarnation, that is over",
        )
        assert len(heard) == 5
        sock.sendto(seal_heartbeat(TOKEN, JOB.encode(), Heartbeat(0, 1, 0, 1, 7)), target)
        wires.until(lambda: len(heard) == 6, "the first heartbeat of the later incarnation")


def _connect_as_server_0(wires: Wires, listens_at: tuple[str, int]) -> None:
    """Server 0 proves itself to server 1 on a new connection."""
    wires.transports[0].set_peers({(1, 0): wires.transports[1].endpoints[0]})
    wires.until(lambda: wires.transports[1].is_up(0, 0), "server 0 has connected")


def test_a_beat_goes_to_the_incarnation_that_is_known() -> None:
    with Wires(1, 1) as wires:
        later = Recorder()
        one = wires.make(1, later, incarnation=9)
        wires.transports.append(one)
        one.set_peers({(0, 0): wires.transports[0].endpoints[0]})
        heartbeat(wires, 0, 1, 0)
        wires.until(lambda: one.nics[0].heartbeats.rejected == 1, "it is for an earlier incarnation")
        wires.transports[0].heartbeat(1, 0, one.endpoints[0], 9)
        wires.until(lambda: later.heard_from == [(0, 0)], "it is for this one")
