"""The parts of shared memory: segments, status pages, results mapped in one piece, waiting."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bml.io import mapping
from bml.io.copies import copy
from bml.protocol.step.direct import Stage, Sum, standing
from bml.protocol.step.workspace import Padded, vector_of
from bml.schedule.algorithms.direct import adds_whole
from bml.sharedmem import Reduction, SharedPool, StatusPages, Use, futex
from bml.sharedmem.joined_mapping import JoinedMapping
from bml.sharedmem.segment import Segment, map_to_read, why_not
from bml.sharedmem.status_page import ASLEEP, CALL, N_HELD, STANDING, PeerStatusPage, StatusPage
from bml.topology.errors import FabricError, InvariantError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
TOKEN, JOB = b"t" * 32, "job-1"


def test_others_read_what_the_owner_writes_and_the_kernel_refuses_more() -> None:
    segment = Segment(8192)
    seen = map_to_read(segment.address)
    segment.memory[5] = 77
    assert seen[5] == 77
    with pytest.raises(TypeError):
        seen[5] = 1
    fd = os.open(segment.address.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 8192)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_memory_outlives_its_owner_and_has_no_name() -> None:
    segment = Segment(4096)
    seen = map_to_read(segment.address)
    segment.memory[0] = 9
    segment.close()
    segment.close()
    assert seen[0] == 9
    with pytest.raises(FileNotFoundError):
        map_to_read(segment.address)


def test_a_segment_longer_than_it_is_cannot_be_mapped() -> None:
    address = Segment(4096).address._replace(nbytes=1 << 20)
    with pytest.raises((OSError, ValueError)):
        map_to_read(address)


def test_a_status_page_says_what_was_posted() -> None:
    page = StatusPage(TOKEN, JOB, 3)
    pool = SharedPool(1 << 20)
    array = pool.empty(100, "float32")
    place = pool.locate(array)
    seen = PeerStatusPage(3, page.address)
    before = seen.changes
    page.describe(0xFFFFFFFF, "allreduce sum ä" * 300, place, 2)
    page.post(7, 12, Stage.DONE)
    page.put_share(2, Segment(4096).address)
    assert seen.words[STANDING] == standing(7, 12, Stage.DONE)
    assert seen.changes == before + 1
    assert (seen.words[CALL], seen.result_set, seen.input) == (0xFFFFFFFF, 2, place)
    assert seen.text.startswith("allreduce sum ä")
    assert len(seen.text.encode()) <= 4096 + 3
    assert seen.share(2).nbytes == 4096


def test_only_a_status_page_of_this_job_and_token_is_believed() -> None:
    seen = PeerStatusPage(3, StatusPage(TOKEN, JOB, 3).address)
    assert seen.proves(TOKEN, JOB)
    assert not seen.proves(b"u" * 32, JOB)
    assert not seen.proves(TOKEN, "job-2")
    assert not PeerStatusPage(4, seen.address).proves(TOKEN, JOB)


def test_status_pages_that_cannot_be_used_are_named() -> None:
    mine, other = StatusPages(0, TOKEN, JOB), StatusPages(1, b"u" * 32, JOB)
    with pytest.raises(FabricError, match="the status page of server 1 is not of this job"):
        mine.open({0: mine.own.address, 1: other.own.address})
    with pytest.raises(FabricError, match="server 1 shares no memory"):
        mine.open({0: mine.own.address, 1: None})
    with pytest.raises(FabricError, match=r"memory of server 1: it is in another container.*use tcp"):
        mine.open({0: mine.own.address, 1: other.own.address._replace(namespace=1)})


def test_a_server_that_is_dead_already_has_no_status_page_and_is_named_when_it_is_needed() -> None:
    mine, other = StatusPages(0, TOKEN, JOB), StatusPages(1, TOKEN, JOB)
    dead = other.own.address._replace(fd=9999)
    mine.open({0: mine.own.address, 1: dead})
    with pytest.raises(OSError, match="the process of server 1 is gone"):
        mine.wait_for_stage(1, 1, Stage.READY, (0, 1), 8, lambda: False)
    assert mine.behind(1, 1, Stage.READY, (1,)) == [1]
    mine.admit({0: mine.own.address, 1: dead})
    with pytest.raises(OSError, match=r"cannot map the memory of server 1.*use tcp"):
        mine[1]
    mine.admit({1: other.own.address})
    assert mine[1].server == 1


def test_what_an_earlier_incarnation_reads_is_not_free_while_it_may_run() -> None:
    mine, first, second = (StatusPages(server, TOKEN, JOB) for server in (0, 1, 1))
    first.own.hold(0)
    mine.open({0: mine.own.address, 1: first.own.address})
    mine.admit({0: mine.own.address, 1: second.own.address})
    assert mine[1].address == second.own.address
    assert mine.free_set() == 1, "this process is the earlier incarnation's, too, and runs"


def test_a_view_that_comes_while_status_pages_are_looked_up_is_not_missed() -> None:
    """The loop admits another incarnation of server 1 while the training thread asks for its page."""
    mine, first, second = (StatusPages(server, TOKEN, JOB) for server in (0, 1, 1))
    mine.open({0: mine.own.address, 1: first.own.address})

    class Members(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            mine.admit({0: mine.own.address, 1: second.own.address})

    assert [page.server for page in mine.of(Members((0, 1)))] == [0, 1]
    assert [page.address for page in mine.of((0, 1))] == [mine.own.address, second.own.address]


def test_result_sets_are_free_when_no_server_holds_them() -> None:
    page = StatusPages(0, TOKEN, JOB)
    page.open({0: page.own.address})
    entries = [page.own.hold(number) for number in range(N_HELD)]
    assert page.free_set() == N_HELD
    assert page.own.hold(N_HELD) is None, "one set must stay free for ever"
    assert entries[4] is not None
    page.own.release(entries[4])
    assert page.free_set() == 4


@pytest.mark.slow
def test_segments_are_mapped_one_behind_the_other_and_stay_until_the_last_array() -> None:
    segments = [Segment(8192) for _ in range(3)]
    for number, segment in enumerate(segments):
        segment.memory[:] = bytes([number + 1]) * 8192
    gone: list[int] = []
    joined = JoinedMapping([segment.address for segment in segments], 4096)
    array = joined.array(3 * 1024, np.dtype("int32"), lambda: gone.append(1))
    part = array[1000:].reshape(2, -1)
    del joined, array
    gc.collect()
    assert not gone
    assert part[0, 0] == 0x01010101
    assert part[-1, -1] == 0x03030303
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    del part
    gc.collect()
    assert gone == [1]


LONG_S = 60.0
"""How long a wait lasts to which no wake-up comes: any end before half of it is one."""


def fall_asleep(sleeper: threading.Thread) -> None:
    """Return when this thread is in the system call `futex` on a word with a time-out, asleep."""
    state = Path(f"/proc/self/task/{sleeper.native_id}/syscall")
    while True:
        number, *arguments = state.read_text().split()
        if number == "202" and int(arguments[1], 16) == 0 and int(arguments[3], 16) != 0:
            return
        assert sleeper.is_alive(), "it did not fall asleep"
        time.sleep(0)


def test_a_wait_ends_when_something_is_posted() -> None:
    page = StatusPage(TOKEN, JOB, 0)
    seen = PeerStatusPage(0, page.address)
    before = seen.changes
    took_s: list[float] = []

    def wait() -> None:
        since_s = time.monotonic()
        seen.wait(before, LONG_S)
        took_s.append(time.monotonic() - since_s)

    thread = threading.Thread(target=wait)
    thread.start()
    fall_asleep(thread)
    page.post(1, 1, Stage.READY)
    page.wake()
    thread.join()
    wait()
    assert max(took_s) < LONG_S / 2, (
        "the first was woken; the second, for what is posted already, never slept"
    )


def test_who_falls_asleep_while_it_waits_is_woken(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the post itself: at the end of a nap it would look again, but here that is far away."""
    monkeypatch.setattr("bml.sharedmem.status_pages._NAP_S", LONG_S)
    (pages, _, _), (others, _, _), _ = host
    naps: list[float] = []

    def wait_for_stage() -> None:
        since_s = time.monotonic()
        assert pages.wait_for_stage(1, 1, Stage.READY, (1,), 8, lambda: False)
        naps.append(time.monotonic() - since_s)

    thread = threading.Thread(target=wait_for_stage)
    thread.start()
    while not others[0].words[ASLEEP]:
        time.sleep(0)
    fall_asleep(thread)
    others.post(1, 1, Stage.READY)
    thread.join()
    assert naps
    assert naps[0] < LONG_S / 2
    assert not others[0].words[ASLEEP]


