"""How the gate chooses and orders tests, and what the nightly run writes down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gate
import nightly
import pytest

_ROOT = Path(__file__).parents[1]


def cases(function: str, number: int, *marks: str) -> str:
    """A test with so many cases, and with these marks."""
    marked = "".join(f"@pytest.mark.{mark}\n" for mark in marks)
    return f'{marked}@pytest.mark.parametrize("n", range({number}))\ndef {function}(n):\n    pass\n\n'


_FILE = f"""
import pytest

{cases("test_drawn", 20, "few(3)")}
{cases("test_all", 40)}
{cases("test_quarter", 40, "slow")}
{cases("test_four", 9, "slow")}
{cases("test_smoke", 9, "real", "smoke")}
{cases("test_real", 9, "real")}
{cases("test_ray", 9, "ray")}
{cases("test_shell", 9, "real")}
{cases("test_rate", 2, "real", "serial('a rate')")}
{cases("test_pace", 2, "serial('a pace')")}
{cases("test_time", 2, "serial('a time')")}
@pytest.mark.timeout(500)
def test_long():
    pass

def test_red():
    assert 1 == 2
"""
_OTHER = "import pytest\n\n" + "".join(cases(f"test_other_{number}", 1, "real") for number in range(6))


def collected(folder: Path, seed: int, *options: str, cwd: Path | None = None, **settings: str) -> list[str]:
    """The tests of the file, in the order in which they would run."""
    said = ran(folder, seed, "--collect-only", *options, cwd=cwd, **settings).stdout
    return [line.partition("::")[2] for line in said.splitlines() if "::" in line]


def ran(
    folder: Path, seed: int, *options: str, cwd: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "pytest", "-q", "-p", "gate", "-p", "no:cacheprovider", "--noconftest"]
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'tests'}:{_ROOT}", "BML_FAULT_SEED": str(seed)}
    environment |= {"BML_TESTS": "sample", **settings}
    return subprocess.run(
        [*program, "-c", str(_ROOT / "pyproject.toml"), f"--rootdir={cwd or folder}", *options, str(folder)],
        env=environment,
        cwd=cwd or folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(_FILE)
    (tmp_path / "test_other.py").write_text(_OTHER)
    return tmp_path


@pytest.mark.slow
def test_cases_are_drawn_by_the_seed_alone_and_the_longest_come_first(folder: Path) -> None:
    chosen = collected(folder, 7)
    assert chosen[0] == "test_long"
    numbers = Counter(each.partition("[")[0] for each in chosen)
    slow = numbers.pop("test_quarter", 0), numbers.pop("test_four", 0)
    others = [f"test_other_{number}" for number in range(6)]
    real = {name: numbers.pop(name, 0) for name in ("test_real", "test_ray", "test_shell", *others)}
    serial = sorted(numbers.pop(name, 0) for name in ("test_rate", "test_pace", "test_time"))
    assert serial == [0, 2, 2], "half of the functions, with all of their cases"
    assert slow in ((10, 0), (0, 4)), "one of two"
    assert sum(map(bool, real.values())) == 3, "of the nine of the folder, whatever their files"
    assert all(drawn in ((0, 1) if name in others else (0, 4)) for name, drawn in real.items())
    assert numbers == {"test_drawn": 3, "test_all": 40, "test_smoke": 9, "test_long": 1, "test_red": 1}
    assert collected(folder, 7, cwd=folder.parent) == chosen, "drawn by the folder, too"
    assert {tuple(collected(folder, seed)) for seed in (8, 9)} != {tuple(chosen)}
    assert len(collected(folder, 7, BML_TESTS="all")) == 20 + 40 + 40 + 9 + 9 + 9 + 9 + 9 + 2 + 6 + 6


@pytest.mark.slow
def test_a_failure_is_printed_with_the_command_that_repeats_it(folder: Path) -> None:
    end = ran(folder, 11, "-n", "2", "--dist", "loadgroup")
    assert end.returncode == 1
    assert "BML_FAULT_SEED=11 .venv/bin/python -m pytest 'test_some.py::test_red'" in end.stdout
    assert "seed of all that is drawn: 11" in end.stdout
    assert f"1 failed, {len(collected(folder, 11)) - 1} passed" in end.stdout


_LIMITS = """
import pytest

