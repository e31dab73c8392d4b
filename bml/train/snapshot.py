"""The training state at a step boundary, as bytes: what a joining server is given, and how it takes it in.

    8 bytes, little endian      length of the manifest
    manifest (msgpack)          position in the training loop, contributors, ledger, dtypes and shapes
    arrays                      one after the other, C order

The arrays are those that the training function named with `session.state`, in order of their names; on the
joiner they are written in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from bml.protocol.workspace import Array
from topology.errors import UsageError

_LENGTH_NBYTES = 8


class Manifest(msgspec.Struct):
    """Everything but the arrays. `loop` counts the session's loops, `index` the steps of that one."""

    loop: int
    index: int
    contributors: tuple[int, ...]
    ledger: bytes | None
    arrays: list[tuple[str, tuple[int, ...]]]


class Snapshot:
    """Bytes over arrays that are not copied: read it before they change."""

    def __init__(self, manifest: Manifest, arrays: Iterable[Array]):
        head = msgspec.msgpack.encode(manifest)
        length = len(head).to_bytes(_LENGTH_NBYTES, "little")
        parts = [memoryview(length + head), *(_raw(array) for array in arrays)]
        self._parts = [part for part in parts if len(part)]
        self._stops = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, span: slice) -> bytes | memoryview:
        start, stop, _ = span.indices(len(self))
        found = []
        while start < stop:
            at = bisect_right(self._stops, start)
            begin = self._stops[at] - len(self._parts[at])
            piece = self._parts[at][start - begin : stop - begin]
            found.append(piece)
            start += len(piece)
        return found[0] if len(found) == 1 else b"".join(found)


def snapshot(
    state: Mapping[str, Any], loop: int, index: int, contributors: tuple[int, ...], ledger: bytes | None
) -> Snapshot:
    """The state as it is now."""
    arrays = [np.ascontiguousarray(array) for array in leaves(state)]
    kinds = [(array.dtype.str, array.shape) for array in arrays]
    return Snapshot(Manifest(loop, index, contributors, ledger, kinds), arrays)


def restore(data: memoryview, state: Mapping[str, Any]) -> Manifest:
    """Write what `snapshot` made into the arrays of `state`; returns the rest of it.

    Raises UsageError unless the joiner named arrays of the same dtypes and shapes, that can be written.
    """
    offset = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    manifest = msgspec.msgpack.decode(data[_LENGTH_NBYTES:offset], type=Manifest)
    own = list(leaves(state))
    theirs = [(dtype, tuple(shape)) for dtype, shape in manifest.arrays]
    mine = [(array.dtype.str, array.shape) for array in own]
    if mine != theirs:
        raise UsageError(
            f"this server joins with the state {mine}, the others have {theirs}: "
            "name the same arrays with session.state before the first session.batches"
        )
    for array in own:
        if not array.flags.writeable:
            raise UsageError(
                "the arrays that session.state names must be writable, a joiner gets its state in them"
            )
        part = np.frombuffer(data[offset : offset + array.nbytes], array.dtype)
        array[...] = part.reshape(array.shape)
        offset += array.nbytes
    return manifest


def leaves(value: Any) -> Iterator[Array]:
    """The arrays in a value: an array, or lists or dicts (in order of their keys) of arrays."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from leaves(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield np.asarray(value)


def _raw(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data) if array.nbytes else memoryview(b"")
