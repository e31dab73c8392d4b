"""Layers of known networks beside published totals, and files of layers."""

from __future__ import annotations

import json

import pytest

from bml.errors import UsageError
from bml.lab.flows.training.layers import (
    FLOPS,
    PARAMETER_NBYTES,
    SAMPLES,
    assumed_s,
    bucketed,
    computed_s,
    read_layers,
    scaled,
    spread,
)
from bml.lab.flows.training.networks import NETWORKS

#: Layers, parameters, and 10⁹ multiplications of a sample: those of torchvision and of Hugging Face.
PUBLISHED = {
    "vgg19": (19, 143_667_240, 19.63),
    "resnet50": (54, 25_557_032, 4.09),
    "alexnet": (8, 61_100_840, 0.714),
    "lenet": (5, 61_706, 0.000417),
    "bert-base": (74, 109_482_240, 11.17),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_network_has_what_is_published_of_it(name):
    shapes, (n_layers, n_parameters, work) = NETWORKS[name](), PUBLISHED[name]
    assert len(shapes) == len({shape.name for shape in shapes}) == n_layers
    assert sum(shape.n_parameters for shape in shapes) == n_parameters
    assert sum(shape.work for shape in shapes) / 1e9 == pytest.approx(work, rel=2e-3)


def test_the_perceptron_has_about_a_million_parameters():
    assert sum(shape.n_parameters for shape in NETWORKS["mnist-1m"]()) == pytest.approx(1e6, rel=0.02)
    assert set(NETWORKS) == {*PUBLISHED, "mnist-1m"}


def test_computation_is_spread_by_work():
    shapes = NETWORKS["vgg19"]()
    layers = spread(shapes, 0.6)
    assert computed_s(layers) == pytest.approx(0.6)
    assert all(layer.backward_s == pytest.approx(2 * layer.forward_s) for layer in layers)
    second = layers[1].forward_s / layers[0].forward_s
    assert second == pytest.approx(64 / 3)  # the same places and outputs, 64 channels instead of 3
    assert layers[-1].nbytes == PARAMETER_NBYTES * (4096 * 1000 + 1000)
    assert computed_s(scaled(layers, 1.5)) == pytest.approx(0.9)
    assert assumed_s(shapes) == pytest.approx(SAMPLES * 6 * 19.632e9 / FLOPS, rel=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("mib", [0.001, 0.5, 2, 25, 10_000])
def test_buckets_are_those_of_attach(name, mib):
    layout = pytest.importorskip("bml.torch.attached.layout", exc_type=ImportError)
    layers, nbytes = spread(NETWORKS[name](), 1.0), int(mib * 2**20)
    found = bucketed(layers, nbytes)
    wanted = layout.buckets([("float32", layer.nbytes) for layer in layers], nbytes)
    assert [bucket.nbytes for bucket in reversed(found)] == [
        sum(layers[at].nbytes for at in numbers) for numbers in wanted
    ]
    assert computed_s(found) == pytest.approx(1.0)
    assert len({bucket.name for bucket in found}) == len(found)


ONE = {"name": "a", "parameters": 10, "forward_s": 0.5, "backward_s": 1}


def test_a_file_of_layers():
    (first, second) = read_layers(json.dumps([ONE, {**ONE, "name": "b", "parameters": 0}]), "x.json")
    assert (first.name, first.n_parameters, first.forward_s, first.backward_s) == ("a", 10, 0.5, 1.0)
    assert second.nbytes == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "x.json is no JSON"),
        ("[" * 100_000, "x.json is no JSON"),
        ("{}", "list of 1 to"),
        ("[]", "list of 1 to"),
        ("[3]", "layer 0 of x.json must be an object of backward_s, forward_s, name, parameters"),
        (json.dumps([{**ONE, "more": 1}]), "no other key"),
        (json.dumps([ONE, {**ONE, "name": 3}]), "layer 1 of x.json: its name"),
        (json.dumps([{**ONE, "parameters": 1.5}]), "whole number"),
        (json.dumps([{**ONE, "parameters": True}]), "whole number"),
        (json.dumps([{**ONE, "parameters": -1}]), "whole number"),
        (json.dumps([{**ONE, "forward_s": -1}]), "must be seconds"),
        (json.dumps([{**ONE, "backward_s": float("nan")}]), "must be seconds"),
        (json.dumps([{**ONE, "backward_s": "1"}]), "must be seconds"),
    ],
)
def test_another_file_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        read_layers(text, "x.json")
