"""JSON of any value, and files that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bml.cli import main
from bml.cli.printed import check_writable, size_lines, strict_json
from bml.topology.errors import UsageError
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


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    check_writable(None, "--report")
    check_writable(tmp_path / "new", "--report")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "--report")
    assert (tmp_path / "old").read_text() == "kept"


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
    assert reader.communicate(timeout=10)[0] == "the report"


def test_the_throughput_is_shown_of_jobs_that_had_several_sizes() -> None:
    six = SizeSummary(steps=120, samples=4320, seconds=4.0, steps_per_s=29.75, samples_per_s=1071.0)
    nine = SizeSummary(steps=1, samples=0, seconds=0.0, steps_per_s=None, samples_per_s=None)
    assert size_lines({6: six}) == []
    assert size_lines({"6": six, "9": nine}) == [
        "with 6 servers: 120 steps in 4.00 s, 29.8 per second, 1071 samples per second",
        "with 9 servers: 1 steps",
    ]
