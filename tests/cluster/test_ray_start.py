"""How actors on Ray start and run: where they are put, what they say if they cannot start, and the driver."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import cloudpickle
import pytest
from fake_ray import KILLED, NOBODY, SPEC, FakeRay, contact, report, waits_for

from bml.cluster.fleets import processes
from bml.cluster.fleets.fleet import Changed, Died, Reported
from bml.cluster.process.mail import Inbox
from bml.cluster.spec.job import JobSpec, ServerReport
from bml.errors import FabricError, StartError

pytestmark = pytest.mark.timeout(60)


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
    assert fleet._strategy(fleet._homes[0]) == where
    (place,) = [arguments[2] for arguments in ray.asked("ServerActor 0", "new")]
    assert (place is not None) == (free == 2.0), "loopback addresses reach nobody elsewhere"
    fleet.close()


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


def test_a_job_begins_with_the_least_servers_that_ray_has_placed(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are ended, and join when they come: an actor cannot become a joiner."""
    from bml.cluster.fleets import start_quorum
    from bml.cluster.fleets.placement import Reservation
    from bml.cluster.ray.fleet import RayFleet

    monkeypatch.setattr(start_quorum, "OTHERS_S", 0.05)
    spec = JobSpec("bcube:2x2", transport="tcp", min_start=2)
    ray.free = {"CPU": 3.0}
    for server in range(3):
        ray.answers[f"ServerActor {server}", "contact"] = (contact(server), NOBODY)
    fleet = RayFleet(spec, None, False, Reservation({"CPU": 1}))
    fleet.start(b"train")
    assert fleet.spec.servers == (0, 1, 2)
    assert ray.asked("ServerActor 3", "killed") == [()]
    assert [len(ray.asked(f"ServerActor {server}", "run")) for server in range(4)] == [1, 1, 1, 0]
    (told,) = ray.asked("CoordinatorActor", "begin")
    assert told[0].absent == (3,)
    assert sorted(told[1]) == [0, 1, 2]
    fleet.close()


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
        assert time.monotonic() - begun < 30.0
        inbox, heard = Inbox(theirs), list[Any]()
        while not heard or heard[-1] != Changed({"number": 2999}):
            assert time.monotonic() - begun < 30.0
            heard += [event for _, event in inbox.take()]
    assert [each for each in heard if isinstance(each, Died)][1:] == [Died(1, KILLED)]
    assert len(heard) <= 1002
