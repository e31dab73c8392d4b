"""What users see of the transport in use: `bml status`, `bml doctor`, and the rows of `bml bench`."""

import importlib

import pytest

from bml.cli.status import _transport_lines
from bml.cluster.spec.job import JobSpec
from bml.errors import UsageError
from bml.lab.bench import rows
from bml.lab.bench.rows import Block, Traffic
from bml.topology.errors import FabricError
from bml.transport.verbs.devices import Gid

doctor = importlib.import_module("bml.cli.doctor")  # the package has the command by that name
GIDS = [
    Gid("mlx5_0", 1, 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
    Gid("mlx5_0", 1, 3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
]


def said(name, traffic_class=0, devices=(), fallback="", zero_copy_to=()):
    return {
        "transport": {
            "name": name,
            "traffic_class": traffic_class,
            "devices": list(devices),
            "fallback": fallback,
            "zero_copy_to": list(zero_copy_to),
        }
    }


def test_status_says_it_once_for_all_servers_alike():
    servers = {
        "0": said("verbs", 104, ["mlx5_0 port 1, GID 3 (::ffff:10.0.0.1, RoCE v2)"]),
        "1": said("tcp", fallback="no RDMA device has the address 10.0.0.2"),
        "10": said("tcp"),
        "2": said("tcp"),
        "3": {"answers": False},
        "4": said("tcp", zero_copy_to=[5]),
        "5": said("tcp", zero_copy_to=[4, 6]),
    }
    assert _transport_lines(servers) == [
        "transport of server 0: verbs, traffic class 104, "
        "NIC 0 mlx5_0 port 1, GID 3 (::ffff:10.0.0.1, RoCE v2)",
        "transport of server 1: tcp, instead of verbs: no RDMA device has the address 10.0.0.2",
        "transport of server 2, 10: tcp",
        "transport of server 4: tcp, but payloads to server 5 through shared memory",
        "transport of server 5: tcp, but payloads to servers 4, 6 through shared memory",
    ]


@pytest.mark.parametrize(
    ("gids", "pyverbs", "nics", "usable", "says"),
    [
        ([], False, "", False, "this machine has no RDMA device"),
        (GIDS, False, "", False, "devices mlx5_0, but no pyverbs: pip install 'bml[rdma]'"),
        (GIDS, True, "", True, "GIDs mlx5_0:3 0000:0000:0000:0000:0000:ffff:0a00:0001"),
        (GIDS, True, "10.0.0.1", True, "mlx5_0:3"),
        (GIDS, True, "10.0.0.9,10.1.0.9", False, "no RDMA device has the address 10.0.0.9"),
    ],
)
def test_doctor_says_whether_verbs_would_work(monkeypatch, gids, pyverbs, nics, usable, says):
    def choose(address, setting):
        if address != "10.0.0.1":
            raise FabricError(f"no RDMA device has the address {address}")

    monkeypatch.setattr(doctor, "gids", lambda: iter(gids))
    monkeypatch.setattr(doctor, "choose", choose)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: pyverbs or None)
    monkeypatch.setenv("BML_NICS", nics)
    check = doctor._verbs()
    assert (check.usable, says in check.why) == (usable, True), check
    assert ("falls back to tcp" in check.why) is not usable


def test_copies_are_per_byte_moved_over_all_turns():
    before, after = Traffic(100, 100, 10, 0), Traffic(1100, 600, 110, 250)
    turn = Block((0.1,), 0.1, 0.05, after.since(before))
    assert turn.traffic == (1000, 500, 100, 250, 0, 0)
    row = rows.row("bml", 4096, 3, [turn, Block((0.1,), 0.1, 0.05), turn], wrong=0, theory_s=1.0, bound_s=1.0)
    assert (row.copies_sent, row.copies_received) == (0.1, 0.5)
    assert rows.line(row).split()[-1] == "0.10/0.50"
    assert rows.copies([Block((0.1,), 0.1, 0.05)]) == (None, None)
    referenced = Block((0.1,), 0.1, 0.05, Traffic(10, 10, 0, 500, 990, 990))
    assert rows.copies([referenced]) == (0, 0.5)


@pytest.mark.parametrize("traffic_class", [-1, 256])
def test_a_traffic_class_is_a_byte(traffic_class):
    with pytest.raises(UsageError, match="0 to 255, a DSCP times 4"):
        JobSpec("bcube:2x1", traffic_class=traffic_class)
