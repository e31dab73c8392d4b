"""The size of slices: a function of numbers that all servers know, so that all choose the same.

A slice is a step of a pipeline. Each costs a start-up on every server; and the last server of a tree sees its
first slice only after all before it have passed one on. With s bytes a slice, P in all, rate B, that is
about o·P/s + d·s/B, least at s = sqrt(P·B·o/d). Slices have a least size, as very many
cost more processor time than they save; it is small, as steps of a higher priority wait for whole ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from math import isqrt

LAN_RATE = 1.25e9
"""Bytes per second of a NIC of which nothing is known: 10 Gbit/s."""
SAME_HOST_RATE = 12.5e9
"""Where all servers share one machine: no wire is kept waiting, so few large slices cost least."""
ZERO_COPY_RATE = 25e9
"""Where, besides, payloads are read where they lie (bml.sharedmem.zero_copy): bytes cost even less."""

_START_UP_S = 5.12e-6
"""o/d, found by experiment at 200 Mbit/s: 90 KiB for 64 MiB."""
_LEAST_S = 0.7e-3
"""A slice takes at least so long on the wire. Found by experiment at 200 Mbit/s, where it is 17 KiB: with 32
KiB one piece with a priority in ten came 1.3 to 3.8 ms late."""
_LEAST_NBYTES = (8 << 10, 32 << 10)
"""The least size is in these bounds, whatever the rate: shorter slices save nothing on faster wires."""
_MOST_NBYTES = 4 << 20

_PIECE_S = 0.02  # long beside the messages of a step, see `piece_nbytes`
_PIECE_ROUNDS = 50
_LEAST_PIECE_NBYTES = 64 << 10
_MOST_PIECE_NBYTES = 8 << 20


def slice_nbytes(nbytes: int, rate: float) -> int:
    """Size of the slices, in bytes, of a vector of `nbytes`; `rate` of a NIC is in bytes per second."""
    best = isqrt(int(nbytes * rate * _START_UP_S))
    low, high = _LEAST_NBYTES
    least = min(max(low, int(rate * _LEAST_S)), high)
    return min(max(best, least), _MOST_NBYTES)


def piece_nbytes(rate: float, alpha_s: float, levels: int) -> int:
    """Length of a piece of a step with a priority, in bytes: what overtakes waits for one or two pieces.

    A piece takes many times as long as the messages of a step, so that these cost little. `rate` of a NIC is
    in bytes per second, `alpha_s` the start-up time of a message, `levels` how many NICs a server has.
    """
    piece_s = max(_PIECE_S, _PIECE_ROUNDS * alpha_s)
    fitting = int(piece_s * rate * levels / 2)  # every byte moves twice
    return min(max(fitting, _LEAST_PIECE_NBYTES), _MOST_PIECE_NBYTES)


def on_one_host(hosts: Iterable[str]) -> bool:
    """Whether these addresses, which are all servers' and all levels', are of one machine's loopback."""
    return all(ip_address(host).is_loopback for host in hosts)


def rate_of(hosts: Iterable[str], zero_copy: bool = False) -> float:
    """The rate to assume for NICs with these addresses (of all servers and levels), in bytes per second.

    `zero_copy`: servers of one host make zero-copy sends to each other.
    """
    if on_one_host(hosts):
        return ZERO_COPY_RATE if zero_copy else SAME_HOST_RATE
    return LAN_RATE
