"""A fleet of actors on Ray: actors that Ray does not reach, deaths, and reports that are lost."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
from fake_ray import SPEC, FakeRay, contact, report, said, unavailable, waits, waits_for

from bml.cluster.fleets.fleet import Changed, Died, Patience, Reported
from bml.cluster.fleets.handles import ProcessId, process_id
from bml.cluster.fleets.placement import Reservation
from bml.errors import StartError

pytestmark = pytest.mark.timeout(60)


def test_a_server_that_ray_does_not_reach_is_not_dead(ray: FakeRay, fleet: Any) -> None:
    ray.answers["ServerActor 1", "run"] = unavailable()
    assert waits(fleet, lambda: len(ray.asked("ServerActor 1", "run")) > 3) == []
    assert ray.asked("CoordinatorActor", "gone") == []
    assert fleet.ask(("status", ""), Patience(0.0)) == {}
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
    assert fleet.ask(("inject", "kill:1"), Patience(0.0))[1] == {"done": "server 1 died of it"}
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


def test_a_server_that_is_ended_is_not_asked_for_its_report_again(
    ray: FakeRay, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the thread that waits for reports finds no actor, and the job ends with a KeyError."""
    ray.answers["ServerActor 1", "run"] = unavailable()
    waits(fleet, lambda: fleet._reports._unheard)

    def meanwhile(actor: Any) -> None:
        until_s = time.monotonic() + 0.1
        waits(fleet, lambda: time.monotonic() > until_s)

    monkeypatch.setattr(ray, "kill", meanwhile)
    fleet._end(1)
    assert fleet._reports.running() == {0}


@pytest.mark.slow
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
    deadline = time.monotonic() + 40
    while len(ray.asked("ServerActor 1", "contact")) < 3:
        assert starting.is_alive()
        assert time.monotonic() < deadline
    ray.answers["ServerActor 1", "contact"] = comes
    starting.join(10)
    assert len(ray.asked("ServerActor 1", "run")) == 1
    assert len(ray.asked("ServerActor 1", "new")) == 1, "it is the same actor"
    fleet.close()


def test_an_actor_that_did_not_come_in_time_is_ended(ray: FakeRay) -> None:
    """Or Ray places it later, and it holds a machine and does nothing."""
    from ray.exceptions import GetTimeoutError

    from bml.cluster.ray.fleet import RayFleet

    fleet = RayFleet(replace(SPEC, start_s=0.1), None, prints=False)
    fleet.start(b"train")
    ray.answers["ServerActor 1", "contact"] = GetTimeoutError()
    ended = len(ray.asked("ServerActor 1", "killed"))
    with pytest.raises(StartError, match="did not start server 1"):
        fleet.join(1, 1, threading.Event())
    assert len(ray.asked("ServerActor 1", "killed")) == ended + 2, "the actor before, and the new one"
    assert 1 not in fleet._actors
    fleet.close()


def test_both_actors_of_a_server_that_is_tried_twice_are_ended(ray: FakeRay, fleet: Any) -> None:
    """Ray put the first one on a dead machine, or says so."""
    from ray.exceptions import ActorDiedError

    ray.answers["ServerActor 1", "contact"] = ActorDiedError()
    with pytest.raises(StartError, match="died at start-up"):
        fleet.join(1, 1, threading.Event())
    assert len(ray.asked("ServerActor 1", "new")) == len(ray.asked("ServerActor 1", "killed")) == 3


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


@pytest.mark.slow
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
    from bml.cluster.process import coordinator
    from bml.cluster.ray.actors import CoordinatorActor

    now = {"term": 1, "state": "steady", "highest": 1, "epoch": 0}

    class Loop:
        deposed_by = 0

        def __init__(self, *arguments: Any) -> None:
            self.on_change = arguments[4]

        def run(self) -> None:
            for epoch in (1, 2, 3):
                for step in (10, 11):
                    self.on_change({**now, "epoch": epoch, "step": epoch * step})

    monkeypatch.setattr(coordinator, "CoordinatorLoop", Loop)
    actor = CoordinatorActor()
    actor.begin(SPEC, {}, {}, 1)
    deadline = time.monotonic() + 40
    while not actor._ended:
        assert time.monotonic() < deadline
    ray.answers["CoordinatorActor", "said"] = actor.said()
    snapshots = list[Any]()
    while not snapshots:
        assert time.monotonic() < deadline
        snapshots += [each.snapshot for each in fleet.wait(0.01)]
    assert [(each["epoch"], each["step"]) for each in snapshots] == [(1, 11), (2, 22), (3, 33)]
    assert len(actor.said().snapshots) == 1, "each once, and the newest again"


