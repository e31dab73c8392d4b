"""Which rates the fault `slow` can give the connections of a NIC without a real cable.

The kernel paces whole segments, and what it has paced already goes on as slowly when the fault has ended. On
loopback a segment has up to 64 KiB.
"""

from __future__ import annotations

from math import ceil

from bml.faults import Fault
from bml.faults.settings import SETTINGS
from bml.topology import Fabric, LinkFailure
from bml.topology.errors import UsageError
from bml.transport.handshake.flows import can_pace

_SEGMENT_BIT = 8 * (64 << 10)


def check_pace(fault: Fault, fabric: Fabric, detect_s: float) -> None:
    """Raise UsageError where this kernel cannot pace, or if a segment would take longer than `detect_s`."""
    if not can_pace():
        raise UsageError(
            f"fault '{fault}': this kernel cannot pace connections (SO_MAX_PACING_RATE); run the job on an "
            "emulated fabric, with --fabric-emulated"
        )
    assert isinstance(fault.target, LinkFailure)
    n_peers = len(fabric.neighbours(fault.target.server, fault.target.level))  # they share the rate equally
    lowest_kbit = ceil(_SEGMENT_BIT * n_peers / detect_s / 1000)
    if fault.settings["rate"] < lowest_kbit * 1000:
        lowest = SETTINGS["rate"].write(lowest_kbit * 1000)
        raise UsageError(
            f"fault '{fault}': one segment of 64 KiB would take longer than detect_s, {detect_s:g} s, over "
            f"each of the {n_peers} connections of the NIC; the lowest rate without real "
            f"cables is {lowest}"
        )
