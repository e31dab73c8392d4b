"""A fleet of actors on Ray: actors that Ray does not reach, deaths, and reports that are lost."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest
from fake_ray import SPEC, FakeRay, contact, report, said, unavailable, waits, waits_for

from bml.cluster.fleets.fleet import Changed, Died, Patience, Reported
from bml.cluster.fleets.handles import ProcessId, process_id

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
    assert fleet.ask(("status", ""), Patience(1.0)) == {}
    assert len(ray.calls) == calls
