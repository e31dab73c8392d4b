"""FlexTree: all-reduce in stages of any widths; one wide stage is a parameter server, many thin ones a ring.

The survivors are numbered 0 .. N-1 in id order and the number is written in mixed radix, one digit per
stage. In stage i the servers that differ in digit i only exchange their parts, as a mesh of that width, so
every server ends up with 1/N of the vector, summed. If the widths multiply to less than N, the servers left
over stay outside the tree: each sends its contribution straight to the owners and gets the results from
them. So a prime N is handled as N = (N-1) + 1 with one server outside.

Its price: GenModel, see bml.schedule.select.model.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np

from bml.schedule.algorithms.registry import algorithm
from bml.schedule.algorithms.ring import draft_ring
from bml.schedule.ir.drawing import Draft, blank, check_room, lay
from bml.schedule.ir.forest import Forest
from bml.topology import Fabric, UsageError

MAX_STAGES = 32
_WIDTHS = "[0-9]{1,6}(x[0-9]{1,6})*"


@algorithm(
    "flextree",
    does="stages of these widths; widths of 1 are a ring; servers that are left over (a prime N) stay "
    "outside the tree and talk to the roots",
    damaged="survivors renumbered; an error if the widths need more",
    argument=_WIDTHS,
    examples=("flextree:3x3",),
)
def flextree(fabric: Fabric, shape: str = "") -> Forest:
    """Build FlexTree with stage widths such as `3x3`; widths of 1 only are a ring.

    Without a shape, the survivors' number (less one if it is a prime above 3) is factored into primes, the
    widest stage first.

    Raises:
        UsageError: the shape is none, or it needs more servers than are alive, or there are too many servers.
    """
    widths = parse_widths(shape) if shape else factors(len(fabric.servers))
    inside = prod(widths)
    if inside > len(fabric.servers):
        raise UsageError(
            f"flextree:{shape} needs {inside} servers, {fabric} has {len(fabric.servers)}: "
            "choose widths whose product is at most that"
        )
    is_ring = set(widths) == {1}
    check_room(fabric, 2 * len(fabric.servers) if is_ring else inside)
    if is_ring:
        return lay(fabric, draft_ring(fabric, list(range(fabric.n_servers))))
    return lay(fabric, _draft(fabric, [width for width in widths if width > 1]))


def parse_widths(shape: str) -> list[int]:
    """Read stage widths, first stage first: `3x3`, `16`, `1`.

    Raises:
        UsageError: the text is no list of widths.
    """
    if not re.fullmatch(_WIDTHS, shape):
        raise UsageError(
            f"'{shape}' is no list of stage widths: write it like flextree:3x3 or flextree:4x2x2"
        )
    widths = [int(width) for width in shape.split("x")]
    if min(widths) < 1 or len(widths) > MAX_STAGES:
        raise UsageError(f"flextree:{shape} must have at most {MAX_STAGES} stages of width 1 or more")
    return widths


def factors(servers: int) -> list[int]:
    """Return the prime factors, largest first; those of servers - 1 if it is a prime above 3."""
    found = _prime_factors(servers)
    return _prime_factors(servers - 1) if found == [servers] and servers > 3 else found or [1]


def _prime_factors(number: int) -> list[int]:
    found: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return sorted([*found, number] if number > 1 else found, reverse=True)


def _draft(fabric: Fabric, widths: list[int]) -> Draft:
    """Draw the tree of the inside servers; those outside send to the roots ahead of stage 0."""
    live = np.array(fabric.servers, np.int32)
    inside = prod(widths)
    number = np.arange(inside)
    root = number[:, None]
    way = blank(inside, fabric)
    outside = live[inside:]
    way.peer[:, outside] = live[:inside, None]
    way.stage[:, outside] = 0
    first = int(len(outside) > 0)
    # Last stage first: an earlier stage whose digit also differs overwrites it.
    for stage in reversed(range(len(widths))):
        low = prod(widths[:stage])
        wanted, own = root // low % widths[stage], number[None, :] // low % widths[stage]
        parent = live[number[None, :] + (wanted - own) * low]
        way.peer[:, live[:inside]] = np.where(wanted != own, parent, way.peer[:, live[:inside]])
        way.stage[:, live[:inside]] = np.where(wanted != own, first + stage, way.stage[:, live[:inside]])
    return Draft(live[:inside], np.zeros(inside, np.int8), way)
