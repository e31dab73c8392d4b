"""The simulated data network: connections per (pair of servers, level) that break, are blocked and heal.

A connection is TCP: frames come out in order, or not at all once it is broken. A blocked path (see
bml.sim.world.paths) gives no sign: frames are held back and come out late if it heals; heartbeats are lost.
The sender's kernel knows which frames the peer's kernel has not acknowledged; the peer's process need not run
for that. As in `bml.transport`, a broken connection stays broken until its server asks for its peers again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from bml.faults.stalls import Flow
from bml.protocol.wire.frame import HEADER_NBYTES, Header
from bml.protocol.wire.messages import View
from bml.sim.judge.zero_copy import Reference
from bml.sim.world.delays import Delays
from bml.sim.world.paths import Pair, Paths, Where, pair
from bml.sim.world.ports import WINDOW, Ports
from bml.sim.world.process import Process

Key: TypeAlias = tuple[int, int]
"""(peer, level), as in the transport."""

_RETRANSMITS_S = (0.2, 0.6, 1.4, 3.0)
"""When TCP sends again without an acknowledgement, in seconds after the first time."""


class Parcel(NamedTuple):
    """A frame with its payload. For the checks alone: the view that its sender was in, where it lay there."""

    header: Header
    payload: bytes
    view: View | None
    reference: Reference | None = None


@dataclass
class _Sent:
    """Frames that one end has sent, and acknowledgements that are missing or held back."""

    outstanding: int = 0
    answers: int = 0
    owed: list[int] = field(default_factory=list)
    since_s: float = 0.0
    nbytes: int = 0
    busy_s: float = 0.0
    acknowledgements: int = 0
    moved: int = 0
    moved_at_s: float = 0.0
    _busy_since_s: float = 0.0

    def put(self, now: float) -> None:
        """One more frame is sent."""
        if not self.outstanding:
            self.since_s = now
        self.outstanding += 1
        if self.outstanding == WINDOW + 1:
            self._busy_since_s = now

    def answered(self, sizes: Sequence[int], now: float) -> None:
        """Frames of these sizes, in bytes, are acknowledged."""
        if self.outstanding > WINDOW:
            waited_s, took_s = now - self._busy_since_s, now - self.since_s
            self.nbytes += int(sum(sizes) * (waited_s / took_s if took_s else 1.0))
            self.busy_s += waited_s
            self._busy_since_s = now
        self.outstanding -= len(sizes)
        self.answers += len(sizes)
        self.since_s = now

    def acknowledged(self, segments: int, now: float) -> None:
        """So many segments have come through in all: those of a frame are acknowledged before its end."""
        if segments != self.moved:
            self.moved, self.moved_at_s = segments, now
            self.acknowledgements += 1

    def flow(self, now: float) -> Flow:
        """What the kernel says now."""
        unanswered = self.outstanding > 0
        since_s = max(self.since_s, self.moved_at_s)
        tries = bisect_right(_RETRANSMITS_S, now - since_s) if unanswered else 0
        waits_s = now - self._busy_since_s if self.outstanding > WINDOW else 0.0
        answers = self.answers + self.acknowledgements
        return Flow(unanswered, answers, tries, self.nbytes, self.busy_s + waits_s)


@dataclass
class _Connection:
    """A connection from opening to end; `late` are frames that a blocked path holds back, per direction."""

    number: int
    pair: Pair
    closed: bool = False
    lossy: bool = False  # closed by a reset: frames under way are lost
    late: dict[int, deque[Callable[[], None]]] = field(default_factory=lambda: defaultdict(deque))
    inbox: dict[int, deque[Parcel]] = field(default_factory=dict)
    sent: dict[int, _Sent] = field(default_factory=lambda: defaultdict(_Sent))

    def other(self, end: int) -> int:
        """The server at the other end."""
        return self.pair[0] + self.pair[1] - end


@dataclass
class _End:
    """One server's side of one pair: wanted or not, its connection, and frames that wait for one."""

    wanted: bool = False
    lost: bool = False
    connection: _Connection | None = None
    queue: deque[Parcel] = field(default_factory=deque)
    tries: int = 0


