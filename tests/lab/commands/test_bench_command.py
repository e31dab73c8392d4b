"""`bml bench` as a user types it."""

import json
import os
import signal
import sys

import commands
import psutil
import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cluster.spec.constants import load_constants
from bml.lab.bench import contest
from bml.lab.bench.contenders import PEERS, missing

QUICK = ("--sizes", "4KiB,64KiB", "--repetitions", "2", "--block-s", "0.02")
KEYS = {"who", "size", "median_s", "algbw", "busbw", "wrong", "theory_s", "ratio"}


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fabric", "bcube:3"], "is not ports x levels"),
        (["--fail", "server:99"], "there is no server 99"),
        (["--algorithm", "rings"], "choose one of"),
        (["--sizes", "3"], "multiple of 4"),
        (["--against", "nccl"], "there is no peer 'nccl'"),
        (["--transport", "rdma"], "'rdma' is not one of 'tcp'"),
        (["--shared"], "give --transport shm"),
        (["--transport", "shm", "--algorithm", "bml"], "use no schedule"),
        (["--transport", "shm", "--fail", "link:0/0"], "strikes links, which data"),
        (["--plot", "out.txt"], "is no .png, .svg or .pdf"),
        (["--fabric", "bcube:2x1", "--fail", "server:0"], "fewer than two servers"),
        (["--constants", "/nowhere"], "holds no constants"),
    ],
)
def test_bad_usage_is_said_before_anything_starts(arguments, says):
    result = bench("allreduce", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_help_has_examples():
    assert "bml bench allreduce --fabric bcube:3x2" in bench().output
    assert "bml bench allreduce --fabric bcube:3x2" in bench("allreduce", "--help").output
    assert bench("--calibrate", "allreduce").exit_code == 2


@pytest.mark.serial("what is measured has a size")
@pytest.mark.real
def test_calibration_is_stored_where_plan_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("BML_CONSTANTS", str(tmp_path / "constants.json"))
    result = bench("--calibrate", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    constants, source = load_constants()
    assert source == f"constants of {printed['stored']}"
    assert 1e-6 < constants.alpha_s < 0.1
    assert 0 < constants.beta_s < 1e-6
    assert constants.alpha_s == pytest.approx(printed["constants"]["alpha_s"], rel=1e-3)
    assert 0 < printed["seconds"] < 60
    planned = CliRunner().invoke(main, ["plan", "bcube:3x2", "--bytes", "4KiB", "--json"])
    assert json.loads(planned.stdout)["constants"] == source


@pytest.mark.real
def test_rows_picture_and_an_absent_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("BML_CONSTANTS", str(tmp_path / "none.json"))
    monkeypatch.setattr(contest, "missing", lambda who: f"{who} is not installed: install it")
    picture = tmp_path / "out.png"
    result = bench(
        "allreduce", "--fabric", "bcube:2x1", *QUICK, "--against", "gloo", "--plot", str(picture), "--json"
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["absent"] == {"gloo": "gloo is not installed: install it"}
    assert [(row["who"], row["size"], row["wrong"]) for row in printed["rows"]] == [
        ("bml", 4096, 0),
        ("bml", 65536, 0),
    ]
    assert all(row.keys() >= KEYS and row["median_s"] > 0 for row in printed["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.real
def test_on_a_damaged_fabric_the_survivors_are_measured():
    result = bench("allreduce", "--fabric", "bcube:3x1", *QUICK, "--fail", "server:1")
    assert result.exit_code == 0, result.output
    assert "allreduce on bcube:3x1 without server:1, 2 servers" in result.stdout
    assert result.stdout.splitlines()[0].split()[:3] == ["#", "size", "count"]


@pytest.mark.real
@pytest.mark.parametrize("shared", [(), ("--shared",)])
def test_shared_memory_is_measured(shared):
    result = bench("allreduce", "--fabric", "bcube:2x1", "--transport", "shm", *shared, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["transport"], printed["algorithm"]) == ("shm", "direct")
    assert [row["wrong"] for row in printed["rows"]] == [0, 0]


@pytest.mark.real
def test_peers_take_part():
    installed = [who for who in PEERS if missing(who) is None]
    if not installed:
        pytest.skip("; ".join(filter(None, map(missing, PEERS))))
    result = bench("allreduce", "--fabric", "bcube:2x1", *QUICK, "--against", ",".join(installed), "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["absent"] == {}
    assert [(row["who"], row["wrong"]) for row in printed["rows"]] == [
        (who, 0) for _ in range(2) for who in ("bml", *installed)
    ]


@pytest.mark.real
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupt_and_termination_leave_nothing(tmp_path, number, status):
    command = [sys.executable, "-m", "bml", "bench", "allreduce", "--fabric", "bcube:2x1", "--sizes"]
    command += ["4KiB,64MiB", "--repetitions", "9", "--block-s", "0.1"]
    with commands.begun(*command, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        assert process.stdout is not None
        while "bml" not in process.stdout.readline():  # the first row
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        commands.interrupt(process, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert list(tmp_path.glob("bml-bench-*")) == []
