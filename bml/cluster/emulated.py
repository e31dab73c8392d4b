"""A job on an emulated fabric: each server lives in its own network namespace, and faults hit real cables."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from bml import fabric
from bml.cluster.constants import constants_of_emulated
from bml.cluster.emulated_ray import EmulatedRayFleet, OnStart
from bml.cluster.fleet import Answers, Fleet, FleetEvent, Request
from bml.cluster.job import JobSpec, Place
from bml.cluster.processes import ProcessFleet
from bml.errors import UsageError
from bml.fabric.injector import FabricInjector


class EmulatedFleet:
    """See bml.cluster.fleet.Fleet: Ray actors or plain processes, and somebody outside who breaks cables.

    The fabric of the default name is made if it is not up, and removed at the end. Raises FabricError if
    another is not up or this one cannot be made, UsageError if it has another shape than the job.
    """

    def __init__(self, spec: JobSpec, launcher: str, prints: bool, on_start: OnStart):
        self._made = spec.emulated == fabric.DEFAULT_NAME and not fabric.is_up(fabric.DEFAULT_NAME)
        if self._made:
            on_start(f"bringing up an emulated {spec.fabric}")
            self._network = fabric.up(spec.fabric, name=fabric.DEFAULT_NAME, maker=os.getpid())
        else:
            self._network = fabric.find(spec.emulated or fabric.DEFAULT_NAME)
        up = self._network.fabric
        if up != spec.parsed_fabric():
            raise UsageError(
                f"the job is for {spec.fabric}, but the emulated fabric {self._network.name} is a {up.name}: "
                f"run it with --fabric {up.name}, or bring up the other"
            )
        self._injector = FabricInjector(self._network)
        goodput = self._network.condition.rate_bit / 8 * fabric.GOODPUT
        constants = constants_of_emulated(spec.constants, goodput, up.n_servers)
        known = replace(spec, nic_rate=goodput, constants=constants)
        strike = self._injector.strike
        self._fleet: Fleet = (
            ProcessFleet(known, prints, self._place, strike)
            if launcher == "processes"
            else EmulatedRayFleet(known, prints, self._place, strike, on_start)
        )
        self.spec = self._fleet.spec

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._fleet.start(train)

    def join(self, server: int, life: int, give_up: threading.Event) -> None:
        """See Fleet."""
        self._fleet.join(server, life, give_up)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        return self._fleet.wait(timeout_s)

    def ask(self, request: Request, timeout_s: float) -> Answers:
        """See Fleet."""
        return self._fleet.ask(request, timeout_s)

    def close(self) -> None:
        """See Fleet; what was broken is healed."""
        self._fleet.close()
        self._injector.close()
        if self._made:
            self._made = False
            self._network.down()

    def _place(self, server: int | None) -> Place:
        """The coordinator sits at the switches, where the management network reaches all."""
        layout, path = self._network.layout, self._network.namespace_path(server)
        if server is None:
            return Place((), layout.coordinator_address, path)
        return Place(layout.nics(server), layout.management_address(server), path)
