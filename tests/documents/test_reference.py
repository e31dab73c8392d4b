"""The reference has all of the public API, and every docstring in it says which errors are raised."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest
from reference_pages import REFERENCE, rows

import bml
import bml.faults
import bml.topology
from bml import errors

DIRECTIVE = re.compile(r"^\.\. auto(class|function|exception|data):: ([\w.]+).*((?:\n   :.*)*)", re.MULTILINE)
MODULE = re.compile(r"^\.\. (?:py:)?(?:currentmodule|automodule):: ([\w.]+)", re.MULTILINE)
ERRORS = {name for name in errors.__all__ if name != "job_error"}


@dataclass(frozen=True)
class Shown:
    """One name that a page of the reference takes from the code."""

    kind: str
    name: str
    hidden: frozenset[str]

    @cached_property
    def value(self) -> Any:
        module, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def members(self) -> Iterator[tuple[str, Any]]:
        """It, and its public methods and properties that are defined by this project."""
        yield self.name, self.value
        if self.kind not in ("class", "exception"):
            return
        for name, member in inspect.getmembers_static(self.value):
            ours = member.fget if isinstance(member, property) else getattr(member, "func", member)
            ours = getattr(ours, "__func__", ours)
            if not name.startswith("_") and name not in self.hidden and inspect.isfunction(ours):
                yield f"{self.name}.{name}", ours


def shown() -> Iterator[Shown]:
    for page in sorted(REFERENCE.glob("*.md")):
        text = page.read_text()
        for found in DIRECTIVE.finditer(text):
            kind, name, options = found.groups()
            modules = [each[1] for each in MODULE.finditer(text, 0, found.start())]
            hidden = re.search(r":exclude-members: (.*)", options)
            whole = name if "." in name else f"{modules[-1]}.{name}"
            yield Shown(kind, whole, frozenset(hidden[1].split(", ")) if hidden else frozenset())


SHOWN = list(shown())
MEMBERS = [pair for each in SHOWN for pair in each.members()]
FUNCTIONS = [
    (name, value, each.value) for each in SHOWN for name, value in each.members() if inspect.isfunction(value)
]


def tree_of(function: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def raised(function: Any) -> set[str]:
    """The public errors that the lines of a function raise, by their names."""
    names = set()
    for node in ast.walk(tree_of(function)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            maker = function.__globals__.get(name)  # such as _wrong(text), which returns the error
            names.add(maker.__annotations__.get("return", "") if inspect.isfunction(maker) else name)
    return {getattr(name, "__name__", name) for name in names} & ERRORS


def helpers(function: Any, owner: Any) -> Iterator[Any]:
    """The functions of its own module and class that a function calls and that users do not see."""
    for node in ast.walk(tree_of(function)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id.startswith("_"):
            found = inspect.unwrap(function).__globals__.get(called.id)
        elif (
            isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.attr[0] == "_"
        ):
            found = inspect.getattr_static(owner, called.attr, None) if called.value.id == "self" else None
        else:
            continue
        if inspect.isfunction(found):
            yield found


@pytest.mark.parametrize("package", [bml, bml.topology, bml.faults], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package: ModuleType) -> None:
    there = {each.name for each in SHOWN} | {f"bml.{name}" for name in ERRORS}
    elsewhere = {f"{package.__name__}.{name}" for name in ERRORS}  # the errors are those of bml
    assert {f"{package.__name__}.{name}" for name in package.__all__} - elsewhere <= there


@pytest.mark.parametrize(("name", "value"), MEMBERS, ids=[name for name, _ in MEMBERS])
def test_what_is_shown_has_a_docstring(name: str, value: Any) -> None:
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__doc__ or "").strip()


@pytest.mark.parametrize(("name", "function", "owner"), FUNCTIONS, ids=[name for name, _, _ in FUNCTIONS])
def test_a_docstring_names_the_errors_that_its_function_raises(name: str, function: Any, owner: Any) -> None:
    errors_of = raised(function).union(*map(raised, helpers(function, owner)))
    missing = {error for error in errors_of if error not in (function.__doc__ or "")}
    assert not missing, f"the docstring of {name} does not name {', '.join(missing)}"


def undocumented(shown_class: Any) -> list[str]:
    """The public fields of a class of which no docstring, comment or text of the class says what they are."""
    source = textwrap.dedent(inspect.getsource(shown_class))
    lines, (tree,) = source.splitlines(), ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    missing = []
    for field, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        is_said = isinstance(after, ast.Expr) or "#:" in lines[field.lineno - 2]
        if not (is_said or name.startswith("_") or re.search(rf"\b{name}\b", shown_class.__doc__ or "")):
            missing.append(name)
    return missing


CLASSES = [each for each in SHOWN if each.kind == "class"]


@pytest.mark.parametrize("shown_class", CLASSES, ids=[each.name for each in CLASSES])
def test_every_field_is_explained(shown_class: Shown) -> None:
    assert set(undocumented(shown_class.value)) <= shown_class.hidden


def test_errors_that_are_raised_are_found() -> None:
    def refuses(n: int) -> None:
        if n:
            raise bml.UsageError("n")

    assert raised(refuses) == {"UsageError"}
    assert len(FUNCTIONS) > 100


def test_the_table_of_errors_has_every_error_with_its_parent() -> None:
    table = {row[0]: row[1] for row in rows("errors.md")}
    assert table == {name: getattr(errors, name).__mro__[1].__name__ for name in ERRORS}
    assert all(all(row) for row in rows("errors.md"))
