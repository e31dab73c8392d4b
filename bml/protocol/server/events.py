"""The events of a server core, and the instructions that it returns to its shell.

Events go in through `ServerCore.handle`, instructions come out, to be carried out in their order.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from bml.protocol.server.transfer import Head, OutgoingState, Part
from bml.protocol.step.dataflow import Reduce, Send
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.step.spans import Spans
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import Header
from bml.protocol.wire.messages import ToCoordinator, ToServer, View
from bml.topology.errors import BmlError

# --- events --------------------------------------------------------------------------------------


class Submit(Struct, frozen=True):
    """The user's thread submits this server's contribution to a step, prepared under the view of `epoch`.

    `signature` is a hash of the call; all servers must have the same.
    """

    step: int
    epoch: int
    call: Call
    signature: int

    @property
    def n_elements(self) -> int:
        """Length of the contribution."""
        return self.call.n_elements

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.call.itemsize


class Follow(Struct, frozen=True):
    """The contribution that `ContributeNeutral` asked for is there; its epoch or step may be over."""

    submit: Submit


class Ready(Struct, frozen=True):
    """The training function of a joiner waits for the state, its first or a later one: let it in."""


class Arrived(Struct, frozen=True):
    """The user of a joiner is at the boundary before `step`: `Begin` answers."""

    step: int


class Ended(Struct, frozen=True):
    """The training function returned ("done") or raised ("failed", with its error)."""

    outcome: str
    error: str = ""


class CanSendState(Struct, frozen=True):
    """The training function is at a step boundary: its state can be sent to joiners there, now and later."""


class SendState(Struct, frozen=True):
    """The user's thread has copied the `outgoing` parts of the state, at the boundary after `step`.

    `heads` are those of the parts, in order; their pieces lie one after the other in Buffer.STATE.
    """

    outgoing: OutgoingState
    step: int
    heads: tuple[Head, ...]


class Prepared(Struct, frozen=True):
    """The program that `Prepare` asked for in this epoch is compiled."""

    epoch: int


class Leaving(Struct, frozen=True):
    """The user's thread has stopped before the next step, as this server was asked to leave."""

    why: str


class Abandoned(Struct, frozen=True):
    """The launcher is gone: nothing starts another coordinator."""


class Alone(Struct, frozen=True):
    """All other servers have ended, and this one was in no view yet."""


class PeerLost(Struct, frozen=True):
    """The connection to (peer, level) broke."""

    peer: int
    level: int
    kind: str
    why: str


class Proved(Struct, frozen=True):
    """The probe of (peer, level) that `Probe` asked for came back whole."""

    peer: int
    level: int


class OwnNicLost(Struct, frozen=True):
    """This server's own NIC of `level` has no carrier."""

    level: int
    why: str


class LossyNics(Struct, frozen=True):
    """At these NICs, as (server, level), segments are lost that other NICs do not lose; at no others now."""

    nics: tuple[tuple[int, int], ...]


class StoodIn(Struct, frozen=True):
    """A heartbeat of this peer came from its stand-in: its process lives, and its loop does not turn."""

    peer: int
    level: int


class Control(Struct, frozen=True):
    """A message of the coordinator."""

    message: ToServer


class Tick(Struct, frozen=True):
    """Time passed; sent at every pass of the loop."""


class Gathered(Struct, frozen=True, gc=False):
    """All members of the view stand at DONE or COMPLETE of this step, or beyond it, in this epoch."""

    epoch: int
    step: int
    stage: Stage


class Summed(Struct, frozen=True):
    """The `Sum` of this step was carried out; `whole`: all of it, not only this server's share."""

    epoch: int
    step: int
    whole: bool


class CallDiffers(Struct, frozen=True):
    """A server that is ready for the same step called something else, `text`."""

    epoch: int
    step: int
    origin: int
    text: str


class ResultFetched(Struct, frozen=True):
    """The result that `FetchResult` asked for is fetched.

    `newest` is the newest epoch in which a member of the step stood after that.
    """

    epoch: int
    step: int
    newest: int


SharedStepEvent = Gathered | Summed | CallDiffers | ResultFetched
FromUser = Submit | Follow | Ready | CanSendState | SendState | Prepared | Arrived | Leaving | Ended
FromLauncher = Abandoned | Alone
Event = (
    FromUser
    | FromLauncher
    | PeerLost
    | Proved
    | OwnNicLost
    | LossyNics
    | StoodIn
    | Control
    | Tick
    | SharedStepEvent
)


