"""Channels of whole messages between two servers, beside the steps: made when a message is to be sent.

A server sends over the channel that it dialled, and is answered over the same. So two servers have up to two.
They use the ports where the servers listen for their coordinator, and prove the job's token as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bml.cluster.server.assembly import Assembly
from bml.cluster.spec.job import JobSpec
from bml.transport.handshake import control
from bml.transport.handshake.auth import Hello, Identity

OnMessage = Callable[[int, bytes, Callable[[bytes], None]], None]
"""Called with a server, its message, and what sends an answer."""
OnLost = Callable[[int, str], None]
"""Called with a server to or from which a channel has ended, and the reason."""


class PeerLines:
    """The channels of `server`; all methods and callbacks are for the thread that polls."""

    def __init__(self, shell: Assembly, server: int, spec: JobSpec, on_message: OnMessage, on_lost: OnLost):
        self._shell = shell
        self._server = server
        self._spec = spec
        self._on_message, self._on_lost = on_message, on_lost
        self._dialled: dict[int, control.Channel] = {}
        self._accepted: dict[int, control.Channel] = {}
        self._waiting: dict[int, list[bytes]] = {}
        shell.line.take_peers(self._take, self._close)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to a server; if that cannot be done, `on_lost` is called."""
        channel = self._dialled.get(peer)
        if channel is not None:
            channel.send(message)
        elif peer in self._waiting:
            self._waiting[peer].append(message)
        else:
            self._waiting[peer] = [message]
            self._dial(peer)

    def why_lost(self, peer: int) -> str:
        """Why a server takes part no more, or this one does not; "" if both do."""
        shell = self._shell
        if shell.meeting.stopped:
            return str(shell.meeting.error or "this server has ended")
        view = shell.core.view
        return "" if view is None or peer in view.members else f"it is out of view {view.epoch}"

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call something in so many seconds."""
        self._shell.poller.after(delay_s, action)

    def _dial(self, peer: int) -> None:
        spec, peers = self._spec, self._shell.peers
        mine = peers.incarnations.get(self._server, 0)
        host, port = peers.contacts[peer].control
        control.dial(
            host,
            port,
            identity=Identity.of(spec.token, spec.job, self._server, mine),
            expect_server=peer,
            expect_incarnation=peers.incarnations.get(peer, 0),
            poller=self._shell.poller,
            on_open=partial(self._opened, peer),
            on_fail=lambda end: self._failed(peer, end),
            timeout_s=spec.timeouts().connect_s,
        )

    def _opened(self, peer: int, channel: control.Channel) -> None:
        if peer in self._dialled:  # it was dialled twice, as the first dial was given up
            channel.close()
            return
        self._dialled[peer] = channel
        self._listen(peer, channel, self._dialled)
        for message in self._waiting.pop(peer, ()):
            channel.send(message)

    def _failed(self, peer: int, end: control.End) -> None:
        self._drop(peer, end.why)

    def _take(self, channel: control.Channel, hello: Hello) -> None:
        if hello.server in self._accepted:
            self._drop(hello.server, "it has connected anew")
        self._accepted[hello.server] = channel
        self._listen(hello.server, channel, self._accepted)

    def _listen(self, peer: int, channel: control.Channel, channels: dict[int, control.Channel]) -> None:
        def lost(end: control.End) -> None:
            if channels.get(peer) is channel:
                self._drop(peer, end.why)

        channel.listen(lambda message: self._on_message(peer, message, channel.send), lost)

    def _drop(self, peer: int, why: str) -> None:
        """End both channels: what was on its way in either direction counts as lost."""
        self._waiting.pop(peer, None)
        for channels in (self._dialled, self._accepted):
            channel = channels.pop(peer, None)
            if channel is not None:
                channel.close()
        self._on_lost(peer, why)

    def _close(self) -> None:
        for channel in (*self._dialled.values(), *self._accepted.values()):
            channel.close()
        self._dialled.clear()
        self._accepted.clear()
