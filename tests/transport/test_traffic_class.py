"""Traffic classes: names and bytes, what sockets are marked with, and what the command line takes."""

from __future__ import annotations

import socket

import click
import pytest
from wires import Wires

from bml.cli.values import TrafficClass
from bml.topology import UsageError
from bml.transport.handshake.traffic_class import NAMES, of_heartbeats, traffic_class_of
from bml.transport.links.ports import bind_pair
from bml.transport.links.settings import traffic_class_of as class_in


@pytest.mark.parametrize(
    ("given", "byte"),
    [("urgent", 136), ("normal", 0), (" Bulk ", 32), ("104", 104), ("0", 0), (255, 255), (0, 0)],
)
def test_a_class_is_a_name_or_a_byte(given: int | str, byte: int) -> None:
    assert traffic_class_of(given) == byte
    assert TrafficClass().convert(given, None, None) == byte


@pytest.mark.parametrize("given", [-1, 256, "256", "-1", "fast", "", "1.5", "²"])
def test_anything_else_is_refused(given: int | str) -> None:
    wanted = "give urgent, normal, bulk, or 0 to 255, a DSCP times 4"
    with pytest.raises(UsageError, match=wanted):
        traffic_class_of(given)
    with pytest.raises(click.BadParameter, match=wanted):
        TrafficClass().convert(given, None, None)


def test_the_variable_takes_names_and_is_named_in_errors() -> None:
    assert class_in({"BML_TRAFFIC_CLASS": "bulk"}) == 32
    assert class_in({"BML_TRAFFIC_CLASS": ""}) == class_in({}) == 0
    with pytest.raises(UsageError, match=r"^BML_TRAFFIC_CLASS: traffic class is slow"):
        class_in({"BML_TRAFFIC_CLASS": "slow"})


def byte_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)


def priority_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


@pytest.mark.parametrize(("name", "priority"), [("urgent", 6), ("normal", 0), ("bulk", 2)])
def test_both_ends_of_a_link_are_marked_and_queued(name: str, priority: int) -> None:
    """The priorities are those of Linux's first band, the usual one and the last (tc-prio(8))."""
    with Wires(2, 1, traffic_class=NAMES[name]) as wires:
        wires.connect()
        for transport in wires.transports:
            (link,) = transport._links.values()
            assert link.sock is not None
            assert (byte_of(link.sock), priority_of(link.sock)) == (NAMES[name], priority)


@pytest.mark.parametrize(("name", "heartbeats"), [("urgent", 136), ("normal", 0), ("bulk", 0)])
def test_heartbeats_of_bulk_are_not_queued_behind_everything(name: str, heartbeats: int) -> None:
    data, beats = bind_pair("127.0.0.1", "NIC", NAMES[name])
    with data, beats:
        assert (byte_of(data), byte_of(beats)) == (NAMES[name], heartbeats)
    assert of_heartbeats(104) == 104


def test_no_heartbeat_has_the_class_that_switches_serve_last() -> None:
    """Switches go by the upper three bits of the byte, of which 1 is the background (IEEE 802.1Q)."""
    for byte in range(256):
        of_beats = of_heartbeats(byte)
        assert of_beats >> 5 != 1
        assert of_beats in (byte, 0)
        assert (of_beats == byte) == (byte >> 5 != 1 or byte == 0)
