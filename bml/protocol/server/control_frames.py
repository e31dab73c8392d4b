"""Frames other than slices of the running step: calls in words, training state, other epochs.

`ServerCore.admit` and `ServerCore.received` handle the slices and tokens of the running step themselves, as
they are asked for every frame, and hand all other frames to this module.
"""

from __future__ import annotations

from bml.errors import StateMismatch
from bml.protocol.server.calls import Calls
from bml.protocol.server.events import Instruction, Verdict
from bml.protocol.server.learner import Learner
from bml.protocol.server.member import Member
from bml.protocol.server.steps import StepMachine
from bml.protocol.step.dataflow import Buffer, Place
from bml.protocol.wire.frame import Header, Kind


class ControlFrames:
    """Decides on these frames for one server; `learner` is None on a server that did not join."""

    def __init__(self, member: Member, steps: StepMachine, learner: Learner | None, calls: Calls):
        self._member = member
        self._steps = steps
        self._learner = learner
        self._calls = calls

    def admit(self, header: Header) -> Place | Verdict:
        """Return where the payload of such a frame belongs, or what else to do with it. Raises FrameError."""
        epoch = self._member.epoch
        if header.epoch > epoch:
            if self._member.may_install(header.epoch):
                self._member.proven_epoch = header.epoch  # the next Tick installs it
            return Verdict.WAIT
        if header.epoch < epoch or self._member.frozen:
            return Verdict.DROP
        if header.kind >= Kind.HEAD:
            return self._admit_state(header)
        if header.step <= self._steps.committed:
            return Verdict.DROP
        if header.kind == Kind.DESCRIBE:
            return Verdict.TEXT
        step = self._steps.current
        if step is None or header.step != step.submit.step:
            return Verdict.WAIT
        if header.signature != step.submit.signature:
            return self._calls.conflicting(step.submit, header)
        return Verdict.TOKEN

    def _admit_state(self, header: Header) -> Place | Verdict:
        if self._learner is None or header.dest != self._member.server:
            return Verdict.DROP
        if header.kind == Kind.HEAD:
            return Verdict.TEXT
        return Place(Buffer.STATE, header.start) if self._learner.admits(header) else Verdict.DROP

    def received(self, header: Header, text: str, n_links: int, now: float) -> list[Instruction]:
        """A text or a piece of state is complete; the server has `n_links` links. Raises FrameError."""
        if header.kind == Kind.DESCRIBE:
            self._calls.described(header, text, n_links)
        learner = self._learner
        if learner is None or header.epoch != self._member.epoch or self._member.frozen:
            return []
        if header.kind != Kind.DESCRIBE:
            return self._state_came(learner, header, text)
        if not self._steps.follows:
            return []
        learner.called(header, text, self._steps.next)
        return self._steps.follow(now)

    def _state_came(self, learner: Learner, header: Header, text: str) -> list[Instruction]:
        try:
            return learner.received(header, text, self._steps.committed)
        except StateMismatch as error:
            return self._steps.give_up(error)
