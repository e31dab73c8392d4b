"""The settings of switches and NICs in a simulation of packets, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

from bml.lab.packets.world import Rules
from bml.topology import UsageError

_BIT = 1 / 8


@dataclass(frozen=True)
class Settings:
    """What switches and NICs do with packets.

    Source, where no other is named: Zhu et al., "Congestion Control for Large-Scale RDMA Deployments",
    SIGCOMM 2015 (DCQCN); the buffer is that of its switches, 12 MB for 32 ports of 40 Gbit/s.

    Attributes:
        packet_nbytes: payload of a packet; 4 KiB is the largest of RoCE, and the quickest to simulate.
        buffer_nbytes: of a switch for each of its ports; what is not headroom is shared by all.
        delay_s: from the last byte that is sent to the packet that is received, for each cable.
        share: a port whose packets take more than this share of the free buffer is paused. An eighth is
            ours; the paper has a range of settings.
        dcqcn: whether NICs send slower after notifications. Without it they send at the rate of the wire.
        mark_from, mark_all_from: bytes in a queue from which on packets are marked with a probability that
            grows from 0 to `most_marked`, and from which on all are.
        gain: g, by which alpha moves.
        alpha_s, timer_s: seconds after which alpha falls, and after which the rate grows.
        counter_nbytes: bytes after which the rate grows.
        notification_s: least time between two notifications of a connection.
        additive_bit, hyper_bit: bits per second by which the target rate grows. The paper has no value of
            the second: ten times the first is ours.
        least_bit: least rate of a connection; the paper has none, this is ours.
    """

    packet_nbytes: int = 4096
    buffer_nbytes: float = 375e3
    delay_s: float = 1e-6
    share: float = 1 / 8
    dcqcn: bool = True
    mark_from: float = 5e3
    mark_all_from: float = 200e3
    most_marked: float = 0.01
    gain: float = 1 / 256
    alpha_s: float = 55e-6
    timer_s: float = 55e-6
    counter_nbytes: float = 10e6
    notification_s: float = 50e-6
    additive_bit: float = 40e6
    hyper_bit: float = 400e6
    least_bit: float = 40e6

    def headroom_nbytes(self, capacity: float) -> float:
        """Return what may still come over a link of `capacity` bytes/s after its switch wants it paused.

        That is what is on the wire in both directions of a pause frame, a packet that has just begun, one
        that is half way through, and the one that made the port too full.
        """
        return 2 * self.delay_s * capacity + 3 * self.packet_nbytes

    def shared_nbytes(self, capacity: float) -> float:
        """Return what one port of `capacity` bytes/s adds to the buffer that ports share.

        Raises:
            UsageError: nothing is left beside the headroom.
        """
        headroom = self.headroom_nbytes(capacity)
        if self.buffer_nbytes <= headroom:
            raise UsageError(
                f"a buffer of {self.buffer_nbytes:.0f} bytes for each port has no room beside the headroom, "
                f"as {headroom:.0f} bytes may come after a pause (what is on the wire for twice "
                f"{self.delay_s * 1e6:g} µs, and three packets): choose a larger --buffer, a smaller "
                "--packet or a shorter --delay"
            )
        return self.buffer_nbytes - headroom

    def rules(self, usual: float) -> Rules:
        """Return them for compiled code; most links have the capacity `usual`, bytes per second."""
        return Rules(
            usual,
            float(self.packet_nbytes),
            self.delay_s,
            self.share,
            2.0 * self.packet_nbytes,
            self.mark_from,
            self.mark_all_from,
            self.most_marked,
            self.dcqcn,
            self.gain,
            self.alpha_s,
            self.timer_s,
            self.counter_nbytes,
            self.notification_s,
            self.additive_bit * _BIT,
            self.hyper_bit * _BIT,
            self.least_bit * _BIT,
        )
