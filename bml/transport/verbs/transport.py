"""The verbs transport: the links of `LinkTransport`, whose frames travel by RDMA."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from bml.io.memory import RegisteredPool
from bml.io.poller import Poller
from bml.topology.errors import UsageError
from bml.transport.handshake.auth import Identity
from bml.transport.interface import Handler
from bml.transport.links.link import Link, LinkCallbacks, LinkConnection
from bml.transport.links.settings import LinkSettings
from bml.transport.links.transport import LinkTransport
from bml.transport.verbs.connection import VerbsConnection
from bml.transport.verbs.devices import choose
from bml.transport.verbs.rdma import Nic, NicMemory
from bml.transport.verbs.settings import VerbsSettings

_LOG = logging.getLogger(__name__)

OpenNic = Callable[[str, str | None], Nic]
"""Opens the RDMA NIC with an address, or the one that a setting names; raises FabricError."""


def open_nic(address: str, setting: str | None) -> Nic:
    """Open the RDMA NIC with this address, by pyverbs. Raises FabricError, which says what to check."""
    gid = choose(address, setting)
    from bml.transport.verbs import driver

    nic = driver.open_nic(gid)
    _LOG.info("%s is %s", address, nic.description)
    return nic


class VerbsTransport(LinkTransport):
    """`Transport` over RDMA; the other arguments are those of `LinkTransport`.

    `pool` has the memory of arrays that are moved without a copy; every NIC knows it until `close`.
    `open_nic` opens the RDMA NIC of an address. Raises FabricError without RDMA NICs, UsageError if `verbs`
    does not name one device per level.
    """

    def __init__(
        self,
        identity: Identity,
        nics: Sequence[str],
        poller: Poller,
        handler: Handler,
        settings: LinkSettings | None = None,
        verbs: VerbsSettings | None = None,
        pool: RegisteredPool | None = None,
        open_nic: OpenNic = open_nic,
    ) -> None:
        self._verbs = verbs or VerbsSettings()
        self.pool = pool or RegisteredPool(self._verbs.pool_nbytes, self._verbs.pool_max_nbytes)
        self._rdma: list[Nic] = []
        devices = self._verbs.devices or (None,) * len(nics)
        if len(devices) != len(nics):
            raise UsageError(
                f"BML_RDMA_DEVICES names {len(devices)} devices, the fabric has {len(nics)} levels"
            )
        try:
            for address, device in zip(nics, devices, strict=True):
                nic = open_nic(address, device)
                self._rdma.append(nic)
                self.pool.add_nic(nic.register)
            super().__init__(identity, nics, poller, handler, settings)
        except BaseException:
            self._close_rdma()
            raise

    @property
    def devices(self) -> tuple[str, ...]:
        """The RDMA device, port and GID of each level."""
        return tuple(nic.description for nic in self._rdma)

    def close(self) -> None:
        """See `Transport`; the pool's arrays stay valid as plain memory."""
        super().close()
        self._close_rdma()

    def _connection(self, link: Link, sock: socket.socket, callbacks: LinkCallbacks) -> LinkConnection:
        nic, memory = self._rdma[link.level], NicMemory(self.pool, link.level)
        return VerbsConnection(sock, self._poller, link, callbacks, nic, memory, self._verbs, self._settings)

    def _close_rdma(self) -> None:
        self.pool.close()
        while self._rdma:
            self._rdma.pop().close()
