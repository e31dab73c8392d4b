"""The fleet on Ray: one actor per server, and one for the coordinator.

Ray places the processes and notices their deaths; it is the control plane. The launcher itself starts another
coordinator, as for plain processes: Ray would start it with the term of the one before, and only if it is
dead. No parameter byte passes through its object store or its calls: the servers' own connections carry them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

from bml.cluster.fleets.fleet import Answers, Died, FleetEvent, Headless, Known, Patience, Reported, reachable
from bml.cluster.fleets.fork_server import ENDING_S
from bml.cluster.fleets.handles import Handle
from bml.cluster.fleets.placement import Reservation, blocks, home_for
from bml.cluster.fleets.racks import Racks
from bml.cluster.ray.actors import ServerActor, SpareActor
from bml.cluster.ray.asking import ask_actors
from bml.cluster.ray.connection import RayConnection
from bml.cluster.ray.coordinator import GOING_S, RayCoordinator
from bml.cluster.ray.gathering import gather
from bml.cluster.ray.machines import (
    Machines,
    check_room,
    living_machines,
    on_node,
    open_machines,
    own_machine,
    room_for,
)
from bml.cluster.ray.reports import Reports
from bml.cluster.ray.spares import RaySpares
from bml.cluster.ray.watching.cluster import ClusterWatch
from bml.cluster.ray.watching.head import HeadWatch, was_cut_off
from bml.cluster.spec.job import Contact, JobSpec, Place, Request, ServerReport
from bml.cluster.spec.leaving import DRAINED, LEFT
from bml.errors import StartError, UsageError
from bml.io.interruptible import Condition, Event

_LOOK_S = 1.0  # how often a start looks whether its time is over
#: How long the coordinator may take to report the end of the job, in seconds: the user gets all views.
_LAST_WORDS_S = 0.3
#: Two calls at a time: the training function, and a request for the status; and some more that ask again for
#: the report, if Ray did not reach the actor for a while.
_CALLS_AT_A_TIME = 8


class RayFleet:
    """See bml.cluster.fleets.fleet.Fleet. Without an address, outside a Ray job, it starts a Ray of its own.

    With `machines` every server runs on the node that is its machine, in the Ray of this process. With
    `racks` servers that are neighbours on the fabric are put into one rack.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: str | None,
        prints: bool,
        reserves: Reservation | None = None,
        machines: Machines | None = None,
        racks: Racks | None = None,
    ):
        self._reserves = reserves or Reservation()
        self._machines = machines
        self._racks = racks or Racks()
        # Guards the attributes below: while one thread is in `wait`, others are in `join` and `ask`.
        self._changing = Condition()
        self._known = Known()
        self._actors: dict[int, Any] = {}
        self._handles: dict[int, Handle] = {}
        self._reports = Reports(self._actors, self._known, self._changing)
        self._train: Any = None
        self._asking = 0
        self._closed = False
        self._watch = ClusterWatch(self._reserves, self._here)
        self._connection = RayConnection(address, prints)
        try:
            self._place(spec)
        except BaseException:
            self._connection.close()
            raise

    def _place(self, spec: JobSpec) -> None:
        """Decide where the servers run, and the open settings of the specification."""
        servers, machines, living = spec.parsed_fabric().servers, self._machines, living_machines()
        is_own = machines is None and self._connection.is_own
        self._homes = (
            self._racks.homes(spec.parsed_fabric(), living) if self._racks else blocks(servers, living)
        )
        # On one machine, loopback addresses reach all servers. It needs room: other nodes may join that Ray.
        alone = machines is None and len(living) == 1
        has_room = not self._reserves or room_for(self._reserves, len(servers))
        if is_own:
            check_room(self._reserves, spec.min_start or len(servers))
        self._one_machine = alone and has_room
        settled = spec.settled(self._one_machine)
        self.spec = self._spec = settled.sharing_cores() if self._one_machine else settled
        self._local = is_own or machines is not None
        own = own_machine(living)
        self._watch.home = node = machines.head if machines else own.node
        self.spares = RaySpares(
            self._spec, self._homes, self._known, self._local, self._spare, self._one_machine
        )
        self._coordinator = RayCoordinator(self._spec, self._known, self._changing, node, self._local)
        # Where this process is on the machine with the head, it dies with it.
        self._head = None if machines or own.is_head else HeadWatch.of_this_cluster()

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._train = ray.put(train)  # once, and not with every call
        self._reports.prepare(self._train)
        for server in self._spec.servers:
            self._actors[server] = self._actor(server)
        self._coordinator.prepare()
        if self._spec.min_start is None:
            deadline = time.monotonic() + self._spec.start_s
            for server in self._actors:
                self._known.contacts[server] = self._contact(server, deadline)
        else:
            self._gather()
        self._coordinator.look_after()
        for server in self._actors:
            self._reports.run(server)
        self._watch.start()

    def _gather(self) -> None:
        """Wait until enough servers are placed; those that have not come by then are absent, and ended."""
        self._known.contacts = contacts = gather(self._spec, self._actors, self._contact)
        for server in self._actors.keys() - contacts.keys():
            self._end(server)
        self.spec = self._spec = self._coordinator.spec = self._spec.beginning_with(contacts)

    def _actor(self, server: int, incarnation: int | None = None) -> Any:
        node = self._machines.nodes[server] if self._machines else self._homes[server]
        return self._make(ServerActor, node, *self._identity(server, incarnation))

    def _spare(self, node: str) -> Any:
        place = Place() if self._one_machine else None
        return self._make(SpareActor, node, self._spec, place, self._train)

    def _identity(self, server: int, incarnation: int | None) -> tuple[Any, ...]:
        """Return what an actor must know to be this server."""
        machines, spec = self._machines, self._spec
        if incarnation is not None:
            spec = spec.for_joiner(again=server in self._known.incarnations)
        place = machines.places[server] if machines else Place() if self._one_machine else None
        return spec, server, place, incarnation, machines.fault_endpoint if machines else None

    def _make(self, kind: type, node: str, *arguments: Any) -> Any:
        options = {
            **self._reserves.options,
            "max_restarts": 0,
            "max_concurrency": _CALLS_AT_A_TIME,
            "scheduling_strategy": self._strategy(node),
        }
        try:
            return ray.remote(kind).options(**options).remote(*arguments)
        except ValueError as error:
            raise UsageError(f"Ray refuses to reserve {self._reserves}: {error}") from None

    def _strategy(self, node: str) -> Any:
        """Return where Ray is to put an actor that is meant for this node."""
        if self._reserves and not (self._machines or self._one_machine):
            # It must be where the resources are free.
            return on_node(node, if_free=True) if self._racks else "SPREAD"
        return on_node(node)

    def join(self, server: int, incarnation: int, give_up: Event) -> None:
        """See Fleet."""
        if server in self._actors:
            self._end(server)
        with self._watch.coming(server):
            contact = self._come_at_last(server, incarnation, give_up)
        with self._changing:
            self._known.came(server, incarnation, contact)
            self._reports.run(server)
            self._coordinator.join(server, incarnation, contact)

    def _come_at_last(self, server: int, incarnation: int, give_up: Event) -> Contact:
        """Start a server that joins, twice if need be; return its addresses."""
        deadline = time.monotonic() + self._spec.start_s
        try:
            return self._come(server, incarnation, deadline, give_up)
        except StartError as error:
            if give_up.is_set():
                raise
            if self._has_machine(server) and not isinstance(error.__cause__, ActorDiedError):
                raise
            # Ray had put it on a dead machine, and knows of that death now.
            return self._come(server, incarnation, deadline, give_up)

    def _come(self, server: int, incarnation: int, deadline: float, give_up: Event) -> Contact:
        """Start a server that joins, elsewhere if its machine is dead or draining; return its addresses."""
        if spare := self.spares.take(server):
            self._homes[server] = spare.node
            self._actors[server] = spare.actor
            spare.actor.become.remote(*self._identity(server, incarnation))
        else:
            if not self._has_machine(server):
                self._homes[server] = home_for(server, self._homes, open_machines(), self._racks.rack)
            self._actors[server] = self._actor(server, incarnation)
        try:
            return self._contact(server, deadline, give_up)
        except StartError:
            self._end(server)  # or Ray places it later, and it holds a machine
            raise

    def _has_machine(self, server: int) -> bool:
        """Whether Ray takes servers on the machine of this server; True if any machine will do."""
        home = self._machines.nodes[server] if self._machines else self._homes[server]
        return bool(self._reserves) or home in {each.node for each in open_machines()}

    def _end(self, server: int) -> None:
        """End the processes of a server, also of a frozen one, which does not react to Ray."""
        self._reports.forget(server)  # first, as another thread may be about to ask it for its report again
        actor = self._actors.pop(server, None)  # another thread may end it, too
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)
        self._let_go(server, kill=True)

    def machine_lost(self, server: int, why: str) -> Died | None:
        """Note the death of a machine, which Ray notices much later. None if its server had already ended."""
        self._let_go(server)
        if server not in self._reports.running():
            return None
        self._reports.forget(server)
        return self._died(server, why)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        head = self._head
        if head is None or not head.absence.away_s:  # it would wait for the head
            self._coordinator.look_after()
        events = self._events(timeout_s)
        if head is not None and head.is_news():
            events.insert(0, Headless(head.why, head.absence.leaves_s))
        if (end := self._watch.take_end()) is not None:
            events.insert(0, end)
        return events

    def _events(self, timeout_s: float) -> list[FleetEvent]:
        saying, wait_s = self._coordinator.ask(), min(timeout_s, self._coordinator.interval_s)
        refs = [*self._reports.calls(), *saying, *self.spares.calls()]
        if not refs:
            time.sleep(wait_s)
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=wait_s)
        self.spares.leave(self._watch.draining)  # before a server there reports that it has left
        events: list[FleetEvent] = []
        for ref in ready:
            events += self._coordinator.heard() if self._coordinator.is_answer(ref) else self._run_event(ref)
        if ready and not self._reports.running():
            events += self._coordinator.last_words(_LAST_WORDS_S)
        return events

    def ask(self, request: Request, patience: Patience) -> Answers:
        """See Fleet; an actor that dies of a fault may take its answer with it."""
        with self._changing:
            if self._closed:
                return {}  # a call of Ray would now connect this process to any cluster it finds
            self._asking += 1
        try:
            actors = {server: actor for server, (_, actor) in self._here().items()}
            return ask_actors(actors, request, patience)
        finally:
            with self._changing:
                self._asking -= 1
                self._changing.notify_all()

    def close(self) -> None:
        """See Fleet."""
        with self._changing:
            self._changing.wait_for(lambda: not self._asking)
            self._closed = True
        self._watch.close()
        if self._head is not None:
            self._head.close()
            if self._head.absence.gone:
                self._abandon()
                return
        with suppress(RayError):  # servers that have reported have ended their children
            running = self._reports.running() & self._actors.keys()
            if ending := [self._actors[server].end_children.remote() for server in running]:
                ray.wait(ending, num_returns=len(ending), timeout=ENDING_S)
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
        self.spares.close()
        deadline = time.monotonic() + GOING_S
        self._coordinator.end(GOING_S)
        for server, handle in list(self._handles.items()):
            ended = handle.has_ended(max(0.0, deadline - time.monotonic()))
            self._let_go(server, kill=not ended)  # a frozen one does not react to Ray
        self._connection.close()

    def _abandon(self) -> None:
        """Close it without Ray's head: actors that have reported end now, the others when they have left."""
        for server in self._actors.keys() - self._reports.running():
            self._actors[server].exit.remote()
        self._actors.clear()
        self.spares.abandon()
        self._coordinator.abandon()
        self._connection.close()

    # --- events ----------------------------------------------------------------------------------

    def _run_event(self, ref: Any) -> list[FleetEvent]:
        if self.spares.heard(ref):
            return []
        ended = self._reports.heard(ref)
        if ended is None:
            return []
        if ended.report is not None:
            return [self._reported(ended.server, ended.report)]
        self._let_go(ended.server)
        return [self._died(ended.server, ended.lost)]

    def _reported(self, server: int, report: ServerReport) -> Reported:
        if self._head is not None:
            self._head.heard(report.error)
        incarnation = self._known.incarnations.get(server, 0)
        if report.kind == LEFT and (
            self._watch.made_leave(server, incarnation) or was_cut_off(self._head, report.error)
        ):
            self._end(server)  # a node that drains ends as soon as nothing runs there
            return Reported(report if self._machines else replace(report, kind=DRAINED))
        self._reports.job_ends()
        return Reported(report)

    def _died(self, server: int, why: str) -> Died:
        with self._changing:
            self._known.gone[server] = why
            self._coordinator.gone(server, why)
        return Died(server, why)

    def _here(self) -> dict[int, tuple[int, Any]]:
        """Return the servers that run, each with its incarnation and its actor."""
        running, actors = self._reports.running(), dict(self._actors)
        return {
            server: (self._known.incarnations.get(server, 0), actors[server])
            for server in sorted(running & actors.keys())
        }

    def _contact(self, server: int, deadline: float, give_up: Event | None = None) -> Contact:
        """Return the addresses of a server that was just started; ask again if Ray does not reach it."""
        while True:
            ref = self._actors[server].contact.remote()
            # Ray may never start an actor that it has placed on a machine that died.
            while not ray.wait([ref], timeout=_LOOK_S)[0] and time.monotonic() < deadline:
                if give_up is not None and give_up.is_set():
                    raise StartError(f"server {server} was still being started when the job ended")
                if not self._has_machine(server):
                    break
            try:
                contact, process = ray.get(ref, timeout=_LOOK_S)
            except ActorUnavailableError as error:
                if time.monotonic() < deadline:
                    continue
                raise StartError(f"Ray did not reach server {server} in time: {error}") from error
            except GetTimeoutError:
                wanted = f", of which each server reserves {self._reserves}" if self._reserves else ""
                raise StartError(
                    f"Ray did not start server {server} of {self._spec.fabric} in time (start_s: "
                    f"{self._spec.start_s:g} s); it has {ray.cluster_resources()}{wanted}. "
                    "Take a smaller fabric, more machines, or a longer start_s"
                ) from None
            except RayError as error:
                raise StartError(f"server {server} died at start-up: {error}") from error
            if self._local:
                self._handles[server] = Handle(process)
            return reachable(server, contact)

    def _let_go(self, server: int, kill: bool = False) -> None:
        """Release the process of a server, if it is on this machine; with `kill`, kill it before."""
        handle = self._handles.pop(server, None)
        if handle is None:
            return
        if kill:
            handle.kill()
        handle.close()