def limit(request):
    return request.node.get_closest_marker("timeout").args[0]

@pytest.mark.timeout(3)
def test_short(request):
    assert limit(request) == 240

@pytest.mark.timeout(500)
def test_long(request):
    assert limit(request) == 500
"""


@pytest.mark.slow
def test_no_time_limit_is_so_short_that_a_slow_machine_exceeds_it(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_LIMITS)
    assert "2 passed" in ran(tmp_path, 7).stdout


_HANGS = """
import signal, threading
import gate

gate.grace_s = 1

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()

def test_next():
    pass
"""


@pytest.mark.slow
def test_a_test_that_cannot_be_interrupted_is_named_and_the_next_ones_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_HANGS)
    end = ran(tmp_path, 7, "-n", "1", "--dist", "loadgroup", "--timeout", "2")
    assert end.returncode == 1
    assert "crashed while running 'test_some.py::test_hangs'" in end.stdout
    assert "1 failed, 1 passed" in end.stdout
    assert "in test_hangs" in end.stderr


def test_the_seed_follows_from_what_is_tested(tmp_path: Path) -> None:
    (tmp_path / "bml").mkdir()
    (tmp_path / "bml" / "a.py").write_text("a = 1\n")
    before = gate.seed_from(tmp_path)
    assert before == gate.seed_from(tmp_path)
    (tmp_path / "bml" / "a.py").write_text("a = 2\n")
    assert gate.seed_from(tmp_path) != before
    (tmp_path / "faults").mkdir()
    (tmp_path / "bml" / "faults").symlink_to("../faults")
    before = gate.seed_from(tmp_path)
    (tmp_path / "faults" / "b.py").write_text("b = 1\n")
    assert gate.seed_from(tmp_path) != before


@pytest.mark.slow
def test_the_gate_looks_at_every_file_that_has_long_tests() -> None:
    """It looks for marks in the text of files; six files had theirs from a function, and never ran there."""
    marks = "slow and not (real or ray or matrix or serial)"
    listed = said_by("make", "--no-print-directory", "--eval=listed: ; @$(SLOW)", "listed").split()
    found = said_by(sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", marks, BML_TESTS="all")
    assert {line.partition("::")[0] for line in found.splitlines() if "::" in line} <= {*listed}
    assert "::" in found


def said_by(*command: str, **settings: str) -> str:
    environment = {**os.environ, **settings}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout


def test_a_file_with_a_fixture_of_its_module_stays_together(tmp_path: Path) -> None:
    (tmp_path / "shares.py").write_text("@pytest.fixture(scope='module', params=[1])\n")
    (tmp_path / "alone.py").write_text("@pytest.fixture(scope='function')\n")
    assert gate.shares_a_fixture(tmp_path / "shares.py")
    assert not gate.shares_a_fixture(tmp_path / "alone.py")


def test_a_part_of_the_nightly_run_has_one_row_in_the_order_of_the_parts() -> None:
    page = f"Text.\n\n{nightly.HEAD}| soak | old |\n\n## Next\n"
    page = nightly.with_row(page, "check", "| check | new |")
    page = nightly.with_row(page, "soak", "| soak | newer |")
    assert page == f"Text.\n\n{nightly.HEAD}| check | new |\n| soak | newer |\n\n## Next\n"
    with pytest.raises(ValueError, match="has no table"):
        nightly.with_row("Text.", "check", "| check |")


def test_the_page_has_the_table_and_every_part_a_command() -> None:
    assert nightly.HEAD in nightly.PAGE.read_text()
    assert nightly.command_of("check", 100) == ".venv/bin/bml check --seeds 100:20100"
    assert nightly.main(["nonsense"]) == 2
