"""What the wires take for the gradients of a training, in one view: simulated, and remembered by size.

The time of an all-reduce is that of the flow simulation, not of the cost model: it has the rate of each link,
the pipeline of slices, and flows that collide in a Fat-Tree, and steps on emulated wires were within 1.4 % of
it. Only the algorithm is chosen by the cost model, as jobs do. A size is simulated once in a view.
"""

from __future__ import annotations

from dataclasses import dataclass

from bml.lab.flows.simulate import Conditions, simulate
from bml.protocol.step.slices import piece_nbytes
from bml.schedule import plan
from bml.schedule.select.candidates import Candidates
from bml.schedule.select.model import Constants
from bml.topology import Fabric


@dataclass(frozen=True)
class Network:
    """What all views have in common.

    Attributes:
        algorithm: a name, or `auto`.
        rate: bytes per second of a NIC of rate 1, each way, headers not counted.
        delay_s: seconds of a hop.
        slice_nbytes: the largest slice; None for that of a job.
        constants: those by which `auto` chooses.
    """

    algorithm: str
    rate: float
    delay_s: float
    slice_nbytes: int | None
    constants: Constants


class Wires:
    """The all-reduces of one view: of a fabric with its failures.

    Raises:
        UsageError: there is no such algorithm.
        FabricError: the survivors cannot all reach one another.
    """

    def __init__(self, fabric: Fabric, network: Network):
        self.fabric = fabric
        self._network = network
        self._asked = plan(fabric, network.algorithm)
        self._candidates: Candidates | None = None
        if network.algorithm == "auto":
            self._candidates = Candidates(fabric, network.constants, patient=True)
        self._known: dict[int, tuple[str, float]] = {}

    @property
    def piece_nbytes(self) -> int:
        """About how long a piece of a step with a priority is, in bytes, as in jobs."""
        return piece_nbytes(self._network.rate, self._network.constants.alpha_s, self.fabric.levels)

    @property
    def algorithms(self) -> list[str]:
        """Those that were taken so far, that of the largest size first."""
        return list(dict.fromkeys(self._known[nbytes][0] for nbytes in sorted(self._known, reverse=True)))

    def seconds(self, nbytes: int) -> float:
        """Return how long an all-reduce of so many bytes takes.

        Raises:
            FabricError: the algorithm cannot work on the fabric.
            UsageError: it is too large to be planned or simulated.
        """
        if nbytes not in self._known:
            made = self._asked if self._candidates is None else self._candidates.best(nbytes)
            network = self._network
            conditions = Conditions(nbytes, network.rate, network.delay_s, network.slice_nbytes)
            self._known[nbytes] = made.algorithm, simulate(made, conditions).seconds
        return self._known[nbytes][1]
