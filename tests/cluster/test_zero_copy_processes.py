"""Jobs whose servers make zero-copy sends, real processes: the bits of tcp, dying and frozen servers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.spec.job import JobSpec
from bml.sharedmem import segment

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(60),
    pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "it can"),
]

LENGTH, STEPS = 300_007, 8
_PR_SET_DUMPABLE = 4
_CAPABILITIES = 0x20080522  # version 3: two words each
_CAP_SYS_PTRACE = 1 << 19


def summed(session: bml.Session) -> dict[str, Any]:
    """Steps of floats, whose bits tell orders of addition apart, and of integers, which are exact."""
    x, n = session.empty(LENGTH, "float32"), session.empty(LENGTH, "int64")
    said, contributors = hashlib.sha256(), []
    for step in range(STEPS):
        x[:] = np.random.default_rng(100 * step + session.server).standard_normal(LENGTH, np.float32)
        said.update(session.allreduce(x).tobytes())
        n[:] = np.arange(LENGTH) * (step + 1) + (1 << session.server)
        members_sum = session.allreduce(n)
        members = session.contributors
        right = np.arange(LENGTH) * (step + 1) * len(members) + sum(1 << each for each in members)
        np.testing.assert_array_equal(members_sum, right)
        contributors.append(members)
    return {"said": said.hexdigest(), "contributors": contributors}


class Hidden:
    """`summed`; one server becomes unreadable to the others before it meets them, as the kernel sees it."""

    def __init__(self, train: Callable[[bml.Session], Any], server: int, folder: Path):
        self._train, self._server, self._folder = train, server, folder

    def __call__(self, session: bml.Session) -> Any:
        """Never called: what is unpickled is the training function itself."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        return _hide, (self._train, self._server, str(self._folder))


def _hide(train: Any, server: int, folder: str) -> Any:
    """Runs where the training function is unpickled, in the server's process: see bml.cluster.process.worker.

    Returns when all four have come so far, as nobody is to meet another before.
    """
    import gc

    from bml.cluster.server.server import Server

    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _CAPABILITIES, 0)
    sets = ctypes.create_string_buffer(24)
    assert not libc.capget(header, sets)
    words = list(struct.unpack("=6I", sets.raw))
    words[0] &= ~_CAP_SYS_PTRACE  # with which root may read everything; of what is effective and permitted
    words[1] &= ~_CAP_SYS_PTRACE
    assert not libc.capset(header, struct.pack("=6I", *words))
    own = next(each for each in gc.get_objects() if isinstance(each, Server))
    if own.server == server:
        assert not libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    Path(folder, str(own.server)).touch()
    deadline = time.monotonic() + 40
    while len(os.listdir(folder)) < 4:
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.01)
    return train


def referenced(result: bml.Result) -> dict[tuple[int, int], int]:
    """Bytes of zero-copy sends from one server to another."""
    found: dict[tuple[int, int], int] = {}
    for server, report in result.reports.items():
        for link, stats in report.metrics["links"].items():
            pair = server, int(link.split("/")[0])
            found[pair] = found.get(pair, 0) + stats["nbytes_zero_copy_sent"]
    return found


def test_sums_have_the_bits_of_tcp_referenced_sent_and_mixed(tmp_path: Path) -> None:
    def run(train: Any, transport: str) -> bml.Result:
        return jobs.launch(train, "bcube:2x2", transport=transport, algorithm="bml")

    sent, all_referenced = run(summed, "tcp"), run(summed, "auto")
    mixed = run(Hidden(summed, 2, tmp_path), "auto")
    digests = {value["said"] for result in (sent, all_referenced, mixed) for value in result.values.values()}
    assert len(digests) == 1
    assert not any(referenced(sent).values())
    assert all(referenced(all_referenced).values())
    assert {pair for pair, nbytes in referenced(mixed).items() if nbytes} == {(0, 1), (1, 0), (1, 3), (3, 1)}


def test_a_server_is_frozen_in_mid_step_and_wakes() -> None:
    """What it has not read yet is other steps' then. Those that die are cells of test_matrix."""
    fault = "freeze:1@step=9,phase=broadcast,for=5s"
    result = jobs.launch(summed, "bcube:2x2", transport="auto", algorithm="bml", faults=[fault], detect_s=2.0)
    spared = {1} & set(result.values)  # it may thaw before anybody misses it
    assert set(result.values) == {0, 2, 3} | spared
    assert len({str(value) for value in result.values.values()}) == 1
    assert any(referenced(result).values())


def test_a_view_change_maps_nobodys_memory_anew() -> None:
    """What is mapped stays so; to map it again would cost every recovery, and nobody would see it."""

    def train(session: bml.Session) -> int:
        from bml.sharedmem import zero_copy

        mapped: list[int] = []
        page = zero_copy.PeerRegistrationPage

        def counted(token: bytes, job: str, server: int, address: Any) -> Any:
            mapped.append(server)
            return page(token, job, server, address)

        zero_copy.PeerRegistrationPage = counted  # type: ignore[assignment, misc]
        summed(session)
        assert len(session.view.members) == 3
        return len(mapped)

    result = jobs.launch(train, "bcube:2x2", transport="auto", algorithm="bml", faults=["kill:3@step=5"])
    assert set(result.values) == {0, 1, 2}
    assert set(result.values.values()) == {0}


def test_which_jobs_send_without_a_copy() -> None:
    def sends_zero_copy(one_host: bool = False, **settings: Any) -> bool:
        return JobSpec("bcube:2x2", **{"transport": "auto", **settings}).settled(one_host).zero_copy

    assert sends_zero_copy()
    assert sends_zero_copy(one_host=True, algorithm="bml")
    assert sends_zero_copy(faults=("kill:1@step=3",))
    assert not sends_zero_copy(one_host=True)  # it is shm altogether
    assert not sends_zero_copy(transport="tcp")
    assert not sends_zero_copy(traffic_class=8)
    assert not sends_zero_copy(faults=("blackhole:1/0@step=3",))
    assert not sends_zero_copy(emulated="bml")
