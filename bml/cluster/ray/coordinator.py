"""The launcher's side of a job's coordinators on Ray: an actor, and another one if it dies or is silent."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from bml.cluster.fleets.fleet import Changed, FleetEvent, Known, look_after
from bml.cluster.fleets.handles import Handle, ProcessId
from bml.cluster.ray.actors import CoordinatorActor
from bml.cluster.ray.machines import on_node
from bml.cluster.ray.own import NAMESPACE
from bml.cluster.spec.job import Contact, JobSpec
from bml.protocol.coordinator.succession import Succession

GOING_S = 3.0
"""How long processes may take to end by themselves once Ray has killed their actors, in seconds. Ray prints
that one died which is killed sooner; only a frozen one takes as long."""
_SNAPSHOT_S = 0.1


class RayCoordinator:
    """Starts coordinators on a node and hears what they say; one thread uses it, but for `join` and `gone`.

    `known` is what every coordinator is told. `changing` guards it, and is held by those who call `join` and
    `gone`. `local`: their processes are on this machine, and can be killed if they do not hear Ray.
    """

    def __init__(self, spec: JobSpec, known: Known, changing: threading.Condition, node: str, local: bool):
        self._spec, self._known, self._changing, self._node, self._local = spec, known, changing, node, local
        self._actor: Any = None
        self._prepared: Any = None
        self._handle: Handle | None = None
        self._saying: Any = None
        self._missed = False
        self._said_at = 0.0
        self._heartbeats = 0
        timeouts = spec.timeouts()
        self._succession = Succession(timeouts, timeouts.start_s, time.monotonic())

    def prepare(self) -> None:
        """Have Ray start the process of the first one, which takes long, while the servers start."""
        self._prepared = self._make(0)

    def look_after(self) -> None:
        """Start or replace the coordinator if it is time to. Raises StartError if the job cannot get one."""
        look_after(self._succession, time.monotonic(), self.end, self._start)

    @property
    def interval_s(self) -> float:
        """How often it is asked."""
        return min(_SNAPSHOT_S, self._succession.interval_s)

    def ask(self) -> list[Any]:
        """Ask what it has to say if it is time to; returns the call that is under way, if there is one."""
        idle = self._saying is None and self._actor is not None
        if idle and time.monotonic() - self._said_at >= self.interval_s:
            self._saying = self._actor.said.remote()
        return [] if self._saying is None else [self._saying]

    def is_answer(self, ref: Any) -> bool:
        """Whether this is the call that is under way."""
        return self._saying is not None and bool(ref == self._saying)

    def heard(self) -> list[FleetEvent]:
        """Take the answer to what it was asked."""
        succession, now = self._succession, time.monotonic()
        ref, self._saying, self._said_at = self._saying, None, now
        try:
            said = ray.get(ref)
        except ActorUnavailableError:  # it may be alive: if it stays silent it is replaced
            self._missed = True
            return []
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._let_go()
            self.end()
            succession.ended(succession.term, f"died: {str(error).splitlines()[0]}", now)
            return []
        if self._missed:
            with self._changing:
                self._tell_all()
        if said.heartbeats != self._heartbeats:
            self._heartbeats = said.heartbeats
            succession.heartbeat(succession.term, now)
        snapshot = said.snapshots[-1]
        self._hold(said.process)
        succession.reported(snapshot["term"], snapshot["state"], snapshot["highest"])
        if said.ended:
            self.end(GOING_S)
            state = snapshot["state"]
            succession.ended(succession.term, f"ended, being {state}", now, done=state == "stopped")
        return [Changed(each) for each in said.snapshots]

    def last_words(self, within_s: float) -> list[FleetEvent]:
        """What it has to say when all servers have reported; waits for that so long at most."""
        if self._actor is None:
            return []
        self._saying = self._saying or self._actor.said.remote()
        return self.heard() if ray.wait([self._saying], timeout=within_s)[0] else []

    def join(self, server: int, incarnation: int, contact: Contact) -> None:
        """Tell it, under the lock, that a server was started to join."""
        if self._actor is not None:
            self._actor.join.remote(server, incarnation, contact)

    def gone(self, server: int, why: str) -> None:
        """Tell it, under the lock, that a server is dead."""
        if self._actor is not None:
            self._actor.gone.remote(server, why)

    def end(self, within_s: float = 0.0) -> None:
        """End what is left of it; it may take so long to end by itself. A stopped one cannot hear Ray."""
        with self._changing:
            actors, self._actor, self._prepared, self._saying = (
                (self._actor, self._prepared),
                None,
                None,
                None,
            )
        for actor in actors:
            if actor is not None:
                with suppress(RayError):
                    ray.kill(actor)
        if self._handle is not None and not self._handle.has_ended(within_s):
            self._handle.kill()
        self._let_go()

    def _start(self, term: int) -> None:
        self._heartbeats = 0
        actor, self._prepared = self._prepared or self._make(term), None
        with self._changing:
            known = self._known
            self._actor = actor
            actor.begin.remote(self._spec, known.contacts, known.incarnations, term)
            self._tell_all()

    def _make(self, term: int) -> Any:
        actor = ray.remote(CoordinatorActor).options(
            name=f"{self._spec.job}-coordinator-{term}",
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            # If Ray's head dies all is over; any other machine may die, and must not take it along.
            scheduling_strategy=on_node(self._node),
        )
        return actor.remote()

    def _tell_all(self) -> None:
        """Tell it what it may have missed, under the lock; what it knows does no harm."""
        known, self._missed = self._known, False
        for server, incarnation in known.incarnations.items():
            self._actor.join.remote(server, incarnation, known.contacts[server])
        for server, why in known.gone.items():
            self._actor.gone.remote(server, why)

    def _hold(self, process: ProcessId) -> None:
        if self._local and self._handle is None:
            self._handle = Handle(process)

    def _let_go(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None
