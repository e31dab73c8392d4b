"""The pages of docs/reference, read by tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def script(name: str) -> ModuleType:
    """The script docs/NAME.py, which writes parts of the documents, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def rows(page: str, title: str = "") -> list[list[str]]:
    """The cells of the first table below this heading (else of the page), without marks of code."""
    lines = (REFERENCE / page).read_text().splitlines()
    begin = next((i for i, line in enumerate(lines) if line.lstrip("#").strip() == title), 0)
    assert begin or not title, f"{page} has no heading {title!r}"
    rule = next(i for i, line in enumerate(lines[begin:], begin) if line.startswith("| ---"))
    found = []
    for line in lines[rule + 1 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")])
    return found


def names(page: str, title: str = "", column: int = 0) -> set[str]:
    """All names, separated by commas, in a column of a table."""
    return {name.strip() for row in rows(page, title) for name in row[column].split(",")}
