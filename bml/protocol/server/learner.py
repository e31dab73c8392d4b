"""A learner: a joiner that follows the steps without contributing, while the training state reaches it.

    outside    -- a view has it as a learner                            -->  following
    following  -- the state at some boundary is there, whole            -->  replaying
    replaying  -- its user has applied all results that were kept       -->  caught up (sends CaughtUp)
    caught up  -- a view has it as a contributor                        -->  a server like the others

It follows a step as soon as a neighbour tells the call, with a contribution that changes nothing. The results
are kept. The user (the training function) starts from the state, and then gets the results one by one.

The state may overtake this server's own commit: its donors have committed the step before the boundary, while
this server still waits for a token of another learner, or copies a result. Then the state is whole, but it is
handed out only once that step is committed here, too.

The memory for results is bounded. When a result does not fit any more, the learner falls behind: it keeps
nothing from there on. The user may be in the middle of an iteration; it gets the results that were kept
before, until it comes to a boundary. There it waits for a later state, and the learner asks for a view, with
which another transfer begins. So a joiner that is slower than the others comes in with a later state.
"""

from __future__ import annotations

from typing import NamedTuple

from bml.errors import BmlError, StepMismatch, TooSlow
from bml.protocol.server.events import (
    AllocateState,
    Begin,
    BufferResult,
    DiscardResult,
    Instruction,
    ResultsDropped,
    StateComplete,
    Submit,
    Tell,
)
from bml.protocol.server.transfer import Head, IncomingState
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.protocol.wire.messages import CaughtUp, NeedsState, View

KEPT_NBYTES = 1 << 30
"""How many bytes of results a learner keeps by default."""
_KEPT_STEPS = 10_000
"""How many results it keeps at most, however short they are."""
_MOST_STATES = 4
"""How often the state is sent to a learner before it is clear that it cannot catch up."""


class _Kept(NamedTuple):
    """The call of a step, and the length of its result in bytes."""

    text: str
    signature: int
    nbytes: int


