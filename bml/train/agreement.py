"""Makes the named state of all servers equal at the beginning, as torch's DDP does with that of rank 0.

Servers with different parameters would train on, each with its own, and only the digests at the end would
show it. One step of 64 bytes compares the digests. If they differ, every server is given the lowest server's
state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array, Padded
from bml.protocol.wire.messages import View
from bml.train.communicator import Committed
from bml.train.state import NamedState, raw

_WORDS = 4
"""How many 64-bit words a sha256 has."""

Prepare = Callable[[View], Array | Padded]
"""Prepares this server's contribution for the members of a view."""


class Step(Protocol):
    """Reduces one vector of every server in a step; `call` and `op` name it, `size` counts elements."""

    def __call__(  # noqa: D102
        self, call: str, op: str, dtype: npt.DTypeLike, size: int, prepare: Prepare, /
    ) -> Committed: ...


def agree(state: NamedState, server: int, step: Step) -> str:
    """Compare the named state of all servers; if it differs, give all of them the lowest server's state.

    Returns a warning then on the lowest server, and an empty text on all others. The steps raise StepMismatch
    if servers named different arrays or values.
    """
    kinds = " ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in state.kinds)
    what = f"session.state {kinds} {' '.join(state.keys)}".rstrip()
    own: npt.NDArray[Any] = np.frombuffer(bytes.fromhex(state.digest(whole=True)), np.uint64)
    if not len(own):
        own = np.zeros(_WORDS, np.uint64)
    found: npt.NDArray[Any] = step(
        what, "max", np.uint64, 2 * _WORDS, lambda view: np.concatenate([own, ~own])
    ).result
    state.is_new = False
    if np.array_equal(found[:_WORDS], ~found[_WORDS:]):
        return ""
    source = _take_lowest(state, server, step)
    if source != server:
        return ""
    return (
        f"the servers began with different states: all go on with that of server {server} (give every "
        "server the same seed, or name the state after it was loaded)"
    )


def _take_lowest(state: NamedState, server: int, step: Step) -> int:
    """Give every server the lowest server's state in a single step; returns the id of that server."""
    saved = np.frombuffer(state.saved(), np.uint8)
    length = np.array([len(saved)], np.uint64)
    longest = int(step("session.state: its length", "max", np.uint64, 1, lambda view: length).result[0])
    padding = np.zeros(longest - len(saved), np.uint8)
    own = np.concatenate([raw(length), *map(raw, state.arrays()), saved, padding])
    outcome = step("session.state: the lowest server's", "sum", np.uint8, len(own), _only_lowest(own, server))
    n_saved = int(np.frombuffer(outcome.result[:8].tobytes(), np.uint64)[0])
    values: npt.NDArray[Any] = outcome.result[8:]
    at = state.fill(values)
    state.load(values[at : at + n_saved].tobytes())
    return min(outcome.contributors)


def _only_lowest(own: Array, server: int) -> Prepare:
    """Prepare `own` on the lowest server of the view, and zeros on all others."""
    return lambda view: own if server == min(view.contributors) else np.zeros_like(own)
