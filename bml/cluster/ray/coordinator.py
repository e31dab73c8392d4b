"""The launcher's side of the coordinators on Ray: an actor, and its successor if it dies or is silent."""

from __future__ import annotations

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
from bml.io.interruptible import Condition
from bml.protocol.coordinator.succession import Succession

GOING_S = 3.0
"""How long processes may take to end after Ray has killed their actors, in seconds. If one is killed sooner,
Ray reports its death. Only a frozen one takes as long."""
_SNAPSHOT_S = 0.1  # a view is told as late at most; each request costs Ray a call


class RayCoordinator:
    """Starts coordinators on a node and takes their answers. One thread uses it, but for `join` and `gone`.

    Every coordinator is told `known`. `changing` guards it, and callers of `join` and `gone` hold it. If
    `local`, their processes are on this machine, and can be killed if they do not react to Ray.
    """

    def __init__(self, spec: JobSpec, known: Known, changing: Condition, node: str, local: bool):
        self.spec, self._known, self._changing, self._node, self._local = spec, known, changing, node, local
        self._actor: Any = None
        self._prepared: Any = None
        self._handle: Handle | None = None
        self._saying: Any = None
        self._missed = False
        self._said_at = 0.0
        self._heartbeats = 0
        self._state = "starting"
        timeouts = spec.timeouts()
        self._succession = Succession(timeouts, timeouts.start_s, time.monotonic())

    def prepare(self) -> None:
        """Let Ray start the process of the first one, which takes long, while the servers start."""
        self._prepared = self._make(0)

    def look_after(self) -> None:
        """Start or replace the coordinator if it is time to. Raises StartError if the job cannot get one."""
        look_after(self._succession, time.monotonic(), self.end, self._start)

    @property
    def interval_s(self) -> float:
        """Seconds between two requests to it."""
        return min(_SNAPSHOT_S, self._succession.interval_s)

    def ask(self) -> list[Any]:
        """Ask for its snapshots if it is time to; return the current call, if there is one."""
        idle = self._saying is None and self._actor is not None
        if idle and time.monotonic() - self._said_at >= self.interval_s:
            self._saying = self._actor.said.remote()
        return [] if self._saying is None else [self._saying]

    def is_answer(self, ref: Any) -> bool:
        """Whether this is the current call."""
        return self._saying is not None and bool(ref == self._saying)

    def heard(self) -> list[FleetEvent]:
        """Take the answer to the current call."""
        succession, now = self._succession, time.monotonic()
        ref, self._saying, self._said_at = self._saying, None, now
        try:
            said = ray.get(ref)
        except ActorUnavailableError:  # it may be alive; if it stays silent, it is replaced
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
        self._hold(said.process)
        for snapshot in said.snapshots:
            self._state = snapshot["state"]
            succession.reported(snapshot["term"], snapshot["state"], snapshot["highest"])
        if said.ended:
            self.end(GOING_S)
            state = self._state
            succession.ended(succession.term, f"ended, being {state}", now, done=state == "stopped")
        return [Changed(each) for each in said.snapshots]

    def last_words(self, within_s: float) -> list[FleetEvent]:
        """Return its last snapshots, when all servers have reported; wait `within_s` seconds at most."""
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
        """End its processes, which have a while to end by themselves: a stopped one cannot react."""
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
                    actor.exit.remote()  # if Ray has lost its head, it kills nothing
                    ray.kill(actor)
        if self._handle is not None and not self._handle.has_ended(within_s):
            self._handle.kill()
        self._let_go()

    def abandon(self) -> None:
        """Let the actors end themselves, as Ray has lost its head and cannot."""
        for actor in (self._actor, self._prepared):
            if actor is not None:
                actor.exit.remote()
        self._actor = self._prepared = self._saying = None

    def _start(self, term: int) -> None:
        self._heartbeats, self._state = 0, "starting"
        actor, self._prepared = self._prepared or self._make(term), None
        with self._changing:
            known = self._known
            self._actor = actor
            actor.begin.remote(self.spec, known.contacts, known.incarnations, term)
            self._tell_all()

    def _make(self, term: int) -> Any:
        actor = ray.remote(CoordinatorActor).options(
            name=f"{self.spec.job}-coordinator-{term}",
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            # The launcher's, if it has one: without the launcher the job is over, and no other death may end
            # the coordinator. A head that is away must not.
            scheduling_strategy=on_node(self._node),
        )
        return actor.remote()

    def _tell_all(self) -> None:
        """Tell it everything that it may have missed, under the lock; repeating does no harm."""
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