class Wires:
    """All connections. `arrived(to, origin, level)` says that there is something to `take`.

    `lost(server, peer, level, why)` says that a wanted connection broke; `heard` that a heartbeat came, and
    `proved` that a probe did (both: to, origin, level).
    `process(server)` is the one that reads: dead, it does not; frozen, it reads later.
    """

    def __init__(
        self,
        ports: Ports,
        connect_s: float,
        process: Callable[[int], Process],
        arrived: Callable[[int, int, int], None],
        lost: Callable[[int, int, int, str], None],
        heard: Callable[[int, int, int, bool], None],
        proved: Callable[[int, int, int], None],
        delays: Delays,
    ):
        self.paths = Paths()
        self.ports = ports
        self._network = ports.network
        self._delays = delays
        self._connect_s = connect_s
        self._process = process
        self._arrived = arrived
        self._lost = lost
        self._heard = heard
        self._proved = proved
        self._ends: dict[int, dict[Key, _End]] = defaultdict(dict)
        self._connections: list[_Connection] = []
        self._count = 0

    def heal(self, kind: str, where: Where) -> None:
        """Undo a block of `paths`: frames that were held back get through."""
        self.paths.heal(kind, where)
        for connection in self._connections:
            for to in connection.pair[:2]:
                self._release(connection, to)

    def _release(self, connection: _Connection, to: int) -> None:
        """Let through the frames and acknowledgements that were held back on the way to this end."""
        origin, level = connection.other(to), connection.pair[2]
        if not self.paths.carries(origin, to, level):
            return
        if connection.late[to]:
            self._network.deliver((connection.number, to), lambda: self._drain(connection, to))
        sent = connection.sent[to]
        if sent.owed:
            sent.answered(sent.owed, self._network.now)
            sent.owed.clear()

    def _drain(self, connection: _Connection, to: int) -> None:
        late, origin, level = connection.late[to], connection.other(to), connection.pair[2]
        while late and self.paths.carries(origin, to, level):
            late.popleft()()

    def _come(self, connection: _Connection, to: int, action: Callable[[], None]) -> None:
        """A frame is about to reach this end, behind those that are held back."""
        origin, level = connection.other(to), connection.pair[2]
        if connection.late[to] or not self.paths.carries(origin, to, level):
            connection.late[to].append(action)
        else:
            action()

    def want(self, server: int, wanted: Iterable[Key]) -> None:
        """See `Transport.set_peers`."""
        keys = set(wanted)
        for (peer, level), end in self._ends[server].items():
            if end.wanted and (peer, level) not in keys:
                end.wanted = False
                self._close(server, peer, level, end)
        for peer, level in sorted(keys):
            end = self._end(server, peer, level)
            if not end.wanted or end.lost or end.connection is None:
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
        """See `Transport.fence`: frames that wait for a connection are dropped."""
        for end in self._ends[server].values():
            end.queue.clear()

    def heartbeat(self, server: int, peer: int, level: int, stands_in: bool = False) -> None:
        """Send a heartbeat: a datagram of its own, of the server or of its stand-in."""

        def arrive() -> None:
            if self.paths.heartbeat_passes(server, peer, level, self._network.random):
                self._process(peer).run(lambda: self._heard(peer, server, level, stands_in))

        way_s = self._delays.link(server, peer, level)
        self._network.deliver((server, peer, level, "heartbeat"), arrive, way_s)

    def probe(self, server: int, peer: int, level: int) -> None:
        """See `Transport.probe`."""

        def answer() -> None:
            if self.paths.connects(server, peer, level) and self._process(peer).runs:
                self._network.deliver((server, peer, level, "answer"), arrive, way_s)

        def arrive() -> None:
            if self.paths.connects(server, peer, level):
                self._process(server).run(lambda: self._proved(server, peer, level))

        way_s = self._delays.link(server, peer, level)
        self._network.deliver((server, peer, level, "probe"), answer, way_s)

    def flows(self, server: int) -> dict[Key, Flow]:
        """See `Transport.flows`."""
        found: dict[Key, Flow] = {}
        for (peer, level), end in self._ends[server].items():
            if end.connection is not None:
                connection, sent = end.connection, end.connection.sent[server]
                if self.paths.carries(server, peer, level) and self.paths.carries(peer, server, level):
                    sent.acknowledged(self.ports.crossed((connection.number, peer)), self._network.now)
                flow = sent.flow(self._network.now)
                found[peer, level] = flow if self.ports.limited else Flow(*flow[:3])
        return found

    def peek(self, server: int, peer: int, level: int) -> Parcel | None:
        """The frame that is next on this connection, if one has arrived."""
        inbox = self._inbox(server, peer, level)
        return inbox[0] if inbox else None

    def take(self, server: int, peer: int, level: int) -> None:
        """Take off the frame that `peek` returned."""
        self._inbox(server, peer, level).popleft()

    def waiting(self, server: int) -> list[Key]:
        """The connections on which frames have arrived that were not taken."""
        return [key for key in self._ends[server] if self._inbox(server, *key)]

    def reset(self, a: int, b: int, level: int) -> None:
        """Break the connection: both ends notice, and frames under way are lost."""
        connection = self._end(a, b, level).connection
        if connection is not None:
            connection.lossy = True
            for server, peer in ((a, b), (b, a)):
                self._break(connection, server, peer, "reset")

    def die(self, server: int) -> None:
        """The process is gone: its connections end behind the frames that it has sent."""
        for (peer, level), end in self._ends[server].items():
            end.wanted = False
            self._close(server, peer, level, end)

    # --- inside ----------------------------------------------------------------------------------

    def _end(self, server: int, peer: int, level: int) -> _End:
        end = self._ends[server].get((peer, level))
        if end is None:
            end = self._ends[server][peer, level] = _End()
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
                and self._process(server).answers
                and self._process(peer).answers
                and self.paths.connects(server, peer, level)
            ):
                self._connect(server, peer, level)
            else:
                self._network.after(self._network.random.uniform(0.005, 0.02), attempt_now)

        self._network.after(self._network.random.uniform(0.0001, 0.002), attempt_now)

    def _connect(self, a: int, b: int, level: int) -> None:
        self._count += 1
        connection = _Connection(self._count, pair(a, b, level))
        self._connections.append(connection)
        for server, peer in ((a, b), (b, a)):
            end = self._end(server, peer, level)
            end.connection = connection
            while end.queue:
                self._put(connection, peer, end.queue.popleft())

    def _put(self, connection: _Connection, to: int, parcel: Parcel) -> None:
        origin, level = connection.other(to), connection.pair[2]
        sent, nbytes = connection.sent[origin], HEADER_NBYTES + parcel.header.nbytes
        sent.put(self._network.now)

        def read() -> None:
            if self._end(to, origin, level).connection is connection:
                connection.inbox.setdefault(to, deque()).append(parcel)
                self._arrived(to, origin, level)

        def arrive() -> None:
            if connection.closed and connection.lossy:
                return
            if self.paths.carries(to, origin, level):
                sent.answered([nbytes], self._network.now)
            else:
                sent.owed.append(nbytes)
            self._process(to).run(read)

        way_s, channel = self._delays.link(origin, to, level), (connection.number, to)

        def carried() -> None:
            self._network.deliver(channel, lambda: self._come(connection, to, arrive), way_s)

        self.ports.carry(channel, (origin, to, level), nbytes, carried)

    def _close(self, server: int, peer: int, level: int, end: _End) -> None:
        """This side closes; the other learns it behind the frames that were sent before."""
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
            self._process(server).run(read)

        way_s = self._delays.link(server, peer, level)
        self._network.deliver(
            (connection.number, server), lambda: self._come(connection, server, arrive), way_s
        )
