"""`bml plan`: its JSON, its table, and how it ends on bad input."""

import json

import pytest
from click.testing import CliRunner

from bml.cli import main


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_json_of_the_papers_failure_schedule():
    result = run("plan", "bcube:4x2", "--algorithm", "detour", "--fail", "server:0", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert report["gst_staged"] == 1.0667
    assert report["gst"] == 1.0333
    assert report["bound"] == 0.9333
    assert report["bound_kind"] == "optimum"
    assert (report["fabric"], report["algorithm"]) == ("bcube:4x2", "detour")
    assert (report["survivors"], report["pieces"], report["detours"]) == (15, 30, 6)
    assert report["failures"] == ["server:0"]
    assert report["violations"] == []
    assert 0 < report["seconds"] < 60


def test_auto_on_a_healthy_fabric_with_a_size():
    report = json.loads(run("plan", "bcube:3x2", "--bytes", "18MB", "--json").stdout)
    assert (report["algorithm"], report["gst"], report["bound"]) == ("bml", 0.8889, 0.8889)
    assert report["busiest_nic_bytes"] == 16_000_000


def test_the_table_says_the_same():
    result = run("plan", "bcube:4x2", "--fail", "link:0/0", "--fail", "server:5", "--bytes", "1MiB")
    assert result.exit_code == 0
    for text in ("bcube:4x2 without server:5, link:0/0", "optimum", "GST, pipelined", "sound"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["torus:4"], 2, "is not size x dimensions"),
        (["bcube:3"], 2, "is not ports x levels"),
        (["bcube:3x2", "--fail", "server:12"], 2, "bcube:3x2 has servers 0-8, there is no server 12"),
        (["bcube:3x2", "--fail", "sever:1"], 2, "is not a kind of failure"),
        (["bcube:3x2", "--algorithm", "rings"], 2, "choose one of auto, bml, detour"),
        (["bcube:3x2", "--bytes", "many"], 2, "'many' is not a size"),
        (["bcube:3x2", "--nonsense"], 2, "No such option"),
        ([], 2, "Missing argument"),
        (["bcube:3x2", "--fail", "link:4/0", "--fail", "link:4/1"], 1, "fall into parts"),
    ],
)
def test_bad_input_ends_with_a_message_and_a_status(arguments, status, says):
    result = run("plan", *arguments, "--json")
    assert result.exit_code == status
    assert says in result.stderr
    assert says in json.loads(result.stdout)["error"]["text"]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("4096", 4096), ("4KiB", 4096), ("64MiB", 64 << 20), ("1gb", 10**9), ("0", 0)),
        *(("57.5MB", 57_500_000), ("0.5KiB", 512), ("1.0", 1)),
    ],
)
def test_sizes(text, nbytes):
    report = json.loads(run("plan", "bcube:2x1", "--bytes", text, "--json").stdout)
    # Two servers on one switch: each sends half up and half down.
    assert report["busiest_nic_bytes"] == nbytes


@pytest.mark.parametrize("text", ["1.5", "0.3KiB", "1.", ".5MB", "1e3", "1,5MB", "-1.5MB"])
def test_what_is_no_whole_number_of_bytes_is_refused(text):
    result = run("plan", "bcube:2x1", f"--bytes={text}")
    assert result.exit_code == 2
    assert text in result.stderr


def test_help_has_an_example_and_the_version_is_known():
    assert "bml plan bcube:4x2 --algorithm detour" in run("plan", "--help").stdout
    assert "bml plan bcube:3x2" in run("--help").stdout
    assert run("--version").stdout.startswith("bml, version 0.")


@pytest.mark.slow
def test_a_plan_for_many_servers_says_how_far_it_is():
    result = run("plan", "torus:64x2", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["pieces"], report["verified_pieces"], report["violations"]) == (16384, 64, [])
    assert report["gst"] == report["bound"] == 0.4999
    for stage in ("building the schedule", "counting the load", "proving", "verifying 64 of 16384 pieces"):
        assert f"torus:64x2: {stage}" in result.stderr


def test_a_plan_that_is_too_large_says_what_to_do_instead():
    result = run("plan", "torus:63x2")
    assert result.exit_code == 2
    assert "GB to build, up to 4 GB are taken: plan a smaller fabric of this kind" in result.stderr
    assert "choose --algorithm tree" in result.stderr