def test_a_report_comes_by_another_server_if_a_connection_is_dead(
    ray: FakeRay, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing breaks: what Ray sends just does not arrive, and for minutes it does not notice."""
    from bml.cluster.ray import reports

    monkeypatch.setattr(reports, "_RELAY_S", 0.05)
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
    deadline = time.monotonic() + 40
    while len([each for each in told if isinstance(each, Reported)]) < len(SPEC.servers):
        assert time.monotonic() < deadline
        told += fleet.wait(0.01)
    assert isinstance(told[-1], Changed), "after it nobody waits any more"


def test_nothing_is_asked_of_ray_after_the_end(ray: FakeRay, fleet: Any) -> None:
    """Ray would connect this process to any cluster that it finds on the machine."""
    fleet.close()
    calls = len(ray.calls)
    assert fleet.ask(("status", ""), Patience(1.0)) == {}
    assert len(ray.calls) == calls


def test_servers_on_draining_nodes_leave_and_say_so(ray: FakeRay, fleet: Any) -> None:
    """Server 1 is on the node that drains; the other one is told nothing."""
    for server, node in ((0, "a" * 56), (1, "b" * 56)):
        ray.answers[f"ServerActor {server}", "node"] = node
        ray.answers[f"ServerActor {server}", "answer"] = {}
    ray.draining = {"b" * 56: 1}
    waits(fleet, lambda: ray.asked("ServerActor 1", "answer"))
    ((request, _),) = ray.asked("ServerActor 1", "answer")
    assert request == ("leave", "its Ray node bbbbbbbbbbbb is draining, and ends in 0 s")
    left = replace(report(1), outcome="stopped", kind="Left")
    ray.answers["ServerActor 1", "run"] = cloudpickle.dumps(left)
    assert waits_for(fleet, len) == [Reported(replace(left, kind="Drained"))]
    assert ray.asked("ServerActor 1", "killed"), "or the node would wait for its end"
    assert not ray.asked("ServerActor 0", "answer")


def test_a_server_that_leaves_for_another_reason_is_not_drained(ray: FakeRay, fleet: Any) -> None:
    left = replace(report(1), outcome="stopped", kind="Left")
    ray.answers["ServerActor 1", "run"] = cloudpickle.dumps(left)
    assert waits_for(fleet, len) == [Reported(left)]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from bml.cluster.ray.watching import cluster as watch

    made = list[Any]()
    monkeypatch.setattr(watch, "_request", made.append)
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    return made


def test_machines_are_asked_for_while_a_server_is_missing(ray: FakeRay, requests: list[Any]) -> None:
    from bml.cluster.ray.fleet import RayFleet

    ray.free = {"GPU": 8.0, "CPU": 8.0}
    fleet = RayFleet(SPEC, None, prints=False, reserves=Reservation({"GPU": 1, "CPU": 4}))
    fleet.start(b"train")
    comes = ray.answers.pop(("ServerActor 1", "contact"))
    joining = threading.Thread(target=fleet.join, args=(1, 1, threading.Event()))
    joining.start()
    waits(fleet, lambda: requests)
    assert requests == [[{"GPU": 1, "CPU": 4}] * 2]
    ray.answers["ServerActor 1", "contact"] = comes
    joining.join(10)
    waits(fleet, lambda: len(requests) > 1)
    assert requests[1:] == [[]], "given back"
    fleet.close()
    assert requests[2:] == []


@contextmanager
def asking(ray: FakeRay, requests: list[Any]) -> Iterator[Any]:
    """A fleet that has asked for a machine, as a server does not come; it is closed at the end."""
    from bml.cluster.ray.fleet import RayFleet

    ray.free = {"GPU": 8.0}
    fleet = RayFleet(SPEC, None, prints=False, reserves=Reservation({"GPU": 1}))
    fleet.start(b"train")
    ray.answers.pop(("ServerActor 1", "contact"))
    give_up = threading.Event()
    joining = threading.Thread(target=lambda: _refused(lambda: fleet.join(1, 1, give_up)))
    joining.start()
    waits(fleet, lambda: requests)
    yield fleet
    give_up.set()
    joining.join(10)
    fleet.close()


def test_machines_are_given_back_at_the_end(ray: FakeRay, requests: list[Any]) -> None:
    with asking(ray, requests):
        pass
    assert requests == [[{"GPU": 1}] * 2, []]


@pytest.mark.parametrize("fails", ["the look takes long", "the cluster refuses"])
def test_machines_that_cannot_be_given_back_are_said(
    ray: FakeRay,
    requests: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    from bml.cluster.ray.watching import cluster as watch

    def refuse(*_: Any) -> None:
        raise RuntimeError("no such cluster")

    looked, goes_on = threading.Event(), threading.Event()

    def look() -> dict[str, int]:
        looked.set()
        assert goes_on.wait(20)
        return {}

    with asking(ray, requests) as fleet:
        if fails == "the look takes long":
            monkeypatch.setattr(watch, "_ENDING_S", 0.05)
            monkeypatch.setattr(watch, "draining_nodes", look)
            assert looked.wait(20)
        else:
            monkeypatch.setattr(watch, "_request", refuse)
    goes_on.set()
    fleet._watch._thread.join(20)
    assert "could not take back the machines" in caplog.text


def test_a_job_whose_launcher_is_on_a_draining_node_ends(ray: FakeRay, fleet: Any) -> None:
    from bml.cluster.fleets.fleet import Headless

    ray.draining = {"another": 0}
    waits(fleet, lambda: fleet._watch.draining == {"another"})
    ray.draining = {fleet._watch.home: 0}
    events = waits_for(fleet, len)
    assert events == [Headless("the launcher's Ray node a is draining", 15.0)]


def test_a_cluster_that_cannot_be_asked_fails_no_job(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bml.cluster.ray.fleet import RayFleet
    from bml.cluster.ray.watching import cluster as watch

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such cluster")

    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(watch, "_request", refuse)
    monkeypatch.setattr(watch, "draining_nodes", refuse)
    ray.free = {"GPU": 8.0}
    fleet = RayFleet(SPEC, None, prints=False, reserves=Reservation({"GPU": 1}))
    fleet.start(b"train")
    fleet.join(1, 1, threading.Event())
    waits(fleet, lambda: "look for nodes that are draining: no such cluster" in caplog.text)
    fleet.close()
    mine = [each for each in caplog.records if each.thread == fleet._watch._thread.ident]
    assert len([each for each in mine if "look for nodes" in each.getMessage()]) == 1, "it is said once"


def _refused(action: Callable[[], None]) -> None:
    with suppress(StartError):
        action()
