"""Collectives that reduce: every element of the result is made of the same element of all servers.

Each function makes the `Work` and the `Finish` of one call; see bml.train.collectives. All raise UsageError
for wrong arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.collectives import CHANGED, Collectives
from bml.train.communicator import Committed
from bml.train.operations.arguments import checked_root, one_for_each
from bml.train.operations.outputs import Outputs
from bml.train.pending import Finish, Work
from bml.train.priority.pieces import Pieces, in_words
from bml.train.vectors import Arrays, Ready, check_not_copied, divide, flatten, given_back, unflatten

_OPS = {"sum": "sum", "avg": "sum", "min": "min", "max": "max", "prod": "prod"}
"""Operation -> how the vector of the step is reduced."""
_OF_BOOL = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
"""The same for bool, which is carried as 0 and 1: a sum is "or", a product is "and"."""


def allreduce(
    collectives: Collectives, arrays: Arrays, op: str, shared: bool, out: Any, ready: Ready | None = None
) -> tuple[Work, Finish]:
    """See Session.allreduce, and its `allreduce_async` for `ready`."""
    collectives.admit()
    reduction = _Reduction(collectives, "allreduce", arrays, op, shared or out is not None, ready)
    if out is None:
        return reduction.work, reduction.finish
    return reduction.work, reduction.into(out)


def allreduce_in_pieces(
    collectives: Collectives, arrays: Arrays, op: str, out: Any, ready: Ready | None, priority: int | None
) -> tuple[Pieces, Finish]:
    """See Session.allreduce_async for `priority`."""
    collectives.admit()
    reduction = _Reduction(collectives, f"allreduce{in_words(priority)}", arrays, op, out is not None, ready)
    pieces, whole = reduction.pieces()
    give = reduction.finish if out is None else reduction.into(out)

    def finish(_: None) -> Any:
        outcome = whole()
        return give(outcome)

    return pieces, finish


def reduce(collectives: Collectives, arrays: Arrays, root: int, op: str, out: Any) -> tuple[Work, Finish]:
    """See Session.reduce."""
    collectives.admit()
    root = checked_root(root, collectives)
    is_root = collectives.communicator.server == root
    reduction = _Reduction(collectives, f"reduce to {root},", arrays, op, not is_root or out is not None)
    if not is_root:
        return reduction.work, lambda outcome: _nothing(reduction.finish(outcome))
    return reduction.work, reduction.finish if out is None else reduction.into(out)


def reduce_scatter(collectives: Collectives, arrays: Any, op: str, out: Any) -> tuple[Work, Finish]:
    """See Session.reduce_scatter."""
    collectives.admit()
    arrays = one_for_each(arrays, collectives, "reduce_scatter")
    reduction = _Reduction(collectives, "reduce_scatter", arrays, op, True)
    server = collectives.communicator.server
    outputs = None if out is None else Outputs(out, reduction.shapes[:1], (reduction.dtype,), False)

    def finish(outcome: Committed) -> Any:
        part = reduction.finish(outcome)[server]
        return part.copy() if outputs is None else outputs.take([part])  # it holds no memory of the others

    return reduction.work, finish


class _Reduction:
    """One call, from the user's memory to the result, which has these `shapes` and this `dtype`."""

    __slots__ = (
        "_check_sum",
        "_collectives",
        "_described",
        "_flat",
        "_given",
        "_is_mean",
        "_many",
        "_op",
        "_pieces",
        "_ready",
        "_shared",
        "dtype",
        "shapes",
    )

    def __init__(
        self,
        collectives: Collectives,
        call: str,
        arrays: Arrays,
        op: str,
        shared: bool,
        ready: Ready | None = None,
    ):
        if op not in _OPS:
            raise UsageError(f"op is {op!r}: give one of {', '.join(_OPS)}")
        self._collectives = collectives
        empty = collectives.communicator.empty
        self._flat, self.shapes, given = flatten(arrays, empty, widened=op not in ("min", "max"))
        self._many = isinstance(arrays, list | tuple)
        self._shared = shared
        self._op = _OPS[op]
        self._pieces: Pieces | None = None
        self._is_mean = op == "avg"
        self.dtype = self._given = given
        if given.kind == "b":
            if op not in _OF_BOOL:
                raise UsageError("bool has no mean: give numbers, or op sum (or), prod (and), max or min")
            self._op = _OF_BOOL[op]
        elif self._is_mean and given.kind in "iu":
            self.dtype = np.dtype(np.float64)
        self._described = collectives.describe(f"{call} {op}", given, self.shapes)
        self._ready = ready
        if ready is not None:
            check_not_copied(arrays, self._flat)
        self._check_sum = zlib.crc32(self._flat.data) if collectives.debug and ready is None else 0

    def work(self) -> Committed:
        """Synchronise the step, and make the result of its vector, in the thread that waits for the step."""
        flat = self._flat
        self._await()  # before the step, which a lost job refuses: what `ready` wakes must not wait for ever
        outcome = self._collectives.step(self._described, self._op, self._prepare, self._shared)
        if not self._is_mean and flat.dtype is self._given:
            return outcome
        vector: Array = outcome.result
        if self._is_mean:
            vector = divide(vector, len(outcome.contributors), self._collectives.communicator.empty)
        return replace(outcome, result=given_back(vector, self._given))

    def pieces(self) -> tuple[Pieces, Callable[[], Committed]]:
        """The step in pieces that others may overtake, and what returns the result when all are committed."""
        flat, empty = self._flat, self._collectives.communicator.empty
        is_float = np.issubdtype(flat.dtype, np.inexact)
        result = empty(flat.size, flat.dtype if is_float or not self._is_mean else np.dtype(np.float64))
        last: list[Committed] = []

        def take(outcome: Committed, start: int, stop: int, values: Array) -> None:
            if self._is_mean:
                divide(values, len(outcome.contributors), np.empty, out=result[start:stop])
            else:
                result[start:stop] = values
            last[:] = [outcome]

        def whole() -> Committed:
            return replace(last[0], result=given_back(result, self._given))

        self._pieces = Pieces(
            self._collectives, self._described, self._op, self._prepare, take, flat.size, flat.dtype
        )
        return self._pieces, whole

    def _prepare(self, view: View) -> Array:
        self._await()
        return self._flat

    def _await(self) -> None:
        """Wait, once, until the vector may be read."""
        if self._ready is not None:
            self._ready()
            self._ready = None
            self._check_sum = zlib.crc32(self._flat.data) if self._collectives.debug else 0

    def finish(self, outcome: Committed) -> Any:
        """The arrays of the result, in the training thread."""
        collectives = self._collectives
        if collectives.debug and zlib.crc32(self._flat.data) != self._check_sum:
            raise UsageError(CHANGED.format(what="an array"))
        collectives.note(outcome.step, outcome.contributors, self._pieces)
        self._pieces = None  # they refer to this: as a cycle they would keep the result
        if self._shared:
            outcome.result.flags.writeable = False
        return unflatten(outcome.result, self.shapes, self._many)

    def into(self, out: Any) -> Callable[[Committed], Any]:
        """A `finish` that writes the result into the user's arrays."""
        many, dtypes = self._many, (self.dtype,) * len(self.shapes)
        outputs = Outputs(out, self.shapes, dtypes, many)

        def finish(outcome: Committed) -> Any:
            result = self.finish(outcome)
            outputs.take(result if many else [result])
            return out

        return finish


def _nothing(result: Any) -> None:
    """The result of a server that is not the root."""
