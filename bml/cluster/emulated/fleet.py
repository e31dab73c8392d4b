"""The fleet on an emulated fabric: each server has its own network namespace, and faults hit real cables."""

from __future__ import annotations

import logging
from dataclasses import replace

from bml import fabric
from bml.cluster.emulated.ray_nodes import EmulatedRayFleet, OnStart
from bml.cluster.fleets.fleet import Answers, Fleet, FleetEvent, NotInjected, Patience
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.spec.constants import constants_of_emulated
from bml.cluster.spec.job import JobSpec, Place, Request
from bml.errors import UsageError
from bml.fabric import bpf
from bml.fabric.injector import FabricInjector
from bml.io.interruptible import Event

_LOG = logging.getLogger(__name__)


class EmulatedFleet:
    """See bml.cluster.fleets.fleet.Fleet: Ray actors or plain processes; an injector outside breaks cables.

    With the name DEFAULT_NAME the job uses the fabric of that name if it is up, else one that is made for the
    job and removed at its end. Raises FabricError if a fabric of another name is not up, or another job uses
    it, or if none can be made; UsageError if its shape is not that of the job.
    """

    def __init__(self, spec: JobSpec, launcher: str, prints: bool, on_start: OnStart):
        asked = spec.emulated or fabric.DEFAULT_NAME
        self._made = False
        if asked == fabric.DEFAULT_NAME:
            if not fabric.is_up(asked):
                on_start(f"bringing up an emulated {spec.fabric}")
            self._network, self._made = fabric.use_or_make(spec.fabric, asked)
        else:
            self._network = fabric.use(asked)
        try:
            self._injector = FabricInjector(self._network)
            self._fleet = self._fleet_of(spec, launcher, prints, on_start)
        except BaseException:
            self._leave()
            raise
        self.spec, self.spares = self._fleet.spec, self._fleet.spares

    def _fleet_of(self, spec: JobSpec, launcher: str, prints: bool, on_start: OnStart) -> Fleet:
        if any(fault.kind == "loss" for fault in spec.fault_plan()):
            bpf.check()
        up = self._network.fabric
        if up != spec.parsed_fabric():
            raise UsageError(
                f"the job is for {spec.fabric}, but the emulated fabric {self._network.name} is a {up.name}: "
                f"run it with --fabric {up.name}, or bring up the other"
            )
        goodput = self._network.condition.rate_bit / 8 * fabric.GOODPUT
        constants = constants_of_emulated(spec.constants, goodput, up.n_servers)
        known = replace(
            spec,
            emulated=self._network.name,
            nic_rate=goodput,
            constants=constants,
            constants_from=f"the rate of the emulated fabric, else {spec.constants_from}",
        )
        apply_fault = self._injector.apply_fault
        if launcher == "processes":
            return ProcessFleet(known, prints, self._place, apply_fault)
        return EmulatedRayFleet(known, prints, self._place, apply_fault, on_start)

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._fleet.start(train)
        self.spec = self._fleet.spec

    def join(self, server: int, incarnation: int, give_up: Event) -> None:
        """See Fleet."""
        self._fleet.join(server, incarnation, give_up)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        events = self._fleet.wait(timeout_s)
        failed = [NotInjected(str(fault), why) for fault, why in self._injector.take_failed()]
        return [*events, *failed]

    def ask(self, request: Request, patience: Patience) -> Answers:
        """See Fleet."""
        return self._fleet.ask(request, patience)

    def close(self) -> None:
        """See Fleet; all damage is healed."""
        self._fleet.close()
        self._injector.close()
        self._leave()

    def _leave(self) -> None:
        """Take down a fabric that was made for the job. As the job is over, errors are only logged."""
        if self._made:
            self._made = False
            try:
                self._network.down()
            except Exception as error:
                _LOG.warning("the emulated fabric %s: %s", self._network.name, error)

    def _place(self, server: int | None) -> Place:
        """Return the place of the coordinator: at the switches, where the management network reaches all."""
        layout, path = self._network.layout, self._network.namespace_path(server)
        if server is None:
            return Place((), layout.coordinator_address, path)
        return Place(layout.nics(server), layout.management_address(server), path)
