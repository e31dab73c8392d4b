"""The registry of algorithms: every file that registers one is imported; no test leaves one out unsaid."""

from __future__ import annotations

import re
from pathlib import Path

import every_algorithm
import pytest

from bml.schedule import Exchange, Forest, plan
from bml.schedule.algorithms.registry import Algorithm, algorithm, find, registered
from bml.schedule.select import available
from bml.topology import UsageError, parse

SCHEDULE = Path(available.__file__).parents[1]


def test_every_file_that_registers_an_algorithm_is_imported() -> None:
    registering = {
        "bml.schedule." + ".".join(path.relative_to(SCHEDULE).with_suffix("").parts)
        for path in SCHEDULE.rglob("*.py")
        if re.search(r"^@algorithm\(", path.read_text(), re.MULTILINE)
    }
    lines = Path(available.__file__).read_text().splitlines()
    imported = {line.removeprefix("import ") for line in lines if line.startswith("import bml.")}
    assert registering == imported


@pytest.mark.parametrize("name", registered())
def test_it_builds_what_its_registration_says(name: str) -> None:
    one = registered()[name]
    assert one.does
    assert one.damaged
    fabric = parse("bcube:3x2")
    for text in (name, *one.examples):
        assert find(text)[0] is one
        assert isinstance(plan(fabric, text).schedule, Forest | Exchange)


@pytest.mark.parametrize("list_name", ["NO_FOREST", "NOT_ON_ENGINES", "NOT_SIMULATED"])
def test_what_tests_leave_out_exists_and_has_a_reason(list_name: str) -> None:
    left_out: dict[str, str] = getattr(every_algorithm, list_name)
    assert left_out.keys() <= registered().keys()
    assert all(len(reason) > 10 for reason in left_out.values())
    assert len(left_out) < len(registered()) / 2


def test_one_name_is_for_one_algorithm_and_examples_are_right() -> None:
    before = registered()
    with pytest.raises(ValueError, match="two algorithms with the name 'tree'"):
        algorithm("tree", does="x", damaged="x")(lambda fabric: plan(fabric).forest)
    with pytest.raises(ValueError, match="needs an argument and examples"):
        algorithm("new", does="x", damaged="x", argument="a|b")(lambda fabric: plan(fabric).forest)
    assert registered() == before


def test_names_are_in_order_and_an_unknown_one_is_refused() -> None:
    assert list(registered()) == sorted(registered())
    assert {type(one) for one in registered().values()} == {Algorithm}
    with pytest.raises(UsageError, match="'trees' is not an algorithm: choose one of auto, bml, "):
        find("trees")
