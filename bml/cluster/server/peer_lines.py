"""Channels of whole messages between two servers, beside the steps: made when a message is to be sent.

A server sends over the channel that it dialled, and is answered over the same. So two servers have up to two,
and the end of one of them concerns only what its dialler sends. They use the ports where the servers listen
for their coordinator, and prove the job's token as it does. A server that is alive is dialled again until it
answers, but no longer than servers may take to start: a path may be blocked in one direction alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from bml.cluster.server.assembly import Assembly
from bml.cluster.spec.job import JobSpec
from bml.transport.handshake import control
from bml.transport.handshake.auth import Hello, Identity

_LOG = logging.getLogger(__name__)

OnMessage = Callable[[int, bytes, Callable[[bytes], None]], None]
"""Called with a server, its message, and what sends an answer."""
OnEnd = Callable[[int, str], None]
"""Called with a server to or from which a channel has ended, and the reason."""

_AGAIN_S = 0.1
"""After a dial that failed the next one begins so much later, in seconds."""


class PeerLines:
    """The channels of `server`; all methods and callbacks are for the thread that polls.

    `on_unsent` is called when the channel to a server has ended: what this server sent may not have arrived.
    `on_cut` is called when the channel from a server has ended: what that one sent may not arrive.
    """

    def __init__(
        self,
        shell: Assembly,
        server: int,
        spec: JobSpec,
        on_message: OnMessage,
        on_unsent: OnEnd,
        on_cut: OnEnd,
    ):
        self._shell = shell
        self._server = server
        self._spec = spec
        self._on_message, self._on_unsent, self._on_cut = on_message, on_unsent, on_cut
        self._dialled: dict[int, control.Channel] = {}
        self._accepted: dict[int, control.Channel] = {}
        self._waiting: dict[int, list[bytes]] = {}
        """Messages to servers that are being dialled."""
        self._failing_since_s: dict[int, float] = {}
        self._warned: set[int] = set()
        shell.line.take_peers(self._take, self._close)

    def send(self, peer: int, message: bytes) -> None:
        """Send a message to a server; if that cannot be done, `on_unsent` is called."""
        channel = self._dialled.get(peer)
        if channel is not None and channel.peer.incarnation < self._incarnation(peer):
            self._shell.poller.soon(partial(self._lost_to, peer, channel, "it was started again"))
        elif channel is not None:
            channel.send(message)
        elif peer in self._waiting:
            self._waiting[peer].append(message)
        else:
            self._waiting[peer] = [message]
            self._dial(peer)

    def hang_up(self, peer: int) -> None:
        """End all channels of a server that is lost, without a callback; what waits is not sent."""
        if peer in self._waiting:
            self._waiting[peer].clear()  # it is still being dialled
        for channels in (self._dialled, self._accepted):
            channel = channels.pop(peer, None)
            if channel is not None:
                channel.close()

    def why_lost(self, peer: int) -> str:
        """Why a server takes part no more, or this one does not; "" if both do."""
        shell = self._shell
        if shell.mailbox.stopped:
            return str(shell.mailbox.error or "this server has ended")
        view = shell.core.view
        return "" if view is None or peer in view.members else f"it is out of view {view.epoch}"

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call something in so many seconds."""
        self._shell.poller.after(delay_s, action)

    def _incarnation(self, peer: int) -> int:
        return self._shell.peers.incarnations.get(peer, 0)

    # --- the channel to a server -----------------------------------------------------------------

    def _dial(self, peer: int) -> None:
        spec = self._spec
        host, port = self._shell.peers.contacts[peer].control
        control.dial(
            host,
            port,
            identity=Identity.of(spec.token, spec.job, self._server, self._incarnation(self._server)),
            expect_server=peer,
            expect_incarnation=self._incarnation(peer),
            poller=self._shell.poller,
            on_open=partial(self._opened, peer),
            on_fail=partial(self._failed, peer),
            timeout_s=spec.timeouts().connect_s,
        )

    def _opened(self, peer: int, channel: control.Channel) -> None:
        self._dialled[peer] = channel
        self._end_failing(peer)
        self._listen(peer, channel, lambda end: self._lost_to(peer, channel, end.why))
        for message in self._waiting.pop(peer):
            channel.send(message)

    def _failed(self, peer: int, end: control.End) -> None:
        """A busy server answers later; one that is dead leaves the view soon."""
        now, timeouts = time.monotonic(), self._spec.timeouts()
        failing_s = now - self._failing_since_s.setdefault(peer, now)
        if failing_s >= timeouts.connect_s and peer not in self._warned:
            self._warned.add(peer)
            _LOG.warning(
                "server %d: a message to server %d waits, as it does not answer at %s:%d: %s; it is dialled "
                "for up to %g s",
                *(self._server, peer, *self._shell.peers.contacts[peer].control, end.why, timeouts.start_s),
            )
        if failing_s >= timeouts.start_s:
            self._give_up(peer, f"it is alive, but its port did not answer for {failing_s:.3g} s: {end.why}")
        else:
            self._shell.poller.after(_AGAIN_S, partial(self._dial_again, peer))

    def _dial_again(self, peer: int) -> None:
        why = self.why_lost(peer)
        if why:
            self._give_up(peer, why)
        else:
            self._dial(peer)

    def _give_up(self, peer: int, why: str) -> None:
        self._end_failing(peer)
        del self._waiting[peer]
        self._on_unsent(peer, why)

    def _end_failing(self, peer: int) -> None:
        self._failing_since_s.pop(peer, None)
        self._warned.discard(peer)

    def _lost_to(self, peer: int, channel: control.Channel, why: str) -> None:
        if self._dialled.get(peer) is channel:
            del self._dialled[peer]
            channel.close()
            self._on_unsent(peer, why)

    # --- the channel from a server ---------------------------------------------------------------

    def _take(self, channel: control.Channel, hello: Hello) -> None:
        peer, before = hello.server, self._accepted.get(hello.server)
        if hello.incarnation < self._incarnation(peer):
            channel.close()
            return
        if before is not None:
            self._lost_from(peer, before, "it has connected anew")
        self._accepted[peer] = channel
        self._listen(peer, channel, lambda end: self._lost_from(peer, channel, end.why))

    def _lost_from(self, peer: int, channel: control.Channel, why: str) -> None:
        if self._accepted.get(peer) is channel:
            del self._accepted[peer]
            channel.close()
            self._on_cut(peer, why)

    # --- both ------------------------------------------------------------------------------------

    def _listen(self, peer: int, channel: control.Channel, lost: Callable[[control.End], None]) -> None:
        channel.listen(lambda message: self._on_message(peer, message, channel.send), lost)

    def _close(self) -> None:
        for channel in (*self._dialled.values(), *self._accepted.values()):
            channel.close()
        self._dialled.clear()
        self._accepted.clear()
