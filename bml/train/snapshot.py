"""The training state at a step boundary, as bytes: made for a server that joins, or for a checkpoint.

    8 bytes, little endian      length of the manifest
    manifest (msgpack)          path, contributors, ledgers, weights, dtypes, shapes, saved values
    arrays                      one after the other, C order

The arrays are those that the training function named with `session.state`, in order of their names; on the
joiner they are written in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec
import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.balancing.throughput import Counted
from bml.train.position import LoopId, Path
from bml.train.state import OTHERS, NamedState, raw

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
    steps: int = 0
    """How many steps were committed, those of a job before this one included."""
    first_step: int = 0
    """See bml.train.collectives."""
    keeping: bytes = b""
    """What is known of checkpoints (`bml.train.keeping.keeper.Keeper.dump`); empty without any."""
    over: list[tuple[LoopId, str]] = []
    """The plans of loops that were over (`bml.train.position.Position.over`)."""
    counted: list[Counted] = []
    """The steps so far, by the number of servers that made them."""


decode_manifest = msgspec.msgpack.Decoder(Manifest).decode
"""Decode the bytes of a manifest alone. Raises msgspec.MsgspecError for other bytes."""


class Snapshot:
    """The manifest and the arrays as one sequence of bytes, without a copy: read it before they change."""

    def __init__(self, manifest: Manifest, arrays: Iterable[Array]):
        self.refusal = manifest.refusal
        self.head = msgspec.msgpack.encode(manifest)
        """The bytes of the manifest, which come before the arrays."""
        length = len(self.head).to_bytes(_LENGTH_NBYTES, "little")
        parts = [
            memoryview(length),
            memoryview(self.head),
            *(memoryview(raw(array).data) for array in arrays),
        ]
        self._parts = [part for part in parts if len(part)]
        self._stops = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, span: slice) -> bytes | memoryview:
        start, stop, _ = span.indices(len(self))
        found = list(self.pieces(start, stop))
        return found[0] if len(found) == 1 else b"".join(found)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop) in pieces, as they lie in memory."""
        while start < stop:
            at = bisect_right(self._stops, start)
            begin = self._stops[at] - len(self._parts[at])
            piece = self._parts[at][start - begin : stop - begin]
            yield piece
            start += len(piece)


def snapshot(
    state: NamedState,
    path: Path,
    contributors: tuple[int, ...],
    ledgers: bytes,
    shares: bytes = b"",
    wants_state: bool = False,
    steps: int = 0,
    first_step: int = 0,
    keeping: bytes = b"",
    over: Sequence[tuple[LoopId, str]] = (),
    counted: Sequence[Counted] = (),
) -> Snapshot:
    """Return the state as it is now, at this position in the program."""
    try:
        state.check_in_use()
        arrays = state.arrays()
        kinds, saved = state.kinds, state.saved()
        known = (shares, wants_state, steps, first_step, keeping, list(over), list(counted))
        manifest = Manifest(path, contributors, ledgers, kinds, saved, "", *known)
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
    return decode_manifest(data[_LENGTH_NBYTES : _end_of_manifest(data)])


def arrays_of(data: memoryview, manifest: Manifest) -> Iterator[Array]:
    """Yield the arrays of a snapshot, in order, one copy at a time."""
    offset = _end_of_manifest(data)
    for _, name, shape in manifest.arrays:
        dtype, size = np.dtype(name), prod(shape)
        end = offset + size * dtype.itemsize
        yield np.frombuffer(bytes(data[offset:end]), dtype).reshape(shape)
        offset = end


def restore(data: memoryview, state: NamedState, giver: str = OTHERS) -> Manifest:
    """Write the arrays of a snapshot into those of `state`, and give its functions their values.

    Returns the manifest. Raises UsageError unless this server named arrays of the same dtypes and shapes as
    the `giver` of the snapshot, other servers or a checkpoint.
    """
    manifest, offset = manifest_of(data), _end_of_manifest(data)
    if manifest.refusal:
        raise UsageError(f"the others cannot give their state: {manifest.refusal}")
    theirs = [(name, dtype, tuple(shape)) for name, dtype, shape in manifest.arrays]
    if state.kinds != theirs:
        raise UsageError(
            f"this server begins with the state {state.kinds}, {giver} {theirs}: "
            "name the same arrays with session.state before the training loop, on every server"
        )
    state.fill(np.frombuffer(data[offset:], np.uint8))
    state.load(manifest.saved, giver)
    return manifest


def _end_of_manifest(data: memoryview) -> int:
    return _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
