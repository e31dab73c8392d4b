"""`bml check`: what it prints, and that a violation shows."""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cli.check import parse_seeds
from bml.io.workers import finished, workers
from bml.protocol.step.barrier import Barrier
from bml.sim.check import Tally
from bml.topology.errors import UsageError


def test_json_has_exactly_these_keys() -> None:
    result = CliRunner().invoke(main, ["check", "--seeds", "0:5", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert list(found) == [
        "seeds",
        "violations",
        "failing_seed",
        "faults_injected",
        "steps_committed",
        "seconds",
    ]
    assert (found["seeds"], found["violations"], found["failing_seed"]) == (5, 0, None)
    assert found["steps_committed"] >= 5


def test_text_says_it_in_a_line() -> None:
    result = CliRunner().invoke(main, ["check", "--seeds", "3:6", "--fabric", "bcube:2x2"])
    assert result.exit_code == 0
    assert result.output.startswith("3 seeds, ")
    assert ": 0 violations (" in result.output


@pytest.mark.slow
def test_two_processes_count_the_same_as_one() -> None:
    totals = []
    for jobs in ("1", "2"):
        result = CliRunner().invoke(main, ["check", "--seeds", "0:60", "--jobs", jobs, "--json"])
        found = json.loads(result.output)
        del found["seconds"]
        totals.append(found)
    assert totals[0] == totals[1]


def test_a_violation_is_told_with_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Barrier, "passed", property(lambda barrier: barrier._entered))
    result = CliRunner().invoke(main, ["check", "--seeds", "0:3"])
    assert result.exit_code == 1
    assert "  seed 0: promise 1: server " in result.output
    assert "seed 0 on bcube" in result.output
    assert "installs view 1" in result.output
    found = json.loads(CliRunner().invoke(main, ["check", "--seeds", "0:3", "--json"]).stdout)
    assert found["failing_seed"] == 0
    assert found["violations"] >= 1


def test_what_was_found_is_said_at_once_and_kept_by_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(seeds: Iterable[int], **_: object) -> Tally:
        tally = Tally()
        for seed in seeds:
            if seed == 7:
                raise KeyboardInterrupt
            tally.count(seed, 1, 2, False, "promise 1: no\nmore" if seed in (2, 5) else None)
        return tally

    monkeypatch.setattr("bml.cli.check.check", one)
    result = CliRunner().invoke(main, ["check", "--seeds", "0:100", "--jobs", "1"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["  seed 2: promise 1: no", "  seed 5: promise 1: no", "Aborted!"]
    assert result.stdout.startswith("7 seeds, 7 faults, 14 steps committed")
    assert ": 2 violations (" in result.stdout
    found = json.loads(
        CliRunner().invoke(main, ["check", "--seeds", "0:100", "--jobs", "1", "--json"]).stdout
    )
    assert (found["seeds"], found["violations"], found["failing_seed"]) == (7, 2, 2)


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "-1:5", "0:5:9", "a:b", "0:9999999999999999"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a range of seeds"):
        parse_seeds(text)


def test_an_unknown_fabric_is_refused() -> None:
    result = CliRunner().invoke(main, ["check", "--fabric", "bcube:9"])
    assert result.exit_code == 2


#: Python alone takes 10 MB, and a worker with all its imports 50 and more.
IMPORTING_NBYTES = 18 << 20


@pytest.mark.real
@pytest.mark.timeout(60)
def test_an_interrupt_while_workers_start_shows_nothing_of_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bml", "check", "--seeds", "0:100000", "--jobs", "2"]
    with commands.begun(*command, env=commands.environment_in(tmp_path)) as process:
        family = psutil.Process(process.pid)
        while not any(each.memory_info().rss > IMPORTING_NBYTES for each in family.children()[1:]):
            assert process.poll() is None
        commands.interrupt(process, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert commands.left_of(tmp_path) == []


class Interrupted(threading.Condition):
    """An interrupt comes when the lock is taken, and before it is known to be: it stays taken."""

    def __enter__(self) -> bool:
        taken = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return taken


def hand_out(pool: Any) -> None:
    pool._work_ids.not_full = Interrupted(pool._work_ids.mutex)
    pool.submit(int)


def await_work(pool: Any) -> None:
    future = pool.submit(time.sleep, 0.5)
    future._condition = Interrupted(future._condition._lock)
    for each in finished([future]):
        each.result()


@pytest.mark.real
@pytest.mark.timeout(60)
@pytest.mark.parametrize("work", [hand_out, await_work])
def test_an_interrupt_of_work_leaves_no_lock_taken(work: Callable[[Any], None]) -> None:
    """The thread of the pool needs the lock to end."""
    with pytest.raises(KeyboardInterrupt), workers(1) as pool:
        work(pool)


@pytest.mark.real
@pytest.mark.timeout(60)
def test_workers_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """They hold its standard streams open: a program that reads these would wait for ever."""
    command = [sys.executable, "-m", "bml", "check", "--seeds", "0:100000", "--jobs", "2", "--json"]
    with commands.begun(*command, env=commands.environment_in(tmp_path)) as process:
        while len(psutil.Process(process.pid).children(recursive=True)) < 3:  # two, and multiprocessing's own
            assert process.poll() is None
        process.kill()
        process.communicate(timeout=30)
    assert commands.left_of(tmp_path) == []
