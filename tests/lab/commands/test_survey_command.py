"""`bml plan --survey`: its JSON, its tables, its picture, and how it ends on bad input."""

import json
from fractions import Fraction

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.lab.commands.survey import command
from bml.lab.survey.cost import Cost
from bml.lab.survey.survey import Case, Row
from bml.schedule import plan
from bml.topology import parse


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_json_has_a_row_for_each_number_of_failures():
    result = run("bcube:2x2", "--survey", "2", "--mtbf", "link=90d", "--mttr", "4h", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["surveys"]
    assert [(row["failures"], row["sets"], row["exact"]) for row in found["rows"]] == [
        (0, 1, True),
        (1, 16, True),
        (2, 120, True),
    ]
    worst = found["rows"][1]["worst"][0]
    assert worst["gst"] == float(plan(parse("bcube:2x2").without(*worst["failures"])).gst())
    assert 0 < found["expected"]["low"] <= found["expected"]["high"] <= found["expected"]["healthy"] + 1e-3


def test_the_curve_of_a_picture_has_each_time_once() -> None:
    costs = [Cost(3, 3, None if time is None else Fraction(time), None) for time in (2, 1, 2, None)]
    row = Row(
        1,
        10,
        True,
        tuple(Case(frozenset(), cost, like) for cost, like in zip(costs, (1, 2, 3, 4), strict=True)),
    )
    assert command._cumulated(row) == [(1.0, 0.0), (1.0, 20.0), (2.0, 60.0)]
    assert command._cumulated(Row(1, 4, True, row.cases[3:])) == []


@pytest.mark.slow
def test_tables_of_fabrics_of_one_size_and_a_picture(tmp_path):
    picture = tmp_path / "survey.svg"
    result = run("switch:4", "--survey", "1", "--compare", "--draw", str(picture))
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ("switch:4", "bcube:2x2", "fattree:4/4"))
    assert "switch:0/0: falls apart, 1 of 4 stay together (no other like this)" in result.output
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "arguments",
    [
        ("graph:0-1,1-2,2-0", "--survey", "1"),
        ("graph:0-1,1-2,2-0", "--survey", "2", "--samples", "20"),
        ("bcube:2x2", "--survey", "1", "--fail", "server:0"),
        ("fattree:4/8", "--survey", "1"),
    ],
)
def test_parts_are_not_said_to_be_alike_or_not_where_no_symmetry_is_looked_for(arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "worst with 1 dead:" in result.output
    assert "like this" not in result.output
    assert "alike" not in result.output


@pytest.mark.slow
def test_sets_of_more_failures_than_are_compared_are_not_said_to_be_unlike_others():
    result = run("switch:4", "--survey", "7")
    assert result.exit_code == 0, result.output
    compared, _, others = result.output.partition("worst with 7 dead:")
    assert compared.count("like this)") == 18
    assert "falls apart" in others
    assert "like this" not in others


@pytest.mark.slow
def test_numbers_are_whole_where_the_output_is_no_terminal():
    result = run("bcube:2x2", "--survey", "4", "--samples", "20")
    assert result.exit_code == 0, result.output
    assert "20 of" in result.output
    assert "like this of 20 drawn)" in result.output
    assert "…" not in result.output


@pytest.mark.slow
def test_a_fabric_with_too_few_parts_is_left_out_of_a_comparison():
    result = run("torus:3x1", "--compare", "--survey", "8", "--samples", "10")
    assert result.exit_code == 0, result.output
    assert "switch:3 is left out: it has fewer than 8 parts" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bcube:2x2", "--survey", "1", "--bytes", "1MiB"), "leave out --bytes"),
        (("bcube:2x2", "--survey", "1", "--mtbf", "1y"), "belong together"),
        (("bcube:2x2", "--survey", "1", "--mtbf", "soon", "--mttr", "1h"), "write a time such as 4h"),
        (("bcube:2x2", "--mtbf", "1y", "--mttr", "1h"), "go with --survey"),
        (("switch:2", "--survey", "6"), "5 parts, 6 of them cannot fail"),
        (("bcube:2x2", "--survey", "1", "--algorithm", "magic"), "magic"),
    ],
)
def test_bad_input_is_said(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
