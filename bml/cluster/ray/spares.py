"""The spares of a job on Ray: actors that have done all imports, and wait to become servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError

from bml.cluster.fleets.fleet import Known
from bml.cluster.fleets.handles import Handle
from bml.cluster.fleets.spare_places import Waiting, choose, nodes_for_spares
from bml.cluster.ray.coordinator import GOING_S
from bml.cluster.ray.machines import open_machines
from bml.cluster.spec.job import JobSpec

_LOG = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often a spare that Ray does not reach is asked again


@dataclass
class Spare:
    """An actor that is no server yet. `node` is Ray's id of where it is; before it is ready, is to be."""

    node: str
    actor: Any
    networks: tuple[str, ...] | None = None
    is_ready: bool = False
    handle: Handle | None = None

    def let_go(self, kill: bool = False) -> None:
        """Release its process, if it is on this machine; with `kill`, kill it before."""
        if self.handle is not None:
            if kill:
                self.handle.kill()
            self.handle.close()
            self.handle = None


class RaySpares:
    """See bml.cluster.fleets.fleet.Spares. Any thread may call `left` and `take`, one thread all else.

    `homes` are the nodes of the servers and `known` their addresses, as they are now. Processes of spares can
    be held, and killed, if they are `local`. `make` starts an actor on a node. On `one_machine` servers have
    loopback addresses, and so do spares.
    """

    def __init__(
        self,
        spec: JobSpec,
        homes: Mapping[int, str],
        known: Known,
        local: bool,
        make: Callable[[str], Any],
        one_machine: bool,
    ):
        self._fabric, self._to_come = spec.parsed_fabric(), spec.spares
        self._make, self._one_machine = make, one_machine
        self._homes, self._known, self._local = homes, known, local
        self._changing = threading.Lock()
        self._waiting: dict[int, Spare] = {}
        self._aside: dict[int, Spare] = {}
        self._asked: dict[Any, int] = {}
        self._unheard: dict[int, float] = {}

    def start(self) -> None:
        """See Spares; nobody waits for their actors."""
        count, self._to_come = self._to_come, 0
        if not count:
            return
        homes = {server: self._homes[server] for server in dict(self._known.contacts)}
        machines = open_machines()
        if self._one_machine:  # another one may have joined that Ray meanwhile
            machines = [each for each in machines if each.node in homes.values()]
        if not machines:
            _LOG.warning("no Ray node takes the %d spares: all that could are draining", count)
            return
        for number, node in enumerate(nodes_for_spares(count, homes, machines)):
            spare = Spare(node, self._make(node))
            with self._changing:
                self._waiting[number] = spare
            self._ask(number, spare)

    @property
    def left(self) -> int:
        """See Spares: those that have done their imports."""
        with self._changing:
            return sum(spare.is_ready for spare in self._waiting.values())

    def calls(self) -> list[Any]:
        """Return the calls of spares that are to be waited for, to hand their answers to `heard`."""
        for number in [each for each, at in self._unheard.items() if time.monotonic() >= at]:
            del self._unheard[number]
            with self._changing:
                spare = self._waiting.get(number)
            if spare is not None:
                self._ask(number, spare)
        return list(self._asked)

    def _ask(self, number: int, spare: Spare) -> None:
        """Ask a spare whether it is ready; if it is, Ray answers when it has died or is a server."""
        call = spare.actor.stand_by if spare.is_ready else spare.actor.ready
        self._asked[call.remote()] = number

    def heard(self, ref: Any) -> bool:
        """Take the answer to a call, if it is one of a spare; returns whether it is."""
        number = self._asked.pop(ref, None)
        if number is None:
            return False
        try:
            said = ray.get(ref)
        except (ActorUnavailableError, ObjectLostError):
            # Ray does not reach it now, or has lost its answer.
            self._unheard[number] = time.monotonic() + _LOOK_S
            return True
        except RayError as error:
            with self._changing:
                spare = self._waiting.pop(number, None)
            if spare is not None:
                spare.let_go()
                _LOG.warning("a spare is lost: %s", next(iter(str(error).splitlines()), type(error).__name__))
            return True
        with self._changing:
            spare = self._waiting.get(number)
            if spare is not None and not spare.is_ready:
                spare.networks, spare.node, spare.is_ready = said.networks, said.node, True
                spare.handle = Handle(said.process) if self._local else None
                self._ask(number, spare)
        return True

    def set_aside(self, lost: int, free: Collection[int]) -> int | None:
        """See Spares; one that is not ready is taken if no other is there."""
        nics = {
            server: [host for host, _ in contact.nics]
            for server, contact in dict(self._known.contacts).items()
            if server != lost and server not in self._known.gone
        }
        with self._changing:
            if lost in self._aside:  # for a start that was not made
                return lost
            waiting = {
                number: Waiting(spare.node, spare.is_ready, spare.networks)
                for number, spare in self._waiting.items()
            }
            chosen = choose(
                lost, {*free} - self._aside.keys(), waiting, self._homes.get(lost, ""), self._fabric, nics
            )
            if chosen is None:
                return None
            number, address = chosen
            self._aside[address] = self._waiting.pop(number)
            return address

    def take(self, server: int) -> Spare | None:
        """Return the spare that is set aside for this server; None if there is none. It is in use then."""
        with self._changing:
            spare = self._aside.pop(server, None)
        if spare is not None:
            spare.let_go()
        return spare

    def leave(self, nodes: Collection[str]) -> None:
        """End those that wait on these nodes, which are draining: servers there would be lost, too."""
        with self._changing:
            numbers = [number for number, spare in self._waiting.items() if spare.node in nodes]
            ending = [self._waiting.pop(number) for number in numbers]
        for spare in ending:
            _LOG.warning("a spare is lost: its Ray node is draining")
            with suppress(RayError):
                ray.kill(spare.actor)
            spare.let_go(kill=True)

    def abandon(self) -> None:
        """Let all that are not in use end themselves, as Ray has lost its head and cannot."""
        for spare in self._take_all():
            spare.actor.exit.remote()
            spare.let_go()

    def close(self) -> None:
        """End all that are not in use. Idempotent."""
        ending = self._take_all()
        for spare in ending:
            with suppress(RayError):
                ray.kill(spare.actor)
        deadline = time.monotonic() + GOING_S
        for spare in ending:
            gone = spare.handle is None or spare.handle.has_ended(max(0.0, deadline - time.monotonic()))
            spare.let_go(kill=not gone)

    def _take_all(self) -> list[Spare]:
        """Return all that are not in use, which are no spares from now on."""
        with self._changing:
            taken = [*self._waiting.values(), *self._aside.values()]
            self._waiting.clear()
            self._aside.clear()
            self._asked.clear()
            self._unheard.clear()
        return taken
