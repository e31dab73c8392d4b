"""A server's core with a flight recorder: it notes every input before the core takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bml.faults.stalls import Flow
from bml.protocol.record.inputs import ADMITTED, EVENT, FLOWS, HEARD, RECEIVED, SHARED, SUBMITTED
from bml.protocol.record.state import state_of
from bml.protocol.record.tape import Segment, Tape
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Event, Instruction, SharedStepEvent, Submit, Tick, Verdict
from bml.protocol.step.dataflow import Place
from bml.protocol.wire.frame import Header

_received, _admit, _handle = ServerCore.received, ServerCore.admit, ServerCore.handle
_heard = ServerCore.heard
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
        self._steps_shared, self._watch_flows = self.handle_shared, self.flows
        self.handle_shared, self.flows = self._handle_shared, self._flows
        self._seen = self._member.installed, self._member.stopped
        tape = Tape(state_of(self))
        self._note = tape.log.extend
        self._tape = tape

    def recording(self) -> Taken:
        """Return what is recorded, and the present state."""
        return Taken(self._tape.segments(), state_of(self))

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """See ServerCore."""
        if type(event) is Submit:
            self._note((SUBMITTED, now, event.step, event.epoch, event.signature, *event.call))
            return _handle(self, event, now)
        if type(event) is Tick and self._tape.is_full:
            self._tape.turn(state_of(self))
            self._note = self._tape.log.extend
        self._note((EVENT, now, event))
        done = _handle(self, event, now)
        member = self._member
        if (member.installed, member.stopped) != self._seen:
            self._seen = member.installed, member.stopped
            self._tape.mark()
        return done

    def received(self, peer: int, header: Header, text: str, now: float) -> list[Instruction]:
        """See ServerCore."""
        self._note((RECEIVED, peer, text, now, *header))
        return _received(self, peer, header, text, now)

    def admit(self, peer: int, header: Header) -> Place | Verdict:
        """See ServerCore."""
        verdict = _admit(self, peer, header)
        # With others the core has noted nothing: neither that a view is in force, nor that calls differ.
        if verdict is _WAIT or verdict is _DROP:
            self._note((ADMITTED, peer, *header))
        return verdict

    def heard(self, peer: int, level: int, now: float) -> None:
        """See ServerCore."""
        self._note((HEARD, peer, level, now))
        _heard(self, peer, level, now)

    def _handle_shared(self, event: SharedStepEvent, now: float) -> list[Instruction]:
        self._note((SHARED, now, event))
        return self._steps_shared(event, now)

    def _flows(self, flows: Mapping[tuple[int, int], Flow], now: float) -> None:
        noted: list[Any] = [FLOWS, now, len(flows)]
        for link, flow in flows.items():
            noted += (*link, *flow)
        self._note(noted)
        self._watch_flows(flows, now)
