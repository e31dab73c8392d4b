"""What `bml bench --trace` writes, and that it says so when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.lab.bench.contenders import JobSettings, Own
from bml.lab.bench.host import RankError
from bml.topology import parse

SHORT = ["bench", "allreduce", "--fabric", "bcube:2x1", "--sizes", "4KiB", "--repetitions", "1"]


def test_a_job_that_ended_badly_has_no_trace(tmp_path: Path) -> None:
    own = Own(tmp_path, JobSettings(parse("bcube:2x1"), trace=True))
    with pytest.raises(RankError, match="there is no trace of it"):
        own.recorded()
    own._error = RankError("bml: it broke")
    with pytest.raises(RankError, match="it broke"):
        own.recorded()
    own.close()


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_trace_is_written_or_the_command_fails(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = CliRunner().invoke(main, [*SHORT, "--block-s", "0.01", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert json.loads(trace.read_text())["traceEvents"]
    done = CliRunner().invoke(main, [*SHORT, "--block-s", "0.01", "--trace", "/dev/full"])
    assert done.exit_code == 1, done.output
    assert "/dev/full could not be written: No space left on device" in done.output
    assert "Traceback" not in done.output
