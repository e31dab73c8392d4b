"""Jobs over shared memory, real processes: exact sums, dying and frozen servers, nothing left behind."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import commands
import jobs
import numpy as np
import pytest
from descriptors import opened

import bml
from bml.cluster.spec.job import JobSpec
from bml.errors import Evicted, StepMismatch, TrainingError, UsageError
from bml.protocol.step.direct import Stage
from bml.protocol.wire.messages import Install
from bml.sharedmem import segment

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(60),
    pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "it can"),
]

LARGE, STEPS, STEP = 200_003, 12, 5


def left_behind() -> set[str]:
    """Memory with a name that a job might leave."""
    return {str(path) for path in Path("/dev/shm").glob("*bml*")}


def counted(session: bml.Session) -> dict[str, Any]:
    """Steps of exact sums, large and small by turns: what each server got, and whose it was."""
    x = session.empty(LARGE, "int64")
    total = session.empty(LARGE, "int64")
    session.state(params=total)
    total[:] = 0
    contributors = []
    for step in range(STEPS):
        x[:] = np.arange(LARGE) * (step + 1) + (1 << session.server)
        total += session.allreduce(x, shared=step % 2 == 0)
        contributors.append(session.contributors)
        small = session.allreduce(np.array([1 << session.server]))
        assert small[0] == sum(1 << each for each in session.contributors)
    return {"total": total, "contributors": contributors}


def expected(contributors: list[tuple[int, ...]]) -> Any:
    total = np.zeros(LARGE, np.int64)
    for step, members in enumerate(contributors):
        total += np.arange(LARGE) * (step + 1) * len(members) + sum(1 << each for each in members)
    return total


def check_exact(result: bml.Result, survivors: set[int]) -> None:
    assert set(result.values) == survivors
    assert len(set(result.report["digests"].values())) == 1, "they hold different bits"
    first = result.values[min(survivors)]["contributors"]
    for value in result.values.values():
        assert value["contributors"] == first
        np.testing.assert_array_equal(value["total"], expected(first))
    assert set(first[-1]) == survivors


@pytest.mark.parametrize(
    "fabric",
    ["bcube:2x1", "bcube:2x2", pytest.param("bcube:3x2", marks=pytest.mark.smoke), "torus:3x2"],
)
def test_sums_are_exact_and_nothing_is_left(fabric: str) -> None:
    before, descriptors = left_behind(), opened()
    result = jobs.launch(counted, fabric, transport="shm")
    check_exact(result, set(JobSpec(fabric).parsed_fabric().servers))
    assert left_behind() == before
    assert opened() <= descriptors


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *(("kill", phase) for phase in ("compute", "reduce", "broadcast", "complete")),
        *(("freeze", phase) for phase in ("reduce", "broadcast", "complete")),
        ("exit", ""),
    ],
)
def test_a_server_is_lost_in_mid_step(kind: str, phase: str) -> None:
    # Every call is a step; the odd ones are large.
    when = f"step={2 * STEP + 1}" + (f",phase={phase}" if phase else "")
    how = ",for=5s" if kind == "freeze" else ""
    before = left_behind()
    result = jobs.launch(
        counted, "bcube:2x2", transport="shm", faults=[f"{kind}:1@{when}{how}"], detect_s=2.0
    )
    spared = {1} & set(result.values)  # a frozen one may thaw before anybody misses it
    assert not spared or kind == "freeze"
    check_exact(result, {0, 2, 3} | spared)
    assert left_behind() == before


def test_the_first_server_and_the_coordinator_die() -> None:
    """The first member says where results go; another takes over."""
    faults = ["kill:0@step=7", "coordinator@step=11", "kill:4@step=15"]
    seen = jobs.Seen()
    result = jobs.launch(counted, transport="shm", faults=faults, on_change=seen)
    check_exact(result, {1, 2, 3, 5, 6, 7, 8})
    assert seen.terms == [1, 2], "the coordinator did not die"


def test_a_server_joins_and_is_killed_and_joins_again_between_large_and_small_steps() -> None:
    """Its shares, and the memory of its earlier incarnations, are part of steps of every kind."""

    def train(session: bml.Session) -> dict[str, Any]:
        total = np.zeros(LARGE, np.int64)
        contributors: list[tuple[int, ...]] = []
        session.state(params=total)
        for step in session.steps(120):
            x = np.arange(LARGE if step % 3 else 7) + (1 << session.server)
            result = session.allreduce(x, shared=step % 2 == 0)
            members = session.contributors
            right = np.arange(x.size) * len(members) + sum(1 << each for each in members)
            assert np.array_equal(result, right), f"step {step} of {members}"
            total[: x.size] += result
            contributors.append(members)
            time.sleep(0.01)
            if step > 20:
                jobs.pace(session, 4)
        return {"contributors": contributors}

    faults = ["kill:1@step=10,phase=broadcast", "join:1@step=15", "kill:1@phase=transfer", "join:3@step=20"]
    result = jobs.launch(train, "bcube:2x2", transport="shm", absent=[3], rejoin=True, faults=faults)
    assert set(result.values) == {0, 1, 2, 3}
    assert len(set(result.report["digests"].values())) == 1, "they hold different bits"
    longest = result.values[0]["contributors"]
    for server, value in result.values.items():
        assert value["contributors"] == longest[-len(value["contributors"]) :]
        assert server in value["contributors"][-1]


@pytest.mark.smoke
def test_training_equals_the_reference_while_servers_die() -> None:
    result = jobs.launch(
        jobs.descend, transport="shm", faults=["kill:4@step=12", "freeze:7@step=25,for=2s"], detect_s=0.5
    )
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


def test_an_exception_ends_the_job_for_all() -> None:
    with pytest.raises(bml.TrainingError, match="server 3 raised InjectedError"):
        jobs.launch(counted, "bcube:2x2", transport="shm", faults=["exception:3@step=6"])


def test_results_that_are_kept_stay_as_they_are() -> None:
    """More than may be read in place, and some dropped in between."""

    def train(session: bml.Session) -> bool:
        n, kept = 100_000, []
        for step in range(50):
            result = session.allreduce(np.full(n, step + session.server, np.float64), shared=True)
            assert not result.flags.writeable
            kept.append((step, result))
            if step % 7 == 6:
                del kept[session.server :: 3]
        return all(bool((result == 4 * step + 6).all()) for step, result in kept)

    assert all(jobs.launch(train, "bcube:2x2", transport="shm").values.values())


def test_results_read_in_place_survive_lost_servers() -> None:
    def train(session: bml.Session) -> tuple[list[float], list[list[float]]]:
        kept = []
        for step in range(STEPS):
            result = session.allreduce(np.full(120_000, float(step)), shared=True)
            kept.append((step * len(session.contributors), result))
        return [float(value) for value, _ in kept], [np.unique(result).tolist() for _, result in kept]

    faults = ["kill:2@step=4", "freeze:1@step=8,for=2s"]
    for right, found in jobs.launch(
        train, "bcube:3x1", transport="shm", faults=faults, min_servers=1, detect_s=0.5
    ).values.values():
        assert [[value] for value in right] == found


def asleep_between_complete_and_home(session: bml.Session, told: Path) -> int:
    """Server 4 dies when all are complete in a step; server 1 stops as it is told which view commits it.

    It copies the result of that step when it goes on, when the others have evicted it.
    """
    shell = session._communicator._shell  # type: ignore[attr-defined]
    reduction, pages, line = shell.runner._reduction, shell.runner._pages, shell.line
    fetch_result, hear, goes_on = reduction._fetch_result, line._told, threading.Event()
    evicted = told.with_name("evicted")
    step = 0

    def slowly(*args: Any) -> Any:
        if step == STEP and session.server == 4:
            while pages.behind(1, 1 + STEP, Stage.COMPLETE, range(5)):
                time.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STEP and session.server == 1:
            assert goes_on.wait(20.0)
        return fetch_result(*args)

    def late(message: Any) -> None:
        stops = step == STEP and session.server == 1 and isinstance(message, Install)
        if stops:
            wakes = f"for _ in $(seq 600); do [ -e {evicted} ] && break; sleep 0.05; done"
            subprocess.Popen(["sh", "-c", f"{wakes}; kill -CONT {os.getpid()}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        hear(message)
        if stops:
            goes_on.set()

    session.allreduce(np.zeros(3 * LARGE))  # so that fewer servers need no other memory for their shares
    reduction._fetch_result, line._told = slowly, late
    x = session.empty(LARGE, "int64")
    for step in range(1, 300):
        x[:] = np.arange(LARGE) * step + (1 << session.server)
        try:
            result = session.allreduce(x)
        except Evicted:
            told.write_text(f"{session.server} is evicted in step {step}")
            raise
        members = session.contributors
        right = np.arange(LARGE) * step * len(members) + sum(1 << each for each in members)
        if not (result == right).all():
            told.write_text(f"{session.server} has a wrong sum in step {step}")
            break
        if 1 not in members:
            evicted.touch()
    deadline = time.monotonic() + 30
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return step


def test_a_server_that_sleeps_between_complete_and_home_gets_no_torn_sum(tmp_path: Path) -> None:
    told = tmp_path / "told"
    result = jobs.launch(lambda s: asleep_between_complete_and_home(s, told), "bcube:5x1", transport="shm")
    assert set(result.values) == {0, 2, 3}
    assert told.read_text() == f"1 is evicted in step {STEP}"


def test_own_results_may_be_written() -> None:
    def train(session: bml.Session) -> bool:
        x = np.arange(600_000, dtype=np.float32)
        first = session.allreduce(x)
        first += 1
        second = session.allreduce(first)
        return bool(np.array_equal(second, 2 * (2 * x + 1))) and first.flags.writeable

    assert all(jobs.launch(train, "bcube:2x1", transport="shm").values.values())


def test_calls_that_differ_are_named() -> None:
    def train(session: bml.Session) -> None:
        session.allreduce(np.ones(2))
        session.allreduce(np.ones(5 if session.server == 1 else 4))

    with pytest.raises(StepMismatch, match=r"float64 \((5|4),\).*float64 \((5|4),\)"):
        jobs.launch(train, "bcube:2x2", transport="shm")


def test_auto_takes_shared_memory_unless_links_are_needed() -> None:
    def chosen(**settings: Any) -> str:
        return JobSpec("bcube:3x2", transport="auto", **settings).settled(one_host=True).transport

    assert chosen() == "shm"
    assert chosen(faults=("kill:4@step=3", "coordinator@step=5")) == "shm"
    for fault in ("blackhole:2/0@step=3", "cut:2/0@step=3", "flap:2/0@step=3", "switch:0/1@step=3"):
        assert chosen(faults=(fault,)) == "tcp"
    assert chosen(absent=(3,), rejoin=True, faults=("join:3@step=4",)) == "shm"
    assert chosen(algorithm="bml") == "tcp"
    assert chosen(traffic_class=104) == chosen(trace=True) == "tcp"
    assert chosen(emulated="bml") == "tcp"
    assert JobSpec("bcube:3x2", transport="auto").settled(one_host=False).transport == "tcp"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"faults": ("cut:2/0@step=3",)}, "strikes links, which data"),
        ({"algorithm": "bml"}, "use no schedule"),
        ({"emulated": "bml"}, "takes the cables"),
    ],
)
def test_what_shared_memory_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobSpec("bcube:3x2", transport="shm", **settings)


def test_a_silent_nic_is_noticed_and_costs_nobody() -> None:
    """Heartbeats still go over every NIC; data does not."""

    def train(session: bml.Session) -> tuple[str, ...]:
        while not session.allreduce(np.array([len(session.view.failures)]), op="min")[0]:
            session.allreduce(np.ones(50_000), shared=True)
        return tuple(session.view.failures)

    with bml.start(train, "bcube:2x2", launcher="processes", transport="shm") as job:
        job.inject("blackhole:1/0")
        result = job.wait(30)
    assert set(result.values) == {0, 1, 2, 3}
    assert set(result.values.values()) <= {("link:0/0",), ("link:1/0",)}, "one of the two ends of a cable"


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    release = tmp_path / "go"

    def train(session: bml.Session) -> None:
        while session.server == 2 and not release.exists():
            time.sleep(0.01)
        session.barrier()

    with bml.start(train, "bcube:2x2", launcher="processes", transport="shm") as job:
        said: dict[int, str] = {}
        wanted = {
            0: "servers [2] to be READY in step 1",
            2: "the training function to bring step 1",
        }
        while not wanted.items() <= said.items():  # the test's deadline ends this
            said = {server: each.get("waits_for", "") for server, each in job.status()["servers"].items()}
        release.touch()
        job.wait(30)


def test_copies_are_counted_and_own_memory_is_not_copied() -> None:
    def train(session: bml.Session) -> tuple[int, int]:
        server: Any = session._communicator
        session.allreduce(np.concatenate([session.empty(LARGE), session.empty(1)])[:LARGE])
        foreign = server.nbytes_copied
        session.allreduce(session.empty(LARGE))
        return foreign, server.nbytes_copied - foreign

    values = jobs.launch(train, "bcube:2x1", transport="shm").values
    assert set(values.values()) == {(4 * LARGE, 0)}


def test_what_is_read_in_place_is_not_copied() -> None:
    """A result that a user reads where it lies takes its memory as long as it is used; a copy takes none."""

    def train(session: bml.Session) -> tuple[int, int, int]:
        pages = session._communicator._shell.runner._pages  # type: ignore[attr-defined]
        own, held = pages[session.server], []
        x = session.empty(2 * LARGE)
        x[:] = 1
        there = session.allreduce(x, shared=True)
        held.append(len(own.held()))
        assert there[0] == len(session.contributors)
        del there
        gc.collect()
        held.append(len(own.held()))
        copied = session.allreduce(x)
        held.append(len(own.held()))
        assert copied[0] == len(session.contributors)
        return tuple(held)

    values = jobs.launch(train, "bcube:2x2", transport="shm").values
    assert set(values.values()) == {(1, 0, 0)}


def test_the_launcher_can_be_killed_and_nothing_stays(tmp_path: Path) -> None:
    """Memory has no name, so there is nothing to remove; the processes end with their launcher."""
    import signal
    import sys

    script = tmp_path / "forever.py"
    script.write_text(
        "import numpy as np\nimport pathlib, os\n"
        "def train(session):\n"
        "    while True:\n"
        "        session.allreduce(np.ones(100_000))\n"
        f"        pathlib.Path({str(tmp_path)!r}, f'pid{{session.server}}').write_text(str(os.getpid()))\n"
    )
    before = left_behind()
    command = [sys.executable, "-m", "bml", "run", str(script), "--fabric", "bcube:2x1", "--launcher"]
    with commands.begun(*command, "processes", "--transport", "shm", "--quiet") as launcher:
        pids = [tmp_path / f"pid{server}" for server in range(2)]
        while not all(path.exists() and path.read_text() for path in pids):
            assert launcher.poll() is None
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        for path in pids:
            while os.path.exists(f"/proc/{path.read_text()}/fd"):
                pass  # the test's deadline ends this
        launcher.communicate()
    assert left_behind() == before


def test_a_server_that_may_open_no_more_files_says_so_at_once() -> None:
    """It was taken for the others' death, for which it waited two minutes."""

    def train(session: bml.Session) -> None:
        for step in session.steps(10):
            if (session.server, step) == (1, 5):
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
            session.allreduce(np.ones(100_000 << step))

    begun_s = time.monotonic()
    with pytest.raises(TrainingError, match=r"server 1 raised NoRoom: .* MiB more of memory: .*ulimit -n"):
        jobs.launch(train, "bcube:2x2", transport="shm")
    assert time.monotonic() - begun_s < 60
