"""The simulated data network: connections per (pair of servers, level) that break, are blocked and heal.

A connection is TCP: what goes in comes out in order, or not at all once it is broken. A blocked path (dead
NIC, dead switch, partition) gives no sign: frames are held back and come out late if it heals; heartbeats
are lost. As in `bml.transport`, a broken connection stays broken until one asks for its peers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from bml.protocol.frame import Header
from bml.protocol.messages import View
from bml.sim.delays import Delays
from bml.sim.lending import Loan
from bml.sim.network import Network
from bml.sim.process import Process

Pair: TypeAlias = tuple[int, int, int]
"""(lower server, higher server, level)."""
Key: TypeAlias = tuple[int, int]
"""(peer, level), as in the transport."""


class Parcel(NamedTuple):
    """A frame with its payload. For the checks alone: the view that its sender was in, where it lay there."""

    header: Header
    payload: bytes
    view: View | None
    loan: Loan | None = None


@dataclass
class _Connection:
    """One life of a connection; `late` is what a blocked path holds back, per direction."""

    number: int
    pair: Pair
    closed: bool = False
    lossy: bool = False  # closed by a reset: what was on its way is lost
    late: dict[int, deque[Callable[[], None]]] = field(default_factory=dict)
    inbox: dict[int, deque[Parcel]] = field(default_factory=dict)


@dataclass
class _End:
    """One server's side of one pair: wanted or not, its connection, what waits for one."""

    wanted: bool = False
    lost: bool = False
    connection: _Connection | None = None
    queue: deque[Parcel] = field(default_factory=deque)
    tries: int = 0


