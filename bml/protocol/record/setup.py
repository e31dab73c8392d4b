"""The settings of a server's core, as far as its behaviour follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from bml.protocol.record.values import RecordingError
from bml.protocol.server.core import Planner, ServerCore
from bml.protocol.step.slices import slice_nbytes
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire.messages import Incarnation
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
from bml.schedule.select.model import Constants
from bml.topology import Fabric, parse
from bml.topology.errors import BmlError


class Setup(Struct, frozen=True):
    """The settings of one core. `incarnation`: None for a server that was there from the beginning.

    `rate`: bytes per second of a NIC, from which the length of slices follows. `wall_s`: wall time minus the
    server's clock, in seconds.
    """

    server: int
    fabric: str
    algorithm: str
    constants: Constants
    shares_memory: bool
    timeouts: Timeouts
    kept_nbytes: int
    rate: float
    incarnation: Incarnation | None = None
    wall_s: float = 0.0


class Making(NamedTuple):
    """The two functions that a core is made with."""

    planner: Planner
    slice_nbytes: Callable[[int], int]


def planner(algorithm: str, constants: Constants, shares_memory: bool) -> Planner:
    """The function that plans, for a fabric with its failures and a server, the programs of that server."""

    def direct(fabric: Fabric, server: int) -> AnyPrograms:
        return OneProgram(DirectProgram(server, fabric.servers))

    def scheduled(fabric: Fabric, server: int) -> AnyPrograms:
        return Programs(Schedules(fabric, algorithm, constants), server)

    return direct if shares_memory else scheduled


def making(setup: Setup) -> Making:
    """The functions of a real server with these settings."""
    planned = planner(setup.algorithm, setup.constants, setup.shares_memory)
    return Making(planned, lambda nbytes: slice_nbytes(nbytes, setup.rate))


def new_core(setup: Setup, made: Making) -> ServerCore:
    """Make a core with these settings, at time 0. Raises RecordingError if there can be none."""
    try:
        return ServerCore(
            setup.server, parse(setup.fabric), made.planner, setup.timeouts, made.slice_nbytes, 0.0,
            setup.incarnation, setup.kept_nbytes,
        )  # fmt: skip
    except BmlError as error:
        raise RecordingError(f"damaged: {error}") from None
