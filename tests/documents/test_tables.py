"""Tables of the documents that are made from the code are as `python docs/tables.py` writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
assert SPEC is not None
assert SPEC.loader is not None
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


def test_every_table_is_as_the_code_has_it() -> None:
    for path, text in tables.documents().items():
        assert text == tables.renewed(text), f"{path.name} is out of date: run `python docs/tables.py`"


def test_every_table_is_in_a_document() -> None:
    text = "".join(tables.documents().values())
    assert {name for name in tables.TABLES if f"<!-- table: {name} -->" not in text} == set()
