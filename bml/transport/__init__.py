"""Moves frames between servers, one connection per (peer, NIC), and messages to and from the coordinator.

`interface` has the contract: a `Transport` moves frames for its `Handler`, the server. Everything runs on one
`Poller` in one thread and never blocks. `bml.protocol.wire.frame` says what a frame is, and `handshake.auth`
which processes may connect.

Rooms and modules, each using only those above it:

    interface    the contract: `Transport`, `Handler`
    stream       a socket on the poller: when to write, when to read, how it ends
    handshake/   how two processes meet: the proof of the token, listening, dialling, control channels
    links/       what all transports share: a link per (peer, level) with its queue and its counters, the
                 NICs of this server, heartbeats, probes, injected faults (`LinkTransport`)
    tcp/         frames on the link's stream           (`TcpTransport`)
    verbs/       frames by RDMA writes                 (`VerbsTransport`)
    choice       which transport a server opens

The transports have the same modules for the same roles:

    role                                        tcp/                     verbs/
    `Transport`; makes connections              transport                transport
    `LinkConnection`: moves one link's frames   connection               connection
    receiving half, without the socket          incoming                 incoming
    sending half                                bml.io.sendqueue         outgoing
    messages as bytes                           protocol.wire.frame      wire
    settings of all links                       links.settings           links.settings
    settings of its own                         none                     settings
    servers of one host                         zero_copy                none

To add a transport, make a room beside tcp/ and verbs/ with a subclass of `LinkTransport`. Its `_connection`
returns a `LinkConnection` (see `links.link`) that moves frames: it takes them from the link's queue, and asks
`LinkCallbacks.admit` where each payload belongs. Then put its name into `TRANSPORTS` of `choice`, and a
branch into `open_transport`. The room gets a line in `ROOMS` of tests/test_architecture.py. The tests of
tests/transport that take `Wires` show that it works.
"""

from bml.io.poller import Poller, Timer
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.transport.handshake.auth import Hello, Identity, Role
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
from bml.transport.links.settings import LinkSettings
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
    "Identity",
    "Kind",
    "LinkKey",
    "LinkSettings",
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
