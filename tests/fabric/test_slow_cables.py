"""Slow and lossy cables of an emulated fabric: what a NIC sends, what it receives, or both. Needs root."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import pytest
from wires_in_namespaces import goodputs, reaches

from bml.fabric import GOODPUT, EmulatedFabric, namespace
from bml.fabric.injector import FabricInjector
from bml.faults import Fault
from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

MBIT = 1_000_000
#: The bucket of 75 kB is a twentieth of what a second carries at 10 Mbit/s.
SLOW, WHOLE = (0.85 * 10 * MBIT * GOODPUT, 1.1 * 10 * MBIT * GOODPUT), 0.85 * 50 * MBIT * GOODPUT


@pytest.mark.parametrize("shape", ["bcube:2x2", "torus:4x1"])
def test_one_direction_is_slow_and_the_other_is_not(emulated_fabric: BringUp, shape: str) -> None:
    network = emulated_fabric(shape, "50mbit")
    for direction in ("out", "in"):
        network.slow(1, 0, "10mbit", direction)
        assert network.status()["failures"] == [f"slow:1/0,rate=10mbit,direction={direction}"]
        sent, received = goodputs(network, [(1, 0, 0), (0, 1, 0)], seconds=1)
        slow, whole = (sent, received) if direction == "out" else (received, sent)
        assert SLOW[0] <= slow <= SLOW[1]
        # Its acknowledgements share the slow direction, and arrive in bursts.
        assert whole >= 0.6 * WHOLE
    network.heal(1, 0)
    assert network.status()["failures"] == []


def bound(network: EmulatedFabric, server: int) -> socket.socket:
    def bind() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((network.layout.nics(server)[0], 0))
        return sock

    return namespace.inside(network.namespace(server), bind)


def arrived(network: EmulatedFabric, source: int, target: int) -> float:
    """The share of 500 datagrams from NIC source/0 that arrive at NIC target/0."""
    count = 0

    def take(within_s: float) -> int:
        taken = 0
        receiver.settimeout(within_s)
        with suppress(TimeoutError):
            while receiver.recv(1):
                taken += 1
        return taken

    with bound(network, source) as sender, bound(network, target) as receiver:
        for _ in range(20):  # fewer at a time than its buffer holds
            for _ in range(25):
                sender.sendto(b"x", receiver.getsockname())
            count += take(0.002)
        count += take(0.2)
    return count / 500


@pytest.mark.parametrize(
    ("direction", "sent", "received"),
    [("both", 0.7, 0.7), pytest.param("out", 0.7, 1, marks=pytest.mark.smoke), ("in", 1, 0.7)],
)
def test_loss_drops_what_it_says(
    emulated_fabric: BringUp, direction: str, sent: float, received: float
) -> None:
    network = emulated_fabric("bcube:2x2", "100mbit")
    assert reaches(network, 1, 0, 0, 20)
    assert reaches(network, 0, 1, 0, 20), "both know the address: packets that ask would be lost, too"
    network.lose(1, 0, 0.3, direction)
    # 0.1 is five times the standard deviation of the share of 500.
    assert arrived(network, 1, 0) == pytest.approx(sent, abs=0.1)
    assert arrived(network, 0, 1) == pytest.approx(received, abs=0.1)
    assert arrived(network, 2, 3) == 1, "another cable"
    network.lose(1, 0, 0.001)
    assert arrived(network, 1, 0) > 0.98, "the newest loss counts"
    network.heal(1, 0)
    assert network.status()["failures"] == []
    assert arrived(network, 1, 0) == 1


def test_a_cable_degrades_and_stays_slow(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:2x2", "50mbit")
    injector = FabricInjector(network)
    fault = Fault.parse("degrade:1/0,rate=10mbit,over=8s,direction=out", at_once=True)
    try:
        injector.apply_fault(fault, lambda: None)
        (falls,) = goodputs(network, [(1, 0, 0)], seconds=0.5)
        deadline = time.monotonic() + 60
        while network.status()["failures"] != ["slow:1/0,rate=10mbit,direction=out"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (stays,) = goodputs(network, [(1, 0, 0)], seconds=1)
    finally:
        injector.close()
    assert SLOW[0] <= stays <= SLOW[1]
    assert falls > 1.5 * stays
    assert network.status()["failures"] == []
