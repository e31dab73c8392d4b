"""A job on Ray: one actor per server, and one for the coordinator.

Ray places the processes and notices their death; it is control plane only. The launcher itself starts another
coordinator, as for plain processes: Ray would start it with the term of the one before, and only if it is
dead. No parameter byte passes through its object store or its calls: the servers' own connections carry them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import cloudpickle
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from bml.cluster.fleet import Answers, Changed, Died, FleetEvent, Known, Reported, Request, look_after
from bml.cluster.job import Contact, JobSpec, Place
from bml.cluster.nursery import ENDING_S
from bml.cluster.placement import Reservation, blocks
from bml.cluster.ray_actors import CoordinatorActor, ServerActor
from bml.cluster.ray_machines import Machines, living_machines, on_node
from bml.cluster.ray_own import NAMESPACE, OwnRay
from bml.errors import StartError, UsageError
from bml.protocol.succession import Succession

_SNAPSHOT_S = 0.1
_LOOK_S = 1.0
#: Two calls at a time: the training function, and whoever asks how it is going; and some that ask again for
#: the report, as Ray did not reach the actor for a while.
_CALLS_AT_A_TIME = 8


class RayFleet:
    """See bml.cluster.fleet.Fleet. Without an address, and outside a Ray job, it starts a Ray of its own.

    With `machines` every server lives on the node that is its machine, of the Ray that this process is in.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: str | None,
        prints: bool,
        reserves: Reservation | None = None,
        machines: Machines | None = None,
    ):
        self._reserves = reserves or Reservation()
        self._machines = machines
        self._own: OwnRay | None = None
        self._train = b""
        self._one_machine = True
        # Guards what follows: while one thread is in `wait`, another is in `join`.
        self._changing = threading.Lock()
        self._known = Known()
        self._actors: dict[int, Any] = {}
        self._pids: dict[int, int] = {}
        self._runs: dict[Any, int] = {}
        self._unheard: dict[int, float] = {}
        self._coordinator: Any = None
        self._coordinator_pid: int | None = None
        self._saying: Any = None
        self._missed = False
        self._said_at = 0.0
        self._beats = 0
        timeouts = spec.timeouts()
        self._succession = Succession(timeouts, timeouts.start_s, time.monotonic())
        self._ours = not ray.is_initialized()
        if self._ours and (address or os.environ.get("RAY_ADDRESS")):
            ray.init(
                address=address or "auto",
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                log_to_driver=prints,
            )
        elif self._ours:
            self._own = OwnRay(prints)
        living = living_machines()
        self._head = max(living, key=lambda each: each.is_head).node
        self._homes = blocks(spec.parsed_fabric().servers, living)
        # On one machine, loopback addresses reach everybody.
        self._one_machine = machines is None and (self._own is not None or len(living) == 1)
        self.spec = self._spec = spec.settled(self._one_machine)

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._train = train
        for server in self._spec.servers:
            self._actors[server] = self._actor(server)
        deadline = time.monotonic() + self._spec.start_s
        for server in self._actors:
            self._known.contacts[server] = self._contact(server, deadline)
        look_after(self._succession, time.monotonic(), self._end_coordinator, self._start_coordinator)
        for server in self._actors:
            self._run(server)

    def _actor(self, server: int, life: int | None = None) -> Any:
        machines = self._machines
        options = {
            **self._reserves.options,
            "max_restarts": 0,
            "max_concurrency": _CALLS_AT_A_TIME,
            "scheduling_strategy": self._strategy(server),
        }
        spec = self._spec if life is None else self._spec.for_joiner(again=server in self._known.lives)
        place = machines.places[server] if machines else Place() if self._one_machine else None
        strikes = machines.strikes if machines else None
        try:
            return ray.remote(ServerActor).options(**options).remote(spec, server, place, life, strikes)
        except ValueError as error:
            raise UsageError(f"Ray refuses to reserve {self._reserves}: {error}") from None

    def _strategy(self, server: int) -> Any:
        """Where Ray is to put a server."""
        if self._machines:
            return on_node(self._machines.nodes[server])
        if self._reserves:
            return "SPREAD"  # it must be where that is free
        return on_node(self._homes[server])

    def join(self, server: int, life: int, give_up: threading.Event) -> None:
        """See Fleet."""
        if server in self._actors:
            self._end(server)
        deadline = time.monotonic() + self._spec.start_s
        try:
            contact = self._come(server, life, deadline, give_up)
        except StartError as error:
            if give_up.is_set():
                raise
            if self._has_machine(server) and not isinstance(error.__cause__, ActorDiedError):
                raise
            # Ray had put it on a machine that it did not know to be dead; now it does.
            contact = self._come(server, life, deadline, give_up)
        with self._changing:
            self._known.came(server, life, contact)
            self._run(server)
            if self._coordinator is not None:
                self._coordinator.join.remote(server, life, contact)

    def _come(self, server: int, life: int, deadline: float, give_up: threading.Event) -> Contact:
        """Start a server that joins, elsewhere if its machine is dead, and hear where it can be reached."""
        if not self._has_machine(server):
            self._homes[server] = blocks(list(self._homes), living_machines())[server]
        self._actors[server] = self._actor(server, life)
        return self._contact(server, deadline, give_up)

    def _has_machine(self, server: int) -> bool:
        """Whether Ray takes the machine to be alive on which it is to put this server, if not any will do."""
        home = self._machines.nodes[server] if self._machines else self._homes[server]
        return bool(self._reserves) or home in {each.node for each in living_machines()}

    def _end(self, server: int) -> None:
        """End what is left of a server; a frozen one cannot hear Ray."""
        with suppress(RayError):
            ray.kill(self._actors.pop(server))
        pid = self._pids.pop(server, None)
        if pid is not None:
            self._kill(pid)
        self._forget(server)

    def _forget(self, server: int) -> None:
        """Do not wait for the report of a server any more."""
        with self._changing:
            self._runs = {ref: of for ref, of in self._runs.items() if of != server}
            self._unheard.pop(server, None)

    def machine_lost(self, server: int, why: str) -> Died | None:
        """A machine is dead, which Ray will notice much later. None if its server had ended."""
        self._pids.pop(server, None)
        if server not in self._running():
            return None
        self._forget(server)
        return self._died(server, why)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        look_after(self._succession, time.monotonic(), self._end_coordinator, self._start_coordinator)
        asks_s = min(_SNAPSHOT_S, self._succession.interval_s)
        idle = self._saying is None and self._coordinator is not None
        if idle and time.monotonic() - self._said_at >= asks_s:
            self._saying = self._coordinator.said.remote()
        with self._changing:
            self._ask_again()
            refs = [*self._runs, *([self._saying] if self._saying else [])]
        if not refs:
            time.sleep(min(timeout_s, asks_s))
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(timeout_s, asks_s))
        events: list[FleetEvent] = []
        for ref in ready:
            event = self._from_coordinator() if ref is self._saying else self._run_event(ref)
            events += [event] if event else []
        return events

    def ask(self, request: Request, timeout_s: float) -> Answers:
        """See Fleet; an actor that dies of a fault may take its answer with it."""
        running = self._running()
        asked = {
            handle.answer.remote(request, timeout_s): server
            for server, handle in list(self._actors.items())
            if server in running
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        answers: dict[int, dict[str, Any]] = {}
        for ref in ready:
            try:
                answer = ray.get(ref)
            except ActorUnavailableError:
                continue
            except RayActorError:
                answer = {"done": f"server {asked[ref]} died of it"} if request[0] == "inject" else None
            if answer is not None:
                answers[asked[ref]] = answer
        return answers

    def close(self) -> None:
        """See Fleet."""
        with suppress(RayError):  # whoever has reported has ended its children
            running = self._running() & self._actors.keys()
            if ending := [self._actors[server].end_children.remote() for server in running]:
                ray.wait(ending, num_returns=len(ending), timeout=ENDING_S)
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
        self._end_coordinator()
        for pid in self._pids.values():
            self._kill(pid)  # a frozen one cannot hear Ray
        self._pids.clear()
        if self._own is not None:
            self._own.stop()
        elif self._ours and ray.is_initialized():
            ray.shutdown()

    # --- events ----------------------------------------------------------------------------------

    def _run_event(self, ref: Any) -> FleetEvent | None:
        pickled, lost = b"", ""
        try:
            pickled = ray.get(ref)
        except ActorUnavailableError:  # Ray does not reach it now; the others know whether it is dead
            with self._changing:
                if ref in self._runs:
                    self._unheard[self._runs.pop(ref)] = time.monotonic() + _LOOK_S
            return None
        except RayActorError as error:
            lost = f"Ray: {str(error).splitlines()[0]}"
        with self._changing:
            server = self._runs.pop(ref, None)
        if server is None:
            return None  # it was ended meanwhile, to be started again
        if not lost:
            return Reported(cloudpickle.loads(pickled))
        self._pids.pop(server, None)  # the number may soon be another process's
        return self._died(server, lost)

    def _died(self, server: int, why: str) -> Died:
        with self._changing:
            self._known.gone[server] = why
            if self._coordinator is not None:
                self._coordinator.gone.remote(server, why)
        return Died(server, why)

    def _running(self) -> set[int]:
        with self._changing:
            return {*self._runs.values(), *self._unheard}

    def _run(self, server: int) -> None:
        """Have a server run its training function, or hear the end of that; it runs it once."""
        self._runs[self._actors[server].run.remote(self._known.contacts, self._train)] = server

    def _ask_again(self) -> None:
        """Ask those for their reports that Ray did not reach."""
        for server in [each for each, at in self._unheard.items() if time.monotonic() >= at]:
            del self._unheard[server]
            self._run(server)

    def _contact(self, server: int, deadline: float, give_up: threading.Event | None = None) -> Contact:
        ref = self._actors[server].contact.remote()
        # Ray may let who was to be on a machine that has died wait for ever.
        while not ray.wait([ref], timeout=_LOOK_S)[0] and time.monotonic() < deadline:
            if give_up is not None and give_up.is_set():
                raise StartError(f"server {server} was still being started when the job ended")
            if not self._has_machine(server):
                break
        try:
            found = ray.get(ref, timeout=0)
        except GetTimeoutError:
            wanted = f", of which each server reserves {self._reserves}" if self._reserves else ""
            raise StartError(
                f"Ray did not start server {server} in time; it has {ray.cluster_resources()}{wanted}"
            ) from None
        except RayError as error:
            raise StartError(f"server {server} died at start-up: {error}") from error
        contact: Contact
        contact, self._pids[server] = found
        return contact

    # --- the coordinator -------------------------------------------------------------------------

    def _from_coordinator(self) -> FleetEvent | None:
        succession, now = self._succession, time.monotonic()
        ref, self._saying, self._said_at = self._saying, None, now
        try:
            said = ray.get(ref)
        except ActorUnavailableError:  # it may be alive: if it stays silent it is replaced
            self._missed = True
            return None
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._coordinator_pid = None  # somebody else may have it by now
            self._end_coordinator()
            succession.ended(succession.term, f"died: {str(error).splitlines()[0]}", now)
            return None
        if self._missed:
            with self._changing:
                self._tell_all()
        if said.beats != self._beats:
            self._beats = said.beats
            succession.beat(succession.term, now)
        snapshot = said.snapshot
        self._coordinator_pid = said.process
        succession.said(snapshot["term"], snapshot["state"], snapshot["highest"])
        if said.ended:
            self._end_coordinator()
            state = snapshot["state"]
            succession.ended(succession.term, f"ended, being {state}", now, done=state == "stopped")
        return Changed(snapshot)

    def _start_coordinator(self, term: int) -> None:
        self._beats = 0
        actor = ray.remote(CoordinatorActor).options(
            name=f"{self._spec.job}-coordinator-{term}",
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            # If Ray's head dies all is over; any other machine may die, and must not take it along.
            scheduling_strategy=on_node(self._machines.head if self._machines else self._head),
        )
        with self._changing:
            known = self._known
            self._coordinator = actor.remote(self._spec, known.contacts, known.lives, term)
            self._tell_all()

    def _tell_all(self) -> None:
        """Tell the coordinator what it may have missed, under the lock; what it knows does no harm."""
        known, self._missed = self._known, False
        for server, life in known.lives.items():
            self._coordinator.join.remote(server, life, known.contacts[server])
        for server, why in known.gone.items():
            self._coordinator.gone.remote(server, why)

    def _end_coordinator(self) -> None:
        """End what is left of the coordinator; one that is stopped cannot hear Ray."""
        with self._changing:
            actor, self._coordinator, self._saying = self._coordinator, None, None
        pid, self._coordinator_pid = self._coordinator_pid, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)
            if pid is not None:
                self._kill(pid)

    def _kill(self, pid: int) -> None:
        """Kill a process if its id means something here: elsewhere only Ray can."""
        if self._own is not None or self._machines:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
