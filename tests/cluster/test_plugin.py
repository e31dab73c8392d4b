"""The pytest plugin, as its users see it: header, marker, parametrisation, repetition, failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

THREE = {"count": 3, "kinds": ("kill", "cut", "coordinator")}

@pytest.mark.faults(fabric="bcube:3x2", steps=40, must_strike=False, **THREE)
def test_drawn(fault_plan):
    print("DRAWN", fault_plan)

@pytest.mark.faults("kill:4@step=20", "cut:2/0@step=9,phase=broadcast", must_strike=False)
def test_given(fault_plan):
    assert str(fault_plan) == "kill:4@step=20 cut:2/0@step=9,phase=broadcast"

@pytest.mark.parametrize("fault_plan", ["kill:1@step=2", ["kill:1@step=2", "exit:2@t=3s"], ""], indirect=True)
@pytest.mark.faults(must_strike=False)
def test_parametrised(fault_plan):
    assert len(fault_plan) in (0, 1, 2)

@pytest.mark.faults("kill:1@step=2")
def test_fails(fault_plan, fault_seed):
    assert fault_seed < 0

def test_unmarked(fault_plan):
    pass

@pytest.mark.faults("kill:1")
def test_wrong(fault_plan):
    pass

@pytest.mark.faults(steps=3)
def test_incomplete(fault_plan):
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *arguments]
    unseeded = {name: text for name, text in os.environ.items() if name != "BML_FAULT_SEED"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=unseeded
    ).stdout


@pytest.mark.slow
def test_the_whole_of_it(suite: Path) -> None:
    out = run(suite, "--fault-seed", "7", "-rP")
    assert "fault seed: 7 (repeat with --fault-seed 7)" in out
    assert "1 failed" in out
    assert "5 passed" in out
    assert "3 errors" in out
    assert re.search(r"- fault plan -+\nkill:1@step=2\nrepeat with --fault-seed 7", out)
    for reason in (
        "fault_plan needs faults",
        "'kill:1' is not a fault",
        "takes either faults as texts, or fabric= and steps=",
    ):
        assert reason in out
    drawn = re.findall(r"^DRAWN (.*)", out, re.M)
    assert len(drawn[0].split()) == 3


@pytest.mark.slow
def test_a_test_draws_the_same_plan_alone_and_another_one_from_another_seed(suite: Path) -> None:
    drawn = re.findall(r"^DRAWN (.*)", run(suite, "--fault-seed", "7", "-rP"), re.M)
    alone = run(suite, "--fault-seed", "7", "-rP", "-k", "drawn")
    assert re.findall(r"^DRAWN (.*)", alone, re.M) == drawn
    other = run(suite, "--fault-seed", "8", "-rP", "-k", "drawn")
    assert re.findall(r"^DRAWN (.*)", other, re.M) != drawn


@pytest.mark.slow
def test_workers_of_xdist_draw_from_the_printed_seed(suite: Path) -> None:
    pytest.importorskip("xdist")
    out = run(suite, "-n", "2", "-rP", "-k", "drawn or fails")
    (seed,) = set(re.findall(r"fault seed: (\d+)", out))
    drawn = re.findall(r"^DRAWN (.*)", out, re.M)
    assert drawn
    assert re.findall(r"^DRAWN (.*)", run(suite, "--fault-seed", seed, "-rP", "-k", "drawn"), re.M) == drawn


PLACED = """
import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.faults(fabric="bcube:3x2", steps=400, count=3)
class TestGroup:
    @pytest.mark.parametrize("name", ["a", "b@c", "d::e"])
    def test_drawn(self, fault_plan, name):
        print("DRAWN", name, fault_plan)
"""


@pytest.mark.slow
def test_the_same_plan_from_another_folder_and_with_groups(tmp_path: Path) -> None:
    """`nodeid` has the way from pytest's rootdir to the file, and the group of pytest-xdist."""
    pytest.importorskip("xdist")
    inner = tmp_path / "project" / "tests"
    inner.mkdir(parents=True)
    (inner / "test_placed.py").write_text(PLACED)

    def drawn(folder: Path, *arguments: str) -> set[str]:
        out = run(folder, "--fault-seed", "7", "-rP", *arguments)
        return set(re.findall(r"^DRAWN (.*)", out, re.M))

    here = drawn(inner, "--rootdir", str(inner))
    assert len(here) == 3
    assert len({line.partition(" ")[2] for line in here}) == 3, "each has a plan of its own"
    assert drawn(tmp_path, "--rootdir", str(tmp_path)) == here
    assert drawn(inner, "--rootdir", str(inner), "-n", "1", "--dist", "loadgroup") == here


@pytest.mark.slow
@pytest.mark.parametrize("style", ["-q", "-qq", "--tb=no"])
def test_the_seed_is_shown_after_a_failure_also_without_a_header(suite: Path, style: str) -> None:
    out = run(suite, style, "-p", "no:xdist", "--fault-seed", "7", "-k", "fails")
    assert "fault seed: 7 (repeat with --fault-seed 7)" in out
    out = run(suite, "-q", "--fault-seed", "7", "-k", "drawn")
    assert "fault seed" not in out, "nothing failed"


