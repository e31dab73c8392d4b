"""Where spares wait, which of them takes which address, and what a fleet on Ray does with them."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
from fake_ray import NOBODY, SPEC, Actor, FakeRay, contact, report, unavailable, waits, waits_for

from bml.cluster.fleets.fleet import Died, Reported
from bml.cluster.fleets.placement import Machine, blocks
from bml.cluster.fleets.process_spares import ProcessSpares
from bml.cluster.fleets.spare_places import Waiting, choose, is_plugged_in, nodes_for_spares
from bml.cluster.server.carrier import networks
from bml.errors import StartError
from bml.topology import parse

pytestmark = pytest.mark.timeout(30)

FABRIC = parse("bcube:3x2")
#: A network for each switch: 10.level.group.server.
WIRED = {
    server: tuple(f"10.{level}.{FABRIC.group(server, level)}.{server + 1}" for level in range(2))
    for server in FABRIC.servers
}
#: A network for each level, as on a cluster with one switch a rail.
RAILS = {server: (f"10.10.0.{server + 1}", f"10.11.0.{server + 1}") for server in FABRIC.servers}


def machines(*cpus: float) -> list[Machine]:
    return [Machine(f"10.0.0.{i}", f"node{i}", each) for i, each in enumerate(cpus)]


@pytest.mark.parametrize(
    ("count", "n_servers", "cpus", "where"),
    [
        (2, 3, (4, 4, 4, 4), ["node3", "node3"]),
        (3, 2, (4, 4, 4, 4), ["node2", "node2", "node3"]),
        (1, 4, (4, 4), ["node0"]),
        (1, 5, (4, 4), ["node1"]),
        (2, 4, (4, 4), ["node0", "node1"]),
        (2, 2, (0, 4, 4, 4), ["node3", "node3"]),
        (1, 2, (0, 0), ["node0"]),
    ],
)
def test_spares_wait_where_no_server_is_if_there_is_such_a_machine(
    count: int, n_servers: int, cpus: tuple[float, ...], where: list[str]
) -> None:
    homes = blocks(range(n_servers), machines(*cpus))
    assert sorted(nodes_for_spares(count, homes, machines(*cpus))) == where


def test_spares_are_spread_over_the_machines_with_the_fewest_servers() -> None:
    chance = random.Random(5)
    for _ in range(200):
        there = machines(*(chance.randint(1, 4) for _ in range(chance.randint(1, 6))))
        homes = blocks(range(chance.randint(1, 9)), there)
        found = nodes_for_spares(chance.randint(1, 6), homes, there)
        load = {each.node: [*homes.values()].count(each.node) for each in there}
        assert {load[node] for node in found} == {min(load.values())}
        counts = [found.count(node) for node in load if load[node] == min(load.values())]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("at", FABRIC.servers)
def test_a_spare_is_plugged_in_at_one_address_where_each_switch_is_a_network(at: int) -> None:
    """The switches of both levels name one server."""
    others = {server: nics for server, nics in WIRED.items() if server != at}
    spare = [f"10.{level}.{FABRIC.group(at, level)}.99/24" for level in range(2)]
    assert [each for each in FABRIC.servers if is_plugged_in(each, spare, FABRIC, others)] == [at]


def test_on_rails_a_spare_is_plugged_in_everywhere() -> None:
    spare = ["10.10.0.99/24", "10.11.0.99/24"]
    assert all(is_plugged_in(each, spare, FABRIC, RAILS) for each in FABRIC.servers)
    assert not is_plugged_in(4, ["10.11.0.99/24", "10.10.0.99/24"], FABRIC, RAILS), "its cables are swapped"


def at(server: int, node: str = "x", is_ready: bool = True) -> Waiting:
    where = tuple(f"10.{level}.{FABRIC.group(server, level)}.99/24" for level in range(2))
    return Waiting(node, is_ready, where)


ANY, ROUTED = Waiting("x", True), Waiting("x", True, ("192.168.0.7/32", "192.168.1.7/32"))


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        ({}, None),
        ({0: ANY}, (0, 4)),
        ({0: at(8), 1: at(4)}, (1, 4)),
        ({0: at(8)}, (0, 8)),
        ({0: ROUTED}, (0, 4)),
        ({0: ROUTED, 1: at(8)}, (0, 4)),
        ({0: at(5)}, (0, 4)),
        ({0: Waiting("x", False), 1: at(8)}, (1, 8)),
        ({0: Waiting("x", False)}, (0, 4)),
        ({0: Waiting("home", True), 1: ANY}, (1, 4)),
        ({0: Waiting("home", True)}, (0, 4)),
    ],
)
def test_which_spare_takes_which_address(waiting: dict[int, Waiting], chosen: tuple[int, int] | None) -> None:
    """Server 4 is lost, 8 is free, and a server is at 5."""
    others = {server: nics for server, nics in WIRED.items() if server not in (4, 8)}
    assert choose(4, [8], waiting, "home", FABRIC, others) == chosen


def test_this_machines_networks_are_known() -> None:
    assert networks(["127.0.0.1"]) == ("127.0.0.1/8",)
    assert networks(["127.0.0.1", "192.0.2.1"]) is None, "it has no such address"


# --- processes -----------------------------------------------------------------------------------


class Process:
    def __init__(self, has_ended: bool = False) -> None:
        self.has_ended, self.released = has_ended, False

    def end(self) -> None:
        self.released = True


def started(*processes: Process) -> ProcessSpares[Process]:
    coming = iter(processes)
    spares = ProcessSpares(len(processes), lambda: next(coming))
    assert spares.left == 0
    spares.start()
    spares.start()
    return spares


def test_a_spare_that_cannot_be_started_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Process:
        raise StartError("no process more")

    spares = ProcessSpares(2, refuse)
    spares.start()
    assert spares.left == 0
    assert caplog.text.count("a spare cannot start: no process more") == 2


def test_a_process_that_has_ended_takes_no_place() -> None:
    dead, alive = Process(has_ended=True), Process()
    spares = started(dead, alive)
    assert spares.left == 1
    assert spares.set_aside(4, ()) == 4
    assert dead.released
    assert spares.set_aside(4, ()) == 4, "it was not started, and is still set aside"
    assert spares.set_aside(5, ()) is None
    assert spares.take(5) is None
    assert spares.take(4) is alive
    assert spares.take(4) is None
    assert spares.close() == []


def test_processes_that_are_set_aside_are_ended_too() -> None:
    first, second = Process(), Process()
    spares = started(first, second)
    spares.set_aside(4, ())
    assert {*spares.close()} == {first, second}
    assert spares.left == 0


# --- Ray -----------------------------------------------------------------------------------------


@pytest.fixture
def spared(ray: FakeRay) -> Iterator[Any]:
    """A fleet of two servers and a spare, which is not ready yet."""
    from bml.cluster.ray.fleet import RayFleet

    made = RayFleet(replace(SPEC, spares=1), None, prints=False)
    made.start(b"train")
    assert not ray.asked("SpareActor", "new"), "servers that are awaited come before"
    made.spares.start()
    made.spares.start()
    yield made
    made._watch.close()


def is_ready(ray: FakeRay) -> None:
    from bml.cluster.ray.actors import SpareReady

    ray.answers["SpareActor", "ready"] = SpareReady(None, NOBODY, "a")


def test_servers_do_not_wait_for_spares(ray: FakeRay, spared: Any) -> None:
    called = [call[:2] for call in ray.calls]
    assert called.index(("ServerActor 1", "run")) < called.index(("SpareActor", "new"))
    assert called.count(("SpareActor", "new")) == 1
    assert spared.spares.left == 0
    is_ready(ray)
    assert waits(spared, lambda: spared.spares.left == 1) == []
    assert ray.asked("SpareActor", "stand_by") == [()]


def opened(monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
    """These nodes are there when spares are started."""
    there = [Machine("127.0.0.1", node, 2.0) for node in nodes]
    monkeypatch.setattr("bml.cluster.ray.spares.open_machines", lambda: there)


def test_spares_of_a_job_on_one_machine_wait_there(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses reach nobody from a machine that joins meanwhile."""
    from bml.cluster.ray.fleet import RayFleet

    nodes = list[str]()
    monkeypatch.setattr(RayFleet, "_spare", lambda self, node: nodes.append(node) or Actor(ray, "SpareActor"))
    fleet = RayFleet(replace(SPEC, spares=2), None, prints=False)
    fleet.start(b"train")
    opened(monkeypatch, "a", "b")
    fleet.spares.start()
    assert nodes == ["a", "a"]
    fleet.close()


