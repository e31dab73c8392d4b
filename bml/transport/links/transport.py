"""The base of all transports: one authenticated TCP stream per (peer, level), bound to that NIC's address.

Listening, dialling, the handshake, heartbeats, parking, faults and which links are wanted are the same for
every transport. A transport differs only in what a link does with its authenticated stream: that is in the
connection that the transport makes.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from bml.faults.stalls import Flow
from bml.io.backlog import Backlog, stays_on_machine
from bml.io.poller import Poller
from bml.protocol.step.slices import LAN_RATE
from bml.protocol.wire.frame import Header
from bml.topology.errors import InvariantError, UsageError
from bml.transport.handshake.auth import Hello, Identity, Role
from bml.transport.handshake.flows import flow_of, hold, release, segments_of, set_pace
from bml.transport.handshake.greeting import Dial, OnFailed, address_family
from bml.transport.interface import (
    FIRST_INCARNATIONS,
    Endpoint,
    Handler,
    LinkKey,
    LinkStats,
    LinkVitals,
    LostKind,
)
from bml.transport.links.link import Link, LinkCallbacks, LinkConnection, LinkState, OnEnd
from bml.transport.links.nic import LocalNic
from bml.transport.links.opening import Opening
from bml.transport.links.parking import Parking
from bml.transport.links.ports import send_buffers
from bml.transport.links.probing import Probes
from bml.transport.links.settings import LinkSettings
from bml.transport.links.stand_in import StandIn

_LOG = logging.getLogger(__name__)


class LinkTransport:
    """`Transport` over streams, with UDP heartbeats on the same port numbers.

    `identity` is this server's, and `nics` has one local IP address per level. A subclass says in
    `_connection` how frames move over a stream. Raises FabricError if an address is not on this machine,
    UsageError for an address that is not numeric.
    """

    def __init__(
        self,
        identity: Identity,
        nics: Sequence[str],
        poller: Poller,
        handler: Handler,
        settings: LinkSettings | None = None,
    ) -> None:
        self._server = identity.server
        self._identity = identity
        self._poller = poller
        self._handler = handler
        self._settings = settings or LinkSettings()
        self._links: dict[LinkKey, Link] = {}
        self._parking = Parking(poller)
        self._probes = Probes(poller, handler.proved)
        self._stalled: set[LinkKey] = set()
        self._paces: defaultdict[LinkKey, list[int]] = defaultdict(list)
        self.nics: list[LocalNic] = []
        self.stand_in: StandIn | None = None
        self._closed = False
        try:
            for level, address in enumerate(nics):
                self._open_nic(level, address)
        except BaseException:
            self.close()
            raise
        self._sndbufs = send_buffers(nics, self._settings.nic_rate or LAN_RATE)
        self._sndbuf_nbytes = self._sndbufs[False]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """See `Transport`."""
        return tuple(nic.endpoint for nic in self.nics)

    def set_peers(
        self, wanted: Mapping[LinkKey, Endpoint], incarnations: Mapping[int, int] = FIRST_INCARNATIONS
    ) -> None:
        """See `Transport`; raises UsageError for a level or an address that cannot be."""
        if self._closed:
            return
        # Endpoints that were sent as JSON are lists.
        endpoints = {key: (host, port) for key, (host, port) in wanted.items()}
        for (peer, level), endpoint in endpoints.items():
            self._check_wanted(peer, level, endpoint)
        for key, link in self._links.items():
            same = (endpoints.get(key), incarnations.get(link.peer, 0)) == (link.endpoint, link.incarnation)
            if link.state is not LinkState.UNWANTED and not same:
                self.nics[link.level].close_socket(link.detach(LinkState.UNWANTED))
        for (peer, level), endpoint in endpoints.items():
            link = self._link(peer, level)
            link.endpoint, link.incarnation = endpoint, incarnations.get(peer, 0)
            self.nics[level].heartbeats.expect(peer, endpoint, link.incarnation)
            if link.state in (LinkState.UNWANTED, LinkState.LOST):
                self._open(link)
            elif link.opening is not None:
                link.opening.begin_anew()
        if self.stand_in is not None:
            self.stand_in.tell()

    def send(
        self, peer: int, level: int, header: Header, payload: memoryview | None, priority: int = 0
    ) -> None:
        """See `Transport`."""
        link = self._links.get((peer, level))
        if link is None:
            raise InvariantError(f"server {peer} over NIC {level} was never wanted, cannot send {header}")
        link.send(priority, header, payload)

    def fence(self) -> None:
        """See `Transport`."""
        for link in self._links.values():
            link.fence()

    def resume(self) -> None:
        """See `Transport`."""
        for link in self._links.values():
            if link.connection is not None:
                link.connection.resume()

    def beside_computation(self, beside: bool) -> None:
        """See `Transport`."""
        wanted = self._sndbufs[beside]
        if wanted != self._sndbuf_nbytes:
            self._sndbuf_nbytes = wanted
            for link in self._links.values():
                link.set_sndbuf(wanted)

    def heartbeat(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """See `Transport`."""
        self.nics[level].heartbeats.send(peer, endpoint, incarnation)

    def probe(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """See `Transport`."""
        self._check_wanted(peer, level, endpoint)
        held = (peer, level) in self._stalled
        dial = partial(self.nics[level].dial, Role.PROBE, (peer, incarnation), endpoint, held)
        self._probes.start((peer, level), dial)

    def flows(self) -> dict[LinkKey, Flow]:
        """See `Transport`; silenced NICs do not count, as the kernel continues there."""
        found: dict[LinkKey, Flow] = {}
        for key, link in self._links.items():
            if link.sock is not None and not self.nics[link.level].silent:
                with suppress(OSError):  # the end of this connection is about to be reported
                    backlog = link.queue.backlog
                    found[key] = flow_of(link.sock, backlog.moved(link.sock) if backlog else (0, 0.0))
        return found

    def vitals(self) -> dict[LinkKey, LinkVitals]:
        """See `Transport`."""
        now, found = time.monotonic(), dict[LinkKey, LinkVitals]()
        for (peer, level), link in self._links.items():
            if link.sock is not None:
                with suppress(OSError):  # the end of this connection is about to be reported
                    late_s = self.nics[level].heartbeats.take_gap_s(peer, now)
                    found[peer, level] = LinkVitals(*segments_of(link.sock), late_s)
        return found

    def is_up(self, peer: int, level: int) -> bool:
        """See `Transport`."""
        link = self._links.get((peer, level))
        return link is not None and link.is_up

    @property
    def queued_nbytes(self) -> int:
        """See `Transport`; silenced NICs do not count, as nothing is sent over them."""
        return sum(link.queued_nbytes for link in self._links.values() if not self.nics[link.level].silent)

    def stats(self) -> dict[LinkKey, LinkStats]:
        """See `Transport`."""
        return {key: link.stats() for key, link in self._links.items()}

    def silence(self, level: int) -> None:
        """See `Transport`; bytes that the kernel has already may still arrive."""
        self._check_level(level)
        nic = self.nics[level]
        if nic.silent:
            return
        nic.silence()
        self._parking.mute(level)
        for sock in self._probes.abandon(level):
            nic.close_socket(sock)
        for link in self._links.values():
            if link.level == level:
                if link.connection is not None:
                    link.connection.mute()
                elif link.opening is not None:
                    nic.close_socket(link.opening.abandon())

    def unsilence(self, level: int) -> None:
        """See `Transport`."""
        self._check_level(level)
        if not self.nics[level].silent:
            return
        self.nics[level].unsilence()
        self._parking.unmute(level)
        for link in self._links.values():
            if link.level == level and link.connection is not None:
                link.connection.unmute()

    def stand_still(self, level: int) -> None:
        """See `Transport`; connections that are made meanwhile are not held up."""
        self._check_level(level)
        self.nics[level].heartbeats.hold()
        for link in self._links.values():
            if link.level == level and link.connection is not None:
                link.connection.mute()

    def go_on(self, level: int) -> None:
        """See `Transport`."""
        self._check_level(level)
        nic = self.nics[level]
        nic.heartbeats.release()
        for link in self._links.values():
            if link.level == level and link.connection is not None and not nic.silent:
                link.connection.unmute()

    def pace(self, peer: int, level: int, nbytes_s: int) -> Callable[[], None]:
        """See `Transport`; the kernel paces, and heartbeats are not held up."""
        self._check_level(level)
        paces = self._paces[peer, level]
        paces.append(nbytes_s)
        self._set_pace(peer, level)

        def end() -> None:
            paces.remove(nbytes_s)
            self._set_pace(peer, level)

        return end

    def _set_pace(self, peer: int, level: int) -> None:
        link = self._links.get((peer, level))
        if link is not None and link.sock is not None:
            set_pace(link.sock, min(self._paces[peer, level], default=None))

    def stall(self, peer: int, level: int) -> None:
        """See `Transport`; bytes that the kernel has sent already may still be acknowledged."""
        self._check_level(level)
        self._stalled.add((peer, level))
        self._restart_attempt(peer, level)
        link = self._links.get((peer, level))
        if link is not None and link.sock is not None:
            hold(link.sock)

    def unstall(self, peer: int, level: int) -> None:
        """See `Transport`."""
        self._stalled.discard((peer, level))
        self._restart_attempt(peer, level)
        link = self._links.get((peer, level))
        if link is not None and link.sock is not None:
            release(link.sock)

    def close(self) -> None:
        """See `Transport`."""
        self._closed = True
        self._probes.close()
        for link in self._links.values():
            sock = link.detach(LinkState.UNWANTED)
            if sock is not None:
                sock.close()
        self._parking.close()
        for nic in self.nics:
            nic.close()

    def _connection(self, link: Link, sock: socket.socket, callbacks: LinkCallbacks) -> LinkConnection:
        """Make the connection of a link from its authenticated stream."""
        raise NotImplementedError

    def _connect(self, link: Link, sock: socket.socket, on_end: OnEnd) -> LinkConnection:
        handler, peer, level = self._handler, link.peer, link.level
        callbacks = LinkCallbacks(
            partial(handler.admit, peer, level),
            partial(handler.received, peer, level),
            partial(handler.heard, peer, level),
            on_end,
        )
        return self._connection(link, sock, callbacks)

    def _open_nic(self, level: int, address: str) -> None:
        incoming, heard = partial(self._incoming, level), partial(self._heard_heartbeat, level)
        nic = LocalNic(self._identity, level, address, self._poller, self._settings, incoming, heard)
        self.nics.append(nic)

    def _open(self, link: Link) -> None:
        parked = self._parking.take((link.peer, link.level), link.incarnation)
        if parked is not None:
            self._attach(link, parked)
            return
        link.state = LinkState.OPENING
        attempt = partial(self._dial, link) if self._server < link.peer else None
        link.opening = Opening(self._poller, attempt, partial(self._lost, link), self._settings.connect_s)

    def _dial(self, link: Link, on_fail: OnFailed) -> Dial | None:
        def opened(sock: socket.socket, hello: Hello) -> None:
            self._attach(link, sock)

        held = (link.peer, link.level) in self._stalled
        wanted = (link.peer, link.incarnation)
        return self.nics[link.level].dial(Role.DATA, wanted, link.endpoint, held, opened, on_fail)

    def _restart_attempt(self, peer: int, level: int) -> None:
        """Begin a new attempt to this peer: its path has changed, which the present one does not show."""
        link = self._links.get((peer, level))
        if link is not None and link.opening is not None:
            self.nics[level].close_socket(link.opening.abandon())

    def _incoming(self, level: int, sock: socket.socket, hello: Hello) -> None:
        """Take in a connection whose other side has proved the identity `hello`."""
        peer = hello.server
        if (peer, level) in self._stalled:
            hold(sock)
        if hello.role is Role.PROBE:
            self._probes.answer((peer, level), sock)
            return
        if peer >= self._server:
            _LOG.warning(
                "%s: closed a connection from server %d, which this server dials",
                self.nics[level].name,
                peer,
            )
            sock.close()
            return
        link = self._links.get((peer, level))
        if link is not None and hello.incarnation < link.incarnation:
            _LOG.warning(
                "%s: closed a connection from an earlier incarnation of %d", self.nics[level].name, peer
            )
            sock.close()
            return
        known = link is not None and hello.incarnation == link.incarnation
        if link is not None and known and link.state is LinkState.OPENING:
            self._attach(link, sock)
        elif link is not None and known and link.state is LinkState.UP and link.untouched:
            _measure(link, sock)
            link.swap(sock, partial(self._lost, link), muted=False)
            link.set_sndbuf(self._sndbuf_nbytes)
            self._set_pace(peer, level)
        else:
            # A later incarnation than the known one waits for the view that has it; the earlier one stays.
            self._parking.put((peer, level), sock, hello.incarnation)
            if link is not None and known and link.state is LinkState.UP:
                # Frames may have been lost with the old connection, so the loss must be reported.
                self._lost(link, "reset", "the peer opened a new connection")

    def _attach(self, link: Link, sock: socket.socket) -> None:
        if (link.peer, link.level) not in self._stalled:
            release(sock)  # it may have been held when it was accepted
        _measure(link, sock)
        link.attach(sock, partial(self._lost, link), muted=self.nics[link.level].silent)
        link.set_sndbuf(self._sndbuf_nbytes)
        self._set_pace(link.peer, link.level)

    def _lost(self, link: Link, kind: LostKind, why: str) -> None:
        nic = self.nics[link.level]
        nic.close_socket(link.detach(LinkState.LOST))
        name = f"{nic.name}: connection to server {link.peer} ({kind})"
        self._handler.lost(link.peer, link.level, kind, f"{name}: {why}")

    def _heard_heartbeat(self, level: int, peer: int, stands_in: bool) -> None:
        self._handler.heard(peer, level)
        if stands_in:
            self._handler.stood_in(peer, level)

    def _link(self, peer: int, level: int) -> Link:
        link = self._links.get((peer, level))
        if link is None:
            link = self._links[peer, level] = Link(peer, level, self._connect)
        return link

    def _check_level(self, level: int) -> None:
        if not 0 <= level < len(self.nics):
            raise UsageError(f"server {self._server} has NICs 0 to {len(self.nics) - 1}, not {level}")

    def _check_wanted(self, peer: int, level: int, endpoint: Endpoint) -> None:
        self._check_level(level)
        address_family(endpoint[0])
        if peer == self._server or peer < 0 or not 0 < endpoint[1] < 1 << 16:
            raise UsageError(f"server {self._server} cannot want server {peer} at {endpoint}")


def _measure(link: Link, sock: socket.socket) -> None:
    """Measure what this connection carries, unless it never leaves the machine: memory has no NIC's rate."""
    with suppress(OSError):  # the end of this connection is about to be reported
        link.queue.backlog = None if stays_on_machine(sock) else Backlog()