JOBS = """
import bml, numpy as np, pytest
from bml.cluster.spec.job import JobSpec
from bml.cluster.launcher.outcomes import tell
from bml.cluster.launcher.result import Result

def job(*faults, struck=()):
    tell(Result(JobSpec("bcube:2x2", faults=faults), struck=set(struck)))

@pytest.mark.faults("kill:1@step=2", "kill:2@step=99")
def test_vacuous(fault_plan):
    job(*map(str, fault_plan), struck=["kill:1@step=2"])

@pytest.mark.faults("kill:1@step=2", "kill:2@step=99")
def test_good(fault_plan):
    job("cut:0/0@step=99")
    job(str(fault_plan), struck=["kill:1@step=2", "kill:2@step=99"])

@pytest.mark.faults("kill:2@step=99", must_strike=False)
def test_told_otherwise(fault_plan):
    job("kill:2@step=99")

@pytest.mark.parametrize("fault_plan", ["kill:2@step=99"], indirect=True)
@pytest.mark.faults(must_strike=False)
def test_parametrised(fault_plan):
    job("kill:2@step=99")

@pytest.mark.faults(fabric="bcube:2x2", steps=40, count=1, must_strike=False)
def test_drawn(fault_plan):
    job(str(fault_plan))
"""


@pytest.mark.slow
def test_a_test_whose_faults_never_struck_fails(tmp_path: Path) -> None:
    (tmp_path / "test_jobs.py").write_text(JOBS)
    out = run(tmp_path, "-p", "no:xdist")
    assert "1 failed, 4 passed" in out
    assert "kill:2@step=99: step 99 never came while server 2 was in the job" in out
    assert "kill:1@step=2: " not in out
    assert "must_strike=False" in out


FORGOTTEN = (
    JOBS.partition("@pytest")[0]
    + """
@pytest.mark.faults("kill:1@step=2")
def test_takes_no_plan():
    job("kill:1@step=2", struck=["kill:1@step=2"])

@pytest.mark.faults("kill:1@step=2")
class TestOfAClass:
    def test_takes_no_plan_either(self):
        pass

    def test_takes_it_late(self, request):
        job(str(request.getfixturevalue("fault_plan")), struck=["kill:1@step=2"])

@pytest.mark.faults("kill:1@step=2", "kill:2@step=3")
def test_gives_it_to_no_job(fault_plan):
    job("cut:0/0@step=99")

@pytest.mark.parametrize("fault_plan", ["kill:2@step=9"], indirect=True)
def test_gives_no_job_the_plan_of_a_row(fault_plan):
    pass

@pytest.mark.faults("kill:1@step=2", must_strike=False)
def test_told_otherwise():
    pass

@pytest.mark.faults("kill:1@step=2")
def test_injects_it_later(fault_plan):
    job(struck=map(str, fault_plan))

@pytest.mark.faults("kill:1@step=2")
def test_fails_by_itself():
    assert False
"""
)


@pytest.mark.slow
def test_a_test_that_injects_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "test_jobs.py").write_text(FORGOTTEN)
    out = run(tmp_path, "-p", "no:xdist", "-rf")
    failed = re.findall(r"^FAILED test_jobs.py::(\S*) - (.*)$", out, re.M)
    assert {name.rpartition("::")[2].partition("[")[0] for name, _ in failed} == {
        "test_takes_no_plan",
        "test_takes_no_plan_either",
        "test_gives_it_to_no_job",
        "test_gives_no_job_the_plan_of_a_row",
        "test_fails_by_itself",
    }
    assert "5 failed, 3 passed" in out
    assert out.count("it does not take the fixture fault_plan") == 2
    for fault in ("kill:1@step=2", "kill:2@step=3", "kill:2@step=9"):
        assert f"  {fault}: no job of this test was given it (faults=fault_plan)" in out


WRONG = {
    'fabric="bcube:3x2", steps=9, kinds="kill"': "kinds is 'kill': give a list of kinds",
    'fabric="bcube:3x2", steps="10"': "steps is '10': give a whole number",
    'fabric="bcube:3x2", steps=10, count=1.5': "count is 1.5: give a whole number",
    'fabric="bcube:3x2", steps=10, kind=["kill"]': "takes either faults as texts, or fabric= and steps=",
    'fabric="bcub:3x2", steps=10': "bcub",
    "fabric=3, steps=10": "3",
    '"kil:4@step=20"': "'kil:4@step=20'",
    '["kill:4@step=20"]': "['kill:4@step=20'] is not the text of a fault",
}


@pytest.mark.slow
def test_a_wrong_marker_is_named_in_one_line(tmp_path: Path) -> None:
    tests = [
        f"@pytest.mark.faults({marker})\ndef test_{n}(fault_plan): pass\n" for n, marker in enumerate(WRONG)
    ]
    (tmp_path / "test_wrong.py").write_text("\n".join(["import pytest", *tests]))
    out = run(tmp_path, "-p", "no:xdist").partition("= short test summary")[0]
    told = re.findall(r"^_+ ERROR at setup of test_\d _+\n(.*)\n(?=_|=|\Z)", out, re.M)
    assert len(told) == len(WRONG), out
    for line, says in zip(told, WRONG.values(), strict=True):
        assert says in line


@pytest.mark.slow
def test_without_a_seed_one_is_drawn_and_shown(suite: Path) -> None:
    seeds = {re.findall(r"fault seed: (\d+)", run(suite, "-k", "given"))[0] for _ in range(2)}
    assert len(seeds) == 2
    assert (
        "--fault-seed is -1: give a number"
        in subprocess.run(
            [sys.executable, "-m", "pytest", "--fault-seed", "-1"],
            capture_output=True,
            text=True,
            cwd=suite,
            check=False,
        ).stderr
    )
