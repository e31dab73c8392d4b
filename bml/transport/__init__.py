"""Moves bytes between two servers over one NIC, and control messages between a server and the coordinator.

`Transport` and `Handler` are the contract; `TcpTransport` is the default. Everything runs on one `Poller`
in one thread and never blocks. See `frame` for what is on the wire and `auth` for who may connect.
"""

from bml.io.poller import Poller, Timer
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.transport.handshake.auth import Hello, Role
from bml.transport.handshake.control import (
    COORDINATOR,
    Channel,
    ControlListener,
    End,
    EndKind,
    dial,
)
from bml.transport.handshake.greeting import Dial
from bml.transport.interface import (
    DROP,
    WAIT,
    Endpoint,
    Handler,
    LinkKey,
    LinkStats,
    LostKind,
    Transport,
    Verdict,
)
from bml.transport.tcp.transport import TcpTransport

__all__ = [
    "COORDINATOR",
    "DROP",
    "WAIT",
    "Channel",
    "ControlListener",
    "Dial",
    "End",
    "EndKind",
    "Endpoint",
    "FrameError",
    "Handler",
    "Header",
    "Hello",
    "Kind",
    "LinkKey",
    "LinkStats",
    "LostKind",
    "Poller",
    "Role",
    "TcpTransport",
    "Timer",
    "Transport",
    "Verdict",
    "dial",
]
