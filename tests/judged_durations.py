"""Finds asserts that judge how long something took, by reading a test's source: see test_architecture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_READ = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
CLOCKS = {*_READ, *(f"{name}_ns" for name in _READ)}
_MAY_JUDGE = re.compile(rf"\b({'|'.join(CLOCKS)})\b|mark\.(real|ray|matrix)")
#: A longer bound is one on a hang: nothing takes that long because other tests run beside it.
HANGS_S = 30.0
Function = ast.FunctionDef | ast.AsyncFunctionDef
Compared = tuple[ast.expr, ast.expr]  # the lesser one, and the greater


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


class Held(NamedTuple):
    """The names of a function that hold a reading of a clock, and those that hold a duration."""

    readings: set[str]
    durations: set[str]


def judged(source: str) -> list[int]:
    """The lines of asserts that something took less than HANGS_S, outside of tests marked serial.

    A duration is what is computed from a clock, at once, by way of names of the same function, or by one of
    the file's functions that returns one. In a real test it is also what is called `..._s` or a gap. An
    assert in a `while` loop is the deadline of a wait.
    """
    if not _MAY_JUDGE.search(source):
        return []
    nodes.cache_clear()  # those of the file before
    tree = ast.parse(source)
    if any(isinstance(node, ast.Assign) and _names_mark(node) for node in tree.body):
        return []
    functions = [node for node in nodes(tree) if isinstance(node, Function)]
    timing: set[str] = set()
    while new := {each.name for each in functions if each.name not in timing and _returns_one(each, timing)}:
        timing |= new
    constants = _constants(tree)
    module_is_real = re.search(r"pytestmark = .*mark\.(real|ray|matrix)", source) is not None
    alone = {id(each) for node in nodes(tree) if _is_serial(node) for each in nodes(node)}
    waits = {each.lineno for node in nodes(tree) if isinstance(node, ast.While) for each in _asserts_in(node)}
    found: set[int] = set()
    for function in functions:
        if id(function) not in alone:
            marks = " ".join(ast.unparse(each) for each in function.decorator_list)
            is_real = module_is_real or re.search(r"mark\.(real|ray|matrix)", marks) is not None
            found.update(_asserts(function, timing, constants, is_real))
    return sorted(found - waits)


def _is_serial(node: ast.AST) -> bool:
    """Whether it is a function or class whose tests run alone."""
    if isinstance(node, ast.ClassDef) and any(
        isinstance(each, ast.Assign) and _names_mark(each) for each in node.body
    ):
        return True
    return isinstance(node, Function | ast.ClassDef) and any(
        "mark.serial" in ast.unparse(each) for each in node.decorator_list
    )


def _asserts_in(node: ast.AST) -> Iterator[ast.Assert]:
    return (each for each in nodes(node) if isinstance(each, ast.Assert))


def _constants(tree: ast.Module) -> dict[str, float]:
    found: dict[str, float] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and (value := _value(node.value, found)):
            found.update({each.id: value for each in _elements(node.targets[0])})
    return found


def _names_mark(node: ast.Assign) -> bool:
    return "pytestmark" in ast.unparse(node.targets[0]) and "serial" in ast.unparse(node.value)


def _returns_one(function: Function, timing: set[str]) -> bool:
    held = _held(function, timing)
    returned = [
        node.value for node in nodes(function) if isinstance(node, ast.Return | ast.Yield) and node.value
    ]
    return any(_is_duration(value, held, timing) for value in returned)


def _asserts(
    function: Function, timing: set[str], constants: dict[str, float], is_real: bool
) -> Iterator[int]:
    held = _held(function, timing)
    for node in _asserts_in(function):
        for less, more in _compared(node.test):
            measured = _is_duration(less, held, timing) or (is_real and _is_called_one(less))
            if measured and _value(more, constants) < HANGS_S:
                yield node.lineno


def _compared(test: ast.expr) -> Iterator[Compared]:
    for node in nodes(test):
        if isinstance(node, ast.Compare):
            for left, operator, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                if isinstance(operator, ast.Lt | ast.LtE):
                    yield left, right
                elif isinstance(operator, ast.Gt | ast.GtE) and _is_fixed(left):  # 5 > took_s
                    yield right, left


def _is_fixed(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _value(node: ast.expr, constants: dict[str, float]) -> float:
    """The number, where it stands in the file; else 0.0: nobody knows how small it is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = _value(node.left, constants), _value(node.right, constants)
        return parts[0] / parts[1] if all(parts) else 0.0
    return constants.get(node.id, 0.0) if isinstance(node, ast.Name) else 0.0


def _is_called_one(node: ast.expr) -> bool:
    """Whether a part of it has the name of a measured time, such as view["noticed_s"]."""
    if isinstance(node, ast.Set):  # of names
        return False
    words = [
        each.value for each in nodes(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    words += [each.id for each in nodes(node) if isinstance(each, ast.Name) and not each.id.isupper()]
    words += [each.attr for each in nodes(node) if isinstance(each, ast.Attribute)]
    return any(re.fullmatch(r"\w+(?<!_per)_s|(\w+_)?gaps?", word) for word in words)


def _held(function: Function, timing: set[str]) -> Held:
    """What the names of a function hold, however late they are assigned."""
    held, assigned = Held(set(), set()), list(_assigned(function))
    while True:
        before = len(held.readings) + len(held.durations)
        for target, value in assigned:
            if _is_duration(value, held, timing):
                held.durations.update(each.id for each in _elements(target))
            elif _reads_clock(value):
                held.readings.update(each.id for each in _elements(target))
        if len(held.readings) + len(held.durations) == before:
            return held


def _assigned(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each name with what is assigned or appended to it."""
    for node in nodes(function):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr | ast.AnnAssign) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from _pairs(target, node.value)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
        ):
            yield node.func.value, node.args[0]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What is assigned to what: of `a, b = 1, 2` each to its own."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _elements(target: ast.expr) -> list[ast.Name]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return [each for each in parts if isinstance(each, ast.Name)]


def _is_duration(node: ast.AST, held: Held, timing: set[str]) -> bool:
    """Whether something in it is a difference that a clock's reading is part of, or holds one already."""
    for each in nodes(node):
        if isinstance(each, ast.Name) and each.id in held.durations:
            return True
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in timing:
            return True
        if (
            isinstance(each, ast.BinOp)
            and isinstance(each.op, ast.Sub)
            and (
                _reads_clock(each.left) or (isinstance(each.left, ast.Name) and each.left.id in held.readings)
            )
        ):
            return True
    return False


def _reads_clock(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Call)
        and (
            (
                isinstance(each.func, ast.Attribute)
                and each.func.attr in CLOCKS
                and ast.unparse(each.func.value) == "time"
            )
            or (isinstance(each.func, ast.Name) and each.func.id in CLOCKS - {"time"})
        )
        for each in nodes(node)
    )
