"""The parts of the verbs transport that need no NIC: pool, messages, devices, settings, the choice."""

from __future__ import annotations

import gc
import logging
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wires import JOB, TOKEN, Recorder, nic

from bml.io.memory import RegisteredPool, address_of
from bml.protocol.wire.frame import HEADER_NBYTES, FrameError
from bml.topology.errors import FabricError, UsageError
from bml.transport import Poller
from bml.transport.choice import Opened, open_transport
from bml.transport.links.settings import traffic_class_of
from bml.transport.verbs import devices, wire
from bml.transport.verbs.rdma import Address
from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.wire import Grant, Imm, PairHello


class Registered:
    def __init__(self) -> None:
        self.lkey = self.rkey = 1
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class Nic:
    def __init__(self, most_nbytes: int = 1 << 40) -> None:
        self.made: list[tuple[int, int, Registered]] = []
        self.most_nbytes = most_nbytes

    def register(self, address: int, nbytes: int) -> Registered:
        if nbytes > self.most_nbytes:
            raise OSError(12, "Cannot allocate memory")
        self.made.append((address, nbytes, Registered()))
        return self.made[-1][2]


@pytest.mark.slow
def test_arrays_of_a_pool_are_registered_once_and_come_back() -> None:
    pool, one = RegisteredPool(1 << 20), Nic()
    pool.add_nic(one.register)
    a = pool.empty((3, 1000), "float32")
    b = pool.empty(7, np.int64)
    assert (a.shape, a.dtype, a.flags.c_contiguous, b.shape) == ((3, 1000), np.float32, True, (7,))
    other = Nic()
    assert pool.add_nic(other.register) == 1
    assert len(one.made) == len(other.made) == 1
    a[:] = 1
    b[:] = 2
    assert a.sum() == 3000
    found = pool.find(a[1].data)
    assert found is not None
    assert found.address == address_of(a) + 4000
    assert found.registrations == [one.made[0][2], other.made[0][2]]
    assert pool.find(np.zeros(4)) is None
    part = a[2, 10:20]
    used = pool.nbytes - pool.free_nbytes
    del a
    gc.collect()
    assert pool.nbytes - pool.free_nbytes == used, "a view keeps the array"
    view = memoryview(part)
    del part, found
    assert pool.nbytes - pool.free_nbytes == used, "a memoryview too"
    del view, b
    gc.collect()
    assert pool.free_nbytes == pool.nbytes
    pool.close()
    pool.close()
    assert not one.made[0][2].is_open


def test_a_pool_grows_by_regions_up_to_its_limit_which_is_named() -> None:
    pool, nic_ = RegisteredPool(1 << 20, 3 << 20), Nic()
    pool.add_nic(nic_.register)
    kept = [pool.empty(900_000, "uint8") for _ in range(2)]
    large = pool.empty(1 << 20, "uint8")
    assert [nbytes for _, nbytes, _ in nic_.made] == [1 << 20] * 3
    with pytest.raises(FabricError, match="BML_POOL_MAX_MIB allows 3 MiB"):
        pool.empty(900_000, "uint8")
    del large
    assert pool.find(pool.empty(900_000, "uint8")) is not None
    assert len(nic_.made) == 3
    del kept


def test_memory_that_may_not_be_locked_names_the_setting() -> None:
    pool = RegisteredPool(1 << 20)
    pool.add_nic(Nic(1000).register)
    with pytest.raises(FabricError, match=r"ulimit -l.*BML_POOL_MIB"):
        pool.empty(10, "uint8")
    with pytest.raises(UsageError, match="BML_POOL_MIB"):
        RegisteredPool(10 << 20, 1 << 20)


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=60))
def test_parts_of_a_pool_never_overlap(requests: list[tuple[int, bool]]) -> None:
    pool = RegisteredPool(1 << 18)
    fill(pool, requests)
    assert pool.free_nbytes == pool.nbytes


def fill(pool: RegisteredPool, requests: list[tuple[int, bool]]) -> None:
    kept = []
    for number, (nbytes, keep) in enumerate(requests):
        array = pool.empty(nbytes, "uint8")
        array[:] = number % 256
        if keep:
            kept.append((number, array))
        elif kept:
            kept.pop(number % len(kept))
    assert all((array == number % 256).all() for number, array in kept)


def test_messages_survive_the_wire() -> None:
    hello = PairHello(3, Address(17, 0xABCDEF, "fe80::1", 5), 1 << 60, 99, 64, 4096, 1 << 40)
    assert wire.unpack_setup(wire.pack_hello(hello)) == hello
    assert wire.unpack_setup(wire.pack_ready(7)) == 7
    offers = [(i, bytes([i]) * HEADER_NBYTES) for i in range(5)]
    slot = memoryview(wire.pack_offers(offers))
    assert [wire.read_offer(slot, i) for i in range(5)] == offers
    grants = [Grant(i, i * 3, i << 40) for i in range(4)]
    generation, read = wire.read_grants(memoryview(wire.pack_grants(9, grants)), 4)
    assert (generation, list(read)) == (9, grants)
    assert list(wire.read_cancels(memoryview(wire.pack_cancels([4, 5])), 2)) == [4, 5]
    for pack, most in (
        (lambda n: wire.pack_offers([(0, bytes(HEADER_NBYTES))] * n), wire.most_offers),
        (lambda n: wire.pack_grants(0, [Grant(0, 0, 0)] * n), wire.most_grants),
        (lambda n: wire.pack_cancels([0] * n), wire.most_cancels),
    ):
        assert len(pack(most(512))) <= 512 < len(pack(most(512) + 1))


