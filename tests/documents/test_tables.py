"""Tables of the documents that are made from the code are as `python docs/tables.py` writes them."""

from __future__ import annotations

import pytest
from reference_pages import script

tables = script("tables")


@pytest.mark.slow
def test_every_table_is_as_the_code_has_it() -> None:
    for path, text in tables.documents().items():
        assert text == tables.renewed(text), f"{path.name} is out of date: run `python docs/tables.py`"


def test_every_table_is_in_a_document() -> None:
    text = "".join(tables.documents().values())
    assert {name for name in tables.TABLES if f"<!-- table: {name} -->" not in text} == set()
