"""The fleet of plain processes: threads that meet, deaths before a coordinator, addresses that are set."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_ray import KILLED, SPEC, contact

from bml.cluster.fleets import fork_server, processes
from bml.cluster.fleets.fleet import Died, reachable
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.process import worker
from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.spec.constants import constants_of_one_host
from bml.cluster.spec.job import Contact, JobSpec, Place, default_nics
from bml.errors import StartError
from bml.protocol.coordinator.events import Gone
from bml.topology.errors import UsageError
from bml.transport.handshake.control import End

pytestmark = pytest.mark.timeout(60)


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
    assert [receive(first)[0] for _ in range(2)] == ["coordinator", "start"]
    first.close()
    while len(spawned.theirs) < 4:
        fleet.wait(0.01)
    second = spawned.theirs[3]
    second.settimeout(5)
    assert [receive(second)[0] for _ in range(2)] == ["coordinator", "start"]
    assert receive(second) == ("gone", SPEC.job, 1, KILLED)


@pytest.mark.usefixtures("own_logger")
def test_a_process_that_cannot_be_a_server_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_RDMA_SLOTS", "many")
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "close_on_fork", lambda again: [again.detach(), theirs][1])
    with ours, theirs:
        Outbox(ours, 1).put("server", Place(default_nics(0, 1)), SPEC, 0, None)
        worker.serve(theirs.fileno())
        (said,) = receive(ours)
    with pytest.raises(StartError, match=r"^server \d cannot start: BML_RDMA_SLOTS is 'many': give a whole"):
        reachable(0, said)


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
    assert (dialled, heard) == ([1], [Gone(1, "its process is gone: it refuses connections")])


# --- addresses ----------------------------------------------------------------------------------------


def test_each_server_takes_its_own_of_the_addresses_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_NICS", "10.7.0.{n}, 10.7.1.{n}")
    fleet = ProcessFleet(JobSpec("bcube:2x2"), prints=False)
    assert fleet._place(2).nics == ("10.7.0.3", "10.7.1.3")
    with pytest.raises(UsageError, match="for each of 1 levels"):
        ProcessFleet(SPEC, prints=False)._place(0)


def test_servers_of_one_host_choose_schedules_as_ones_that_share_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of other places, as on an emulated fabric, keep the constants that they were given."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    spec = JobSpec("bcube:3x2", transport="tcp")
    on_one_host = ProcessFleet(spec, prints=False)
    assert on_one_host.spec.constants == constants_of_one_host(spec.constants, 9)
    elsewhere = ProcessFleet(spec, prints=False, place=on_one_host._place)
    assert elsewhere.spec.constants == spec.constants


@pytest.mark.slow
def test_a_fork_server_that_cannot_run_is_named_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket may end long before it does, on a busy machine."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\neval "exec $3>&-"\nsleep 1\nexit 7\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    server = fork_server.ForkServer(prints=False)
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(StartError, match="python exited with status 7"):
        server.fork(theirs, 20.0)
    server.close()
