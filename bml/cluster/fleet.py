"""What a launcher needs: start servers and a coordinator somewhere, and hear what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from bml.cluster.job import ServerReport


@dataclass(frozen=True)
class Reported:
    """A server has ended, with its report."""

    report: ServerReport


@dataclass(frozen=True)
class Died:
    """A server's process is gone without a report."""

    server: int
    why: str


@dataclass(frozen=True)
class Changed:
    """The coordinator's newest snapshot (see CoordinatorLoop.snapshot)."""

    snapshot: dict[str, Any]


FleetEvent = Reported | Died | Changed


class Fleet(Protocol):
    """The processes of one job."""

    def start(self, train: bytes) -> None:
        """Start every server and the coordinator; `train` is the pickled training function."""
        ...

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """What happened, waiting for it up to `timeout_s`. Restarts the coordinator if it died."""
        ...

    def close(self) -> None:
        """End every process of the job and leave nothing behind. Idempotent."""
        ...