@pytest.mark.parametrize(("idle_yields", "wanted"), [(0, 1), (3, 4), (1000, 60)])
def test_beside_a_thread_that_computes_it_sleeps_when_that_wants_the_core(
    idle_yields: int, wanted: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pages, _, _), (others, _, _), _ = host
    yields: list[bool] = []

    def yield_idle_core() -> bool:
        yields.append(len(yields) < idle_yields)
        return yields[-1]

    def sleep(changes: int, timeout_s: float) -> None:
        others.post(1, 1, Stage.READY)

    monkeypatch.setattr("bml.sharedmem.status_pages.yield_idle_core", yield_idle_core)
    monkeypatch.setattr(pages[1], "wait", sleep)
    assert pages.wait_for_stage(1, 1, Stage.READY, (1,), 8, lambda: False, beside=True)
    assert len(yields) == wanted


def test_a_wait_has_an_end() -> None:
    segment = Segment(4096)
    futex.wait(segment.start, 0, 0.001)


Host = list[tuple[StatusPages, SharedPool, Reduction]]


@pytest.fixture
def host() -> Iterator[Host]:
    """Three servers, in one process."""
    servers: Host = []
    for server in range(3):
        pages, pool = StatusPages(server, TOKEN, JOB), SharedPool(4 << 20)
        servers.append((pages, pool, Reduction(pages, pool)))
    addresses = {server: each[0].own.address for server, each in enumerate(servers)}
    for pages, _, _ in servers:
        pages.open(addresses)
    yield servers
    for pages, _, reduction in servers:
        pages.close()
        reduction.close()


