"""The verbs transport: the links of `LinkTransport`, whose frames travel by RDMA."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from bml.io.memory import RegisteredPool
from bml.io.poller import Poller
from bml.protocol.wire.frame import MAX_NBYTES
from bml.topology.errors import UsageError
from bml.transport.interface import Handler
from bml.transport.links.link import Link, LinkConnection, OnEnd
from bml.transport.links.links import LinkTransport
from bml.transport.verbs.connection import VerbsConnection
from bml.transport.verbs.devices import choose
from bml.transport.verbs.rdma import Nic
from bml.transport.verbs.settings import VerbsSettings

_LOG = logging.getLogger("bml.transport")

OpenNic = Callable[[str, str | None], Nic]
"""Opens the RDMA NIC with an address, or the one that a setting names; raises FabricError."""


def open_nic(address: str, setting: str | None) -> Nic:
    """The RDMA NIC with this address, by pyverbs; raises FabricError that says what to check."""
    gid = choose(address, setting)
    from bml.transport.verbs import driver

    nic = driver.open_nic(gid)
    _LOG.info("%s is %s", address, nic.description)
    return nic


class VerbsTransport(LinkTransport):
    """`Transport` over RDMA; the other arguments are those of `LinkTransport`.

    `pool` is where arrays live that are moved without a copy; every NIC knows it until `close`. Raises
    FabricError without RDMA NICs.
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
        settings: VerbsSettings | None = None,
        pool: RegisteredPool | None = None,
        connect_s: float = 5.0,
        max_nbytes: int = MAX_NBYTES,
        incarnation: int = 0,
        open_nic: OpenNic = open_nic,
    ) -> None:
        self.settings = settings or VerbsSettings()
        self.pool = pool or RegisteredPool(self.settings.pool_nbytes, self.settings.pool_max_nbytes)
        self._rdma: list[Nic] = []
        devices = self.settings.devices or (None,) * len(nics)
        if len(devices) != len(nics):
            raise UsageError(
                f"BML_RDMA_DEVICES names {len(devices)} devices, the fabric has {len(nics)} levels"
            )
        try:
            for address, device in zip(nics, devices, strict=True):
                nic = open_nic(address, device)
                self._rdma.append(nic)
                self.pool.add_nic(nic.register)
            super().__init__(
                server,
                nics,
                token=token,
                job=job,
                poller=poller,
                handler=handler,
                connect_s=connect_s,
                max_nbytes=max_nbytes,
                traffic_class=self.settings.traffic_class,
                incarnation=incarnation,
            )
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

    def _connection(self, link: Link, sock: socket.socket, on_end: OnEnd) -> LinkConnection:
        handler, peer, level = self._handler, link.peer, link.level
        return VerbsConnection(
            sock,
            self._poller,
            link.queue,
            link.counters,
            nic=self._rdma[level],
            nic_number=level,
            pool=self.pool,
            settings=self.settings,
            max_nbytes=self._max_nbytes,
            connect_s=self._connect_s,
            admit=partial(handler.admit, peer, level),
            received=partial(handler.received, peer, level),
            heard=partial(handler.heard, peer, level),
            on_end=on_end,
        )

    def _close_rdma(self) -> None:
        self.pool.close()
        while self._rdma:
            self._rdma.pop().close()
