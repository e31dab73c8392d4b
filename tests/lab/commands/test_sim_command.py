"""`bml sim`: its JSON, its tables, its files, and how it ends on bad input."""

import json

import pytest
from click.testing import CliRunner

from bml.cli import main

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine


def run(*arguments):
    return CliRunner().invoke(main, ["sim", *arguments])


def test_json_has_the_time_and_the_links():
    result = run("bcube:3x2", "--bytes", "1MiB", "--rate", "100mbit", "--delay", "0", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["algorithm"], report["survivors"], report["stands_for"]) == ("bml", 9, 9)
    assert report["gst"] == pytest.approx(8 / 9, rel=1e-5)
    assert report["gst_s"] == pytest.approx(8 / 9 * (1 << 20) * 8 / 1e8, rel=1e-6)
    assert [link["link"] for link in report["links"]] == ["0/0 out", "0/0 in", "0/1 out", "0/1 in"]
    assert all(link["utilisation"] == 1.0 for link in report["links"])


@pytest.mark.slow
def test_a_table_of_a_damaged_fabric_with_a_slow_link(tmp_path):
    trace, picture = tmp_path / "step.json", tmp_path / "links.svg"
    result = run(
        *("bcube:3x2", "--bytes", "256KiB", "--fail", "server:4", "--link-rate", "5/1=1/4"),
        *("--trace", str(trace), "--plot", str(picture)),
    )
    assert result.exit_code == 0, result.output
    assert "bcube:3x2 without server:4" in result.output
    assert "packed" in result.output
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    assert {each["pid"] for each in events} == {0, 1, 2, 3, 5, 6, 7, 8}
    assert max(each["ts"] + each["dur"] for each in events) <= max(e["args"]["arrived_us"] for e in events)
    assert {each["name"] for each in events} == {"sum", "result"}
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert "packed on bcube:3x2 without server:4" in drawn
    assert "256 KiB over NICs of 10 Gbit/s" in drawn


def test_seeds_of_a_fat_tree():
    result = run(
        "fattree:4", "--algorithm", "mesh", "--bytes", "1MB", "--seeds", "4", "--fail", "core:0", "--json"
    )
    report = json.loads(result.stdout)
    assert len(report["seeds"]) == 4
    assert report["seeds"][0] == report["gst"]
    assert min(report["seeds"]) > report["planned"]
    assert any("core 1" in link["link"] for link in report["links"])
    assert not any("core 0" in link["link"] for link in report["links"])


def test_comparison_with_prices():
    result = run(
        "bcube:4x2", "--compare", "--bytes", "1MB", "--delay", "0", "--prices", "nic=1,port=3", "--json"
    )
    tables = json.loads(result.stdout)
    times = {row["algorithm"]: row["gst_s"] for row in tables["algorithms"]}
    assert times["bml"] < times["ring"] < times["tree"]
    assert times["exchange"] is not None
    fabrics = {row["fabric"]: row for row in tables["fabrics"]}
    assert next(iter(fabrics)) == "bcube:4x2"
    assert set(fabrics) >= {"switch:16", "fattree:4", "torus:4x2"}
    assert fabrics["bcube:4x2"]["price"] == 1
    assert fabrics["switch:16"]["price"] == 0.5
    one = fabrics["switch:16"]
    assert one["equal_price_gst_s"] == pytest.approx(one["gst_s"] / 2, rel=1e-6)
    # 64 cables of two ends, of which servers have 16: 16 + 3 * (16 + 2 * 32).
    assert fabrics["fattree:4"]["price"] == (16 + 3 * (16 + 64)) / (32 + 3 * 32)
    assert (fabrics["torus:4x2"]["nic_ports"], fabrics["torus:4x2"]["switch_ports"]) == (64, 0)