@pytest.mark.parametrize("message", [b"", b"H", b"BML\xf1" + bytes(44), b"R" + bytes(5), b"H" + bytes(200)])
def test_what_is_no_setup_message_is_refused(message: bytes) -> None:
    with pytest.raises(FrameError):
        wire.unpack_setup(message)


def test_a_message_cut_short_is_refused() -> None:
    with pytest.raises(FrameError, match="cut short"):
        wire.read_offer(memoryview(bytes(20)), 0)


@given(st.integers(0, 1 << 40), st.integers(0, 1000))
def test_counts_travel_in_24_bits(count: int, more: int) -> None:
    kind, low = wire.unpack_imm(wire.pack_imm(Imm.RING, count + more))
    assert kind == Imm.RING
    assert wire.advance(count, low) == count + more


@given(st.integers(0, 1 << 30), st.integers(0, 31))
def test_done_names_a_run_of_offers(last: int, before: int) -> None:
    kind, value = wire.unpack_imm(wire.pack_done(last, before))
    assert kind == Imm.DONE
    named = [offer & wire.OFFER_MASK for offer in wire.unpack_done(value)]
    assert named == [(last - before + i) & wire.OFFER_MASK for i in range(before + 1)]


def sysfs(root: Path, table: dict[str, list[tuple[str, str]]]) -> Path:
    for device, entries in table.items():
        port = root / device / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        for index in range(16):
            text, kind = entries[index] if index < len(entries) else ("0000:" * 7 + "0000", "")
            (port / "gids" / str(index)).write_text(text + "\n")
            if kind:
                (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
    return root


MAPPED = "0000:0000:0000:0000:0000:ffff:0a07:00{:02x}"


def test_the_gid_of_an_address_is_found(tmp_path: Path) -> None:
    link = ("fe80:0000:0000:0000:a8eb:54ff:feef:fcbf", "RoCE v2")
    here = sysfs(
        tmp_path,
        {
            "mlx5_0": [link, (MAPPED.format(1), "IB/RoCE v1"), (MAPPED.format(1), "RoCE v2")],
            "mlx5_1": [link, (MAPPED.format(2), "RoCE v2")],
        },
    )
    assert devices.choose("10.7.0.1", None, here)[:3] == ("mlx5_0", 1, 2)
    assert devices.choose("10.7.0.2", None, here)[:3] == ("mlx5_1", 1, 1)
    assert devices.choose("10.7.0.9", "mlx5_1:0", here)[:3] == ("mlx5_1", 1, 0)
    assert devices.choose("10.7.0.1", "mlx5_0", here).place == 2
    assert devices.choose("fe80::a8eb:54ff:feef:fcbf", None, here).device == "mlx5_0"
    with pytest.raises(FabricError, match=r"has the address 10\.9\.9\.9: there are .*10\.7\.0\.2"):
        devices.choose("10.9.9.9", None, here)
    with pytest.raises(UsageError, match=r"'mlx5_7' for address 10\.7\.0\.1; there are: mlx5_0:0"):
        devices.choose("10.7.0.1", "mlx5_7", here)


def test_without_devices_the_error_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"no RDMA device \(rdma link shows none\)"):
        devices.choose("10.7.0.1", None, tmp_path / "nothing")
    (tmp_path / "mlx5_0" / "ports" / "1" / "gids").mkdir(parents=True)
    with pytest.raises(FabricError, match="none has a GID"):
        devices.choose("10.7.0.1", None, tmp_path)


def test_settings_come_from_the_environment_and_are_checked() -> None:
    given_ = {"BML_RDMA_WINDOW_NBYTES": "65536", "BML_RDMA_DEVICES": "mlx5_0, mlx5_1:3", "BML_POOL_MIB": "8"}
    settings = VerbsSettings.from_environment(given_)
    assert settings.window_nbytes == 65536
    assert settings.devices == ("mlx5_0", "mlx5_1:3")
    assert settings.pool_nbytes == 8 << 20
    assert VerbsSettings.from_environment({}) == VerbsSettings()
    for name, text in (
        ("BML_RDMA_RETRIES", "7"),
        ("BML_RDMA_TIMEOUT", "31"),
        ("BML_RDMA_SLOTS", "many"),
    ):
        with pytest.raises(UsageError, match=name):
            VerbsSettings.from_environment({name: text})
    with pytest.raises(UsageError, match="BML_TRAFFIC_CLASS: traffic class is 256: give"):
        traffic_class_of({"BML_TRAFFIC_CLASS": "256"})


def test_tcp_replaces_verbs_only_when_asked_to_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices.choose, "__defaults__", (None, tmp_path / "nothing"))
    poller = Poller()

    def opened(name: str, traffic_class: int | None = None) -> Opened:
        return open_transport(
            name,
            0,
            [nic(0, 0)],
            token=TOKEN,
            job=JOB,
            poller=poller,
            handler=Recorder(),
            connect_s=1.0,
            traffic_class=traffic_class,
            environ={"BML_TRAFFIC_CLASS": "40"},
        )

    with pytest.raises(FabricError, match="no RDMA device"):
        opened("verbs")
    with pytest.raises(UsageError, match="transport is 'rdma'"):
        opened("rdma")
    with caplog.at_level(logging.WARNING, "bml.transport"):
        found = opened("verbs,tcp")
    assert (found.name, found.devices, found.traffic_class) == ("tcp", (), 40)
    assert found.fallback.startswith("no RDMA device has the address 127.77.0.1")
    assert "server 0 uses tcp instead of verbs: no RDMA device" in caplog.text
    assert found.memory.empty(3, "float32").shape == (3,)
    found.transport.close()
    asked = opened("tcp", 104)
    assert (asked.traffic_class, asked.fallback) == (104, "")
    listener = asked.transport.nics[0].listener._sock  # type: ignore[attr-defined]
    assert listener.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 104
    asked.transport.close()
    poller.close()
