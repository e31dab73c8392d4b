"""The page of promises: a page long, and each promise has tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from reference_pages import REFERENCE, ROOT, rows

PAGE = "promises.md"
TITLES = re.findall(r"^## (.+)$", (REFERENCE / PAGE).read_text(), re.MULTILINE)
PROMISES = [row for title in TITLES for row in rows(PAGE, title)]
HELD_BY = re.compile(r"(tests/[\w/]+/test_\w+\.py)::([\w:]+)")


def found_in(path: Path) -> set[str]:
    """The names of the tests of a file, those of classes after the name of the class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        each = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in each if isinstance(one, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def missing(held_by: str) -> list[str]:
    """The tests in a cell that are not there; the cell itself if it is no list of tests."""
    named = [HELD_BY.fullmatch(each) for each in held_by.split(", ")]
    if not all(named):
        return [held_by]
    paths = [(ROOT / each[1], each[2]) for each in named if each]
    return [f"{path}::{name}" for path, name in paths if not path.exists() or name not in found_in(path)]


def test_it_is_a_page() -> None:
    assert 0 < len(PROMISES) <= 60
    assert (REFERENCE / PAGE).read_text().count("\n| --- ") == len(TITLES), "a table below each heading"


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0][:60])
def test_the_tests_of_a_promise_are_there(row: list[str]) -> None:
    promise, does_not_hold, held_by = row
    assert promise.endswith(".")
    assert does_not_hold
    assert missing(held_by) == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    (path := tmp_path / "test_one.py").write_text(
        "def test_a(): ...\ndef helper(): ...\nclass TestB:\n    def test_c(self): ...\n"
    )
    assert found_in(path) == {"test_a", "TestB::test_c"}
    here, nowhere = "tests/documents/test_promises.py", "tests/documents/test_nowhere.py::test_a"
    assert missing(f"{here}::test_it_is_a_page") == []
    gone = f"{here}::test_of_nothing"
    assert missing(f"{here}::test_it_is_a_page, {gone}") == [f"{ROOT}/{gone}"]
    assert missing(nowhere) == [f"{ROOT}/{nowhere}"]
    assert missing("") == [""]
    assert missing("-") == ["-"]
    assert missing(here) == [here]