@pytest.mark.slow
def test_json_of_packets():
    step = ("--algorithm", "mesh", "--bytes", "8MB", "--rate", "40gbit")
    arguments = ("fattree:4", *step, "--packets", "--json")
    report = json.loads(run(*arguments, "--no-dcqcn").stdout)
    assert (report["packets"], report["delay_s"], report["dcqcn"]) == (16 * 15 * 2 * 124, 1e-6, False)
    assert report["gst"] > report["planned"]
    assert report["pauses"] == sum(each["pauses"] for each in report["links"]) > 0
    assert report["paused_s"] == pytest.approx(sum(each["paused_s"] for each in report["links"]))
    assert report["longest_queue"] == max(each["longest_queue"] for each in report["links"])
    assert report["links"][0]["pauses"] == max(each["pauses"] for each in report["links"])
    assert len(report["switches"]) == 20
    assert all(0 < each["most_held"] < each["buffer"] == 1_500_000 for each in report["switches"])
    assert report["notifications"] == 0 < report["marked"]
    other = json.loads(run(*arguments, "--seed", "1", "--buffer", "1GB", "--packet", "8KiB").stdout)
    assert (other["pauses"], other["seed"], other["packet_nbytes"]) == (0, 1, 8192)
    assert other["notifications"] > 0


def test_a_table_of_packets():
    result = run("bcube:3x2", "--bytes", "1MB", "--packets", "--fail", "server:4", "--delay", "0")
    assert result.exit_code == 0, result.output
    assert "bcube:3x2 without server:4" in result.output
    assert "0, together 0.000 ms" in result.output
    assert "DCQCN: 0 marked" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bcube:3x2", "--packet", "1KiB"], "--packet is for packets: add --packets"),
        (["bcube:3x2", "--buffer", "1MB"], "--buffer is for packets"),
        (["bcube:3x2", "--dcqcn"], "--dcqcn is for packets"),
        (["bcube:3x2", "--no-dcqcn"], "--no-dcqcn is for packets"),
        (["bcube:3x2", "--seed", "0"], "--seed is for packets"),
        (["bcube:3x2", "--packets", "--compare"], "--compare is for flows: leave it out, or --packets"),
        (["bcube:3x2", "--packets", "--plot", "x.svg"], "--plot is for flows"),
        (["bcube:3x2", "--packets", "--trace", "x.json"], "--trace is for flows"),
        (["bcube:3x2", "--packets", "--seeds", "2"], "--seeds is for flows"),
        (["bcube:3x2", "--packets", "--packet", "0"], "at least 1 byte"),
        (["bcube:3x2", "--packets", "--packet", "1GiB"], "packets of up to 1048576 bytes"),
        (["bcube:3x2", "--packets", "--buffer", "10KB"], "no room beside the headroom"),
        (["bcube:3x2", "--packets", "--delay", "1"], "no room beside the headroom"),
        (["bcube:3x2", "--packets", "--bytes", "100GB"], "times over a link, which would take about"),
        (["bcube:3x2", "--rate", "fast"], "'fast' is no rate"),
        (["bcube:3x2", "--rate", "0mbit"], "'0mbit' is no rate"),
        (["bcube:3x2", "--bytes", "many"], "'many' is not a size"),
        (["bcube:3x2", "--prices", "nic=1"], "--prices is for --compare"),
        (["bcube:3x2", "--compare", "--prices", "gold=1"], "'gold=1' in 'gold=1' is no price"),
        (["bcube:3x2", "--compare", "--prices", "nic=0"], "makes NICs and cables free"),
        (["bcube:3x2", "--fail", "core:1"], "no inner switch of bcube:3x2"),
        (["fattree:4", "--fail", "core:4"], "core switches 0-3"),
        (["bcube:3x2", "--goodput", "0"], "0.0 is not in the range"),
        (["bcube:3x2", "--goodput", "1e-320"], "is not in the range"),
        (["bcube:3x2", "--compare", "--plot", "x.svg"], "--plot is for one simulation: leave it out"),
        (["bcube:3x2", "--compare", "--trace", "x.json"], "--trace is for one simulation"),
        (["bcube:3x2", "--compare", "--seeds", "2"], "--seeds is for one simulation"),
        (["bcube:3x2", "--plot", "x.txt"], "no .png, .svg or .pdf"),
        (["bcube:3x2", "--trace", "/nowhere/x.json"], "cannot be written"),
        (["bcube:3x2", "--slice", "0"], "at least 1 byte"),
        (["bcube:4x2", "--algorithm", "ring", "--bytes", "1GB", "--slice", "1"], "GB to simulate"),
        (["bcube:3x2", "--fail", "link:4/0", "--fail", "link:4/1"], "cannot all reach one another"),
    ],
)
def test_bad_input_is_said(arguments, said):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "Traceback" not in result.output
