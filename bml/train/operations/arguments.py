"""Arguments that several collectives have: a root, and a list with an array for each server."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.collectives import Collectives
from bml.train.vectors import Bucket


def checked_root(root: Any, collectives: Collectives) -> int:
    """The root as a whole number. Raises UsageError if it is no server's id."""
    n = collectives.n_servers
    try:
        found = -1 if isinstance(root, bool) else operator.index(root)
    except TypeError:
        found = -1
    if not 0 <= found < n:
        raise UsageError(f"root is {root!r}: give the id of a server, 0 to {n - 1}")
    return found


def one_for_each(arrays: Any, collectives: Collectives, what: str) -> Sequence[Array]:
    """The arrays of a list, one for each server, or the bucket that was given.

    Raises UsageError unless they have one shape and dtype.
    """
    n = collectives.n_servers
    if not isinstance(arrays, list | tuple):
        raise UsageError(f"{what} takes a list of {n} arrays, one for each server: it was given one thing")
    found = [np.asarray(array) for array in arrays]
    if len(found) != n:
        raise UsageError(f"{what} takes a list of {n} arrays, one for each server: it was given {len(found)}")
    kinds = {(array.shape, array.dtype) for array in found}
    if len(kinds) > 1:
        texts = sorted(f"{dtype} {shape}" for shape, dtype in kinds)
        raise UsageError(f"{what} takes arrays of one shape and dtype, these are {' and '.join(texts)}")
    return arrays if isinstance(arrays, Bucket) else found
