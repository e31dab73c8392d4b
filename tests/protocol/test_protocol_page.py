"""docs/explanation/protocol.md agrees with the code: its promises, messages, frames and state tables."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from bml.protocol.coordinator import agreement
from bml.protocol.server import member
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Kind

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "protocol.md").read_text()


def table(title: str) -> list[list[str]]:
    """The rows of the first table under this heading, without marks of code."""
    part = re.split(rf"\n##+ {title}\n", PAGE)[1]
    lines = part.split("\n| --- |", 1)[1].split("\n")[1:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def states(text: str) -> list[list[str]]:
    """The state table of a module's text: columns under lines, a row may go on below."""
    lines = text.split("\n")
    under = next(i for i, line in enumerate(lines) if line.strip().startswith("---"))
    starts = [found.start() for found in re.finditer("-+", lines[under])]
    rows: list[list[str]] = []
    for line in lines[under + 1 :]:
        if not line.strip():
            break
        cells = [line[left:right].strip() for left, right in pairwise([*starts, 200])]
        if cells[2]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, each)) for each in zip(rows[-1], cells, strict=True)]
    return rows


@pytest.mark.parametrize(("title", "module"), [("A server", member), ("The coordinator", agreement)])
def test_states_are_those_of_the_code(title: str, module: object) -> None:
    assert table(title) == states(module.__doc__ or "")


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        ("From the coordinator to a server", msg.ToServer),
        ("From a server to the coordinator", msg.ToCoordinator),
    ],
)
def test_every_message_is_there_with_its_fields(title: str, kinds: object) -> None:
    said = {row[0]: row[1].split(", ") for row in table(title)}
    assert said == {kind.__name__: [*kind.__struct_fields__] for kind in get_args(kinds)}


def test_every_frame_is_there() -> None:
    assert [row[0] for row in table("Frames")] == [kind.name for kind in Kind]


def test_every_promise_that_is_checked_is_there() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "bml" / "sim").rglob("*.py"))
    checked = {int(number) for number in re.findall(r"PromiseBroken\(\s*(\d)", code)}
    assert {int(row[0]) for row in table("Promises")} == checked
