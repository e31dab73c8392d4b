"""The interface of the simulation to a simulated server, and the contributions of samples."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from bml.protocol.step.workspace import Array
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.sim.judge.history import History
from bml.sim.judge.promises import Promises
from bml.sim.world.host import Host
from bml.sim.world.network import Network
from bml.sim.world.settings import Settings
from bml.sim.world.wires import Wires
from bml.topology import Fabric


class World(Protocol):
    """The simulation as a machine sees it."""

    fabric: Fabric
    first: tuple[int, ...]
    settings: Settings
    timeouts: Timeouts
    network: Network
    wires: Wires
    host: Host | None
    zero_copy: bool
    history: History
    promises: Promises

    def point(self, name: str, text: str, server: int | None = None) -> None:
        """Something happened (at a server) to which a mishap may be tied."""

    def function_ends(self, server: int, how: str, said: str) -> None:
        """A training function raised (`said` is its error), returned early, or computes without end.

        Or it raised in a job without a launcher: its server departs.
        """

    def left(self, server: int, is_done: bool) -> None:
        """The job is over for a server, well or with an error."""

    def tell(self, server: int, message: msg.ToCoordinator) -> None:
        """Send a message to the coordinator."""


@lru_cache(maxsize=256)
def samples(n_samples: int, n_elements: int, step: int) -> Array:
    """The contribution of each sample to a step, float64 of shape (n_samples, n_elements).

    The first half of the elements are integers, exact in any order; the others are not, so that another
    order of addition shows in their last bits.
    """
    rows = np.arange(n_samples)[:, None]
    table = ((rows * 7 + np.arange(n_elements) * 3 + step * 5) % 101).astype(np.float64)
    table[:, n_elements - n_elements // 2 :] *= 0.1
    table.setflags(write=False)
    return table
