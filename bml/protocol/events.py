"""What can happen to a server core, and what it can ask its shell to do.

Events go in through `ServerCore.handle`, instructions come out, to be carried out in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bml.protocol.direct import Post, Stage, Sum
from bml.protocol.engine import Reduce, Send
from bml.protocol.frame import Header
from bml.protocol.messages import ToCoordinator, ToServer, View
from topology.errors import BmlError

# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """The user's thread brings this server's contribution to a step, prepared under view `epoch`.

    `signature` hashes `text`, which says what the user called; all servers must agree on it.
    """

    step: int
    epoch: int
    n_elements: int
    itemsize: int
    signature: int
    text: str


@dataclass(frozen=True)
class Ended:
    """The training function returned ("done") or raised ("failed", with its error)."""

    outcome: str
    error: str = ""


@dataclass(frozen=True)
class PeerLost:
    """The connection to (peer, level) broke."""

    peer: int
    level: int
    kind: str
    why: str


@dataclass(frozen=True)
class OwnNicLost:
    """This server's own NIC of `level` has no carrier."""

    level: int
    why: str


@dataclass(frozen=True)
class Control:
    """A message of the coordinator."""

    message: ToServer


@dataclass(frozen=True)
class Tick:
    """Time passed; sent at every pass of the loop."""


@dataclass(frozen=True)
class Gathered:
    """All members of the view stand at this stage of this step, or beyond it, in this epoch."""

    epoch: int
    step: int
    stage: Stage


@dataclass(frozen=True)
class Summed:
    """The `Sum` of this step was carried out."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Differs:
    """A server that is ready for the same step called something else, `text`."""

    epoch: int
    step: int
    origin: int
    text: str


Event = Submit | Ended | PeerLost | OwnNicLost | Control | Tick | Gathered | Summed | Differs

# --- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Make the workspace of this step, with so much scratch; frames for it are welcome from now on."""

    step: int
    scratch_elements: int


@dataclass(frozen=True)
class SendText:
    """Tell a neighbour what this server's user called."""

    peer: int
    level: int
    header: Header
    text: bytes


@dataclass(frozen=True)
class Commit:
    """The step is committed by everybody: give the result to the user."""

    step: int
    epoch: int
    contributors: tuple[int, ...]


@dataclass(frozen=True)
class Retry:
    """The view changed: prepare the contribution to this step again, for the view `epoch`."""

    step: int
    epoch: int


@dataclass(frozen=True)
class Stop:
    """The job is over for this server's user; every further call raises this."""

    error: BmlError


@dataclass(frozen=True)
class Installed:
    """A new view is in force."""

    view: View


@dataclass(frozen=True)
class Links:
    """These (peer, level) connections are wanted, no others."""

    wanted: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Fence:
    """Drop what is queued or half received: its epoch is over."""


@dataclass(frozen=True)
class Resume:
    """Frames that had to wait may be welcome now: ask again."""


@dataclass(frozen=True)
class Beat:
    """Send a heartbeat."""

    peer: int
    level: int


@dataclass(frozen=True)
class Tell:
    """Send a message to the coordinator; lost when there is none, its successor will ask."""

    message: ToCoordinator


@dataclass(frozen=True)
class Leave:
    """Everybody is done: the server may go."""


Instruction = (
    Send
    | Reduce
    | Post
    | Sum
    | Open
    | SendText
    | Commit
    | Retry
    | Stop
    | Installed
    | Links
    | Fence
    | Resume
    | Beat
    | Tell
    | Leave
)


class Verdict(Enum):
    """What to do with a frame that has no place now."""

    DROP = "its epoch or step is over"
    WAIT = "this server is not there yet: stop reading, ask again after Resume"
    TEXT = "a text, at most 4 KiB"
    TOKEN = "a token, without payload"
