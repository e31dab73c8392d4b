"""The settings of RDMA, read from BML_* of the environment; the defaults are safe on every NIC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bml.io.memory import POOL_MAX_SETTING, POOL_SETTING
from bml.transport.links.settings import check_range, number_of

MAX_RETRIES = 6
"""Soft-RoCE retries for ever if it is given 7."""


@dataclass(frozen=True)
class VerbsSettings:
    """The settings that only RDMA has (docs/guides/rdma.md).

    Raises UsageError, which names the variable, for values out of range.
    """

    devices: tuple[str, ...] = ()
    """One RDMA device per level, "mlx5_0" or with a GID index "mlx5_0:3"; else found by the address."""
    slots: int = 64
    """The most messages on their way to a receiver, per queue pair."""
    slot_nbytes: int = 4096
    """Bytes of the longest message. Frames that fit are copied into one, others are written into place."""
    window_nbytes: int = 1 << 20
    """Bytes of payload that a NIC has at once per queue pair. The time-out must be longer than they take."""
    timeout: int = 16
    """The time to wait for an acknowledgement, as an exponent: 4.096 us x 2^timeout, so 0.27 s."""
    retries: int = 4
    """The number of time-outs in a row after which the link is lost."""
    pool_nbytes: int = 64 << 20
    """Bytes of the regions in which memory is registered."""
    pool_max_nbytes: int | None = None
    """The most bytes to register; None: no limit."""

    def __post_init__(self) -> None:
        check_range("BML_RDMA_SLOTS", self.slots, 16, 4096)
        check_range("BML_RDMA_SLOT_NBYTES", self.slot_nbytes, 256, 1 << 20)
        check_range("BML_RDMA_WINDOW_NBYTES", self.window_nbytes, 1, 1 << 30)
        check_range("BML_RDMA_TIMEOUT", self.timeout, 8, 24)
        check_range("BML_RDMA_RETRIES", self.retries, 1, MAX_RETRIES)
        check_range(POOL_SETTING, self.pool_nbytes, 1, 1 << 50)
        if self.pool_max_nbytes is not None:
            check_range(POOL_MAX_SETTING, self.pool_max_nbytes, self.pool_nbytes, 1 << 50)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> VerbsSettings:
        """The settings of these environment variables. Raises UsageError, which names the variable."""
        given = cls()
        devices = tuple(
            name.strip() for name in environ.get("BML_RDMA_DEVICES", "").split(",") if name.strip()
        )
        pool_max = number_of(environ, POOL_MAX_SETTING, 0)
        return cls(
            devices=devices,
            slots=number_of(environ, "BML_RDMA_SLOTS", given.slots),
            slot_nbytes=number_of(environ, "BML_RDMA_SLOT_NBYTES", given.slot_nbytes),
            window_nbytes=number_of(environ, "BML_RDMA_WINDOW_NBYTES", given.window_nbytes),
            timeout=number_of(environ, "BML_RDMA_TIMEOUT", given.timeout),
            retries=number_of(environ, "BML_RDMA_RETRIES", given.retries),
            pool_nbytes=number_of(environ, POOL_SETTING, given.pool_nbytes >> 20) << 20,
            pool_max_nbytes=pool_max << 20 if pool_max else None,
        )
