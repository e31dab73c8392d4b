"""Collectives that move values from server to server: every bit comes through, whatever the dtype is.

Each function makes the `Work` and the `Finish` of one call; see bml.train.collectives. All raise UsageError
for wrong arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from bml.errors import ContributorLost
from bml.protocol.step.workspace import Array, Padded
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.agreement import Prepare
from bml.train.collectives import CHANGED, Called, Collectives
from bml.train.communicator import Committed
from bml.train.operations.arguments import checked_root, one_for_each
from bml.train.operations.given import Given, array_of, nbytes_of
from bml.train.operations.outputs import Outputs
from bml.train.operations.parcel import PARCEL_NBYTES, pack, unpack
from bml.train.operations.places import Places, source
from bml.train.pending import Finish, Work
from bml.train.vectors import Arrays, name_of


def broadcast(collectives: Collectives, arrays: Arrays, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.broadcast."""
    collectives.admit()
    root = checked_root(root, collectives)
    server, empty = collectives.communicator.server, collectives.communicator.empty
    many = isinstance(arrays, list | tuple)
    given = Given.of(arrays, empty)
    outputs = None if out is None else Outputs(out, given.shapes, given.dtypes, many)
    places = Places(given.sizes)

    def prepare(view: View) -> Array | Padded:
        gives = source(root, view.contributors) == server
        return places.vector(0, given.parts if gives else (), empty)

    def give(outcome: Committed) -> Any:
        kinds = enumerate(zip(given.shapes, given.dtypes, strict=True))
        found = [array_of(places.part(outcome.result, place), *kind) for place, kind in kinds]
        if outputs is not None:
            outputs.take(found)
            return out
        return found if many else found[0]

    return _pair(collectives, f"broadcast from {root}", given, prepare, outputs is not None, give)


def all_gather(collectives: Collectives, array: Any, out: Any) -> tuple[Work, Finish]:
    """See Session.all_gather."""
    collectives.admit()
    given = Given.of(np.asarray(array), collectives.communicator.empty)
    return _table(collectives, "all_gather", given, 0, out)


def gather(collectives: Collectives, array: Any, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.gather."""
    collectives.admit()
    root = checked_root(root, collectives)
    given = Given.of(np.asarray(array), collectives.communicator.empty)
    is_root = collectives.communicator.server == root
    return _table(collectives, f"gather to {root}", given, 0 if is_root else None, out)


def all_to_all(collectives: Collectives, arrays: Any, out: Any) -> tuple[Work, Finish]:
    """See Session.all_to_all."""
    collectives.admit()
    server, empty = collectives.communicator.server, collectives.communicator.empty
    given = Given.of(one_for_each(arrays, collectives, "all_to_all"), empty)
    return _table(collectives, "all_to_all", given, server, out)


def _table(
    collectives: Collectives, call: str, given: Given, column: int | None, out: Any
) -> tuple[Work, Finish]:
    """Each server brings a row of a table, arrays of one kind, and gets a column of it, or with None nothing.

    The entries of servers that do not contribute are None.
    """
    server, empty, n = collectives.communicator.server, collectives.communicator.empty, collectives.n_servers
    width, shape, dtype = len(given.shapes), given.shapes[0], given.dtypes[0]
    gets = column is not None
    outputs = Outputs(out, (shape,) * n, (dtype,) * n, True) if gets and out is not None else None
    places = Places(given.sizes * n)
    shared = outputs is not None or not gets or width > 1

    def prepare(view: View) -> Array | Padded:  # when its step begins, not before: it is n times as large
        return places.vector(server * width, given.parts, empty)

    def give(outcome: Committed) -> Any:
        if column is None:
            return None
        found: list[Array | None] = [None] * n
        for giver in outcome.contributors:
            part = array_of(places.part(outcome.result, giver * width + column), shape, dtype)
            # A part of a whole row is copied, as it would hold the memory of all others.
            found[giver] = part.copy() if width > 1 and outputs is None else part
        return found if outputs is None else outputs.take(found)

    return _pair(collectives, call, given, prepare, shared, give)


def scatter(collectives: Collectives, arrays: Any, root: int, out: Any) -> tuple[Work, Finish]:
    """See Session.scatter. Its first step says what the root has, as the others do not know it."""
    collectives.admit()
    root = checked_root(root, collectives)
    server, empty, n = collectives.communicator.server, collectives.communicator.empty, collectives.n_servers
    given, head = Given(), Given()
    if server == root:
        given = Given.of(one_for_each(arrays, collectives, "scatter"), empty)
        head = Given.of(pack(given.shapes[0], given.dtypes[0]), empty)
    described = collectives.describe(
        f"scatter from {root}: shape and dtype as", np.dtype(np.uint8), ((PARCEL_NBYTES,),)
    )
    check = _check_of(collectives, given)

    def step(called: Called, places: Places, given: Given) -> Committed:
        return collectives.step(called, "sum", lambda view: places.vector(0, given.parts, empty), True)

    def work() -> Committed:
        first = step(described, Places([PARCEL_NBYTES]), head)
        if root not in first.contributors:
            return first
        shape, dtype = unpack(first.result.view(np.uint8))
        arrays_of_root = f", then {n} arrays {name_of(dtype)} {shape}"
        second = (described[0] + arrays_of_root, zlib.crc32(arrays_of_root.encode(), described[1]))
        places = Places([nbytes_of(shape, dtype)] * n)
        done = step(second, places, given)
        if root not in done.contributors:
            return done
        return replace(done, result=array_of(places.part(done.result, server), shape, dtype).copy())

    def finish(done: Committed) -> Any:
        check()
        collectives.note(done.step, done.contributors)
        if root not in done.contributors:
            return ContributorLost(f"server {root}, the root of a scatter, was lost before it could send")
        if out is None:
            return done.result
        return Outputs(out, (done.result.shape,), (done.result.dtype,), False).take([done.result])

    return work, finish


def _pair(
    collectives: Collectives,
    call: str,
    given: Given,
    prepare: Prepare,
    shared: bool,
    give: Callable[[Committed], Any],
) -> tuple[Work, Finish]:
    """One step of a vector of places; `shared`: its result is only read, and not kept."""
    dtype = given.dtypes[0]
    if any(each != dtype for each in given.dtypes):
        call, dtype = f"{call} of {', '.join(map(name_of, given.dtypes))} as", np.dtype(np.uint8)
    described = collectives.describe(call, dtype, given.shapes)
    check = _check_of(collectives, given)

    def finish(outcome: Committed) -> Any:
        check()
        collectives.note(outcome.step, outcome.contributors)
        return give(outcome)

    return lambda: collectives.step(described, "sum", prepare, shared), finish


def _check_of(collectives: Collectives, given: Given) -> Callable[[], None]:
    """A function that raises UsageError if the arrays have changed since now, in tests (BML_DEBUG)."""
    before = given.check_sum() if collectives.debug else 0

    def check() -> None:
        if collectives.debug and given.check_sum() != before:
            raise UsageError(CHANGED.format(what="an array"))

    return check
