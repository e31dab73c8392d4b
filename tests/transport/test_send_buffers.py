"""The sizes of the kernel's send buffers: short queues at slow NICs, room beside computations."""

from __future__ import annotations

import pytest

from bml.fabric.layout import GOODPUT
from bml.transport.links.ports import LOOPBACK_SNDBUF_NBYTES, send_buffers

NICS = ("10.10.0.1", "10.11.0.1")


@pytest.mark.parametrize(
    ("mbit", "nbytes"), [(1, 16 << 10), (100, 16 << 10), (200, 31005), (500, 64 << 10), (10_000, 64 << 10)]
)
def test_no_more_than_leaves_soon_is_given_to_the_kernel(mbit: int, nbytes: int) -> None:
    usual, beside = send_buffers(NICS, mbit * 1e6 / 8 * GOODPUT)
    assert usual == nbytes
    assert beside >= 64 << 10


def test_no_wire_is_behind_loopback() -> None:
    assert send_buffers(("127.0.0.1", "127.0.0.1"), 1e6)[0] == LOOPBACK_SNDBUF_NBYTES
