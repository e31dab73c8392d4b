"""Decisions that every server makes alike: gradients that go together, the seed of a share, its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bml.train.batches import Indices

NO_SAMPLES: Indices = np.empty(0, np.int64)
FIRST_NBYTES = 1 << 20
"""The most bytes of the first bucket: the sooner it is full, the sooner communication begins."""
MOST_NBYTES = 8 << 20
"""The most bytes of a bucket, unless the user decides: larger ones make no better use of the wires."""
_FRACTION = 8
"""About so many buckets a small model has: the last one is sent when backward has ended."""


def limit_of(total_nbytes: int) -> int:
    """Return the size of the buckets of a model whose gradients have so many bytes."""
    return min(MOST_NBYTES, max(FIRST_NBYTES, total_nbytes // _FRACTION))


def buckets(gradients: Sequence[tuple[str, int]], most_nbytes: int) -> list[tuple[int, ...]]:
    """Group gradients (dtype and bytes, in the order in which the model registers its parameters).

    Backward makes them about in reverse, so each bucket has neighbours of one dtype in reverse order. The
    buckets are in the order in which their last gradients are ready. A bucket is full when it has reached
    `most_nbytes`, the first one at 1 MiB.
    """
    limit = min(FIRST_NBYTES, most_nbytes)
    open_: dict[str, tuple[list[int], int]] = {}
    made: list[tuple[int, ...]] = []
    for number in reversed(range(len(gradients))):
        dtype, nbytes = gradients[number]
        members, size = open_.pop(dtype, ([], 0))
        members.append(number)
        if size + nbytes >= limit:
            made.append(tuple(members))
            limit = most_nbytes
        else:
            open_[dtype] = members, size + nbytes
    return sorted([*made, *(tuple(members) for members, _ in open_.values())], key=lambda each: -each[-1])


def seed_of(seed: int, step: int, indices: Indices) -> int:
    """The seed of torch's random numbers for these samples in this batch: the same on whichever server."""
    sha = hashlib.sha256(f"{seed} {step} ".encode() + np.ascontiguousarray(indices, np.int64).tobytes())
    return int.from_bytes(sha.digest()[:8], "little") >> 1


def cuts(n_samples: int, n_parts: int) -> list[tuple[int, int]]:
    """Cut so many samples into at most `n_parts` parts, none empty unless there are no samples."""
    n_parts = max(1, min(n_parts, n_samples))
    stops = [n_samples * part // n_parts for part in range(n_parts + 1)]
    return list(pairwise(stops))
