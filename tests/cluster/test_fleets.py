"""The fleets by themselves: threads that meet, deaths before a coordinator, servers out of Ray's reach."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest

from bml.cluster.fleets import processes
from bml.cluster.fleets.fleet import Changed, Died, Reported, reachable
from bml.cluster.fleets.handles import ProcessId, process_id
from bml.cluster.fleets.placement import Machine
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.process import worker
from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.process.mail import Inbox, Outbox, receive
from bml.cluster.spec.job import Contact, JobSpec, Place, ServerReport, default_nics
from bml.errors import FabricError, StartError
from bml.protocol.coordinator.events import Gone
from bml.topology.errors import UsageError
from bml.transport.handshake.control import End

pytestmark = pytest.mark.timeout(60)

SPEC = JobSpec("bcube:2x1", transport="tcp")
NOBODY = ProcessId(1 << 30, 0)
KILLED = "its process was killed by signal 9"


def contact(server: int) -> Contact:
    return Contact(server, ("127.0.0.1", 1), (("127.0.0.1", 2),))


def report(server: int) -> ServerReport:
    return ServerReport(server, "done", 7, "", "NoneType", "", "", None, [], {})


# --- plain processes ---------------------------------------------------------------------------------


class ForkServer:
    """One whose processes are sockets; `ended` are those that were killed."""

    def __init__(self) -> None:
        self.ends = os.eventfd(0, os.EFD_NONBLOCK)
        self.ended: set[int] = set()

    def kill(self, process: int) -> None:
        self.ended.add(process)

    def has_ended(self, process: int) -> bool:
        return process in self.ended

    def returncode(self, process: int, within_s: float = 0.0) -> int:
        return -9

    def heard(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.ends)


class Spawned:
    """A fleet whose processes are sockets: `theirs` are their ends, in order."""

    def __init__(self) -> None:
        self.fleet = ProcessFleet(SPEC, prints=False)
        self.fork_server = ForkServer()
        self.fleet._fork_server = self.fork_server  # type: ignore[assignment]
        self.fleet._spawn = self.spawn  # type: ignore[method-assign]
        self.theirs: list[socket.socket] = []

    def spawn(self) -> processes._Child:
        ours, theirs = socket.socketpair()
        self.theirs.append(theirs)
        return processes._Child(self.fork_server, len(self.theirs), ours)  # type: ignore[arg-type]


@pytest.fixture
def spawned() -> Iterator[Spawned]:
    made = Spawned()
    yield made
    made.fleet.close()
    for sock in made.theirs:
        sock.close()


def test_a_server_may_be_started_again_while_another_thread_waits_for_what_is_left_of_it(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = spawned.fleet
    fleet._servers = {server: fleet._spawn() for server in SPEC.servers}
    fleet._known.contacts = {server: contact(server) for server in SPEC.servers}
    real: Callable[..., Any] = processes.wait

    def starts_it_first(watched: Any, timeout_s: float) -> Any:
        def again() -> None:
            fleet._spawn = no_process  # type: ignore[method-assign]
            with pytest.raises(StartError):
                fleet.join(0, 1, threading.Event())

        def no_process() -> processes._Child:
            raise StartError("no process could be made")

        thread = threading.Thread(target=again)
        spawn = fleet._spawn
        thread.start()
        thread.join()
        fleet._spawn = spawn  # type: ignore[method-assign]
        return real(watched, timeout_s)

    monkeypatch.setattr(processes, "wait", starts_it_first)
    assert fleet.wait(0.0) == []
    monkeypatch.setattr(processes, "wait", real)
    assert fleet.wait(0.0) == []
    assert fleet._leaving == [], "it is let go of"
    assert sorted(fleet._servers) == [1]


def test_a_coordinator_hears_of_the_deaths_before_it(spawned: Spawned) -> None:
    fleet = spawned.fleet
    fleet._servers = {server: fleet._spawn() for server in SPEC.servers}
    spawned.theirs[1].close()
    assert fleet.wait(0.0) == [Died(1, KILLED)]
    first = spawned.theirs[2]
    assert receive(first)[0] == "coordinator"
    first.close()
    while len(spawned.theirs) < 4:
        fleet.wait(0.01)
    second = spawned.theirs[3]
    second.settimeout(5)
    assert receive(second)[0] == "coordinator"
    assert receive(second) == ("gone", 1, KILLED)


def test_a_process_that_cannot_be_a_server_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_RDMA_SLOTS", "many")
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "close_on_fork", lambda again: [again.detach(), theirs][1])
    with ours, theirs:
        Outbox(ours, 1).put("server", Place(default_nics(0, 1)), SPEC, 0, None)
        worker.serve(theirs.fileno())
        (said,) = receive(ours)
    with pytest.raises(StartError, match=r"^server 0 cannot start: BML_RDMA_SLOTS is 'many': give a whole"):
        reachable(0, said)


# --- Ray ---------------------------------------------------------------------------------------------


class Actor:
    def __init__(self, ray: FakeRay, kind: str) -> None:
        self.ray, self.kind = ray, kind

    def __getattr__(self, name: str) -> Any:
        return Call(self.ray, self.kind, name)


class Call:
    def __init__(self, ray: FakeRay, kind: str, name: str) -> None:
        self.ray, self.kind, self.name = ray, kind, name

    def remote(self, *arguments: Any) -> int:
        self.ray.calls.append((self.kind, self.name, arguments))
        return Ref(len(self.ray.calls) - 1)


class Ref(int):
    """A call; as with Ray's client, those that Ray gives out are equal, and not the same object."""