class Wires:
    """All connections. `arrived(to, origin, level)` says that there is something to `take`.

    `lost(server, peer, level, why)` says that a wanted connection broke; `heard` that a heartbeat came.
    `process(server)` is the one that reads: dead, it does not; frozen, it reads later.
    """

    def __init__(
        self,
        network: Network,
        connect_s: float,
        process: Callable[[int], Process],
        arrived: Callable[[int, int, int], None],
        lost: Callable[[int, int, int, str], None],
        heard: Callable[[int, int, int], None],
        delays: Delays,
    ):
        self.silent: set[Key] = set()
        self.parted: list[frozenset[int]] = []
        self._network = network
        self._delays = delays
        self._connect_s = connect_s
        self._process = process
        self._arrived = arrived
        self._lost = lost
        self._heard = heard
        self._ends: dict[tuple[int, int, int], _End] = {}
        self._connections: list[_Connection] = []
        self._count = 0

    def blocked(self, a: int, b: int, level: int) -> bool:
        """Whether nothing gets through between these two on that level."""
        if (a, level) in self.silent or (b, level) in self.silent:
            return True
        return any((a in part) != (b in part) for part in self.parted)

    def block(self, nics: Iterable[Key] = (), part: frozenset[int] = frozenset()) -> None:
        """Let NICs go silent, or cut `part` off from the others."""
        self.silent.update(nics)
        if part:
            self.parted.append(part)

    def heal(self, nics: Iterable[Key] = (), part: frozenset[int] = frozenset()) -> None:
        """Undo a `block`: what was held back gets through."""
        self.silent.difference_update(nics)
        if part in self.parted:
            self.parted.remove(part)
        for connection in self._connections:
            a, b, level = connection.pair
            if not self.blocked(a, b, level):
                for to in list(connection.late):
                    for action in connection.late.pop(to):
                        self._network.deliver((connection.number, to), action)

    def want(self, server: int, wanted: Iterable[Key]) -> None:
        """See `Transport.set_peers`."""
        keys = set(wanted)
        for (owner, peer, level), end in list(self._ends.items()):
            if owner == server and end.wanted and (peer, level) not in keys:
                end.wanted = False
                self._close(server, peer, level, end)
        for peer, level in sorted(keys):
            end = self._end(server, peer, level)
            if not end.wanted or end.lost:
                end.wanted, end.lost = True, False
                self._dial(server, peer, level, end)

    def send(self, server: int, peer: int, level: int, parcel: Parcel) -> None:
        """See `Transport.send`."""
        end = self._end(server, peer, level)
        if end.connection is not None:
            self._put(end.connection, peer, parcel)
        elif end.wanted and not end.lost:
            end.queue.append(parcel)

    def fence(self, server: int) -> None:
        """See `Transport.fence`: what waits for a connection is dropped."""
        for (owner, _, _), end in self._ends.items():
            if owner == server:
                end.queue.clear()

    def beat(self, server: int, peer: int, level: int) -> None:
        """Send a heartbeat: a datagram of its own."""

        def arrive() -> None:
            if not self.blocked(server, peer, level):
                self._process(peer).run(lambda: self._heard(peer, server, level))

        way_s = self._delays.link(server, peer, level)
        self._network.deliver((server, peer, level, "beat"), arrive, way_s)

    def peek(self, server: int, peer: int, level: int) -> Parcel | None:
        """The frame that is next on this connection, if one has arrived."""
        inbox = self._inbox(server, peer, level)
        return inbox[0] if inbox else None

    def take(self, server: int, peer: int, level: int) -> None:
        """Take off what `peek` showed."""
        self._inbox(server, peer, level).popleft()

    def waiting(self, server: int) -> list[Key]:
        """The connections on which frames have arrived that were not taken."""
        return [(p, lv) for (s, p, lv) in self._ends if s == server and self._inbox(s, p, lv)]

    def reset(self, a: int, b: int, level: int) -> None:
        """Break the connection: both ends notice, what was on its way is lost."""
        connection = self._end(a, b, level).connection
        if connection is not None:
            connection.lossy = True
            for server, peer in ((a, b), (b, a)):
                self._break(connection, server, peer, "reset")

    def die(self, server: int) -> None:
        """The process is gone: its connections end behind what it has sent."""
        for (owner, peer, level), end in list(self._ends.items()):
            if owner == server:
                end.wanted = False
                self._close(server, peer, level, end)

    # --- inside ----------------------------------------------------------------------------------

    def _end(self, server: int, peer: int, level: int) -> _End:
        end = self._ends.get((server, peer, level))
        if end is None:
            end = self._ends[server, peer, level] = _End()
        return end

    def _inbox(self, server: int, peer: int, level: int) -> deque[Parcel]:
        connection = self._end(server, peer, level).connection
        return connection.inbox.setdefault(server, deque()) if connection else deque()

    def _dial(self, server: int, peer: int, level: int, end: _End) -> None:
        end.tries += 1
        attempt = end.tries
        give_up_at = self._network.now + self._connect_s

        def attempt_now() -> None:
            other = self._end(peer, server, level)
            if end.tries != attempt or not end.wanted or end.lost or end.connection is not None:
                return
            if self._network.now >= give_up_at:
                end.lost = True
                self._lost(server, peer, level, "timeout")
            elif (
                other.wanted
                and not other.lost
                and other.connection is None
                and self._process(server).runs
                and self._process(peer).runs
                and not self.blocked(server, peer, level)
            ):
                self._connect(server, peer, level)
            else:
                self._network.after(self._network.random.uniform(0.005, 0.02), attempt_now)

        self._network.after(self._network.random.uniform(0.0001, 0.002), attempt_now)

    def _connect(self, a: int, b: int, level: int) -> None:
        self._count += 1
        connection = _Connection(self._count, (min(a, b), max(a, b), level))
        self._connections.append(connection)
        for server, peer in ((a, b), (b, a)):
            end = self._end(server, peer, level)
            end.connection = connection
            while end.queue:
                self._put(connection, peer, end.queue.popleft())

    def _put(self, connection: _Connection, to: int, parcel: Parcel) -> None:
        a, b, level = connection.pair
        origin = b if to == a else a

        def read() -> None:
            if self._end(to, origin, level).connection is connection:
                connection.inbox.setdefault(to, deque()).append(parcel)
                self._arrived(to, origin, level)

        def arrive() -> None:
            if connection.closed and connection.lossy:
                return
            if self.blocked(a, b, level):
                connection.late.setdefault(to, deque()).append(arrive)
            else:
                self._process(to).run(read)

        self._network.deliver((connection.number, to), arrive, self._delays.link(a, b, level))

    def _close(self, server: int, peer: int, level: int, end: _End) -> None:
        """This side closes; the other learns it behind what was sent before."""
        connection, end.connection = end.connection, None
        end.queue.clear()
        if connection is not None:
            connection.lossy |= self._network.random.random() < 0.5  # unread data makes a FIN a RST
            self._break(connection, peer, server, "eof")

    def _break(self, connection: _Connection, server: int, peer: int, why: str) -> None:
        """Let `server` learn that the connection is over."""
        level = connection.pair[2]
        connection.closed = True

        def read() -> None:
            end = self._end(server, peer, level)
            if end.connection is connection:
                end.connection = None
                if end.wanted:
                    end.lost = True
                    self._lost(server, peer, level, why)

        def arrive() -> None:
            if self.blocked(server, peer, level):
                connection.late.setdefault(server, deque()).append(arrive)
            else:
                self._process(server).run(read)

        self._network.deliver((connection.number, server), arrive, self._delays.link(server, peer, level))
