"""Namespaces of other programs stay, whatever their names, and no job takes another's fabric. Needs root."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from bml import fabric
from bml.cli import main
from bml.fabric import inventory, namespace, state
from bml.pytest_plugin import BringUp
from bml.topology import FabricError

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def name(emulated_fabric: BringUp) -> Iterator[str]:
    """A fabric name of this test alone; a fabric that has it at the end is removed."""
    chosen = f"v{os.getpid()}"
    yield chosen
    for each in inventory.others(chosen):
        namespace.remove(each)
    for each in (chosen, f"{chosen}2", f"{chosen}3"):
        fabric.down(each)


@pytest.fixture
def interrupted() -> Iterator[threading.Event]:
    """Is set when Ctrl-C has been heard."""
    heard = threading.Event()

    def hear(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    yield heard
    signal.signal(signal.SIGINT, before)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["fabric", *arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize("command", [["down"], ["up", "bcube:2x2"]])
def test_namespaces_of_others_are_named_and_stay(name: str, command: list[str]) -> None:
    theirs = [f"{name}-s1", f"{name}-switches"]
    for each in theirs:
        namespace.create(each)
    code, output = run(*command, "--name", name)
    assert code == 1
    assert f"bml did not make the network namespaces {', '.join(theirs)}" in output
    assert [each for each in namespace.names() if each.startswith(name)] == theirs
    assert all(namespace.is_alive(each) for each in theirs)
    with pytest.raises(FabricError, match="no emulated fabric"):
        fabric.find(name)


def test_down_removes_ours_and_leaves_what_others_put_in_its_place(name: str) -> None:
    network = fabric.up("bcube:2x2", name=name)
    theirs = network.namespace(3)
    namespace.remove(theirs)
    namespace.create(theirs)
    with pytest.raises(FabricError, match=f"{theirs} has no device b0: bml did not make the namespace"):
        network.cut(3, 0)
    with pytest.raises(FabricError, match=f"bml did not make the network namespace {theirs}"):
        network.kill_machine(3)
    with pytest.raises(FabricError, match=f"bml did not make the network namespaces {theirs},"):
        network.down()
    assert [each for each in namespace.names() if each.startswith(name)] == [theirs]
    assert namespace.is_alive(theirs)


def without_mounts(name: str) -> list[str]:
    """Do what the restart of a container does: the files of namespaces stay, what is behind them is gone."""
    spaces = [each for each in namespace.names() if each.startswith(name)]
    for each in spaces:
        namespace.remove(each)
        os.close(os.open(namespace.path_of(each), os.O_CREAT | os.O_EXCL))
    return spaces


@pytest.mark.parametrize("then", ["up", "down"])
def test_files_without_a_namespace_count_as_left_behind(name: str, then: str) -> None:
    network = fabric.up("bcube:2x2", name=name)
    assert len(without_mounts(name)) == 5
    assert not fabric.is_up(name)
    with pytest.raises(FabricError, match="is not whole"):
        fabric.find(name)
    if then == "up":
        assert fabric.up("bcube:2x2", name=name).has_carrier(3, 0)
    assert network.down() == {}
    assert not [each for each in namespace.names() if each.startswith(name)]


def test_a_file_that_no_fabric_of_ours_knows_stays(name: str) -> None:
    theirs = f"{name}-s1"
    os.close(os.open(namespace.path_of(theirs), os.O_CREAT | os.O_EXCL))
    with pytest.raises(FabricError, match=f"bml did not make the network namespaces {theirs},"):
        fabric.down(name)
    assert theirs in namespace.names()


def test_a_second_job_gets_a_fabric_of_its_own(name: str) -> None:
    first, made = fabric.use_or_make("bcube:2x2", name)
    assert (first.name, made) == (name, True)
    second, made = fabric.use_or_make("bcube:2x2", name)
    assert (second.name, made) == (f"{name}2", True)
    first.down()
    assert second.has_carrier(3, 0)
    for attempt in (lambda: fabric.use(second.name), lambda: fabric.up("bcube:2x2", name=second.name)):
        with pytest.raises(FabricError, match=rf"was made for a job \(process {os.getpid()}\)"):
            attempt()


def test_a_second_job_leaves_the_fabric_that_a_user_keeps_up_under_the_next_name(name: str) -> None:
    fabric.use_or_make("bcube:2x1", name)
    kept = fabric.up("bcube:2x1", name=f"{name}2")
    kept.cut(1, 0)
    namespace.create(f"{name}3-s1")
    second, made = fabric.use_or_make("bcube:2x1", name)
    try:
        assert (second.name, made) == (f"{name}4", True)
        assert not kept.has_carrier(1, 0)
    finally:
        second.down()
        namespace.remove(f"{name}3-s1")


def test_a_running_jobs_fabric_is_not_taken_from_it(name: str) -> None:
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from bml import fabric; fabric.use_or_make('bcube:2x1', '{name}'); print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        job = rf"was made for a job \(process {other.pid}\)"
        with pytest.raises(FabricError, match=job):
            fabric.down(name)
        assert fabric.is_up(name)
        namespace.remove(f"{name}-s1")
        for attempt in (lambda: fabric.down(name), lambda: fabric.up("bcube:2x2", name=name)):
            with pytest.raises(FabricError, match=job):
                attempt()
        other.kill()
    fabric.down(name)
    assert not [each for each in namespace.names() if each.startswith(f"{name}-")]


def test_a_removed_nic_is_named(name: str) -> None:
    network = fabric.up("bcube:2x1", name=name)
    subprocess.run(["ip", "-n", network.namespace(1), "link", "del", "b0"], check=True)
    for attempt in (lambda: network.has_carrier(1, 0), lambda: network.cut(1, 0)):
        with pytest.raises(FabricError, match=f"{name}-s1 has no device b0: .* was removed"):
            attempt()


def test_a_job_uses_the_fabric_that_a_user_keeps_up(name: str) -> None:
    kept = fabric.up("bcube:2x2", "50mbit", name=name)
    assert fabric.use_or_make("bcube:3x2", name) == (kept, False)
    assert fabric.use(name) == kept


def test_fabrics_of_jobs_that_were_killed_are_removed(name: str) -> None:
    program = f"from bml import fabric; import os; fabric.use_or_make('bcube:2x2', '{name}'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert not fabric.is_up(name)
    other, _ = fabric.use_or_make("bcube:2x1", f"{name}3")
    assert not [each for each in namespace.names() if each.startswith(f"{name}-")]
    other.down()


def test_a_fabric_that_a_process_shares_is_removed_when_that_has_ended(name: str) -> None:
    program = f"from bml import fabric; import os; fabric.up('bcube:2x1', name='{name}', maker=os.getpid())"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; print(flush=True); input(); os._exit(9)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert fabric.use(name).has_carrier(1, 0), "others may use it meanwhile"
        assert fabric.use_or_make("bcube:2x1", name) == (fabric.find(name), False)
    fabric.up("bcube:2x1", name=f"{name}3")
    assert not [each for each in namespace.names() if each.startswith(f"{name}-")]


def test_a_process_with_the_id_of_a_dead_job_does_not_keep_its_fabric(name: str) -> None:
    network, _ = fabric.use_or_make("bcube:2x1", name)
    known = state.load(name)
    assert known is not None
    assert not known.orphaned
    with state.locked():
        saved = state.State(known.fabric, known.condition, True, os.getpid(), known.maker_began - 1)
        state.save(name, saved)
    assert not fabric.is_up(name)
    network.down()


def test_a_lock_that_is_held_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bml.fabric.network._PATIENCE_S", 0.1)
    state.FOLDER.mkdir(exist_ok=True)
    descriptor = os.open(state.FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        reason = fabric.obstacle()
    finally:
        os.close(descriptor)
    assert reason is not None
    assert "another command has been changing emulated fabrics for more than 0.1 s" in reason


def test_a_machine_on_which_no_device_can_be_made_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("bml.fabric.netlink._make_bridges", refused)
    reason = fabric.obstacle()
    assert reason is not None
    assert "needs CAP_NET_ADMIN" in reason
    assert not [each for each in namespace.names() if each.startswith("probe")]


def test_ctrl_c_while_the_probe_is_removed_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, interrupted: threading.Event
) -> None:
    destroy = inventory.netlink().destroy

    def in_the_middle(spaces: list[str]) -> dict[int, str]:
        if spaces:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            interrupted.wait(10)
        left: dict[int, str] = destroy(spaces)
        return left

    monkeypatch.setattr("bml.fabric.netlink.destroy", in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        fabric.obstacle()
    assert interrupted.is_set()
    assert not [each for each in namespace.names() if each.startswith(f"probe{os.getpid()}-")]
    assert state.load(f"probe{os.getpid()}") is None
