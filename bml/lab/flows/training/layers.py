"""The layers of a training: parameters and times of each, of a known network or of a user's file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bml.errors import UsageError
from bml.lab.flows.training.networks import Shape

SAMPLES = 32
"""Samples of a server in an iteration, for the computation that is assumed if none is given."""
FLOPS = 10e12
"""Operations per second of a server, for the same: about what a V100 reaches in float32 (ResNet-50, 400
images per second). A multiplication and its addition are two operations."""
FIRST_NBYTES = 1 << 20
"""The most bytes of the first bucket: the sooner it is full, the sooner communication begins."""
PARAMETER_NBYTES = 4
"""Gradients are float32."""
_PASSES = 3
"""Backward computes as much as two forward passes: the gradients of inputs, and those of weights."""
_MOST_LAYERS = 10_000
_MOST_PARAMETERS = 10**13
_MOST_S = 1e6
_KEYS = {"name", "parameters", "forward_s", "backward_s"}


@dataclass(frozen=True)
class Layer:
    """A layer: its parameters, and the seconds of its forward and backward pass on a server of speed 1."""

    name: str
    n_parameters: int
    forward_s: float
    backward_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.n_parameters * PARAMETER_NBYTES


def assumed_s(shapes: Sequence[Shape]) -> float:
    """Return seconds of computation of an iteration of SAMPLES samples at FLOPS operations per second."""
    return SAMPLES * 2 * _PASSES * sum(shape.work for shape in shapes) / FLOPS


def spread(shapes: Sequence[Shape], compute_s: float) -> list[Layer]:
    """Return layers that compute for `compute_s` seconds together, each in proportion to its work.

    A third of that is the forward pass.
    """
    second_s = compute_s / _PASSES / sum(shape.work for shape in shapes)
    return [
        Layer(shape.name, shape.n_parameters, shape.work * second_s, (_PASSES - 1) * shape.work * second_s)
        for shape in shapes
    ]


def scaled(layers: Sequence[Layer], times: float) -> list[Layer]:
    """Return layers that compute so many times as long."""
    return [
        replace(layer, forward_s=layer.forward_s * times, backward_s=layer.backward_s * times)
        for layer in layers
    ]


def bucketed(layers: Sequence[Layer], nbytes: int) -> list[Layer]:
    """Join neighbours whose gradients go together, in one step, and whose passes wait for it together.

    From the last layer on a bucket is full when it has so many bytes, the first one at FIRST_NBYTES, as those
    of `bml.torch.attach` and of DistributedDataParallel.
    """
    found: list[list[Layer]] = []
    limit, has = 0, 0
    for layer in reversed(layers):
        if has >= limit:
            limit, has = (nbytes if found else min(nbytes, FIRST_NBYTES)), 0
            found.append([])
        found[-1].insert(0, layer)
        has += layer.nbytes
    return [
        Layer(
            each[0].name if len(each) == 1 else f"{each[0].name} to {each[-1].name}",
            sum(layer.n_parameters for layer in each),
            sum(layer.forward_s for layer in each),
            sum(layer.backward_s for layer in each),
        )
        for each in reversed(found)
    ]


def computed_s(layers: Sequence[Layer]) -> float:
    """Return seconds of forward and backward of all layers."""
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def read_layers(text: str, source: str) -> list[Layer]:
    """Read layers, in the order of the forward pass, from a JSON list of objects.

    Their keys are `name`, `parameters`, `forward_s` and `backward_s`. `source` is named in errors.

    Raises:
        UsageError: the text is something else.
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is no JSON: {error}") from None
    if not isinstance(read, list) or not 0 < len(read) <= _MOST_LAYERS:
        raise UsageError(f"{source} must be a list of 1 to {_MOST_LAYERS} layers")
    return [_layer(each, f"layer {number} of {source}") for number, each in enumerate(read)]


def _layer(read: Any, where: str) -> Layer:
    if not isinstance(read, dict) or set(read) != _KEYS:
        raise UsageError(f"{where} must be an object of {', '.join(sorted(_KEYS))}, and no other key")
    name, n_parameters = read["name"], read["parameters"]
    if not isinstance(name, str):
        raise UsageError(f"{where}: its name must be a text")
    if type(n_parameters) is not int or not 0 <= n_parameters <= _MOST_PARAMETERS:
        raise UsageError(f"{where}: parameters must be a whole number from 0 to {_MOST_PARAMETERS:.0e}")
    times = [read["forward_s"], read["backward_s"]]
    for seconds in times:
        if type(seconds) not in (int, float) or not (math.isfinite(seconds) and 0 <= seconds <= _MOST_S):
            raise UsageError(f"{where}: forward_s and backward_s must be seconds from 0 to {_MOST_S:.0e}")
    return Layer(name, n_parameters, float(times[0]), float(times[1]))
