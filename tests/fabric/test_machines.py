"""A namespace as a machine: its processes end together, it has its own folders, faults break its cables."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from bml.cluster.emulated import ray_nodes
from bml.cluster.emulated.ray_nodes import EmulatedRayFleet
from bml.cluster.fleets.actuators import FaultListener, apply_fault_through
from bml.cluster.fleets.machines import MACHINE_FOLDER, Machines
from bml.cluster.spec.job import JobSpec, Place
from bml.errors import StartError
from bml.fabric import EmulatedFabric, namespace
from bml.faults import Fault
from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

TOKEN = b"t" * 32
ENVIRONMENT = dict(os.environ)


@pytest.fixture
def network(emulated_fabric: BringUp) -> EmulatedFabric:
    return emulated_fabric("bcube:2x1")


@pytest.fixture
def machines(network: EmulatedFabric) -> Iterator[Machines]:
    kept = Machines((), prints=True)
    yield kept
    kept.close()


def run(machines: Machines, network: EmulatedFabric, server: int, script: str) -> None:
    command = [sys.executable, "-c", script]
    machines.start(str(server), network.namespace_path(server), command, ENVIRONMENT, logged=True)


def ended(machines: Machines) -> tuple[str, int, str]:
    assert wait([machines.sock], 20), "no machine ended"
    return machines.hear()


def test_a_machine_has_its_own_network_folders_and_last_words(
    machines: Machines, network: EmulatedFabric
) -> None:
    script = (
        "import os, socket, sys\n"
        f"print(sorted(os.listdir({MACHINE_FOLDER!r})), os.listdir('/dev/shm'))\n"
        "print(sorted(name for _, name in socket.if_nameindex()))\n"
        "open('/dev/shm/left', 'w')\n"
        "sys.exit(3)"
    )
    run(machines, network, 1, script)
    machine, code, words = ended(machines)
    assert (machine, code) == ("1", 3)
    assert words == "['start.log'] []\n['b0', 'f0', 'lo', 'm0']"
    assert not Path("/dev/shm/left").exists()


def test_a_machine_ends_as_its_command_does(machines: Machines, network: EmulatedFabric) -> None:
    run(machines, network, 0, "import os; os.kill(os.getpid(), 9)")
    assert ended(machines) == ("0", -signal.SIGKILL, "")


def test_what_a_machine_leaves_behind_ends_with_the_agent(
    machines: Machines, network: EmulatedFabric
) -> None:
    script = (
        "import subprocess\n"
        "subprocess.Popen(['sh', '-c', 'sleep 300 & sleep 300'], start_new_session=True)\n"
        "subprocess.call(['sleep', '300'])"
    )
    run(machines, network, 0, script)
    until(lambda: list(namespace.processes([network.namespace(0)]).values()).count("sleep") == 3)
    machines.close()
    assert namespace.processes([network.namespace(0)]) == {}


def test_a_node_dies_with_all_its_processes_and_no_other_does(
    machines: Machines, network: EmulatedFabric
) -> None:
    for server in (0, 1):
        run(machines, network, server, "import subprocess; subprocess.call(['sleep', '300'])")
    for server in (0, 1):
        until(lambda server=server: "sleep" in namespace.processes([network.namespace(server)]).values())
    assert namespace.kill(network.namespace(0)) == 3
    assert ended(machines) == ("0", -signal.SIGKILL, "")
    assert "sleep" in namespace.processes([network.namespace(1)]).values()


def test_a_launcher_that_is_killed_takes_its_machines_along(network: EmulatedFabric) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, time; from bml.cluster.fleets.machines import Machines; "
            "made = Machines((), True); "
            f"made.start('0', {network.namespace_path(0)!r}, ['sleep', '300'], dict(os.environ), True); "
            "time.sleep(300)",
        ],
        start_new_session=True,
    )
    until(lambda: "sleep" in namespace.processes([network.namespace(0)]).values())
    family = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert namespace.processes([network.namespace(0)]) == {}


def test_an_agent_that_may_not_says_why() -> None:
    # Without rights, as in most containers.
    drop = (
        "import os; from bml.cluster.fleets import machines; os.getuid() or os.setuid(65534); machines.main()"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", drop, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    with ours:
        assert json.loads(ours.recv(1 << 16)) == {
            "is": "cannot",
            "name": "none",
            "why": "cannot have a PID namespace: Operation not permitted; "
            "machines of their own need root and CAP_SYS_ADMIN",
        }
    assert process.wait() == 1


def test_servers_have_cables_broken_over_the_management_network(network: EmulatedFabric) -> None:
    applied: list[Fault] = []

    def apply_fault(fault: Fault, done: object) -> None:
        assert callable(done)
        applied.append(fault)
        threading.Timer(0.05, done).start()

    host = network.layout.coordinator_address
    listener = FaultListener(Path(network.namespace_path(None)).name, host, TOKEN, apply_fault)
    try:
        fault = Fault.parse("cut:1/0", at_once=True)
        before = time.monotonic()
        namespace.inside(
            network.namespace(1), lambda: apply_fault_through(listener.endpoint, TOKEN, 5.0)(fault)
        )
        assert applied == [fault]
        assert time.monotonic() - before >= 0.05, "it returns when it is done"
        # Whoever has another token, or none, is refused, and the next one is served all the same.
        namespace.inside(
            network.namespace(1), lambda: apply_fault_through(listener.endpoint, b"x" * 32, 5.0)(fault)
        )
        with namespace.inside(
            network.namespace(1), lambda: socket.create_connection(listener.endpoint)
        ) as sock:
            sock.sendall(b"cut:1/0")
        assert applied == [fault]
        namespace.inside(
            network.namespace(0), lambda: apply_fault_through(listener.endpoint, TOKEN, 5.0)(fault)
        )
        assert applied == [fault, fault]
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "_free_nbytes",
            lambda: 500 << 20,
            "need about 1050 MiB of memory, 500 MiB are free: use the launcher",
        ),
        ("find_spec", lambda name: None, "Ray is not installed: pip install"),
    ],
)
def test_what_cannot_be_is_said_first(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, message: str
) -> None:
    monkeypatch.setattr(ray_nodes, name, value)
    spec = JobSpec("bcube:2x1", emulated="bml")
    fleet = EmulatedRayFleet(spec, False, lambda server: Place(), lambda *_: None, lambda text: None)
    with pytest.raises(StartError, match=message):
        fleet.start(b"")
    fleet.close()


def until(condition: object, within_s: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + within_s
    while True:
        with suppress(FileNotFoundError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)
