"""What `bml bench train` is asked for: contenders, failures and scales as texts, and what cannot run."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.errors import FabricError, TooFewServers, UsageError
from bml.lab.bench.failing import fault_of
from bml.lab.bench.training.asked import (
    MOST_NBYTES,
    WARM_UP,
    Comparison,
    Contender,
    Strike,
    contenders,
    read_scale,
    scaled_down,
    strikes,
    usual_scale,
)
from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import Layer, spread
from bml.lab.flows.training.networks import NETWORKS
from bml.topology import ServerFailure, parse, parse_failure

OWN = parse("bcube:3x2")
LAYERS = (Layer("a", 1000, 0.1, 0.2), Layer("b", 0, 0.1, 0.1), Layer("c", 5000, 0.1, 0.2))


def comparison(**changes) -> Comparison:
    whole = Comparison(
        model="mine",
        layers=LAYERS,
        scale=Fraction(1),
        rate_bit=100_000_000,
        overlap=Overlap.none,
        own=Contender("bml", "auto", OWN),
        against=contenders("ring@switch:9", OWN),
        strikes=(),
        iterations=5,
        turns=3,
    )
    return replace(whole, **changes)


def named(text: str) -> list[tuple[str, str]]:
    return [(each.algorithm, each.fabric.name) for each in contenders(text, OWN)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("ring", [("ring", "bcube:3x2")]),
        ("ring,mesh,ps@switch:9", [(each, "switch:9") for each in ("ring", "mesh", "ps")]),
        ("mesh@switch:9, ring", [("mesh", "switch:9"), ("ring", "bcube:3x2")]),
        ("ps:4@switch:9,ring@torus:3x2", [("ps:4", "switch:9"), ("ring", "torus:3x2")]),
        ("ring,ring@switch:9,ring,", [("ring", "switch:9"), ("ring", "bcube:3x2")]),
    ],
)
def test_algorithms_before_an_at_are_on_its_fabric(text, found):
    assert named(text) == found


def test_failures_of_one_iteration_strike_together_and_in_order():
    assert strikes(["server:4@20", "link:2/1@9", "server:5@20"]) == (
        Strike(9, (parse_failure("link:2/1"),)),
        Strike(20, (ServerFailure(4), ServerFailure(5))),
    )
    assert [fault_of(parse_failure(text)) for text in ("server:4", "link:4/0", "switch:0/2")] == [
        "kill:4",
        "cut:4/0",
        "switch:0/2",
    ]


@pytest.mark.parametrize(
    ("text", "scale"), [("1/8", (1, 8)), ("0.25", (1, 4)), ("1", (1, 1)), ("3/4", (3, 4))]
)
def test_scales_are_read_exactly(text, scale):
    assert read_scale(text) == Fraction(*scale)


@pytest.mark.parametrize("text", ["0", "2", "1/0", "-1/2", "9/8", "half", "1e-3", "", "1/2/3"])
def test_other_scales_are_refused(text):
    with pytest.raises(UsageError, match="write it like 1/8"):
        read_scale(text)


@pytest.mark.parametrize("model", NETWORKS)
def test_the_usual_scale_is_the_largest_power_of_two_that_fits(model):
    nbytes = sum(layer.nbytes for layer in spread(NETWORKS[model](), 1.0))
    scale = usual_scale(nbytes)
    assert nbytes * scale <= MOST_NBYTES
    assert scale == 1 or nbytes * scale * 2 > MOST_NBYTES


def test_gradients_are_scaled_and_computation_is_not():
    found = scaled_down(LAYERS, Fraction(1, 1500))
    assert [each.n_parameters for each in found] == [1, 0, 3]
    assert [(each.forward_s, each.backward_s) for each in found] == [
        (each.forward_s, each.backward_s) for each in LAYERS
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"against": contenders("ring@switch:8", OWN)}, UsageError, "has 8 servers, bcube:3x2 has 9"),
        ({"against": contenders("rings@switch:9", OWN)}, UsageError, "choose one of"),
        ({"layers": LAYERS[1:2]}, UsageError, "no parameters"),
        ({"strikes": strikes(["server:9@20"])}, UsageError, "there is no server 9"),
        ({"strikes": strikes(["server:4@20", "server:4@23"])}, UsageError, "server:4@23 strikes what has"),
        ({"strikes": strikes(["server:4@20", "link:4/1@23"])}, UsageError, "link:4/1@23 strikes what has"),
        ({"against": contenders("bml", OWN)}, UsageError, "is what the others are compared with"),
        ({"strikes": strikes([f"server:4@{WARM_UP + 1}"])}, UsageError, "in iteration 4 or later"),
        ({"strikes": strikes([f"server:{each}@20" for each in range(5)])}, TooFewServers, "4 of 9 servers"),
    ],
)
def test_what_cannot_run_is_refused(changes, kind, says):
    with pytest.raises(kind, match=says):
        comparison(**changes).check()


def test_a_run_that_can_be_is_let_pass():
    comparison(strikes=strikes(["server:4@20", "server:5@23", "link:2/1@23"])).check()


def train(*arguments):
    return CliRunner().invoke(main, ["bench", "train", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "vgg20"], "is no file, and no model: write one of vgg19"),
        (["--model", "lenet", "--fail", "server:4"], "write server:4@20"),
        (["--model", "lenet", "--fail", "server:9@20"], "there is no server 9"),
        (
            ["--model", "lenet", "--fail", "server:4@20", "--fail", "server:5@21"],
            "too close to be told apart",
        ),
        (["--model", "lenet", "--against", "ring@switch:8"], "compare fabrics of as many servers"),
        (["--model", "lenet", "--against", "@switch:9"], "names no algorithm"),
        (["--model", "lenet", "--rate", "fast"], "200mbit"),
        (["--model", "lenet", "--scale", "2"], "at most 1"),
        (["--model", "lenet", "--fabric", "bcube:3"], "is not ports x levels"),
        (["--model", "lenet", "--compute-s", "nan"], "not a finite number"),
    ],
)
def test_bad_usage_is_said_before_anything_starts(arguments, says):
    result = train(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--fabric", "bcube:5x2"], "16 can be emulated"), (["--fabric", "fattree:4"], "cannot be emulated")],
)
def test_fabrics_that_cannot_be_emulated_are_refused_with_the_reason(arguments, says):
    result = train("--model", "lenet", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr


def test_without_root_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = train("--model", "lenet", "--fabric", "switch:2", "--against", "")
    assert result.exit_code == 1, result.output
    assert "that needs root: use sudo" in result.stderr
    assert FabricError.__name__ not in result.stderr
