"""What every server does in an iteration: when computation has each gradient, and what is in it. Pure.

Each of the servers has SAMPLES samples of a global batch, and survivors share those of a lost one. The
gradient of sample i is i + 1 times a pattern, so its mean over a batch of n samples is (n + 1) / 2 times the
pattern, whichever servers have summed it. Gradients have patterns of their own, and every other iteration has
twice of them, so a mean of another gradient or iteration is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bml.lab.flows.training.iterations import Overlap
from bml.lab.flows.training.layers import SAMPLES, Layer

Vector = npt.NDArray[np.float32]
_PERIOD = 61
"""Sums of 16 servers' samples times twice the pattern stay below 2^24, where float32 is exact."""
_EVERY = 1009
_RTOL = 1e-6
"""A sample of 16 servers' is 8e-6 of their sum at least."""


@dataclass(frozen=True)
class Gradient:
    """A gradient of `size` elements, float32, that backward has `ready_s` seconds after the start.

    That is the time of a server with its own samples alone.
    """

    size: int
    ready_s: float


@dataclass(frozen=True)
class Work:
    """What servers replay: `iterations` times the `gradients`, in the order in which backward has them.

    `compute_s` is forward and backward. With `late` gradients are sent when backward has ended.
    """

    gradients: tuple[Gradient, ...]
    compute_s: float
    late: bool
    iterations: int


def work(layers: tuple[Layer, ...], overlap: Overlap, iterations: int) -> Work:
    """Return what servers replay for layers in the order of the forward pass; each gradient is a step."""
    now = sum(layer.forward_s for layer in layers)
    gradients = []
    for layer in reversed(layers):
        now += layer.backward_s
        if layer.n_parameters:
            gradients.append(Gradient(layer.n_parameters, now))
    return Work(tuple(gradients), now, overlap is Overlap.none, iterations)


def middle_step(work: Work, iteration: int) -> int:
    """Return the number of the step of the largest gradient in this iteration, both counted from 1."""
    sizes = [gradient.size for gradient in work.gradients]
    return (iteration - 1) * len(sizes) + sizes.index(max(sizes)) + 1


def share_of(n_samples: int) -> float:
    """How many times as long as with its own samples alone a server computes with so many."""
    return n_samples / SAMPLES


def pattern(size: int, number: int = 0) -> Vector:
    """Return that of the gradient with this number: of the first one 1, 2, … 61, 1, 2, …"""
    return np.resize(np.roll(np.arange(1, _PERIOD + 1, dtype=np.float32), -number), size)


def weight(indices: npt.NDArray[np.int64], iteration: int = 0) -> np.float32:
    """How many times the pattern is in the sum of these samples' gradients."""
    return np.float32((int(indices.sum()) + len(indices)) * (1 + iteration % 2))


def wrong(mean: Vector, pattern: Vector, n_samples: int, all_of_it: bool, iteration: int = 0) -> int:
    """Count the elements that are not the mean over a batch of so many samples in this iteration.

    Every 1009th element is looked at, or every one with `all_of_it`.
    """
    step = 1 if all_of_it else _EVERY
    wanted = pattern[::step] * np.float32((n_samples + 1) / 2 * (1 + iteration % 2))
    return int(np.count_nonzero(~np.isclose(mean[::step], wanted, rtol=_RTOL, atol=0.0)))
