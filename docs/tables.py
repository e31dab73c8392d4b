"""Writes the tables of the documents that are made from registries of the code: `python docs/tables.py`.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. A test compares every
one with what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from bml.faults import AtOnce, Fault
from bml.faults.kinds import KINDS
from bml.lab.commands.plan.compare import as_markdown, papers
from bml.metrics.table import TABLE
from bml.schedule.algorithms.registry import registered

DOCS = Path(__file__).resolve().parent
_TABLE = re.compile(r"(<!-- table: (?P<name>[a-z ]+) -->\n\n).*?(\n<!-- end of table -->\n)", re.DOTALL)


def algorithms() -> Iterator[str]:
    """A row for each algorithm, under all its names."""
    yield "| name | what it does | on a damaged fabric |"
    yield "| --- | --- | --- |"
    for name, algorithm in registered().items():
        if name == algorithm.name:
            names = ", ".join(f"`{each}`" for each in (*algorithm.names, *algorithm.examples))
            yield f"| {names} | {algorithm.does} | {algorithm.damaged} |"


def fault_kinds() -> Iterator[str]:
    """A row for each kind of fault, and one where it can strike the coordinator in place of a server."""
    yield "| kind | what really happens | in `bml check` |"
    yield "| --- | --- | --- |"
    for kind in KINDS.values():
        simulated = f"`{kind.simulated}`" if kind.simulated else ""
        yield f"| {_written(kind.example)} | {kind.means} | {simulated} |"
        if kind.coordinator:
            example, means = kind.coordinator
            yield f"| {_written(example)} | {means} | `coordinator-{kind.simulated}` |"


def _written(example: str) -> str:
    """A fault as for a running job: without its time."""
    return f"`{replace(Fault.parse(example), trigger=AtOnce())}`"


def comparison() -> Iterator[str]:
    """What `bml plan --compare --markdown` prints."""
    yield "\n\n".join(as_markdown(grid) for grid in papers())


def metrics() -> Iterator[str]:
    """A row for each metric."""
    yield "| name | kind | unit | labels | what it is | counted by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.all_labels)
        what = f"{metric.kind} | {metric.unit} | {labels} | {metric.help} | {metric.source}"
        yield f"| `{metric.name}` | {what} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "algorithms": algorithms,
    "comparison": comparison,
    "fault kinds": fault_kinds,
    "metrics": metrics,
}


def renewed(text: str) -> str:
    """Return a document with its tables as they should be."""
    return _TABLE.sub(lambda found: found[1] + "\n".join(TABLES[found["name"]]()) + "\n" + found[3], text)


def documents() -> dict[Path, str]:
    """The documents that have such tables, and their text."""
    found = {path: path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    return {path: text for path, text in found.items() if _TABLE.search(text)}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(renewed(text))
