"""Collectives that move values from server to server: every bit comes through, whatever the dtype is.

Each function makes the `Work` and the `Finish` of one call; see bml.train.collectives. All raise UsageError
for wrong arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from bml.errors import ContributorLost
from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.agreement import Prepare
from bml.train.collectives import CHANGED, Called, Collectives
from bml.train.communicator import Committed
from bml.train.operations.arguments import checked_root, one_for_each
from bml.train.operations.outputs import Outputs
from bml.train.operations.parcel import PARCEL_WORDS, pack, unpack
from bml.train.operations.words import Raw, from_words, in_place, words, zeros
from bml.train.pending import Finish, Work
from bml.train.vectors import Arrays, name_of


def broadcast(collectives: Collectives, arrays: Arrays, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.broadcast."""
    collectives.admit()
    root = checked_root(root, collectives)
    server, empty = collectives.communicator.server, collectives.communicator.empty
    many = isinstance(arrays, list | tuple)
    raw = Raw.of(arrays, empty)
    outputs = None if out is None else Outputs(out, raw.shapes, raw.dtypes, many)

    def prepare(view: View) -> Array:
        source = root if root in view.contributors else min(view.contributors)
        return words(raw.data, empty) if server == source else zeros(raw.data.size, empty)

    def give(outcome: Committed) -> Any:
        parts = from_words(outcome.result, raw.shapes, raw.dtypes)
        if outputs is not None:
            outputs.take(parts)
            return out
        return parts if many else parts[0]

    return _pair(collectives, f"broadcast from {root}", raw, prepare, outputs is not None, give)


def all_gather(collectives: Collectives, array: Any, out: Any) -> tuple[Work, Finish]:
    """See Session.all_gather."""
    collectives.admit()
    return _gathered(collectives, array, "all_gather", out, True)


def gather(collectives: Collectives, array: Any, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.gather."""
    collectives.admit()
    root = checked_root(root, collectives)
    is_root = collectives.communicator.server == root
    return _gathered(collectives, array, f"gather to {root}", out if is_root else None, is_root)


def _gathered(collectives: Collectives, array: Any, call: str, out: Any, gets: bool) -> tuple[Work, Finish]:
    server, empty, n = collectives.communicator.server, collectives.communicator.empty, collectives.n_servers
    raw = Raw.of(np.asarray(array), empty)
    outputs = None if out is None else Outputs(out, raw.shapes * n, raw.dtypes * n, True)

    def give(outcome: Committed) -> Any:
        if not gets:
            return None
        parts = from_words(outcome.result, raw.shapes * n, raw.dtypes * n)
        return _of_contributors(parts, outcome, outputs)

    # The vector is prepared when its step begins, not before: it is n times as large.
    shared = outputs is not None or not gets
    return _pair(collectives, call, raw, lambda view: in_place(raw.data, server, n, empty), shared, give)


def all_to_all(collectives: Collectives, arrays: Any, out: Any) -> tuple[Work, Finish]:
    """See Session.all_to_all."""
    collectives.admit()
    server, empty, n = collectives.communicator.server, collectives.communicator.empty, collectives.n_servers
    raw = Raw.of(one_for_each(arrays, collectives, "all_to_all"), empty)
    outputs = None if out is None else Outputs(out, raw.shapes, raw.dtypes, True)

    def give(outcome: Committed) -> Any:
        table = outcome.result.view(np.uint8).reshape(n, n, raw.data.size // n)  # from, to, bytes
        mine = np.ascontiguousarray(table[:, server]).reshape(-1)
        return _of_contributors(from_words(mine, raw.shapes, raw.dtypes), outcome, outputs)

    return _pair(
        collectives, "all_to_all", raw, lambda view: in_place(raw.data, server, n, empty), True, give
    )


class _Lost(NamedTuple):
    """The outcome of a scatter without a root."""

    outcome: Committed


def scatter(collectives: Collectives, arrays: Any, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.scatter. Its first step says what the root has, as the others do not know it."""
    collectives.admit()
    root = checked_root(root, collectives)
    server, empty, n = collectives.communicator.server, collectives.communicator.empty, collectives.n_servers
    is_root = server == root
    raw = Raw.of(one_for_each(arrays, collectives, "scatter"), empty) if is_root else None
    head = zeros(8 * PARCEL_WORDS, empty) if raw is None else pack(raw.shapes[0], raw.dtypes[0])
    described = collectives.describe(f"scatter from {root}: shape and dtype as", head.dtype, (head.shape,))
    check = _no_check if raw is None else _check_of(collectives, raw)

    def step(called: Called, contribution: Array) -> Committed | _Lost:
        outcome = collectives.step(called, "sum", lambda view: contribution, True)
        return outcome if root in outcome.contributors else _Lost(outcome)

    def work() -> Any:
        first = step(described, head)
        if isinstance(first, _Lost):
            return first
        shape, dtype = unpack(first.result)
        arrays_of_root = f", then {n} arrays {name_of(dtype)} {shape}"
        nbytes = n * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        second = (described[0] + arrays_of_root, zlib.crc32(arrays_of_root.encode(), described[1]))
        done = step(second, zeros(nbytes, empty) if raw is None else words(raw.data, empty))
        if isinstance(done, _Lost):
            return done
        mine = from_words(done.result, (shape,) * n, (dtype,) * n)[server].copy()
        return replace(done, result=mine)

    def finish(done: Committed | _Lost) -> Any:
        check()
        if isinstance(done, _Lost):
            collectives.contributors = done.outcome.contributors
            return ContributorLost(f"server {root}, the root of a scatter, was lost before it could send")
        collectives.contributors = done.contributors
        if out is None:
            return done.result
        return Outputs(out, (done.result.shape,), (done.result.dtype,), False).take([done.result])

    return work, finish


def _of_contributors(parts: list[Array], outcome: Committed, outputs: Outputs | None) -> list[Array | None]:
    """The parts of the servers that contributed; None for each of the others."""
    found = [part if server in outcome.contributors else None for server, part in enumerate(parts)]
    return found if outputs is None else outputs.take(found)


def _pair(
    collectives: Collectives,
    call: str,
    raw: Raw,
    prepare: Prepare,
    shared: bool,
    give: Callable[[Committed], Any],
) -> tuple[Work, Finish]:
    """One step of words; `shared`: its result is only read, and not kept."""
    dtype = raw.dtypes[0]
    if any(each != dtype for each in raw.dtypes):
        call, dtype = f"{call} of {', '.join(map(name_of, raw.dtypes))} as", np.dtype(np.uint8)
    described = collectives.describe(call, dtype, raw.shapes)
    check = _check_of(collectives, raw)

    def finish(outcome: Committed) -> Any:
        check()
        collectives.contributors = outcome.contributors
        return give(outcome)

    return lambda: collectives.step(described, "sum", prepare, shared), finish


def _check_of(collectives: Collectives, raw: Raw) -> Callable[[], None]:
    """A function that raises UsageError if the arrays have changed since now, in tests (BML_DEBUG)."""
    if not collectives.debug:
        return _no_check
    check_sum = zlib.crc32(raw.data.data)

    def check() -> None:
        if zlib.crc32(raw.data.data) != check_sum:
            raise UsageError(CHANGED.format(what="an array"))

    return check


def _no_check() -> None:
    """Nothing is checked."""
