"""Huge, odd and unreadable values of every command: a clear error at once, never a traceback or a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.fabric.condition import Damage
from bml.faults import Fault, FaultPlan
from bml.topology import UsageError, parse

BIG = "9" * 5000
RUN = ["run", "SCRIPT", "--launcher", "processes", "--fabric", "bcube:2x1"]
BENCH = ["bench", "allreduce", "--fabric", "bcube:2x1"]
DAYS = "is too long, a time is at most 1000000s"
WITHIN_S = 60.0
"""A second on an idle machine."""

CASES = [
    (["check", "--seeds", "0:9999999999"], "9999999999 seeds would take weeks: give at most 10000000"),
    (["check", "--seeds", f"0:{BIG}"], "is not a range of seeds"),
    (["check", "--seeds", "-3:4"], "is not a range of seeds"),
    (["check", "--jobs", BIG], "Invalid value for '--jobs'"),
    (["check", "--fabric", f"bcube:{BIG}x2"], "bcube"),
    (["plan", "bcube:3x2", "--rate", "0/0=1e99999999"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", "0/0=1e-99999999"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", "0/0=1e99"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", f"0/0={BIG}"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", f"0/0=1/{BIG}"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", "0/0=nan"], "write a positive exact number"),
    (["plan", "bcube:3x2", "--rate", f"{BIG}/0=1"], "is not a rate"),
    (["plan", "bcube:3x2", "--bytes", BIG], "is not a size"),
    (["plan", "bcube:3x2", "--bytes", "99999999999GB"], "is too much"),
    (["plan", "bcube:3x2", "--bytes", "nan"], "is not a size"),
    (["plan", "bcube:3x2", "--draw", "/dev/null/x.svg"], "--draw /dev/null/x.svg cannot be written"),
    (["plan", "bcube:3x2", "--draw", "/tmp"], "--draw /tmp cannot be written"),
    (["plan", "bcube:3x2", "--constants", "/dev/null/x"], "holds no constants"),
    (["plan", "bcube:3x2", "--fail", f"server:{BIG}"], "server:9"),
    (["plan", f"torus:{BIG}x2"], "torus"),
    (["plan", "torus:3x999"], "at most 65536"),
    ([*RUN, "--fault-seed", "-1"], "Invalid value for '--fault-seed'"),
    ([*RUN, "--fault-seed", BIG], "Invalid value for '--fault-seed'"),
    ([*RUN, "--kept-mib", "nan"], "Invalid value for '--kept-mib'"),
    ([*RUN, "--kept-mib", "inf"], "Invalid value for '--kept-mib'"),
    ([*RUN, "--kept-mib", "1e300"], "kept_mib is 1e+300"),
    ([*RUN, "--detect-s", "nan"], "detect_s is nan"),
    ([*RUN, "--detect-s", "1e300"], "detect_s is 1e+300"),
    ([*RUN, "--min-servers", BIG], "--min-servers"),
    ([*RUN, "--servers", "6"], "'6' is no range of servers"),
    ([*RUN, "--servers", "9..6"], "cannot have 9 to 6 servers"),
    ([*RUN, "--servers", f"6..{BIG}"], "is no range of servers"),
    ([*RUN, "--spares", "-1"], "spares is -1"),
    ([*RUN, "--absent", BIG], "not a list of servers"),
    ([*RUN, "--absent", "-1"], "cannot be absent"),
    ([*RUN, "--resource", "GPU=nan"], "cannot reserve nan"),
    ([*RUN, "--resource", f"GPU={BIG}"], "cannot reserve"),
    ([*RUN, "--fault", "kill:1@step=0"], "'0' is no step, a number counted from 1"),
    ([*RUN, "--fault", f"kill:1@step={BIG}"], "is no step"),
    ([*RUN, "--fault", "kill:1@t=1e999s"], DAYS),
    ([*RUN, "--fault", "freeze:1@step=2,for=1e999s"], DAYS),
    ([*RUN, "--fault", "flap:1/0@step=2,every=1e999s"], DAYS),
    ([*RUN, "--fault", f"slow:1/0@step=2,rate={BIG}gbit"], "is no rate"),
    (
        [*RUN, "--fault", "loss:1/0@step=2,share=0.00001%"],
        "is no share, a number with % from 0.0001% to 100%",
    ),
    ([*RUN, "--fault", f"kill:{BIG}@step=2"], "is no server"),
    ([*RUN, "--fault", "LATIN.yaml"], "is not text in UTF-8"),
    ([*RUN, "--fault", "DEEP.yaml"], "the fault plan is not YAML"),
    ([*RUN, "--fault", "FOLDER.yaml"], "cannot be read: Is a directory"),
    ([*RUN, "--fault", "/dev/null/x.yaml"], "there is no fault plan"),
    ([*BENCH, "--block-s", "nan"], "Invalid value for '--block-s'"),
    ([*BENCH, "--sizes", BIG], "is not a size"),
    ([*BENCH, "--sizes", "99999999GB"], "is too much"),
    ([*BENCH, "--sizes", "900000GB"], "do not fit into the memory of this machine"),
    ([*BENCH, "--repetitions", BIG], "Invalid value for '--repetitions'"),
    ([*BENCH, "--trace", "/dev/null/trace.json"], "--trace /dev/null/trace.json cannot be written"),
    ([*BENCH, "--plot", "/dev/null/x.svg"], "--plot /dev/null/x.svg cannot be written"),
    ([*RUN, "--every", "5"], "--every is for checkpoints: give --checkpoint, too"),
    ([*RUN, "--keep", "3"], "--keep is for checkpoints: give --checkpoint, too"),
    ([*RUN, "--resume", "/dev/null", "--every", "100"], "--every is for checkpoints: give --checkpoint, too"),
    ([*RUN, "--fabric-name", "b"], "--fabric-name is for emulated fabrics: give --fabric-emulated, too"),
    ([*BENCH, "--fabric-name", "b"], "--fabric-name is for emulated fabrics: give --fabric-emulated, too"),
    (["doctor", "--detect-s", "nan"], "detect_s is nan"),
    (["fabric", "up", "bcube:2x2", "--rate", f"{BIG}mbit"], "is no rate"),
    (["fabric", "up", "bcube:2x2", "--rate", "nan"], "is no rate"),
    (["fabric", "up", "bcube:2x2", "--name", "x" * 5000], "is no name"),
    (["fabric", "cut", f"{BIG}/0"], "is no damage"),
    (["fabric", "slow", "0/0", "--rate", f"{BIG}gbit"], "is no rate"),
    (["inject", f"kill:{BIG}"], "is no server"),
    (["inject", "freeze:1,for=1e999s"], DAYS),
]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "script.py").write_text("def train(session): pass\n")
    (tmp_path / "LATIN.yaml").write_bytes(b"- kill:1@step=2 # \xff\xfe\n")
    (tmp_path / "DEEP.yaml").write_text("[" * 100_000)
    (tmp_path / "FOLDER.yaml").mkdir()
    made = ("LATIN.yaml", "DEEP.yaml", "FOLDER.yaml")
    return {"SCRIPT": str(tmp_path / "script.py"), **{name: str(tmp_path / name) for name in made}}


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S)
@pytest.mark.parametrize(("arguments", "says"), CASES, ids=lambda value: " ".join(value)[:60])
def test_an_odd_value_is_refused_at_once(files: dict[str, str], arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, [files.get(word, word) for word in arguments])
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert len(done.output) < 1500, "nobody reads 5,000 digits"


@pytest.mark.parametrize("share", ["0.0001%", "0.5%", "5%", "50%", "99.9999%", "100%"])
def test_shares_are_written_as_they_are_read(share: str) -> None:
    text = f"loss:1/0@step=2,share={share}"
    assert str(Fault.parse(text)) == text
    assert str(Damage.parse(f"loss:1/0,share={share}")) == f"loss:1/0,share={share}"


@pytest.mark.parametrize("time_", ["1e-05s", "0.001s", "1000000s"])
def test_times_are_written_as_they_are_read(time_: str) -> None:
    assert str(Fault.parse(f"cut:1/0@t={time_}")) == f"cut:1/0@t={time_}"


def test_a_plan_is_drawn_from_a_number_from_0() -> None:
    with pytest.raises(UsageError, match="the seed of a fault plan is -1: give a number from 0"):
        FaultPlan.draw(-1, parse("bcube:3x2"), 20)
