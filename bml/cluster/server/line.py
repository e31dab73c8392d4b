"""A server's line to its coordinator, which dials in. Anything but a message of a coordinator ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bml.cluster.spec.job import JobSpec, check_contacts
from bml.io.poller import Poller
from bml.protocol.wire import messages as msg
from bml.protocol.wire.validate import check_for_server
from bml.topology import Fabric
from bml.transport.handshake import control
from bml.transport.handshake.auth import Hello, Identity

_LOG = logging.getLogger(__name__)


class CoordinatorLine:
    """Listens on `host` for the coordinator of `server` in this `incarnation`.

    A newer connection replaces the older one. `told` is called with every message, `lost` when the connection
    is gone.
    """

    def __init__(
        self,
        server: int,
        incarnation: int,
        fabric: Fabric,
        spec: JobSpec,
        host: str,
        poller: Poller,
        told: Callable[[msg.ToServer], None],
        lost: Callable[[], None],
    ):
        self._server = server
        self._fabric = fabric
        self._told = told
        self._lost = lost
        self._channel: control.Channel | None = None
        self._on_peer: Callable[[control.Channel, Hello], None] | None = None
        self._on_close: Callable[[], None] = lambda: None
        self._listener = control.ControlListener(
            host, identity=Identity.of(spec.token, spec.job, server, incarnation), poller=poller,
            on_connect=self._connected,
        )  # fmt: skip

    @property
    def endpoint(self) -> tuple[str, int]:
        """(host, port) to dial."""
        return self._listener.endpoint

    @property
    def is_open(self) -> bool:
        """Whether a coordinator is connected."""
        return self._channel is not None

    def take_peers(
        self, on_peer: Callable[[control.Channel, Hello], None], on_close: Callable[[], None]
    ) -> None:
        """From now on, give connections of other servers to `on_peer`; `on_close` is called in `close`."""
        self._on_peer, self._on_close = on_peer, on_close

    def tell(self, message: msg.ToCoordinator) -> None:
        """Send a message; it is lost when no coordinator is there."""
        if self._channel is not None:
            self._channel.send(msg.encode(message))

    def close(self) -> None:
        """Hang up, and take no call any more."""
        if self._channel is not None:
            self._channel.close()
        self._on_close()
        self._listener.close()

    def _connected(self, channel: control.Channel, hello: Hello) -> None:
        if hello.server != control.COORDINATOR and self._on_peer is not None:
            self._on_peer(channel, hello)
            return
        if hello.server != control.COORDINATOR:
            _LOG.warning("server %d: closed a control connection of server %d", self._server, hello.server)
            channel.close()
            return
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        channel.listen(lambda data: self._take(channel, data), lambda end: self._gone(channel))

    def _gone(self, channel: control.Channel) -> None:
        if channel is self._channel:
            self._channel = None
            self._lost()

    def _take(self, channel: control.Channel, data: bytes) -> None:
        try:
            message = check_for_server(msg.decode(data), self._fabric)
            if isinstance(message, msg.Propose):
                check_contacts(message.view.joined, self._fabric.levels)
        except msg.MessageError as error:
            _LOG.warning("server %d: closed the connection of its coordinator: %s", self._server, error)
            channel.close()
            self._gone(channel)
            return
        self._told(message)