class Maker:
    def __init__(self, ray: FakeRay, kind: str) -> None:
        self.ray, self.kind = ray, kind

    def options(self, **options: Any) -> Maker:
        return self

    def remote(self, *arguments: Any) -> Actor:
        name = self.kind if self.kind == "CoordinatorActor" else f"{self.kind} {arguments[1]}"
        self.ray.calls.append((name, "new", arguments))
        return Actor(self.ray, name)


class FakeRay:
    """Actors that only note what they are asked; `answer` says what they answer, by the name of the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.answers: dict[tuple[str, str], Any] = {}
        self.puts: list[Any] = []
        self.free: dict[str, float] = {}

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: type) -> Maker:
        return Maker(self, kind.__name__)

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float = 0.0) -> Any:
        ready = [Ref(ref) for ref in refs if self.calls[ref][:2] in self.answers][:num_returns]
        if not ready:
            time.sleep(min(timeout, 0.01))
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: int, timeout: float | None = None) -> Any:
        answer = self.answers[self.calls[ref][:2]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, value: Any) -> Any:
        self.puts.append(value)
        return ("put", value)

    def available_resources(self) -> dict[str, float]:
        return self.free

    def cluster_resources(self) -> dict[str, float]:
        return self.free

    def kill(self, actor: Actor) -> None:
        self.calls.append((actor.kind, "killed", ()))

    def asked(self, kind: str, name: str) -> list[tuple[Any, ...]]:
        return [arguments for *called, arguments in self.calls if called == [kind, name]]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray_fleet = pytest.importorskip("bml.cluster.ray.fleet")
    from bml.cluster.ray import connection as ray_connection
    from bml.cluster.ray import coordinator as ray_coordinator
    from bml.cluster.ray import machines as ray_machines

    made = FakeRay()
    for module in (ray_fleet, ray_coordinator, ray_connection, ray_machines):
        monkeypatch.setattr(module, "ray", made)
    for module in (ray_fleet, ray_coordinator):
        monkeypatch.setattr(module, "on_node", lambda node: node)
    monkeypatch.setattr(ray_fleet, "living_machines", lambda: [Machine("127.0.0.1", "a", 2.0, True)])
    monkeypatch.setattr(ray_fleet, "_LOOK_S", 0.05)
    for server in SPEC.servers:
        made.answers[f"ServerActor {server}", "contact"] = (contact(server), NOBODY)
    return made


@pytest.fixture
def fleet(ray: FakeRay) -> Any:
    from bml.cluster.ray.fleet import RayFleet

    made = RayFleet(SPEC, None, prints=False)
    made.start(b"train")
    return made


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the connection broke", None)


def said(heartbeats: int, term: int = 1) -> Any:
    from bml.cluster.ray.actors import Said

    return Said([{"term": term, "state": "steady", "highest": term}], NOBODY, heartbeats, False)


def waits(fleet: Any, until: Callable[[], object]) -> list[Any]:
    """What happens to servers until then."""
    return waits_for(fleet, lambda events: until())


def waits_for(fleet: Any, until: Callable[[list[Any]], object]) -> list[Any]:
    deadline, events = time.monotonic() + 10, list[Any]()
    while not until(events):
        assert time.monotonic() < deadline
        events += [each for each in fleet.wait(0.01) if not hasattr(each, "snapshot")]
    return events


def test_a_server_that_ray_does_not_reach_is_not_dead(ray: FakeRay, fleet: Any) -> None:
    ray.answers["ServerActor 1", "run"] = unavailable()
    assert waits(fleet, lambda: len(ray.asked("ServerActor 1", "run")) > 3) == []
    assert ray.asked("CoordinatorActor", "gone") == []
    assert fleet.ask(("status", ""), 0.0) == {}
    assert len(ray.asked("ServerActor 1", "answer")) == 1, "it runs"
    ray.answers["ServerActor 1", "run"] = cloudpickle.dumps(report(1))
    assert waits_for(fleet, len) == [Reported(report(1))]


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("ActorDiedError", (), "died unexpectedly"),
        (
            "OutOfMemoryError",
            ("killed as the node was low on memory\nmore",),
            "Ray: killed as the node was low",
        ),
        ("NodeDiedError", ("",), "Ray: NodeDiedError"),
    ],
)
def test_a_server_that_ray_knows_to_be_dead_is(
    kind: str, given: tuple[str, ...], says: str, ray: FakeRay, fleet: Any
) -> None:
    from ray import exceptions as errors

    ray.answers["ServerActor 1", "run"] = ray.answers["ServerActor 1", "answer"] = getattr(errors, kind)(
        *given
    )
    assert fleet.ask(("inject", "kill:1"), 0.0)[1] == {"done": "server 1 died of it"}
    (died,) = waits_for(fleet, len)
    assert type(died) is Died
    assert died.why.startswith("its process is gone (Ray: ")
    assert says in died.why
    assert len(ray.asked("CoordinatorActor", "gone")) == 1


def test_a_report_that_ray_has_lost_is_asked_for_again(ray: FakeRay, fleet: Any) -> None:
    from ray.exceptions import ObjectLostError

    ray.answers["ServerActor 1", "run"] = ObjectLostError("ab" * 28, None, "")
    assert waits(fleet, lambda: len(ray.asked("ServerActor 1", "run")) > 1) == []
    ray.answers["ServerActor 1", "run"] = cloudpickle.dumps(report(1))
    assert waits_for(fleet, len) == [Reported(report(1))]


def test_a_coordinator_that_ray_does_not_reach_is_replaced_only_if_it_stays_silent(
    ray: FakeRay, fleet: Any
) -> None:
    ray.answers["CoordinatorActor", "said"] = said(1)
    waits(fleet, lambda: fleet._coordinator._heartbeats == 1)
    fleet._died(1, "killed")
    told = len(ray.asked("CoordinatorActor", "gone"))
    ray.answers["CoordinatorActor", "said"] = unavailable()
    asked = len(ray.asked("CoordinatorActor", "said"))
    waits(fleet, lambda: len(ray.asked("CoordinatorActor", "said")) > asked + 1)
    ray.answers["CoordinatorActor", "said"] = said(2)
    waits(fleet, lambda: fleet._coordinator._heartbeats == 2)
    assert len(ray.asked("CoordinatorActor", "new")) == 1, "it was out of reach for a moment"
    assert len(ray.asked("CoordinatorActor", "gone")) == told + 1, "it is told what it may have missed"
    ray.answers["CoordinatorActor", "said"] = unavailable()
    waits(fleet, lambda: len(ray.asked("CoordinatorActor", "new")) == 2)
    assert ray.asked("CoordinatorActor", "killed")
    assert ray.asked("CoordinatorActor", "gone")[-1] == (1, "killed"), "and so is its successor"


def test_a_server_that_ray_does_not_reach_while_it_starts_is_asked_again(ray: FakeRay) -> None:
    from bml.cluster.ray.fleet import RayFleet

    fleet, comes = RayFleet(SPEC, None, prints=False), ray.answers.pop(("ServerActor 1", "contact"))
    ray.answers["ServerActor 1", "contact"] = unavailable()
    starting = threading.Thread(target=fleet.start, args=(b"train",))
    starting.start()
    deadline = time.monotonic() + 10
    while len(ray.asked("ServerActor 1", "contact")) < 3:
        assert starting.is_alive()
        assert time.monotonic() < deadline
    ray.answers["ServerActor 1", "contact"] = comes
    starting.join(10)
    assert len(ray.asked("ServerActor 1", "run")) == 1
    assert len(ray.asked("ServerActor 1", "new")) == 1, "it is the same actor"


def test_what_has_the_number_of_a_dead_server_is_not_killed(ray: FakeRay, fleet: Any) -> None:
    """Nor is what has the coordinator's."""
    fleet._local = fleet._coordinator._local = True
    with stranger() as process:
        named = ProcessId(process.pid, process_id(process.pid).began - 1)
        ray.answers["ServerActor 1", "contact"] = (contact(1), named)
        fleet.join(1, 1, threading.Event())
        told = said(1)
        ray.answers["CoordinatorActor", "said"] = told._replace(process=named)
        waits(fleet, lambda: fleet._coordinator._heartbeats == 1)
        fleet.close()
        assert process.poll() is None


