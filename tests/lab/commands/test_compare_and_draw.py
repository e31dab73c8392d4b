"""`bml plan --compare` and `--draw`: the tables of the papers and the picture of trees."""

import json

import pytest
from click.testing import CliRunner

from bml.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_one_fabric_with_single_failures():
    result = run("bcube:4x2", "--compare", "--json")
    assert result.exit_code == 0
    (table,) = json.loads(result.stdout)["tables"]
    times = {(row["fabric"], row["algorithm"]): row["gst"] for row in table["rows"]}
    assert times["bcube:4x2", "bml"] == times["bcube:4x2", "hips"] == 0.9375
    assert times["bcube:4x2", "mesh"] == 1.5
    assert times["bcube:4x2 without server:0", "detour"] == 1.0333
    assert times["bcube:4x2 without server:0", "exchange"] is None
    assert all(row["how"] in ("built", "impossible") for row in table["rows"])


def test_the_damage_that_was_asked_for():
    result = run("bcube:3x2", "--fail", "server:4", "--fail", "link:0/0", "--compare")
    assert result.exit_code == 0
    assert "bcube:3x2 without server:4" in result.stdout
    assert "exchange cannot work" in result.stdout


@pytest.mark.slow
def test_the_papers_table():
    tables = json.loads(run("--compare", "--json").stdout)["tables"]
    times = {(r["fabric"], r["algorithm"]): (r["gst"], r["how"]) for t in tables for r in t["rows"]}
    assert times["bcube:4x2", "hips"] == (0.9375, "built")
    assert times["bcube:4x4", "hips"] == (0.498, "formula")
    assert times["torus:16x4", "mesh"] == (4.0, "formula")
    markdown = run("--compare", "--markdown").stdout
    assert "| hips | 0.9375 | 0.6562 | 0.4980 | 0.4688 | 0.3281 | 0.2490 |" in markdown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'FABRIC'"),
        (["bcube:3x2", "--rate", "4/0"], "is not a rate: write server/level=rate"),
        (["bcube:3x2", "--rate", "9/0=2"], "there is no server 9"),
        (["switch:5", "--draw", "x.png"], "only BCube and torus"),
        (["bcube:3x2", "--draw", "x.txt"], "give an .svg, .png or .pdf file"),
    ],
)
def test_bad_usage(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_rate_counts():
    report = json.loads(run("bcube:3x2", "--algorithm", "bml", "--rate", "4/0=1/2", "--json").stdout)
    assert report["gst"] == 1.7778


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["bcube:4x2", "--algorithm", "detour", "--fail", "server:0"],
        ["torus:3x2", "--algorithm", "hips", "--fail", "link:0/0"],
        ["bcube:2x3"],
    ],
)
def test_a_picture_is_made(tmp_path, arguments):
    pytest.importorskip("matplotlib")
    target = tmp_path / "trees.svg"
    result = run(*arguments, "--draw", str(target), "--json")
    assert result.exit_code == 0, result.stderr
    assert "with root" in result.stderr
    assert json.loads(result.stdout)["violations"] == []
    assert b"<svg" in target.read_bytes()[:1000]
