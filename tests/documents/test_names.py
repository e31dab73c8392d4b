"""Files, folders and modules that the documents name are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", *sorted(ROOT.glob("CONTRIBUTING.md"))]
FOLDERS = "bml|topology|faults|tests|benchmarks|examples|docs"

FILE = re.compile(rf"`((?:{FOLDERS})/[\w/.-]*)(?::\d+)?`")
DOTTED = re.compile(r"`(bml(?:\.\w+)+)(?:\(\))?`")


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    whole = name.split(".")
    for n in range(len(whole), 0, -1):
        try:
            found = importlib.import_module(".".join(whole[:n]))
        except ModuleNotFoundError:
            continue
        for attribute in whole[n:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    missing = {name for name in FILE.findall(text) if "NAME" not in name and not (ROOT / name).exists()}
    missing |= {name for name in DOTTED.findall(text) if not is_there(name)}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_document_that_readers_do_not_have(page: Path) -> None:
    assert "design document" not in page.read_text().lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_names_the_phases_of_a_step_says_what_they_are_together(page: Path) -> None:
    text = page.read_text()
    names_both = re.search(r"\bbroadcast\b", text) and re.search(r"\breduce\b", text)
    if names_both and page.name not in ("commands.md", "CONTRIBUTING.md"):  # generated; house rules
        assert "reduce-scatter" in text
        assert "all-gather" in text