def test_a_server_that_does_not_hear_ray_is_killed(ray: FakeRay, fleet: Any) -> None:
    fleet._local = True
    with stranger() as process:
        ray.answers["ServerActor 1", "contact"] = (contact(1), process_id(process.pid))
        fleet.join(1, 1, threading.Event())
        fleet.close()
        assert process.wait(10) == -signal.SIGKILL


@contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_coordinators_process_starts_beside_those_of_the_servers(ray: FakeRay, fleet: Any) -> None:
    """Or the first view would wait for one process after the other."""
    called = [call[:2] for call in ray.calls]
    first_contact = called.index(("ServerActor 0", "contact"))
    assert called.index(("CoordinatorActor", "new")) < first_contact
    assert called.index(("CoordinatorActor", "begin")) > first_contact
    assert len(ray.asked("CoordinatorActor", "new")) == 1
    ((_, contacts, _, term),) = ray.asked("CoordinatorActor", "begin")
    assert contacts == {server: contact(server) for server in SPEC.servers}
    assert term == 1


def test_a_coordinator_that_is_not_needed_is_ended(ray: FakeRay) -> None:
    from bml.cluster.ray.fleet import RayFleet

    fleet = RayFleet(SPEC, None, prints=False)
    fleet._coordinator.prepare()
    fleet.close()
    assert len(ray.asked("CoordinatorActor", "killed")) == 1


