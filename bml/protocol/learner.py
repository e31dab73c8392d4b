"""A joiner on its way in: it follows the steps without contributing, while the training state reaches it.

    outside    -- a view has it as a learner                            -->  following
    following  -- the state at some boundary is there, whole            -->  replaying
    replaying  -- its user has applied all results that were kept       -->  caught up (CaughtUp is told)
    caught up  -- a view has it as a contributor                        -->  a server like the others

It follows a step as soon as a neighbour says what is called in it, with a contribution that changes nothing;
the results are kept, and the user, who starts from the state, is given them one by one.

The state may overtake this server's own commit: its donors have committed the step of the boundary, while
this server still waits for a token of another learner, or copies a result. The state is then whole, but it
is here only once that step is committed here, too.
"""

from __future__ import annotations

from bml.protocol.call import Call
from bml.protocol.events import Expect, Instruction, StateHere, Submit
from bml.protocol.frame import FrameError, Header, Kind
from bml.protocol.messages import View
from bml.protocol.transfer import Head, Incoming


class Learner:
    """The state of joining `server`; see the module's text."""

    def __init__(self, server: int):
        self._server = server
        self.follows = False
        self.has_state = False
        self._calls: dict[int, tuple[Call, int]] = {}
        self._kept: dict[int, tuple[str, int]] = {}
        self._incoming = Incoming()

    def install(self, view: View) -> None:
        """A view is in force; unless the state is whole, another transfer of it begins."""
        self.follows = self._server in view.learners
        self._calls.clear()
        if not self._incoming.complete:
            self._incoming = Incoming()

    def called(self, header: Header, text: str, step: int) -> None:
        """A neighbour says what is called in a step; this server is at `step`. Raises FrameError."""
        if header.step > step + 1:  # no neighbour can be there without this server's tokens
            raise FrameError(f"server {header.origin} calls step {header.step}, step {step} is not over")
        self._calls[header.step] = (Call.decode(text), header.signature)

    def submit(self, step: int, epoch: int) -> Submit | None:
        """What to bring to this step; None while nobody has said what is called in it."""
        for past in [each for each in self._calls if each < step]:
            del self._calls[past]
        called = self._calls.get(step) if self.follows else None
        return None if called is None else Submit(step, epoch, *called)

    def keeps(self, submit: Submit) -> None:
        """A followed step is committed; the user will come to it."""
        self._kept[submit.step] = (submit.call.text, submit.signature)

    def differs(self, submit: Submit) -> str | None:
        """What the others called in a step that the user has come to now, if it is not the same."""
        text, signature = self._kept.pop(submit.step, ("something else", None))
        return None if signature == submit.signature else text

    def admits(self, header: Header) -> bool:
        """Whether this piece of state is wanted. Raises FrameError if no such piece can be."""
        if not self._wants_state:
            return False
        self._incoming.check(header)
        return True

    def came(self, header: Header, text: str, committed: int) -> list[Instruction]:
        """A part of the state is announced in `text`, or a piece of it is in its place. Raises FrameError."""
        if header.kind != Kind.HEAD:
            self._incoming.arrived(header)
            return self.state(committed)
        if not self._wants_state:
            return []
        first = self._incoming.head(header, Head.decode(text))
        expect = [Expect(self._incoming.nbytes)] if first else []
        return [*expect, *self.state(committed)]

    def state(self, committed: int) -> list[Instruction]:
        """What follows when the state is whole, and so many steps are committed here."""
        step = self._incoming.step
        if self.has_state or not self._incoming.complete or committed < step:
            return []
        self.has_state = True
        self._kept = {kept: what for kept, what in self._kept.items() if kept > step}
        return [StateHere(step, self._incoming.digests)]

    @property
    def _wants_state(self) -> bool:
        return self.follows and not self.has_state and not self._incoming.complete
