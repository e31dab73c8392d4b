"""Makes the named state of all servers equal at the beginning, as torch's DDP does: rank 0's is taken.

Servers whose parameters differ would train on, each with its own, and nothing would show it but digests at
the end. A step of 64 bytes compares them; only where they differ is the lowest server's state sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bml.protocol.messages import View
from bml.protocol.workspace import Array
from bml.train.communicator import Committed
from bml.train.state import NamedState

_WORDS = 4
"""64-bit words of a sha256."""


Prepare = Callable[[View], Array]
"""Makes this server's contribution for the members of a view."""


class Step(Protocol):
    """Reduces vectors of all servers in one step: what for, how, their dtype and size."""

    def __call__(  # noqa: D102
        self, call: str, op: str, dtype: npt.DTypeLike, size: int, prepare: Prepare, /
    ) -> Committed: ...


def agree(state: NamedState, server: int, step: Step) -> None:
    """Compare the named state of all servers, and take the lowest server's where they differ.

    Warns, on that server, if they do. Raises StepMismatch if they named other arrays or values, by the steps.
    """
    kinds = " ".join(f"{dtype}{list(shape)}" for dtype, shape in state.kinds)
    what = f"session.state {kinds} {' '.join(state.keys)}".rstrip()
    own: npt.NDArray[np.uint64] = np.frombuffer(bytes.fromhex(state.digest(whole=True)), np.uint64)
    if not len(own):
        own = np.zeros(_WORDS, np.uint64)
    found: npt.NDArray[Any] = step(
        what, "max", np.uint64, 2 * _WORDS, lambda view: np.concatenate([own, ~own])
    ).result
    state.is_new = False
    if np.array_equal(found[:_WORDS], ~found[_WORDS:]):
        return
    source = server
    for array in state.arrays():
        source = _send(array, server, step)
    if state.keys:
        state.load(_sent_bytes(state.saved(), server, step))
    if source == server:
        warnings.warn(
            f"the servers began with different states: all go on with that of server {server} (give every "
            "server the same seed, or name the state after it was loaded)",
            stacklevel=2,
        )


def _send(array: Array, server: int, step: Step) -> int:
    """Give everybody the lowest server's array; returns which server that is."""
    own = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    outcome = step("session.state: the lowest server's", "sum", np.uint8, len(own), _only_lowest(own, server))
    array[...] = outcome.result.view(array.dtype).reshape(array.shape)
    return min(outcome.contributors)


def _sent_bytes(own: bytes, server: int, step: Step) -> bytes:
    """The lowest server's bytes; those of others may be longer or shorter."""
    length = np.array([len(own)], np.uint64)
    longest = int(step("session.state: its length", "max", np.uint64, 1, lambda view: length).result[0])
    padded = np.zeros(8 + longest, np.uint8)
    padded[:8] = length.view(np.uint8)
    padded[8 : 8 + len(own)] = np.frombuffer(own, np.uint8)
    result: npt.NDArray[Any] = step(
        "session.state: values of functions", "sum", np.uint8, len(padded), _only_lowest(padded, server)
    ).result
    return bytes(result[8 : 8 + int(result[:8].view(np.uint64)[0])])


def _only_lowest(own: Array, server: int) -> Prepare:
    """A contribution that is nothing but on the lowest server of the view."""
    return lambda view: own if server == min(view.contributors) else np.zeros_like(own)
