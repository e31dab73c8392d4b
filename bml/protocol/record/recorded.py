"""A server's core with a flight recorder: it notes every input before the core takes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from bml.faults.stalls import Flow
from bml.protocol.record import tape
from bml.protocol.record.inputs import (
    ADMITTED,
    EVENT,
    FLOWS,
    FRAME,
    HEARD,
    RECEIVED,
    SHARED,
    SUBMITTED,
    pack_frame,
)
from bml.protocol.record.state import state_of
from bml.protocol.record.tape import Segment, Tape
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Event, Instruction, SharedStepEvent, Submit, Tick, Verdict
from bml.protocol.step.dataflow import Place
from bml.protocol.wire.frame import Header
from bml.topology.errors import InvariantError

_LOG = logging.getLogger(__name__)

_received, _handle, _heard = ServerCore.received, ServerCore.handle, ServerCore.heard
_WAIT, _DROP = Verdict.WAIT, Verdict.DROP


class Taken(NamedTuple):
    """What a recorder holds, and the state of the core then."""

    segments: tuple[Segment, ...]
    state: bytes


class RecordedCore(ServerCore):
    """See the module's text; arguments as of ServerCore.

    Whoever may use the core may take the recording: both need the same lock.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._seen = self._member.installed, self._member.stopped
        try:
            self._tape = Tape(state_of(self))
        except Exception as error:
            self._tape = Tape(b"")
            self._end(error)
        log, most, turn = self._tape.log, 2 * tape.MOST_ENTRIES, self._turn
        self._note = note = log.extend
        # Functions of their own cost less than methods, and are called in every step.
        steps_shared, admit, self._watch_flows = self.handle_shared, self._control_frames.admit, self.flows

        def handle_shared(event: SharedStepEvent, now: float) -> list[Instruction]:
            note((SHARED, now, event))
            return steps_shared(event, now)

        def admit_other(header: Header) -> Place | Verdict:
            """Of what `admit` is asked, only this can change a core: a view is in force, calls differ."""
            verdict = admit(header)
            if verdict is _WAIT or verdict is _DROP:
                note((ADMITTED, *header))
            return verdict

        def received(peer: int, header: Header, text: str, now: float) -> list[Instruction]:
            """Frames may come for so long without a tick that memory would fill."""
            if len(log) >= most:
                turn()
            if text:
                note((RECEIVED, peer, text, now, *header))
            else:
                note((FRAME, pack_frame(now, peer, *header)))
            return _received(self, peer, header, text, now)

        self.handle_shared, self.flows = handle_shared, self._flows
        vars(self)["received"] = received
        vars(self._control_frames)["admit"] = admit_other

    def recording(self) -> Taken:
        """Return what is recorded, and the present state. Raises InvariantError if the recorder has ended."""
        if self._tape.ended:
            raise InvariantError(f"the flight recorder has ended: {self._tape.ended}")
        return Taken(self._tape.segments(), state_of(self))

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """See ServerCore."""
        ring = self._tape
        if ring.is_overfull or (type(event) is Tick and ring.is_full):
            self._turn()
        if type(event) is Submit:
            self._note((SUBMITTED, now, event.step, event.epoch, event.signature, *event.call))
            return self._steps.submit(event, now)  # as handle does
        self._note((EVENT, now, event))
        done = _handle(self, event, now)
        member = self._member
        if (member.installed, member.stopped) != self._seen:
            self._seen = member.installed, member.stopped
            self._tape.mark()
        return done

    def _turn(self) -> None:
        """Begin the next segment. An error of the recorder ends the recorder, and not the job."""
        ring = self._tape
        if ring.ended:
            ring.log.clear()
            return
        try:
            ring.turn(state_of(self))
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._tape.end(f"{type(error).__name__}: {error}")
        _LOG.warning("server %d records no more: %s", self.server, self._tape.ended)

    def heard(self, peer: int, level: int, now: float) -> None:
        """See ServerCore."""
        self._note((HEARD, peer, level, now))
        _heard(self, peer, level, now)

    def _flows(self, flows: Mapping[tuple[int, int], Flow], now: float) -> None:
        noted: list[Any] = [FLOWS, now, len(flows)]
        for link, flow in flows.items():
            noted += (*link, *flow)
        self._note(noted)
        self._watch_flows(flows, now)
