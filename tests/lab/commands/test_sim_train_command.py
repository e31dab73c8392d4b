"""`bml sim train`: its JSON, its tables, its comparison, and how it ends on bad input."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.lab.commands.sim.trained import ms

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

LAYERS = [
    {"name": "first", "parameters": 1000, "forward_s": 0.01, "backward_s": 0.02},
    {"name": "second", "parameters": 200_000, "forward_s": 0.02, "backward_s": 0.05},
]


def run(*arguments):
    return CliRunner().invoke(main, ["sim", "train", *arguments])


def answer(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_the_job_and_its_views():
    found = answer(
        *("bcube:3x2", "--model", "vgg19", "--compute-s", "0.6", "--iterations", "10", "--rate", "25gbit"),
        *("--fail", "server:4@4", "--fail", "link:2/1@4", "--slow-server", "0=1.25", "--overlap", "none"),
    )
    assert (found["layers"], found["parameters"], found["nbytes"]) == (19, 143667240, 4 * 143667240)
    assert (found["overlap"], found["order"], found["iterations"]) == ("none", "begin", 10)
    first, second = found["views"]
    assert (first["view"], first["since"], first["iterations"], first["survivors"]) == (1, 0, 4, 9)
    assert (second["since"], second["iterations"], second["failures"]) == (4, 6, ["server:4", "link:2/1"])
    assert first["compute_s"] == pytest.approx(0.75)
    assert second["compute_s"] == pytest.approx(0.75 * 9 / 8)
    assert found["jct_s"] == pytest.approx(first["seconds"] + second["seconds"])
    assert found["lost_s"] == pytest.approx(0.07)
    parts_s = found["iteration_s"] * 10, (found["compute_s"] + found["exposed_s"]) * 10
    assert parts_s == pytest.approx((found["jct_s"] - 0.07,) * 2)
    assert (found["rate_bit"], found["computation"]) == (25e9, "given by --compute-s")
    assert found["compute_share"] == pytest.approx(10 * found["compute_s"] / found["jct_s"], abs=1e-6)


def test_a_step_takes_what_sim_says(tmp_path):
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS[1:]))
    network = (
        "torus:3x2",
        "--rate",
        "100mbit",
        "--fail",
        "server:1",
        "--link-rate",
        "2/1=1/2",
        "--slice",
        "1MB",
    )
    step = json.loads(CliRunner().invoke(main, ["sim", *network, "--bytes", "800000", "--json"]).stdout)
    found = answer(*network, "--model", str(tmp_path / "layers.json"))
    assert found["views"][0]["communication_s"] == step["gst_s"]
    assert found["iteration_s"] == pytest.approx(0.07 + step["gst_s"])
    assert (found["failures"], found["lost_s"]) == (["server:1"], 0)


def test_the_order_is_of_need_or_of_begin():
    network = "bcube:2x2", "--model", "vgg19", "--rate", "10gbit", "--overlap", "forward"
    need, begin = answer(*network), answer(*network, "--order", "begin")
    assert (need["order"], begin["order"]) == ("need", "begin")
    assert need["jct_s"] < 0.9 * begin["jct_s"]


def test_computation_of_a_file_is_scaled(tmp_path):
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS))
    found = answer("switch:4", "--model", str(tmp_path / "layers.json"), "--compute-s", "0.4")
    assert found["compute_s"] == pytest.approx(0.4)


def test_gradients_in_buckets():
    found = answer("bcube:2x2", "--model", "resnet50", "--bucket", "25MiB")
    assert (found["layers"], found["parameters"]) == (5, 25557032)
    assert found["views"][0]["algorithms"] == ["bml"]


def test_tables():
    result = run("bcube:3x2", "--model", "lenet", "--fail", "switch:0/1", "--fail", "server:8@500")
    assert result.exit_code == 0, result.output
    assert "lenet on bcube:3x2 without switch:0/1" in result.output
    assert "5, 61706" in result.output
    assert "server:8" in result.output
    assert "0.070 s" in result.output
    assert "10 Gbit/s, of which 100.0% is payload" in result.output
    assert "of 32 samples a server at 10 Tflop/s" in result.output


@pytest.mark.slow
def test_comparison():
    network = "bcube:4x2", "--model", "resnet50", "--fail", "server:3@50", "--compare"
    tables = answer(*network)
    times = {row["algorithm"]: row["jct_s"] for row in tables["algorithms"]}
    assert times["packed"] < times["ring"] < times["ps"]
    assert times["exchange"] is None
    fabrics = {row["fabric"]: row for row in tables["fabrics"]}
    assert set(fabrics) >= {"bcube:4x2", "switch:16", "fattree:4", "torus:4x2"}
    alone = answer("bcube:4x2", "--model", "resnet50")
    assert fabrics["bcube:4x2"]["jct_s"] == pytest.approx(alone["jct_s"])
    assert fabrics["bcube:4x2"]["jct_s"] < fabrics["switch:16"]["jct_s"]
    shown = run(*network, "--algorithm", "exchange")
    assert "- exchange: exchange cannot work on bcube:4x2 without server:3" in shown.output
    assert "NICs of 10 Gbit/s, computation of 32 samples a server at 10 Tflop/s" in shown.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.2092, "209.2"), (3.2e-4, "0.32"), (50.0124, "50012")]
)
def test_milliseconds_have_no_exponent(seconds, text):
    assert ms(seconds) == text


def test_fabrics_for_one_price():
    network = "bcube:2x2", "--model", "lenet", "--rate", "1gbit", "--compare", "--prices", "port=3"
    choice = answer(*network, "--mtbf", "server=30d,switch=60d", "--mttr", "server=1d,switch=1d")["choice"]
    assert choice["prices"] == "nic 1, port 3, cable 0"
    assert choice["dead"] == {"server": pytest.approx(1 / 31), "link": 0, "switch": pytest.approx(1 / 61)}
    rates = {row["fabric"]: row["rate_bit"] for row in choice["offers"]}
    assert rates["bcube:2x2"] == pytest.approx(1e9)
    assert rates["switch:4"] == pytest.approx(2e9), "a server has one NIC and one port, and had two of each"
    assert choice["best"] in rates
    assert {each["to"] for each in choice["changes"]} >= {"none", "10 times as many"}
    shown = run(*network).output
    assert "while nothing fails; --mtbf and --mttr weigh failures" in shown
    assert "prices: nic 1, port 3, cable 0, for one rate" in shown
    assert "within 1%" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bcube:3x2", "--model", "lenet", "--prices", "port=1"], "--prices is for --compare"),
        (["bcube:3x2", "--model", "lenet", "--compare", "--mtbf", "1y"], "--mtbf and --mttr belong together"),
        (
            ["bcube:3x2", "--model", "lenet", "--compare", "--mtbf", "1y", "--mttr", "4h"],
            "--mtbf and --mttr are for --prices",
        ),
        (["bcube:3x2", "--model", "lenet", "--compare", "--prices", "nics=1"], "'nics=1' in 'nics=1' is no"),
        (["bcube:3x2"], "Missing option '--model'"),
        (["bcube:3x2", "--model", "vgg"], "'vgg' is no file, and no model: write one of vgg19, resnet50"),
        (["bcube:3", "--model", "lenet"], "bcube:3"),
        (["bcube:3x2", "--model", "lenet", "--compute-s", "0"], "is not in the range"),
        (["bcube:3x2", "--model", "lenet", "--order", "need"], "--order is for --overlap forward"),
        (["bcube:3x2", "--model", "lenet", "--fail", "server:4@"], "does not say when"),
        (["bcube:3x2", "--model", "lenet", "--fail", "server:4@x"], "does not say when"),
        (["bcube:3x2", "--model", "lenet", "--fail", "server:4@0"], "write server:4, dead from the start"),
        (["bcube:3x2", "--model", "lenet", "--fail", "server:4@1000"], "never strikes"),
        (
            ["bcube:3x2", "--model", "lenet", "--fail", "server:4@5", "--fail", "server:4@9"],
            "has failed before",
        ),
        (["bcube:3x2", "--model", "lenet", "--fail", "server:9@5"], "server"),
        (["switch:2", "--model", "lenet", "--fail", "server:1@5"], "leaves 1 of 2 servers"),
        (["bcube:3x2", "--model", "lenet", "--slow-server", "4"], "'4' is no slow server"),
        (["bcube:3x2", "--model", "lenet", "--slow-server", "4=0"], "'4=0' is no slow server"),
        (["bcube:3x2", "--model", "lenet", "--slow-server", "9=2"], "has no live server 9"),
        (["bcube:3x2", "--model", "lenet", "--algorithm", "x"], "x"),
        (["bcube:3x2", "--model", "lenet", "--bucket", "0"], "at least 1 byte"),
        (["bcube:3x2", "--model", "lenet", "--rate", "fast"], "'fast' is no rate"),
    ],
)
def test_bad_input_is_said(arguments, said):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "Traceback" not in result.output


def test_layers_that_compute_nothing_cannot_share_a_time(tmp_path):
    nothing = {**LAYERS[0], "forward_s": 0, "backward_s": 0}
    (tmp_path / "layers.json").write_text(json.dumps([nothing]))
    model = "--model", str(tmp_path / "layers.json")
    assert answer("bcube:2x2", *model)["compute_share"] == 0
    assert "cannot be spread" in run("bcube:2x2", *model, "--compute-s", "1").output
    (tmp_path / "layers.json").write_bytes(b"\xff")
    assert "cannot be read" in run("bcube:2x2", *model).output


def test_help_has_the_name_of_the_command():
    assert (
        "Usage: bml sim train [OPTIONS] FABRIC"
        in CliRunner().invoke(main, ["sim", "train", "--help"], prog_name="bml").output
    )
