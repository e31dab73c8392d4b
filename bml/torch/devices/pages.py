"""Whole pages of host memory, which can be page-locked without touching what lies beside them."""

from __future__ import annotations

import mmap

import numpy as np

from bml.io.memory import Array, address_of
from bml.train.operations.places import Empty


def whole_pages(nbytes: int, empty: Empty) -> Array:
    """Uninitialised bytes, at least `nbytes`, in whole pages that nothing else lies in; uint8, shape (n,).

    `empty` makes the memory; a page more than needed is taken of it.
    """
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    made = empty(size + mmap.PAGESIZE, np.uint8)
    start = -address_of(made) % mmap.PAGESIZE
    return made[start : start + size]
