"""The emulated fabric: a server-centric network on one Linux machine, made of network namespaces.

Cables are veth pairs, switches are bridges, rates are token buckets. `layout` and `condition` are pure;
`network` has the object that users handle; `netlink` and `loss` change the kernel's devices.

`up` returns an `EmulatedFabric`: `up("bcube:3x2", "200mbit")`, then `.cut(4, 0)`, `.heal(4, 0)`, `.down()`.
"""

from bml.fabric.condition import Condition, Damage
from bml.fabric.jobs import use, use_or_make
from bml.fabric.layout import DEFAULT_NAME, GOODPUT, Layout, parse_rate, rate_text
from bml.fabric.network import DEFAULT_RATE, EmulatedFabric, down, find, is_up, obstacle, up

__all__ = [
    "DEFAULT_NAME",
    "DEFAULT_RATE",
    "GOODPUT",
    "Condition",
    "Damage",
    "EmulatedFabric",
    "Layout",
    "down",
    "find",
    "is_up",
    "obstacle",
    "parse_rate",
    "rate_text",
    "up",
    "use",
    "use_or_make",
]