class Learner:
    """The joining of `server`; see the module's text. It keeps results of up to `most_nbytes` bytes.

    `behind`: a later state is needed, as results that come after those that are kept are lost. `waits`: the
    user waits for a state. `replays`: the user goes through an iteration in which it contributes nothing.
    """

    def __init__(self, server: int, most_nbytes: int = KEPT_NBYTES):
        self._server = server
        self._most_nbytes = most_nbytes
        self.follows = False
        self.has_state = False
        self.behind = False
        self.waits = False
        self.replays = False
        self._level = False
        self._arrived = 0
        self._calls: dict[int, tuple[Call, int]] = {}
        self._kept: dict[int, _Kept] = {}
        self._since = 0  # results from this step on count; those before belong to an earlier state
        self._nbytes = 0
        self._n_steps = 0
        self._states = 1
        self._incoming = IncomingState()

    def install(self, view: View) -> None:
        """A view is in force; unless the state is whole, another transfer of it begins."""
        self.follows = self._server in view.learners
        self._calls.clear()
        if not self._incoming.complete:
            self._incoming = IncomingState()
        if self.behind and self.waits:
            self.behind = False
            self._since, self._nbytes, self._n_steps = view.commit + 1, 0, 0

    def called(self, header: Header, text: str, step: int) -> None:
        """A neighbour tells the call of a step; this server is at `step`. Raises FrameError."""
        if header.step > step + 1:  # no neighbour can be there without this server's tokens
            raise FrameError(f"server {header.origin} calls step {header.step}, step {step} is not over")
        self._calls[header.step] = (Call.decode(text), header.signature)

    def submit(self, step: int, epoch: int) -> Submit | None:
        """The submission to this step; None while no neighbour has told its call."""
        for past in [each for each in self._calls if each < step]:
            del self._calls[past]
        called = self._calls.get(step) if self.follows else None
        return None if called is None else Submit(step, epoch, *called)

    @property
    def late(self) -> bool:
        """Whether this is a learner that must not contribute yet, whatever it reported before."""
        return self.follows and (self.behind or self.replays)

    def arrived(self, step: int, committed: int, frozen: bool) -> Begin:
        """The user is at the boundary before `step`, and the last step that is `committed` here is known.

        The iteration that begins replays while the user is late, and once more when it has drawn level, so
        that it comes to the next boundary when the others do. It does not replay while this server is
        `frozen`: the next view may have it as a contributor.
        """
        late = step <= committed or not self._level
        self.replays = late and self.follows and not frozen
        self._level |= step > committed
        self._arrived = 0 if self.replays else step
        return Begin(self.replays)

    def progress(self, epoch: int, step: int, brought: bool) -> list[Instruction]:
        """The message to the coordinator before this step; `brought`: the user has submitted it."""
        if not self.follows:
            return []
        if self.behind and self.waits:
            return [Tell(NeedsState(self._server, epoch))]
        level = brought or self._arrived == step
        return [Tell(CaughtUp(self._server, epoch))] if level and not self.late else []

    # --- results ---------------------------------------------------------------------------------

    def keeps(self, submit: Submit, epoch: int, contributors: tuple[int, ...]) -> list[Instruction]:
        """A followed step is committed, and the user will come to it. Raises TooSlow if it never can."""
        step, nbytes = submit.step, submit.n_elements * submit.itemsize
        if self.behind:
            return [DiscardResult(step)]
        full = self._nbytes + nbytes > self._most_nbytes or self._n_steps >= _KEPT_STEPS
        # One result is always kept: there is no later state of use otherwise. Nor does any come if the view
        # that commits the step makes this server a contributor.
        if full and self.follows and self._n_steps:
            return [DiscardResult(step), *self._fall_behind(step)]
        self._kept[step] = _Kept(submit.call.text, submit.signature, nbytes)
        self._nbytes += nbytes
        self._n_steps += 1
        return [BufferResult(step, epoch, contributors)]

    def _fall_behind(self, step: int) -> list[Instruction]:
        if self._states >= _MOST_STATES:
            raise TooSlow(
                f"server {self._server} cannot catch up: the training state was sent to it {self._states} "
                f"times, and each time the others committed more steps than it keeps results of "
                f"({self._bound}) before it had applied them. Let its training loop skip what need not be "
                "computed (session.replays), raise kept_mib, or give it a faster machine"
            )
        self._states += 1
        self.behind, self.has_state = True, False
        self._incoming = IncomingState()
        return [ResultsDropped(step)]

    def refuses(self, submit: Submit) -> BmlError | None:
        """Why the user, at this committed step, cannot get its result; None if it can."""
        step = submit.step
        if not self.has(step):
            return TooSlow(
                f"server {self._server} cannot catch up: the results of one iteration of its training loop, "
                f"up to step {step}, are more than it keeps ({self._bound}): raise kept_mib"
            )
        theirs = self.differs(submit)
        if theirs is None:
            return None
        return StepMismatch(
            f"step {step}: the others called {theirs}, but server {self._server}, a joiner, called "
            f"{submit.call.text}; it starts where its first session.batches or session.steps begins, so "
            "every call of a step must be made in such a loop"
        )

    @property
    def _bound(self) -> str:
        return f"{self._most_nbytes / 2**20:g} MiB, {_KEPT_STEPS} steps"

    def has(self, step: int) -> bool:
        """Whether the result of this step is kept, now that the user has come to it."""
        while self._kept and (first := next(iter(self._kept))) < step:
            self._drop(first)  # the user has got a later state meanwhile
        return step in self._kept

    def differs(self, submit: Submit) -> str | None:
        """The call of the others in the step that the user has come to, if it is another than the user's."""
        kept = self._drop(submit.step)
        return None if kept.signature == submit.signature else kept.text

    def _drop(self, step: int) -> _Kept:
        kept = self._kept.pop(step)
        if step >= self._since:
            self._nbytes -= kept.nbytes
            self._n_steps -= 1
        return kept

    # --- the state -------------------------------------------------------------------------------

    def admits(self, header: Header) -> bool:
        """Whether this piece of state is wanted. Raises FrameError if no such piece can be."""
        if not self._wants_state:
            return False
        self._incoming.check(header)
        return True

    def received(self, header: Header, text: str, committed: int) -> list[Instruction]:
        """A part of the state is announced in `text`, or a piece of it is in its place.

        Raises FrameError, and StateMismatch if the donors' states differ.
        """
        if header.kind != Kind.HEAD:
            self._incoming.arrived(header)
            return self.state(committed)
        if not self._wants_state:
            return []
        first = self._incoming.head(header, Head.decode(text))
        expect = [AllocateState(self._incoming.nbytes)] if first else []
        return [*expect, *self.state(committed)]

    def state(self, committed: int) -> list[Instruction]:
        """Hand out the state if it is whole, now that `committed` is the last step that is committed here."""
        step = self._incoming.step
        if self.has_state or not self._incoming.complete or committed < step:
            return []
        self.has_state, self.waits = True, False
        for past in [each for each in self._kept if self._since <= each <= step]:
            self._drop(past)
        return [StateComplete(step, self._incoming.digests)]

    @property
    def _wants_state(self) -> bool:
        return self.follows and not (self.has_state or self.behind or self._incoming.complete)