def begin(host: Host, vectors: Sequence[np.ndarray | Padded], op: str, uses: list[Use]) -> None:
    """Everybody brings a vector and adds a share."""
    members = tuple(range(len(host)))
    size, itemsize = vector_of(vectors[0]).size, vector_of(vectors[0]).itemsize
    share = -(-size * itemsize // len(host) // 4096) * 4096 // itemsize or 1
    for (_, _, reduction), vector, use in zip(host, vectors, uses, strict=True):
        reduction.contribute(vector, op, use, 1, "call", members)
    for server, (_, _, reduction) in enumerate(host):
        start, stop = min(server * share, size), min((server + 1) * share, size)
        assert not reduction.add(Sum(1, 1, start, stop, share, False, False, members))


def end(host: Host) -> list[np.ndarray]:
    """All are done: the results."""
    for _, _, reduction in host:
        reduction.hold()
    for _, _, reduction in host:
        reduction.join()
        reduction.fetch()
    return [reduction.take() for _, _, reduction in host]


def step(
    host: Host, vectors: Sequence[np.ndarray | Padded], op: str = "sum", shared: bool = False
) -> list[np.ndarray]:
    begin(host, vectors, op, [Use.READ if shared else Use.OWN] * len(host))
    return end(host)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64", "complex128"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_reductions_of_every_kind(host: Host, dtype: str, op: str) -> None:
    chance = np.random.default_rng(5)
    vectors = [chance.integers(1, 5, 100_003).astype(dtype) for _ in host]
    ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    right = ufunc(ufunc(vectors[0], vectors[1]), vectors[2])
    for result in step(host, vectors, op):
        assert result.dtype == right.dtype
        assert result.tobytes() == right.tobytes()
    for result in step(host, vectors, op, shared=True):
        assert result.tobytes() == right.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 9_000, 400_003])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_zeros_that_were_not_written_are_not_read(host: Host, n: int, shared: bool, seed: int) -> None:
    """Contributions filled anywhere, also nowhere or not padded at all; then a step without padded ones."""
    chance = np.random.default_rng(seed)
    brought: list[np.ndarray | Padded] = []
    right = np.zeros(n, np.uint64)
    for server, (_, pool, _) in enumerate(host):
        vector = pool.empty(n, "uint64")
        vector[:] = chance.integers(1, 1 << 60, n, np.uint64)
        start, stop = sorted(chance.integers(0, n + 1, 2).tolist())
        if server == seed:
            start, stop = 0, n
        brought.append(vector if server == seed else Padded(vector, start, stop))
        right[start:stop] += vector[start:stop]
    for result in step(host, brought, shared=shared):
        assert result.tolist() == right.tolist()
    members = (0, 1, 2)
    for (_, _, reduction), each in zip(host, brought, strict=True):
        reduction.contribute(each, "sum", Use.OWN, 1, "call", members)
    for _, _, reduction in host:
        assert reduction.add(Sum(1, 1, 0, n, n, True, True, members)), "all add the whole"
        reduction.fetch()
        assert reduction.take().tolist() == right.tolist()
    dense = [np.arange(n, dtype=np.uint64) for _ in host]
    for result in step(host, dense, shared=shared):
        assert result.tolist() == (3 * dense[0]).tolist()


