"""The training state at a step boundary, as bytes: made for a server that joins, and restored there.

    8 bytes, little endian      length of the manifest
    manifest (msgpack)          path, contributors, ledgers, weights, dtypes, shapes, saved values
    arrays                      one after the other, C order

The arrays are those that the training function named with `session.state`, in order of their names; on the
joiner they are written in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import msgspec
import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.position import Path
from bml.train.state import NamedState, raw

_LENGTH_NBYTES = 8
_MOST_TEXT = 1000
"""Most characters of an error that is sent to a joiner."""


class Manifest(msgspec.Struct):
    """Everything but the arrays."""

    path: Path
    contributors: tuple[int, ...]
    ledgers: bytes
    arrays: list[tuple[str, str, tuple[int, ...]]]
    saved: bytes
    refusal: str = ""
    """Why no state can be given: the joiner ends with this error, and the other servers go on."""
    shares: bytes = b""
    """The weights by which batches are split (`bml.train.balancing.balancer.Balancer.dump`)."""
    wants_state: bool = False
    """See bml.train.collectives: a joiner that decides as the others do must begin with what they know."""


class Snapshot:
    """The manifest and the arrays as one sequence of bytes, without a copy: read it before they change."""

    def __init__(self, manifest: Manifest, arrays: Iterable[Array]):
        head = msgspec.msgpack.encode(manifest)
        length = len(head).to_bytes(_LENGTH_NBYTES, "little")
        parts = [memoryview(length + head), *(memoryview(raw(array).data) for array in arrays)]
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
    state: NamedState,
    path: Path,
    contributors: tuple[int, ...],
    ledgers: bytes,
    shares: bytes = b"",
    wants_state: bool = False,
) -> Snapshot:
    """Return the state as it is now, at this position in the program."""
    try:
        state.check_in_use()
        arrays = state.arrays()
        kinds, saved = state.kinds, state.saved()
        manifest = Manifest(path, contributors, ledgers, kinds, saved, "", shares, wants_state)
    except (
        Exception
    ) as error:  # also one of a user's function: a healthy job must not end because a server joins
        return Snapshot(Manifest(path, contributors, ledgers, [], b"", _why(error)), [])
    return Snapshot(manifest, arrays)


def _why(error: Exception) -> str:
    if isinstance(error, UsageError):
        return str(error)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # raised by a class of the user
        text = type(error).__name__
    return text[:_MOST_TEXT].encode("utf-8", "backslashreplace").decode()


def manifest_of(data: memoryview) -> Manifest:
    """Return the manifest of a snapshot."""
    return msgspec.msgpack.decode(data[_LENGTH_NBYTES : _end_of_manifest(data)], type=Manifest)


def restore(data: memoryview, state: NamedState) -> Manifest:
    """Write the arrays of a snapshot into those of `state`, and give its functions their values.

    Returns the manifest. Raises UsageError unless the joiner named arrays of the same dtypes and shapes.
    """
    manifest, offset = manifest_of(data), _end_of_manifest(data)
    if manifest.refusal:
        raise UsageError(f"the others cannot give their state: {manifest.refusal}")
    theirs = [(name, dtype, tuple(shape)) for name, dtype, shape in manifest.arrays]
    if state.kinds != theirs:
        raise UsageError(
            f"this server joins with the state {state.kinds}, the others have {theirs}: "
            "name the same arrays with session.state before the training loop, on every server"
        )
    state.fill(np.frombuffer(data[offset:], np.uint8))
    state.load(manifest.saved)
    return manifest


def _end_of_manifest(data: memoryview) -> int:
    return _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