# --- instructions --------------------------------------------------------------------------------


class Open(Struct, frozen=True):
    """Make the workspace of this step, with so much scratch memory; its frames are admitted from now on.

    `follows`: this call has no contribution, take a neutral one. `left`: the step of the present workspace
    goes on; only these elements of its result are missing, and the new workspace has no others.
    """

    step: int
    scratch_elements: int
    follows: Call | None = None
    left: Spans = ()


class ContributeNeutral(Struct, frozen=True):
    """A learner can take part in this step over shared memory: make a neutral contribution, then `Follow`."""

    submit: Submit


class SendText(Struct, frozen=True):
    """Send a neighbour a short text: the call of this server's user, or the head of a part of the state."""

    peer: int
    level: int
    header: Header
    text: bytes


class Commit(Struct, frozen=True):
    """All members have committed the step: give the result to the user."""

    step: int
    epoch: int
    contributors: tuple[int, ...]


class FetchResult(Struct, frozen=True):
    """A view commits the step: fetch the result, then look where its members stand, and say `ResultFetched`.

    `follows`: it is one that a learner has followed.
    """

    epoch: int
    step: int
    follows: bool


class Prepare(Struct, frozen=True):
    """Have the program for a vector of `nbytes` compiled by another thread; `Prepared` follows."""

    epoch: int
    nbytes: int


class BufferResult(Struct, frozen=True):
    """The step that was followed is committed: keep the result until the user comes to it (`Replay`)."""

    step: int
    epoch: int
    contributors: tuple[int, ...]


class DiscardResult(Struct, frozen=True):
    """The step that was followed is committed, and the user will not come to it: forget the result."""

    step: int


class ResultsDropped(Struct, frozen=True):
    """Results from this step on are not kept: at the next boundary the user takes a later state."""

    step: int


class Begin(Struct, frozen=True):
    """The user of a joiner may begin the iteration at whose boundary it is.

    `replays`: its contributions in this iteration are not used, and it must submit them only to steps whose
    results are kept. Until it arrives at the next boundary no view has this server as a contributor.
    """

    replays: bool


class Replay(Struct, frozen=True):
    """The user has come to a step that was committed before: give it the result that was kept."""

    step: int


class AllocateState(Struct, frozen=True):
    """Make Buffer.STATE, of `nbytes` bytes."""

    nbytes: int


class StateComplete(Struct, frozen=True):
    """Buffer.STATE holds the training state after `step`; its parts have these hashes, or it is damaged."""

    step: int
    digests: dict[Part, str]


class Retry(Struct, frozen=True):
    """The view changed: prepare the contribution to this step again, for the view `epoch`."""

    step: int
    epoch: int


class Stop(Struct, frozen=True):
    """The job is over for this server's user; every further call raises this."""

    error: BmlError


class Installed(Struct, frozen=True):
    """A new view is in force."""

    view: View


class Links(Struct, frozen=True):
    """These (peer, level) connections are wanted, no others."""

    wanted: frozenset[tuple[int, int]]


class Fence(Struct, frozen=True):
    """Drop all frames that are queued or half received: their epoch is over."""


class Resume(Struct, frozen=True):
    """Frames that had to wait may be welcome now: ask again."""


class Heartbeat(Struct, frozen=True):
    """Send a heartbeat."""

    peer: int
    level: int


class Probe(Struct, frozen=True):
    """Have (peer, level), a link that is out of the view, carry bytes there and back; then say `Proved`."""

    peer: int
    level: int


class Tell(Struct, frozen=True):
    """Send a message to the coordinator; lost when there is none, its successor will ask."""

    message: ToCoordinator


class Exit(Struct, frozen=True):
    """The job is over: the server's process may exit."""


Instruction = (
    Send
    | Reduce
    | Post
    | Sum
    | Quit
    | Open
    | ContributeNeutral
    | SendText
    | Commit
    | FetchResult
    | Prepare
    | BufferResult
    | DiscardResult
    | ResultsDropped
    | Begin
    | Replay
    | AllocateState
    | StateComplete
    | Retry
    | Stop
    | Installed
    | Links
    | Fence
    | Resume
    | Heartbeat
    | Probe
    | Tell
    | Exit
)


class Verdict(Enum):
    """How to treat a frame whose payload has no place now."""

    DROP = "its epoch or step is over"
    WAIT = "this server is not there yet: stop reading, ask again after Resume"
    TEXT = "a text, at most 4 KiB"
    TOKEN = "a token, without payload"
