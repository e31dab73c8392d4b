"""JSON of any value, and files that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bml.cli import main
from bml.cli.printed import check_writable, size_lines, strict_json, write_file
from bml.topology.errors import FabricError, UsageError
from bml.train.balancing.throughput import SizeSummary


def refuse(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def parsed(value: Any) -> Any:
    return json.loads(strict_json(value), parse_constant=refuse)


class Mute:
    def __str__(self) -> str:
        raise ValueError("no text")


class Endless(dict[str, int]):
    def items(self) -> Any:
        raise SystemExit(3)


class NoNumber(int):
    def bit_length(self) -> int:
        raise ZeroDivisionError


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.floats(width=32).map(np.float32), st.just(Mute()), st.just(Endless()), st.just(NoNumber()),
    st.just(np.arange(3)), st.just("\ud800"),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.floats(), st.none())
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner)
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_value_is_json(value: Any) -> None:
    parsed(value)


def test_what_json_has_words_for_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "text"], "b": {"c": 10**30}}
    assert parsed(value) == value
    assert parsed([float("nan"), np.float64(0.5), (1, 2)]) == ["nan", 0.5, [1, 2]]


def test_a_value_that_contains_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert "[...]" in strict_json(value)


@pytest.mark.parametrize("where", ["missing/report.json", "."])
def test_a_file_that_cannot_be_written_is_named(where: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--report .* cannot be written"):
        check_writable(tmp_path / where, "--report")


@pytest.mark.parametrize(
    "command",
    [
        ["metrics", "dashboard", "/dev/full"],
        ["sim", "bcube:2x2", "--bytes", "1KiB", "--trace", "/dev/full"],
    ],
)
def test_a_disk_that_is_full_is_an_error_in_words(command: list[str]) -> None:
    found = CliRunner().invoke(main, command)
    assert "/dev/full could not be written: No space left on device" in found.output
    assert not found.exception or isinstance(found.exception, SystemExit)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files may have so few bytes that a report does not fit."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_that_was_there_is_kept_if_the_new_one_does_not_fit(tmp_path: Path, full_disk: None) -> None:
    report = tmp_path / "report.json"
    report.write_text("the old one")
    with pytest.raises(FabricError, match=r"report\.json could not be written: File too large"):
        write_file(report, "x" * (1 << 12))
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"report.json": "the old one"}


def test_a_new_file_is_where_the_link_leads_with_the_mode_of_the_old_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, "new")
    assert (target.read_text(), link.is_symlink(), target.stat().st_mode & 0o777) == ("new", True, 0o640)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("piped", [False, True])
def test_streams_are_written_in_place(stream: str, piped: bool, tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from bml.cli.printed import write_file\n"
        f"write_file(pathlib.Path({stream!r}), 'text'); os.write(1, b' and more')"
    )
    with (tmp_path / "out").open("ab") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE if piped else out, check=True, timeout=60
        )
    assert (done.stdout if piped else (tmp_path / "out").read_bytes()) == b"text and more"


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    check_writable(None, "--report")
    check_writable(tmp_path / "new", "--report")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "--report")
    assert (tmp_path / "old").read_text() == "kept"


def test_nobody_sees_a_report_before_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the file would read an empty one, or find that it is gone again."""
    seen, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: (seen.extend(tmp_path.iterdir()), unlink(path)))
    check_writable(tmp_path / "new", "--report")
    assert len(seen) == 1
    assert tmp_path / "new" not in seen


def test_a_number_that_parsers_refuse_is_text() -> None:
    assert parsed([10**5000, -(1 << 5000), 7**100]) == [hex(10**5000), hex(-(1 << 5000)), 7**100]


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    check_writable(link, "--report")
    assert [*tmp_path.iterdir()] == [link]


def test_the_reader_of_a_pipe_does_not_see_that_it_was_looked_at(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    looking = threading.Thread(target=check_writable, args=(pipe, "--report"), daemon=True)
    looking.start()
    looking.join(10)
    assert not looking.is_alive(), "it waits for a reader"
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    pipe.write_text("the report")
    assert reader.communicate(timeout=30)[0] == "the report"


def test_the_throughput_is_shown_of_jobs_that_had_several_sizes() -> None:
    six = SizeSummary(steps=120, samples=4320, seconds=4.0, steps_per_s=29.75, samples_per_s=1071.0)
    nine = SizeSummary(steps=1, samples=0, seconds=0.0, steps_per_s=None, samples_per_s=None)
    assert size_lines({6: six}) == []
    assert size_lines({"6": six, "9": nine}) == [
        "with 6 servers: 120 steps in 4.00 s, 29.8 per second, 1071 samples per second",
        "with 9 servers: 1 steps",
    ]
