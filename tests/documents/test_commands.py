"""docs/reference/commands.md is what docs/commands.py writes, and environment.md has every variable."""

from __future__ import annotations

import re
from pathlib import Path

from reference_pages import REFERENCE, ROOT, names, script

VARIABLE = re.compile(r"\bBML_[A-Z][A-Z_]*[A-Z]\b")


def test_the_page_of_commands_is_that_of_today() -> None:
    writer = script("commands")
    page = (REFERENCE / "commands.md").read_text()
    assert page == writer.page(), "run: python docs/commands.py"
    assert page.count("\n## ") > 15


def variables(*files: Path) -> set[str]:
    return {name for file in files for name in VARIABLE.findall(file.read_text())}


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_every_variable_that_the_code_reads_has_its_row() -> None:
    read = variables(*python_files("bml", "topology", "faults"))
    assert names("environment.md") == read


def test_every_variable_of_the_tests_has_its_row() -> None:
    tests = [*python_files("tests"), *(ROOT / "tests").rglob("*.sh"), ROOT / "Makefile", ROOT / ".ci/workers"]
    ours = names("environment.md", "Variables of this project's own tests")
    assert ours == variables(*tests) - names("environment.md")