@pytest.mark.parametrize("nodes", [(), ("b",)])
def test_a_job_goes_on_without_spares_where_no_machine_takes_them(
    nodes: tuple[str, ...], ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bml.cluster.ray.fleet import RayFleet

    fleet = RayFleet(replace(SPEC, spares=2), None, prints=False)
    fleet.start(b"train")
    opened(monkeypatch, *nodes)
    fleet.spares.start()
    assert not ray.asked("SpareActor", "new")
    assert "no Ray node takes the 2 spares" in caplog.text
    fleet.close()


def test_a_spare_becomes_the_lost_server(ray: FakeRay, spared: Any) -> None:
    is_ready(ray)
    waits(spared, lambda: spared.spares.left == 1)
    assert spared.spares.set_aside(1, ()) == 1
    assert spared.spares.left == 0
    ray.answers["SpareActor", "contact"] = (contact(1), NOBODY)
    spared.join(1, 3, threading.Event())
    ((_, server, place, incarnation, _),) = ray.asked("SpareActor", "become")
    assert (server, incarnation) == (1, 3)
    assert place is not None
    assert len(ray.asked("ServerActor 1", "new")) == 1, "no other actor is started"
    assert ray.asked("CoordinatorActor", "join") == [(1, 3, contact(1))]
    ray.answers["SpareActor", "stand_by"] = None
    ray.answers["SpareActor", "run"] = cloudpickle.dumps(report(1))
    assert waits_for(spared, len) == [Reported(report(1))]
    assert spared.spares.set_aside(0, ()) is None


def test_a_spare_that_dies_waits_no_more(ray: FakeRay, spared: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ray.exceptions import ActorDiedError

    is_ready(ray)
    waits(spared, lambda: spared.spares.left == 1)
    ray.answers["SpareActor", "stand_by"] = ActorDiedError()
    assert waits(spared, lambda: spared.spares.left == 0) == []
    assert "a spare is lost: The actor died" in caplog.text
    assert spared.spares.set_aside(1, ()) is None
    assert not [each for each in spared.wait(0.01) if isinstance(each, Died)]


def unreached(kind: str) -> Exception:
    from ray.exceptions import ObjectLostError

    return unavailable() if kind == "unavailable" else ObjectLostError("ab" * 28, None, "")


@pytest.mark.parametrize("kind", ["unavailable", "lost"])
def test_a_spare_that_ray_does_not_reach_is_asked_again(kind: str, ray: FakeRay, spared: Any) -> None:
    """Or nobody would know that it is ready, or that it has died later."""
    from ray.exceptions import ActorDiedError

    ray.answers["SpareActor", "ready"] = unreached(kind)
    waits(spared, lambda: len(ray.asked("SpareActor", "ready")) > 2)
    assert spared.spares.left == 0
    is_ready(ray)
    waits(spared, lambda: spared.spares.left == 1)
    ray.answers["SpareActor", "stand_by"] = unreached(kind)
    waits(spared, lambda: len(ray.asked("SpareActor", "stand_by")) > 2)
    assert spared.spares.left == 1
    ray.answers["SpareActor", "stand_by"] = ActorDiedError()
    waits(spared, lambda: spared.spares.left == 0)


def test_a_spare_that_is_used_is_not_asked_again(ray: FakeRay, spared: Any) -> None:
    is_ready(ray)
    waits(spared, lambda: spared.spares.left == 1)
    ray.answers["SpareActor", "stand_by"] = unavailable()
    waits(spared, lambda: spared.spares._unheard)
    assert spared.spares.set_aside(1, ()) == 1
    waits(spared, lambda: not spared.spares._unheard)
    assert spared.spares.calls() == []


def test_spares_that_are_not_needed_are_ended(ray: FakeRay, spared: Any) -> None:
    spared.close()
    assert ray.asked("SpareActor", "killed") == [()]
    spared.spares.close()
    assert len(ray.asked("SpareActor", "killed")) == 1


def test_a_spare_on_a_node_that_drains_takes_no_place(
    ray: FakeRay, spared: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bml.cluster.ray.watching import cluster

    monkeypatch.setattr(cluster, "_LOOK_S", 0.01)
    monkeypatch.setattr(spared._watch, "home", "that of the launcher")
    is_ready(ray)
    waits(spared, lambda: spared.spares.left == 1)
    ray.draining = {"another": 0}
    waits(spared, lambda: spared._watch.draining)
    assert spared.spares.left == 1
    ray.draining = {"a": 0}
    assert waits(spared, lambda: spared.spares.left == 0) == []
    assert ray.asked("SpareActor", "killed") == [()]
    assert "a spare is lost: its Ray node is draining" in caplog.text
    assert spared.spares.set_aside(1, ()) is None


def test_without_rays_head_spares_end_themselves(ray: FakeRay, spared: Any) -> None:
    spared.spares.abandon()
    assert ray.asked("SpareActor", "exit") == [()]
    assert ray.asked("SpareActor", "killed") == []
    assert spared.spares.set_aside(1, ()) is None


def test_a_spare_is_told_its_end_before_it_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends it, and lets it leave when it is a server."""
    ray_actors = pytest.importorskip("bml.cluster.ray.actors")
    signals, left = list[int](), list[str]()
    monkeypatch.setattr(ray_actors, "leave_on_sigterm", lambda server: None)
    monkeypatch.setattr(ray_actors, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_actors.os, "kill", lambda process, number: signals.append(number))

    class Server:
        contact = contact(1)

        def __init__(self, *arguments: Any) -> None:
            pass

        def leave(self, why: str) -> None:
            left.append(why)

    monkeypatch.setattr(ray_actors, "Server", Server)
    watches = list[Any]()
    monkeypatch.setattr(ray_actors.HeadWatch, "of_this_cluster", watches.append)
    spare = ray_actors.SpareActor(SPEC, None, b"no pickle")
    spare.leave("now")
    assert (len(signals), left) == (1, [])
    spare.become(SPEC, 1, None, 2)
    spare.stand_by()
    spare.leave("now")
    assert (len(signals), left) == (1, ["now"])
    assert spare.contact()[0] == contact(1)
    assert watches == [spare._leave_without_head], "as a server, it looks for Ray's head"


def test_a_machine_has_nics_for_each_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_actors = pytest.importorskip("bml.cluster.ray.actors")
    monkeypatch.setenv("BML_NICS", "10.7.0.{n}, 10.7.1.{n}")
    assert ray_actors.nic_addresses(3, 2, socket.gethostname()) == ("10.7.0.4", "10.7.1.4")
    monkeypatch.setattr(ray_actors, "get_node_ip_address", lambda: "10.7.0.1")
    assert ray_actors._own_networks(SPEC) is None, "a spare has no number yet"
