"""The means by which faults take effect on one server; acts get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bml.faults import Fault
from bml.faults.busy import Slowdown
from bml.faults.holds import Holds
from bml.io.poller import Poller
from bml.protocol.server import events as ev
from bml.protocol.wire import messages as msg
from bml.topology import Fabric
from bml.transport.interface import Transport


@dataclass(frozen=True)
class Actuators:
    """The functions and objects of a server through which faults act on it."""

    server: int
    """Its id."""
    fabric: Fabric
    """The healthy fabric."""
    transport: Transport
    """Silences NICs, and stalls and paces connections."""
    poller: Poller
    """Calls something later."""
    tell: Callable[[msg.ToCoordinator], None]
    """Sends a message to the coordinator."""
    throw: Callable[[Exception], None]
    """Raises an exception in the training function."""
    dispatch: Callable[[ev.Event], None]
    """Brings an event to the core."""
    leave: Callable[[str], None]
    """Asks this server to go, for a reason."""
    slowdown: Slowdown
    """Slows the computation of the training function down."""
    apply_to_fabric: Callable[[Fault], None] | None = None
    """Has a fault applied to real cables or machines, and waits until it is in force; None without."""
    holds: Holds = field(default_factory=Holds, init=False)
    """The NICs (levels) and connections (peer, level) that faults hold down at present."""
