"""What tcp and verbs have in common: one TCP stream per (peer, level), bound to that NIC's address.

Listening, dialling, the handshake, heartbeats, parking, silence and which links are wanted are the same; what
a link does with its authenticated stream is the transport's own, in the connection that it makes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from bml.faults.stalls import Flow
from bml.io.poller import Poller
from bml.protocol.step.slices import LAN_RATE
from bml.protocol.wire.frame import MAX_NBYTES, Header
from bml.topology.errors import InvariantError, UsageError
from bml.transport.handshake.auth import DialerHandshake, Hello, Role, check_token, job_bytes
from bml.transport.handshake.flows import flow_of, hold, release
from bml.transport.handshake.greeting import (
    Dial,
    OnFailed,
    OnGreeted,
    address_family,
    check_traffic_class,
    fresh_nonce,
)
from bml.transport.handshake.listening import Listener
from bml.transport.interface import FIRST_INCARNATIONS, Endpoint, Handler, LinkKey, LinkStats, LostKind
from bml.transport.links.heartbeats import HeartbeatSocket
from bml.transport.links.link import Link, LinkConnection, LinkState, OnEnd
from bml.transport.links.opening import Opening
from bml.transport.links.parking import Parking
from bml.transport.links.ports import bind_pair, send_buffers
from bml.transport.links.probing import Probes

_LOG = logging.getLogger("bml.transport")


class LinkTransport:
    """`Transport` over streams, with UDP heartbeats on the same port numbers; a subclass says `_connection`.

    `incarnation` is this server's own, 0 is the first.
    `nics` has one local IP address per level; `token` is the cluster's secret and `job` (at most 64 bytes)
    keeps jobs apart. A link that is wanted but not up after `connect_s` seconds is lost. `nic_rate` is
    that of every NIC in bytes per second, where it is known; `max_nbytes` the longest payload that is
    accepted; `traffic_class` the byte that marks all packets for switches (DSCP times 4).
    Raises FabricError if an address is not on this machine, UsageError on bad arguments.
    """

    def __init__(
        self,
        server: int,
        nics: Sequence[str],
        *,
        token: bytes,
        job: str | bytes,
        poller: Poller,
        handler: Handler,
        connect_s: float = 5.0,
        nic_rate: float | None = None,
        max_nbytes: int = MAX_NBYTES,
        traffic_class: int = 0,
        incarnation: int = 0,
    ) -> None:
        self._server = server
        self._incarnation = incarnation
        self._nics = tuple(nics)
        self._token = check_token(token)
        self._job = job_bytes(job)
        self._poller = poller
        self._handler = handler
        self._connect_s = connect_s
        self._max_nbytes = max_nbytes
        self._traffic_class = check_traffic_class(traffic_class)
        self._links: dict[LinkKey, Link] = {}
        self._parking = Parking(poller)
        self._probes = Probes(poller, handler.proved)
        self._stalled: set[LinkKey] = set()
        self._silent: set[int] = set()
        # Sockets of silenced NICs that are not used any more: closing them would be noticed by the peer.
        self._deferred_closes: dict[int, list[socket.socket]] = {
            level: [] for level in range(len(self._nics))
        }
        self._listeners: list[Listener] = []
        self._heartbeats: list[HeartbeatSocket] = []
        self._closed = False
        try:
            for level in range(len(self._nics)):
                self._open_nic(level)
        except BaseException:
            self.close()
            raise
        self._sndbufs = send_buffers(nics, nic_rate or LAN_RATE)
        self._sndbuf_nbytes = self._sndbufs[False]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """See `Transport`."""
        return tuple(listener.endpoint for listener in self._listeners)

    def set_peers(
        self, wanted: Mapping[LinkKey, Endpoint], incarnations: Mapping[int, int] = FIRST_INCARNATIONS
    ) -> None:
        """See `Transport`; raises UsageError for a level or an address that cannot be."""
        if self._closed:
            return
        # Endpoints that travelled as JSON are lists.
        endpoints = {key: (host, port) for key, (host, port) in wanted.items()}
        for (peer, level), endpoint in endpoints.items():
            self._check_wanted(peer, level, endpoint)
        for key, link in self._links.items():
            same = (endpoints.get(key), incarnations.get(link.peer, 0)) == (link.endpoint, link.incarnation)
            if link.state is not LinkState.UNWANTED and not same:
                self._bury(link.level, link.detach(LinkState.UNWANTED))
        for (peer, level), endpoint in endpoints.items():
            link = self._link(peer, level)
            link.endpoint, link.incarnation = endpoint, incarnations.get(peer, 0)
            self._heartbeats[level].expect(peer, endpoint, link.incarnation)
            if link.state in (LinkState.UNWANTED, LinkState.LOST):
                self._open(link)
            elif link.opening is not None:
                link.opening.begin_anew()

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
        self._heartbeats[level].send(peer, endpoint, incarnation)

    def probe(self, peer: int, level: int, endpoint: Endpoint, incarnation: int = 0) -> None:
        """See `Transport`."""
        self._check_wanted(peer, level, endpoint)
        self._probes.start(
            (peer, level), partial(self._call, Role.PROBE, (peer, incarnation), level, endpoint)
        )

    def flows(self) -> dict[LinkKey, Flow]:
        """See `Transport`; silenced NICs do not count, their kernel goes on."""
        found: dict[LinkKey, Flow] = {}
        for key, link in self._links.items():
            if link.sock is not None and link.level not in self._silent:
                with suppress(OSError):  # its end is about to be reported
                    found[key] = flow_of(link.sock)
        return found

    def is_up(self, peer: int, level: int) -> bool:
        """See `Transport`."""
        link = self._links.get((peer, level))
        return link is not None and link.is_up

    @property
    def queued_nbytes(self) -> int:
        """See `Transport`; silenced NICs do not count, nothing will leave them."""
        return sum(link.queued_nbytes for link in self._links.values() if link.level not in self._silent)

    def stats(self) -> dict[LinkKey, LinkStats]:
        """See `Transport`."""
        return {key: link.stats() for key, link in self._links.items()}

    def silence(self, level: int) -> None:
        """See `Transport`; what the kernel has taken already may still arrive."""
        self._check_level(level)
        if level in self._silent:
            return
        self._silent.add(level)
        self._deferred_closes[level] += self._listeners[level].mute()
        self._heartbeats[level].mute()
        self._parking.mute(level)
        self._deferred_closes[level] += self._probes.abandon(level)
        for link in self._links.values():
            if link.level == level:
                if link.connection is not None:
                    link.connection.mute()
                elif link.opening is not None:
                    self._bury(level, link.opening.abandon())

    def unsilence(self, level: int) -> None:
        """See `Transport`."""
        self._check_level(level)
        if level not in self._silent:
            return
        self._silent.remove(level)
        self._close_deferred(level)
        self._listeners[level].unmute()
        self._heartbeats[level].unmute()
        self._parking.unmute(level)
        for link in self._links.values():
            if link.level == level and link.connection is not None:
                link.connection.unmute()

    def stall(self, peer: int, level: int) -> None:
        """See `Transport`; what the kernel has sent already may still be acknowledged."""
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
        for listener in self._listeners:
            listener.close()
        for heartbeats in self._heartbeats:
            heartbeats.close()
        for level in self._deferred_closes:
            self._close_deferred(level)

    def _connection(self, link: Link, sock: socket.socket, on_end: OnEnd) -> LinkConnection:
        """Make the connection of a link from its authenticated stream."""
        raise NotImplementedError

    def _open_nic(self, level: int) -> None:
        tcp, udp = bind_pair(self._nics[level], self._nic_name(level), self._traffic_class)
        me = self._hello(level)
        self._listeners.append(
            Listener(tcp, self._poller, token=self._token, me=me, on_open=partial(self._incoming, level))
        )
        self._heartbeats.append(
            HeartbeatSocket(
                udp,
                self._poller,
                server=self._server,
                incarnation=self._incarnation,
                level=level,
                token=self._token,
                job=self._job,
                on_heartbeat=partial(self._heard_heartbeat, level),
            )
        )

    def _open(self, link: Link) -> None:
        parked = self._parking.take((link.peer, link.level), link.incarnation)
        if parked is not None:
            self._attach(link, parked)
            return
        link.state = LinkState.OPENING
        attempt = partial(self._dial, link) if self._server < link.peer else None
        link.opening = Opening(self._poller, attempt, partial(self._lost, link), self._connect_s)

    def _dial(self, link: Link, on_fail: OnFailed) -> Dial | None:
        def opened(sock: socket.socket, hello: Hello) -> None:
            self._attach(link, sock)

        return self._call(
            Role.DATA, (link.peer, link.incarnation), link.level, link.endpoint, opened, on_fail
        )

    def _call(
        self,
        role: Role,
        wanted: tuple[int, int],
        level: int,
        endpoint: Endpoint,
        on_open: OnGreeted,
        on_fail: OnFailed,
    ) -> Dial | None:
        """Dial `wanted`, a server in one of its incarnations, over a NIC; None if nothing can be sent now."""
        if level in self._silent:
            return None
        me = self._hello(level, role)
        handshake = DialerHandshake(self._token, me, fresh_nonce(), *wanted)
        try:
            return Dial(
                endpoint,
                handshake,
                self._poller,
                on_open,
                on_fail,
                source=self._nics[level],
                traffic_class=self._traffic_class,
                timeout_s=self._connect_s,
                held=(wanted[0], level) in self._stalled,
            )
        except OSError as error:
            _LOG.warning("%s: cannot make a socket: %s; trying again", self._nic_name(level), error)
            return None

    def _restart_attempt(self, peer: int, level: int) -> None:
        """The way to this peer has changed: what is under way tells nothing of how it is now."""
        link = self._links.get((peer, level))
        if link is not None and link.opening is not None:
            self._bury(level, link.opening.abandon())

    def _incoming(self, level: int, sock: socket.socket, hello: Hello) -> None:
        """Take in a connection whose other side proved to be `hello`."""
        peer = hello.server
        if (peer, level) in self._stalled:
            hold(sock)
        if hello.role is Role.PROBE:
            self._probes.answer((peer, level), sock)
            return
        if peer >= self._server:
            _LOG.warning("%s: closed a connection from server %d: we dial it", self._nic_name(level), peer)
            sock.close()
            return
        link = self._links.get((peer, level))
        if link is not None and hello.incarnation < link.incarnation:
            _LOG.warning(
                "%s: closed a connection from an earlier incarnation of %d", self._nic_name(level), peer
            )
            sock.close()
            return
        known = link is not None and hello.incarnation == link.incarnation
        if link is not None and known and link.state is LinkState.OPENING:
            self._attach(link, sock)
        elif link is not None and known and link.state is LinkState.UP and link.untouched:
            link.swap(sock, partial(self._lost, link), muted=False)
            link.set_sndbuf(self._sndbuf_nbytes)
        else:
            # A later incarnation than the known one waits for the view that says so; the earlier one stays.
            self._parking.put((peer, level), sock, hello.incarnation)
            if link is not None and known and link.state is LinkState.UP:
                # Frames may have been lost with the old one, so the loss must be known.
                self._lost(link, "reset", "the peer opened a new connection")

    def _attach(self, link: Link, sock: socket.socket) -> None:
        if (link.peer, link.level) not in self._stalled:
            release(sock)  # it may have been held when it came
        link.attach(sock, partial(self._lost, link), muted=link.level in self._silent)
        link.set_sndbuf(self._sndbuf_nbytes)

    def _lost(self, link: Link, kind: LostKind, why: str) -> None:
        self._bury(link.level, link.detach(LinkState.LOST))
        name = f"{self._nic_name(link.level)}: connection to server {link.peer} ({kind})"
        self._handler.lost(link.peer, link.level, kind, f"{name}: {why}")

    def _heard_heartbeat(self, level: int, peer: int) -> None:
        self._handler.heard(peer, level)

    def _bury(self, level: int, sock: socket.socket | None) -> None:
        """Close a socket, but not while its NIC is silenced: the peer would notice."""
        if sock is None:
            return
        if level in self._silent and not self._closed:
            self._deferred_closes[level].append(sock)
        else:
            sock.close()

    def _close_deferred(self, level: int) -> None:
        deferred, self._deferred_closes[level] = self._deferred_closes[level], []
        for sock in deferred:
            sock.close()

    def _link(self, peer: int, level: int) -> Link:
        link = self._links.get((peer, level))
        if link is None:
            link = Link(peer, level, self._connection)
            self._links[peer, level] = link
        return link

    def _hello(self, level: int, role: Role = Role.DATA) -> Hello:
        return Hello(role, self._job, self._server, level, self._incarnation)

    def _check_level(self, level: int) -> None:
        if not 0 <= level < len(self._nics):
            raise UsageError(f"server {self._server} has NICs 0 to {len(self._nics) - 1}, not {level}")

    def _check_wanted(self, peer: int, level: int, endpoint: Endpoint) -> None:
        self._check_level(level)
        address_family(endpoint[0])
        if peer == self._server or peer < 0 or not 0 < endpoint[1] < 1 << 16:
            raise UsageError(f"server {self._server} cannot want server {peer} at {endpoint}")

    def _nic_name(self, level: int) -> str:
        return f"server {self._server} NIC {level} ({self._nics[level]})"
