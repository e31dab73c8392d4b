"""Replays recordings: the same cores take the same inputs, and must come to the same states, bit for bit.

A segment begins with a state of the core. The state at its end must be the one with which the next begins,
or the one that was taken at the end of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from bml.protocol.record.inputs import Input, each_input, give, time_of
from bml.protocol.record.recording import ServerRecording
from bml.protocol.record.setup import Making, making, new_core
from bml.protocol.record.state import difference, digest, set_state, state_of
from bml.protocol.record.values import RecordingError
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Instruction
from bml.topology.errors import BmlError

Seen = Callable[[float, ServerCore, Input, "list[Instruction] | BmlError"], None]
"""Is called after each input: when it came (by the server's clock), the core after it, the input, and what
the core returned or raised."""


class Checked(NamedTuple):
    """A state that was reached: after so many inputs of segment `segment`.

    `digest` is a hash of the state; `differs` says where it is another than the recorded one, "" if nowhere.
    """

    segment: int
    inputs: int
    digest: str
    differs: str


class Replayed(NamedTuple):
    """The replay of one server: the states that were compared, the last one at the end of the recording."""

    server: int
    incarnation: int
    checked: tuple[Checked, ...]

    @property
    def equal(self) -> bool:
        """Whether all states are bit-equal."""
        return not any(each.differs for each in self.checked)

    @property
    def inputs(self) -> int:
        """How many inputs were replayed."""
        return sum(each.inputs for each in self.checked)


def replay(recording: ServerRecording, seen: Seen | None = None, made: Making | None = None) -> Replayed:
    """Replay what one server recorded; `made`: the functions of its core, if not those of a real server.

    Raises RecordingError for a recording that no core of this version of bml can have made.
    """
    with _damage_told(recording):
        checked = tuple(_segments(recording, seen, made or making(recording.setup)))
    return Replayed(*recording.who, checked)


def last_core(recording: ServerRecording) -> ServerCore:
    """The core of a real server as it was when its recording was taken. Raises RecordingError."""
    with _damage_told(recording):
        core = new_core(recording.setup, making(recording.setup))
        set_state(core, recording.state)
    return core


@contextmanager
def _damage_told(recording: ServerRecording) -> Iterator[None]:
    try:
        yield
    except RecordingError:
        raise
    except Exception as error:  # a core raises only BmlError for what it can be given
        where = f"server {recording.setup.server} cannot be replayed"
        raise RecordingError(f"damaged, or of another version of bml: {where}: {error!r:.200}") from error


def _segments(recording: ServerRecording, seen: Seen | None, made: Making) -> Iterator[Checked]:
    ends = [
        after.state if after.number == before.number + 1 else None
        for before, after in pairwise(recording.segments)
    ]
    for segment, end in zip(recording.segments, [*ends, recording.state], strict=True):
        core = new_core(recording.setup, made)
        set_state(core, segment.state)
        n_inputs, now = 0, 0.0
        for given in each_input(segment.log):
            now, n_inputs = time_of(given, now), n_inputs + 1
            outcome = give(core, given)
            if seen is not None:
                seen(now, core, given, outcome)
        reached = state_of(core)
        differs = "" if end is None else difference(reached, end)
        yield Checked(segment.number, n_inputs, digest(reached), differs)