def test_the_training_function_is_handed_to_ray_once(ray: FakeRay, fleet: Any) -> None:
    assert ray.puts == [b"train"]
    assert [arguments[1] for arguments in ray.asked("ServerActor 1", "run")] == [("put", b"train")]


def test_every_view_is_told_on_ray(ray: FakeRay, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them may come between two questions to the coordinator."""
    from bml.cluster.ray import actors as ray_actors

    now = {"term": 1, "state": "steady", "highest": 1, "epoch": 0}

    class Loop:
        def __init__(self, *arguments: Any) -> None:
            self.on_change = arguments[4]

        def run(self) -> None:
            for epoch in (1, 2, 3):
                for step in (10, 11):
                    self.on_change({**now, "epoch": epoch, "step": epoch * step})

        def snapshot(self) -> dict[str, Any]:
            return {**now, "epoch": 3, "step": 50}

    monkeypatch.setattr(ray_actors, "CoordinatorLoop", Loop)
    actor = ray_actors.CoordinatorActor()
    actor.begin(SPEC, {}, {}, 1)
    deadline = time.monotonic() + 10
    while not actor._ended:
        assert time.monotonic() < deadline
    ray.answers["CoordinatorActor", "said"] = actor.said()
    snapshots = list[Any]()
    while not snapshots:
        assert time.monotonic() < deadline
        snapshots += [each.snapshot for each in fleet.wait(0.01)]
    assert [(each["epoch"], each["step"]) for each in snapshots] == [(1, 11), (2, 22), (3, 50)]
    assert len(actor.said().snapshots) == 1, "each once, and how it is now"


def test_a_report_comes_by_another_server_if_a_connection_is_dead(
    ray: FakeRay, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing breaks: what Ray sends just does not arrive, and for minutes it does not notice."""
    from bml.cluster.ray import fleet as ray_fleet

    monkeypatch.setattr(ray_fleet, "_RELAY_S", 0.05)
    assert waits(fleet, lambda: len(ray.asked("CoordinatorActor", "said")) > 0) == []
    ray.answers["ServerActor 0", "relay"] = unavailable()
    ray.answers["ServerActor 0", "run"] = cloudpickle.dumps(report(0))
    assert waits(fleet, lambda: len(ray.asked("ServerActor 0", "relay")) == 3) == [Reported(report(0))]
    ray.answers["ServerActor 0", "relay"] = cloudpickle.dumps(report(1))
    assert waits_for(fleet, len) == [Reported(report(1))]
    ray.answers["ServerActor 1", "run"] = cloudpickle.dumps(report(1))
    assert [each for each in fleet.wait(0.01) if isinstance(each, Reported)] == [], "it comes once"


def test_the_last_view_is_told_though_the_job_is_over(ray: FakeRay, fleet: Any) -> None:
    for server in SPEC.servers:
        ray.answers[f"ServerActor {server}", "run"] = cloudpickle.dumps(report(server))
    ray.answers["CoordinatorActor", "said"] = said(1)
    told = list[Any]()
    deadline = time.monotonic() + 10
    while len([each for each in told if isinstance(each, Reported)]) < len(SPEC.servers):
        assert time.monotonic() < deadline
        told += fleet.wait(0.01)
    assert isinstance(told[-1], Changed), "after it nobody waits any more"


def test_nothing_is_asked_of_ray_after_the_end(ray: FakeRay, fleet: Any) -> None:
    """Ray would connect this process to any cluster that it finds on the machine."""
    fleet.close()
    calls = len(ray.calls)
    assert fleet.ask(("status", ""), 1.0) == {}
    assert len(ray.calls) == calls


@pytest.mark.parametrize(("free", "where"), [(2.0, "a"), (1.0, "SPREAD")])
def test_servers_are_on_one_machine_only_if_it_has_room_for_all(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, free: float, where: str
) -> None:
    """Else Ray may put them on machines that are not there yet."""
    from bml.cluster.fleets.placement import Reservation
    from bml.cluster.ray.fleet import RayFleet

    ray.free = {"CPU": free}
    fleet = RayFleet(SPEC, None, False, Reservation({"CPU": 1}))
    fleet.start(b"train")
    assert fleet._strategy(0) == where
    (place,) = [arguments[2] for arguments in ray.asked("ServerActor 0", "new")]
    assert (place is not None) == (free == 2.0), "loopback addresses reach nobody elsewhere"


def test_a_ray_of_ones_own_without_room_is_refused_at_once(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine will ever join it."""
    from bml.cluster.fleets.placement import Reservation
    from bml.cluster.ray import fleet as ray_fleet

    closed = list[None]()

    class Own:
        is_own = True

        def __init__(self, address: str | None, prints: bool) -> None:
            pass

        def close(self) -> None:
            closed.append(None)

    monkeypatch.setattr(ray_fleet, "RayConnection", Own)
    ray.free = {"CPU": 2.0}
    with pytest.raises(
        StartError, match=r"no room: each of 2 servers reserves GPU=1, and its Ray has free .*CPU"
    ):
        ray_fleet.RayFleet(SPEC, None, False, Reservation({"GPU": 1}))
    assert len(closed) == 1, "Ray is not left behind"


def test_a_server_that_cannot_start_says_why_on_ray(ray: FakeRay) -> None:
    from bml.cluster.ray.fleet import RayFleet

    why = FabricError("no RDMA device has the address 10.0.0.1")
    ray.answers["ServerActor 1", "contact"] = (why, NOBODY)
    with pytest.raises(StartError) as caught:
        RayFleet(SPEC, None, prints=False).start(b"train")
    assert str(caught.value) == f"server 1 cannot start: {why}"


@pytest.mark.parametrize(
    ("variable", "why"), [("BML_NICS", "BML_NICS is 'many'"), ("BML_RDMA_SLOTS", "BML_RDMA_SLOTS is 'many'")]
)
def test_an_actor_that_cannot_be_a_server_lives_to_say_why(
    monkeypatch: pytest.MonkeyPatch, variable: str, why: str
) -> None:
    ray_actors = pytest.importorskip("bml.cluster.ray.actors")
    monkeypatch.setenv(variable, "many")
    monkeypatch.setattr(ray_actors, "get_node_ip_address", lambda: "127.0.0.1")
    said, process = ray_actors.ServerActor(JobSpec("bcube:2x2", transport="tcp"), 0, None).contact()
    assert str(said).startswith(why)
    assert process.number == os.getpid()


def test_a_server_that_ray_does_not_start_in_time_leaves_a_hint(ray: FakeRay) -> None:
    from ray.exceptions import GetTimeoutError

    from bml.cluster.ray.fleet import RayFleet

    ray.answers["ServerActor 1", "contact"] = GetTimeoutError()
    hint = r"server 1 of bcube:2x1 in time \(start_s: 60 s\); .* Take a smaller fabric, more machines, or"
    with pytest.raises(StartError, match=hint):
        RayFleet(SPEC, None, prints=False).start(b"train")


def test_servers_that_run_end_their_children_before_ray_kills_them(ray: FakeRay, fleet: Any) -> None:
    ray.answers["ServerActor 0", "run"] = cloudpickle.dumps(report(0))
    assert waits_for(fleet, len) == [Reported(report(0))]
    ray.answers["ServerActor 1", "end_children"] = None
    fleet.close()
    assert ray.asked("ServerActor 0", "end_children") == [], "it has when it reported"
    called = [call[:2] for call in ray.calls]
    assert called.index(("ServerActor 1", "end_children")) < called.index(("ServerActor 1", "killed"))


def test_an_actor_runs_its_training_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the launcher asks: Ray may have lost an answer, or a question."""
    ray_actors = pytest.importorskip("bml.cluster.ray.actors")
    ran, go = [], threading.Event()

    def run(server: Any, contacts: Any, train: Any) -> ServerReport:
        ran.append(server)
        assert go.wait(10)
        return report(1)

    monkeypatch.setattr(ray_actors, "run_training", run)
    monkeypatch.setattr(ray_actors, "Server", lambda *arguments: "server")
    actor = ray_actors.ServerActor(SPEC, 1, processes.Place())
    reports: list[bytes] = []
    train, ended = cloudpickle.dumps(None), list[None]()
    monkeypatch.setattr(ray_actors, "end_children", lambda: ended.append(None))
    threads = [threading.Thread(target=lambda: reports.append(actor.run({}, train))) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert ran == ["server"]
    assert len(ended) == 1, "its children"
    assert [cloudpickle.loads(each) for each in reports] == 3 * [report(1)]


def test_the_driver_of_ray_does_not_wait_for_a_launcher_that_does_not_read() -> None:
    """Or nobody looks after the coordinator meanwhile. What happens to servers is told in any case."""
    ray_driver = pytest.importorskip("bml.cluster.ray.driver")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        driver, begun = ray_driver._Driver(ours), time.monotonic()
        driver.tell(Died(0, "x" * (1 << 20)))  # no socket has room for it
        for number in range(3000):
            driver.tell(Changed({"number": number}))
            if number == 5:
                driver.tell(Died(1, KILLED))
        assert time.monotonic() - begun < 2.0
        inbox, heard = Inbox(theirs), list[Any]()
        while not heard or heard[-1] != Changed({"number": 2999}):
            assert time.monotonic() - begun < 10.0
            heard += [event for _, event in inbox.take()]
    assert [each for each in heard if isinstance(each, Died)][1:] == [Died(1, KILLED)]
    assert len(heard) <= 1002


# --- the coordinator's dials --------------------------------------------------------------------------


def test_a_refused_dial_proves_the_death_of_the_incarnation_that_was_dialled_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = CoordinatorLoop(SPEC, {0: contact(0), 1: contact(1)}, {}, 1, lambda now: None, lambda: None)
    dialled, heard = [], []
    monkeypatch.setattr(loop, "_dial", dialled.append)
    monkeypatch.setattr(loop, "_handle", heard.append)
    earlier = Contact(1, ("127.0.0.1", 9), (("127.0.0.1", 9),))
    loop._failed(1, earlier, End("refused", "nobody listens there"))
    assert (dialled, heard) == ([1], []), "the server has come again elsewhere"
    loop._failed(1, contact(1), End("refused", "nobody listens there"))
    assert (dialled, heard) == ([1], [Gone(1, "its process is gone (refused)")])


# --- addresses ----------------------------------------------------------------------------------------


def test_each_server_takes_its_own_of_the_addresses_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_NICS", "10.7.0.{n}, 10.7.1.{n}")
    fleet = ProcessFleet(JobSpec("bcube:2x2"), prints=False)
    assert fleet._place(2).nics == ("10.7.0.3", "10.7.1.3")
    with pytest.raises(UsageError, match="for each of 1 levels"):
        ProcessFleet(SPEC, prints=False)._place(0)
