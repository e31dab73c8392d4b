"""A job on an emulated fabric: each server lives in its own network namespace, and faults hit real cables."""

from __future__ import annotations

from dataclasses import replace

from bml import fabric
from bml.cluster.fleet import Answers, FleetEvent, Request
from bml.cluster.job import JobSpec, Place
from bml.cluster.processes import ProcessFleet
from bml.errors import UsageError
from bml.fabric.injector import CableInjector


class EmulatedFleet:
    """See bml.cluster.fleet.Fleet: plain processes, and somebody outside the job who breaks its cables.

    Raises FabricError if the fabric is not up, UsageError if it has another shape than the job.
    """

    def __init__(self, spec: JobSpec, prints: bool):
        self._network = fabric.find(spec.emulated or fabric.DEFAULT_NAME)
        up = self._network.fabric
        if up != spec.parsed_fabric():
            raise UsageError(
                f"the job is for {spec.fabric}, but the emulated fabric {self._network.name} is a {up.name}: "
                f"run it with --fabric {up.name}, or bring up the other"
            )
        self._injector = CableInjector(self._network)
        known = replace(spec, nic_rate=self._network.condition.rate_bit / 8 * fabric.GOODPUT)
        self._processes = ProcessFleet(known, prints, self._place, self._injector.strike)
        self.spec = self._processes.spec

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._processes.start(train)

    def join(self, server: int) -> None:
        """See Fleet."""
        self._processes.join(server)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        return self._processes.wait(timeout_s)

    def ask(self, request: Request, timeout_s: float) -> Answers:
        """See Fleet."""
        return self._processes.ask(request, timeout_s)

    def close(self) -> None:
        """See Fleet; what was broken is healed."""
        self._processes.close()
        self._injector.close()

    def _place(self, server: int | None) -> Place:
        """The coordinator sits at the switches, where the management network reaches all."""
        layout, path = self._network.layout, self._network.namespace_path(server)
        if server is None:
            return Place((), layout.coordinator_address, path)
        return Place(layout.nics(server), layout.management_address(server), path)
