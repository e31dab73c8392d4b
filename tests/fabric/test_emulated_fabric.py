"""A fabric in network namespaces: it is brought up, broken, healed and removed completely. Needs root."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from wires_in_namespaces import goodputs, reaches

from bml import fabric
from bml.cli import main
from bml.fabric import namespace, state
from bml.fabric.condition import Damage
from bml.fabric.layout import belongs
from bml.pytest_plugin import BringUp
from bml.topology import FabricError

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

MBIT = 1_000_000
#: A caller that dies in the middle: SHAPE and NAME are replaced.
CRASH = """
import os
from bml import fabric
from bml.fabric import netlink
netlink.settle = lambda *arguments: os._exit(9)
fabric.up("SHAPE", name="NAME")
"""


@pytest.fixture
def name(emulated_fabric: BringUp) -> Iterator[str]:
    """A fabric name of this test alone; the fabric is taken down even if the test fails."""
    chosen = f"u{os.getpid()}"
    yield chosen
    fabric.down(chosen)


def traces(name: str) -> list[str]:
    known = [str(path) for path in state.FOLDER.glob(f"{name}*")]
    return known + [each for each in namespace.names() if belongs(each, name)]


def links_here() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def bml(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["fabric", *arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "shape",
    [pytest.param("bcube:3x2", marks=pytest.mark.smoke), "torus:3x2", "switch:4", "graph:0-1-2,2-3,3-0,1-3"],
)
def test_up_again_and_down_leave_nothing(name: str, shape: str) -> None:
    before = links_here()
    network = fabric.up(shape, "100mbit", name=name)
    assert len(traces(name)) == network.fabric.n_servers + 2
    assert fabric.up(shape, "100mbit", name=name) == network, "again, it changes nothing"
    assert fabric.find(name).status() == network.status()
    assert network.status()["rate"] == 100 * MBIT
    for server, level in network.fabric.links:
        assert network.has_carrier(server, level)
    assert links_here() == before, "nothing of this machine's own network was touched"
    assert network.down() == {}
    assert traces(name) == []
    assert network.down() == {}, "down again is no error"
    with pytest.raises(FabricError, match="no emulated fabric"):
        network.cut(0, 0)


def test_up_with_another_shape_says_what_is_there(name: str) -> None:
    fabric.up("bcube:2x2", "100mbit", name=name)
    with pytest.raises(FabricError, match=f"a bcube:2x2 is up already.*bml fabric down --name {name}"):
        fabric.up("bcube:3x2", "100mbit", name=name)
    with pytest.raises(FabricError, match=r"is up already with 100mbit and 100mbit.*not 200mbit and 200mbit"):
        fabric.up("bcube:2x2", "200mbit", name=name)


@pytest.mark.parametrize("again", ["down", "up"])
def test_what_a_crash_left_behind_is_removed(name: str, again: str) -> None:
    program = CRASH.replace("SHAPE", "bcube:3x2").replace("NAME", name)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert len(traces(name)) == 11
    with pytest.raises(FabricError, match=f"is not whole: bml fabric down --name {name}"):
        fabric.find(name)
    if again == "up":
        fabric.up("bcube:2x2", name=name)
        assert len(traces(name)) == 6
    fabric.down(name)
    assert traces(name) == []


def test_a_build_that_fails_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bml.fabric.netlink._configure", lambda layout, node: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fabric.up("bcube:2x2", name=name)
    assert traces(name) == []


def test_namespaces_that_another_program_removed(name: str) -> None:
    network = fabric.up("bcube:2x2", name=name)
    namespace.remove(network.namespace(3))
    with pytest.raises(FabricError, match="is not whole"):
        network.status()
    assert fabric.up("bcube:2x2", name=name).has_carrier(3, 0)


def test_two_fabrics_at_once(name: str, emulated_fabric: BringUp) -> None:
    one, other = emulated_fabric("bcube:2x2"), fabric.up("bcube:2x2", name=name)
    other.cut(1, 0)
    assert one.has_carrier(1, 0)
    other.down()
    assert one.status()["failures"] == []
    assert reaches(one, 0, 1, 0, within_s=20)


def test_down_names_the_processes_that_are_still_inside(name: str) -> None:
    network = fabric.up("bcube:2x2", name=name)
    path = network.namespace_path(1)
    sleeper = namespace.inside(network.namespace(1), lambda: subprocess.Popen(["sleep", "60"]))
    assert os.path.exists(path)
    try:
        assert network.down() == {sleeper.pid: "sleep"}
    finally:
        sleeper.kill()
        sleeper.wait()
    assert traces(name) == []


def test_down_removes_the_cables_of_namespaces_that_live_on(name: str) -> None:
    """A connection that cannot say goodbye over a cut cable keeps its namespace for minutes."""
    network = fabric.up("bcube:2x2", name=name)
    held = [open(network.namespace_path(server)) for server in (None, *network.fabric.servers)]  # noqa: SIM115
    network.down()
    for each in held:
        with each:
            path = f"/proc/self/fd/{each.fileno()}"
            assert namespace.inside(path, socket.if_nameindex) == [(1, "lo")]


def test_a_cable_that_two_jobs_cut_works_when_both_have_healed_it(emulated_fabric: BringUp) -> None:
    network, cut = emulated_fabric("bcube:2x2"), Damage.parse("cut:1/0")
    assert network.apply(cut, "first")
    assert network.apply(cut, "second")
    network.undo(cut, "first")
    assert not network.has_carrier(1, 0)
    network.undo(cut, "second")
    assert network.has_carrier(1, 0)


def test_goodput_is_the_rate_less_the_headers(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    (goodput,) = goodputs(network, [(4, 3, 0)], seconds=2)
    # The bucket and the receiver's buffer, filled before the clock started, may add a hundredth.
    assert 0.90 <= goodput / (100 * MBIT * fabric.GOODPUT) <= 1.02


def test_every_nic_has_the_rate_at_the_same_time_both_ways(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:2x2", "50mbit")
    links = [(0, 1, 0), (1, 0, 0), (0, 2, 1), (2, 0, 1)]
    for goodput in goodputs(network, links, seconds=1):
        assert 0.85 <= goodput / (50 * MBIT * fabric.GOODPUT) <= 1.02


def test_two_senders_share_the_receivers_cable(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "50mbit")
    total = sum(goodputs(network, [(3, 4, 0), (5, 4, 0)], seconds=1))
    assert 0.85 <= total / (50 * MBIT * fabric.GOODPUT) <= 1.02


def test_shape_and_slow(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    network.slow(4, 0, "10mbit")
    network.shape("50mbit")
    assert network.status()["failures"] == ["slow:4/0,rate=10mbit"]
    slow, normal = goodputs(network, [(3, 4, 0), (7, 4, 1)], seconds=1)
    # The bucket of 75 kB is a twentieth of what a second carries at this rate.
    assert 0.85 <= slow / (10 * MBIT * fabric.GOODPUT) <= 1.1
    assert 0.85 <= normal / (50 * MBIT * fabric.GOODPUT) <= 1.02
    network.heal(4, 0)
    assert network.status()["failures"] == []


@pytest.mark.parametrize("shape", ["bcube:3x2", pytest.param("torus:3x2", marks=pytest.mark.smoke)])
def test_cut_takes_the_carrier_and_heal_brings_traffic_back(emulated_fabric: BringUp, shape: str) -> None:
    network = emulated_fabric(shape)
    other = network.fabric.neighbours(1, 0)[0]
    network.cut(1, 0)
    assert not network.has_carrier(1, 0)
    if not network.layout.is_direct:
        assert network.has_carrier(other, 0), "the other side hears nothing and sees nothing"
    assert not reaches(network, 1, other, 0, within_s=0.2)
    assert not reaches(network, other, 1, 0, within_s=0.2)
    network.heal(1, 0)
    assert network.has_carrier(1, 0)
    assert reaches(network, 1, other, 0, within_s=20)
    assert reaches(network, other, 1, 0, within_s=20)


@pytest.mark.parametrize("shape", ["bcube:3x2", "torus:3x2"])
def test_black_hole_keeps_the_carrier(emulated_fabric: BringUp, shape: str) -> None:
    network = emulated_fabric(shape)
    other = network.fabric.neighbours(1, 0)[0]
    network.blackhole(1, 0)
    assert network.has_carrier(1, 0)
    assert network.has_carrier(other, 0)
    assert not reaches(network, 1, other, 0, within_s=0.2)
    assert not reaches(network, other, 1, 0, within_s=0.2)
    network.heal(1, 0)
    assert reaches(network, 1, other, 0, within_s=20)


def test_a_dead_switch_takes_all_its_carriers(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2")
    network.cut(5, 0)
    network.switch_down(0, 1)
    assert [network.has_carrier(server, 0) for server in range(9)] == [True] * 3 + [False] * 3 + [True] * 3
    assert reaches(network, 0, 1, 0, within_s=20)
    network.heal(5, 0)
    assert not network.has_carrier(5, 0), "its switch is still dead"
    network.switch_up(0, 1)
    assert reaches(network, 3, 5, 0, within_s=20)


def test_commands(name: str) -> None:
    code, output = bml("up", "bcube:3x2", "--rate", "100mbit", "--one-switch-rate", "200mbit", "--name", name)
    assert code == 0, output
    assert "9 servers, 6 switches, 100mbit a NIC, one-switch network 200mbit" in output
    for command, failures in [
        (["cut", "4/0"], ["cut:4/0"]),
        (["blackhole", "4/0"], ["blackhole:4/0"]),
        (["slow", "4/1", "--rate", "10mbit"], ["blackhole:4/0", "slow:4/1,rate=10mbit"]),
        (["switch-down", "0/2"], ["blackhole:4/0", "slow:4/1,rate=10mbit", "switch:0/2"]),
        (["switch-up", "0/2"], ["blackhole:4/0", "slow:4/1,rate=10mbit"]),
        (["heal", "4/0"], ["slow:4/1,rate=10mbit"]),
        (["shape", "--rate", "50mbit"], ["slow:4/1,rate=10mbit"]),
        (["heal", "--all"], []),
        (["status"], []),
    ]:
        code, output = bml(*command, "--json", "--name", name)
        assert code == 0, output
        now = json.loads(output)
        assert now["failures"] == failures
        assert (now["servers"], now["switches"]) == (9, 6)
    assert now["rate"] == 50 * MBIT
    assert now["one_switch_rate"] == 200 * MBIT
    assert now["addresses"]["4"]["nics"] == ["10.10.1.5", "10.11.1.5"]
    assert bml("cut", "4/0", "--name", name) == (
        0,
        "9 servers, 6 switches, 50mbit a NIC, one-switch network 200mbit\nbroken: cut:4/0\n",
    )
    code, output = bml("down", "--name", name, "--json")
    assert json.loads(output) == {"name": name, "processes": {}}
    assert bml("status", "--name", name) == (
        1,
        f"Error: no emulated fabric {name} is up: bml fabric up bcube:3x2 --name {name}\n",
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "bcube:9x9"], "servers"),
        (["up", "ring:9"], "ring"),
        (["up", "bcube:2x2", "--rate", "quick"], "'quick' is no rate"),
        (["up", "bcube:2x2", "--name", "No"], "is no name"),
        (["cut", "4"], "cut:4/0"),
        (["heal"], "--all"),
        (["shape"], "--rate"),
    ],
)
def test_bad_usage(arguments: list[str], message: str) -> None:
    code, output = bml(*arguments)
    assert code == 2
    assert message in output


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    code, output = bml("up", "bcube:2x2", "--name", "nobody")
    assert code == 1
    assert "needs root" in output


def test_without_pyroute2(emulated_fabric: BringUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    monkeypatch.delitem(sys.modules, "bml.fabric.netlink", raising=False)
    monkeypatch.delattr(fabric, "netlink", raising=False)
    with pytest.raises(FabricError, match=r"pip install 'bml\[fabric\]'"):
        fabric.up("bcube:2x2", name="nobody")