@pytest.mark.parametrize("lies_in_pool", [False, True])
def test_a_vector_that_comes_again_is_read_as_it_is_now_whatever_came_between(
    host: Host, lies_in_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between: none without elements, and one for whose copy there is no memory."""
    vectors = [pool.empty(5000, "float64") if lies_in_pool else np.empty(5000) for _, pool, _ in host]

    def check(value: float) -> None:
        for vector in vectors:
            vector[:] = value
        for result in step(host, vectors):
            np.testing.assert_array_equal(result, 3 * value)

    check(1.0)
    check(2.0)
    for _, _, reduction in host:
        reduction.contribute(np.empty(0), "sum", Use.OWN, 1, "call", (0, 1, 2))
    check(3.0)

    def full(*_: object) -> np.ndarray:
        raise FabricError("no memory")

    for _, pool, reduction in host:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "empty", full)
            with pytest.raises(FabricError):
                reduction.contribute(np.empty(70_000), "sum", Use.OWN, 1, "call", (0, 1, 2))
    check(4.0)


def test_an_attempt_that_failed_leaves_no_trace_with_any_use(host: Host) -> None:
    uses = [Use.OWN, Use.READ, Use.KEPT]
    for number in range(3):
        begin(host, [np.full(70_001, -1.0) for _ in host], "sum", uses)
        uses = [*uses[1:], uses[0]]
        begin(host, [np.arange(70_001.0) + number * server for server in range(3)], "sum", uses)
        for result in end(host):
            np.testing.assert_array_equal(result, 3 * np.arange(70_001.0) + 3 * number)


def test_results_in_place_are_not_overwritten_by_later_steps_of_any_size(host: Host) -> None:
    kept = []
    for number in range(8):
        n = 300_000 + 90_000 * (number % 3)
        kept.append((number, step(host, [np.full(n, number + 0.5 * s) for s in range(3)], shared=True)))
        if number % 3 == 2:
            del kept[0]
    for number, results in kept:
        assert all((result == 3 * number + 1.5).all() for result in results)
    assert all(not result.flags.writeable for _, results in kept for result in results)


def test_extra_memory_is_bounded(host: Host) -> None:
    """Copied results take one result set, however many steps there are."""
    for number in range(10):
        step(host, [np.full(300_000, float(number)) for _ in host])
    for pages, pool, reduction in host:
        assert pages.free_set() == 0
        assert reduction.shared_nbytes <= 300_000 * 8 // 3 + 4096
        assert pool.nbytes == 4 << 20
    copied = [reduction.nbytes_copied for _, _, reduction in host]
    assert sum(copied) == 10 * 2 * 300_000 * 8, "each server copies what the two others add"


@pytest.mark.parametrize("n", [60_000, 100_003, 400_000])
@pytest.mark.parametrize("use", list(Use))
def test_what_only_its_owner_reads_is_not_copied(n: int, use: Use, host: Host) -> None:
    """What is left out must not be read: it is not a number here."""
    for _, pool, _ in host:
        pool.empty(n, "float64")[:] = np.nan
    begin(host, [np.arange(float(n)) + server for server in range(3)], "sum", [use] * 3)
    for result in end(host):
        np.testing.assert_array_equal(result, 3 * np.arange(float(n)) + 3)
    copied = {reduction.nbytes_copied for _, _, reduction in host}
    all_may_add_all = adds_whole(3, 8 * n, use is Use.READ)
    assert (copied == {8 * n}) is all_may_add_all


def test_a_view_with_fewer_servers_gets_what_was_not_copied_before(host: Host) -> None:
    """The shares of two servers are others than those of three."""
    vectors = [np.arange(400_000.0) * (1 + server) for server in range(3)]
    begin(host, vectors, "sum", [Use.READ] * 3)
    left, share, members = [host[0], host[2]], 200_192, (0, 2)
    for (_, _, reduction), vector in zip(left, (vectors[0], vectors[2]), strict=True):
        reduction.contribute(vector, "sum", Use.READ, 1, "call", members)
    for number, (_, _, reduction) in enumerate(left):
        stop = min((number + 1) * share, 400_000)
        assert not reduction.add(Sum(2, 1, number * share, stop, share, False, False, members))
    for result in end(left):
        np.testing.assert_array_equal(result, 4 * np.arange(400_000.0))


def test_a_share_that_was_not_copied_is_no_others(host: Host) -> None:
    reduction, members = host[1][2], (0, 1, 2)
    reduction.contribute(np.zeros(600_000, np.float32), "sum", Use.READ, 1, "call", members)
    with pytest.raises(InvariantError, match="was not copied"):
        reduction.add(Sum(1, 1, 0, 600_000, 600_000, True, True, members))
    with pytest.raises(InvariantError, match="not copied"):
        reduction.add(Sum(1, 1, 0, 200_704, 200_704, False, False, members))


@pytest.mark.parametrize("nbytes", [1, 4095, (4 << 20) - 1, 4 << 20, (4 << 20) + 13])
def test_long_copies_have_the_same_bits(nbytes: int) -> None:
    given = np.random.default_rng(0).integers(0, 256, nbytes + 8, np.uint8)
    for start in (0, 3):
        taken = np.zeros(nbytes + 8, np.uint8)
        copy(taken[start : start + nbytes], given[start : start + nbytes])
        assert np.array_equal(taken[start : start + nbytes], given[start : start + nbytes])
        assert not taken[:start].any()
        assert not taken[start + nbytes :].any()


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(least)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)


@contextlib.contextmanager
def no_more_memory() -> Iterator[None]:
    """This process may map no more."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping, "_map", full)
        yield


@pytest.mark.parametrize(
    ("limit", "named"), [(no_more_files, r"ulimit -n"), (no_more_memory, r"max_map_count")]
)
@pytest.mark.parametrize("what", ["contribution", "share", "those of others"])
def test_a_limit_of_this_process_is_named_and_no_other_server_blamed(
    host: Host, limit: Callable[[], contextlib.AbstractContextManager[None]], named: str, what: str
) -> None:
    vectors = [np.ones(2_000_000) for _ in host]
    members = (0, 1, 2)
    share = 667_136
    if what == "contribution":
        with limit(), pytest.raises(FabricError, match=f"no room for .*{named}"):
            host[0][2].contribute(vectors[0], "sum", Use.OWN, 1, "call", members)
        return
    for (_, _, reduction), vector in zip(host, vectors, strict=True):
        reduction.contribute(vector, "sum", Use.OWN, 1, "call", members)
    sums = [
        Sum(1, 1, s * share, min((s + 1) * share, 2_000_000), share, False, False, members) for s in members
    ]
    if what == "share":
        with limit(), pytest.raises(FabricError, match=f"no room for .*{named}"):
            host[0][2].add(sums[0])
        return
    for (_, _, reduction), each in zip(host, sums, strict=True):
        reduction.add(each)
    with limit(), pytest.raises(FabricError, match=f"no room for .*{named}"):
        host[0][2].join()


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True])
def test_vectors_of_changing_sizes_leave_nothing_mapped(host: Host, foreign: bool) -> None:
    """As many files as there are servers, for pages, contributions and shares in two sets, stay mapped."""

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:bml" in line}

    gc.collect()
    before, fds = len(mapped()), len(os.listdir("/proc/self/fd"))
    for number in range(24):
        n = 200_000 + 30_000 * number - 100_000 * (number % 3)
        vectors = [np.empty(n) if foreign else pool.empty(n, "float64") for _, pool, _ in host]
        for vector in vectors:
            vector[:] = number
        for result in step(host, vectors, shared=number % 2 == 0):
            assert result[0] == result[-1] == 3 * number
        del vectors, vector, result
    gc.collect()
    assert len(mapped()) <= before + 3 * 4
    assert len(os.listdir("/proc/self/fd")) <= fds + 3 * 3


def test_memory_of_the_pool_is_contributed_where_it_lies(host: Host) -> None:
    vectors = []
    for _, pool, _ in host:
        vectors.append(pool.empty(50_000, "float64"))
        vectors[-1][:] = 2
    assert all((result == 6).all() for result in step(host, vectors))
    assert [reduction.nbytes_copied for _, _, reduction in host] == [0, 0, 0]
