"""What benchmarks of training share: the layers of known networks, and the time of a step that is alone."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import bml


class Layer(NamedTuple):
    """A layer: how many parameters it has, and how many multiplications one sample takes in its forward."""

    n_parameters: int
    work: float


def vgg19() -> list[Layer]:
    """The 16 convolutions and 3 full layers of VGG-19 for images of 224 x 224."""
    found, channels, side = [], 3, 224
    for width, n in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(n):
            weights = 9 * channels * width
            found.append(Layer(weights + width, weights * side**2))
            channels = width
        side //= 2
    for inputs, outputs in ((512 * 49, 4096), (4096, 4096), (4096, 1000)):
        found.append(Layer(inputs * outputs + outputs, inputs * outputs))
    return found


def resnet50() -> list[Layer]:
    """The first convolution, the 16 blocks and the full layer of ResNet-50 for images of 224 x 224."""
    found = [Layer(3 * 49 * 64 + 128, 3 * 49 * 64 * 112**2)]
    channels, side = 64, 56
    for width, n in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(n):
            weights = channels * width + 9 * width**2 + 4 * width**2
            weights += 4 * channels * width if block == 0 else 0
            found.append(Layer(weights, weights * side**2))
            channels = 4 * width
        side //= 2
    return [*found, Layer(2048 * 1000 + 1000, 2048 * 1000)]


NETWORKS = {"vgg19": vgg19, "resnet50": resnet50}


def alone(session: bml.Session, n_elements: int) -> float:
    """Seconds of a step of so many elements with nothing beside it; all servers have the longest."""
    vector, found = session.empty(n_elements), []
    vector[:] = 1
    for _ in range(4):
        session.barrier()
        began_s = time.perf_counter()
        session.allreduce(vector, shared=True)
        found.append(time.perf_counter() - began_s)
    median = session.empty(1, "f8")
    median[0] = statistics.median(found[1:])
    return float(session.allreduce(median, "max")[0])
