"""The messages between servers and coordinator: typed, validated, encoded as msgpack.

No parameter byte travels here. Nothing is unpickled: a message that does not fit its type is a
`MessageError`, and the connection that brought it is closed.
"""

from __future__ import annotations

import msgspec

from bml.topology.errors import FabricError


class MessageError(FabricError):
    """A control message is malformed."""


class Incarnation(msgspec.Struct, frozen=True):
    """The incarnation of a server that came later than the others, or again; each has another number.

    `contact` says where it is to be reached; only the shells read it (bml.cluster.spec.job.Contact, as JSON).
    """

    server: int
    number: int
    contact: str = ""


class Rate(msgspec.Struct, frozen=True):
    """The rate with which the NIC of `server` on `level` is planned: the nominal one halved `halvings` times.

    `times` is how often it was found slow in this job, also if it is not any more.
    """

    server: int
    level: int
    halvings: int
    times: int


class View(msgspec.Struct, frozen=True):
    """One agreed state of the fabric: the members, and the parts that are known to be dead.

    `commit` is the last step that is committed as of this view. A member that was still running a
    later step retries it; a member that had completed step `commit` commits it now. `epoch` is its number,
    from 1; `failures` are texts such as "link:4/0"; `reason` says in words why it was made.
    """

    epoch: int
    members: tuple[int, ...]
    failures: tuple[str, ...]
    commit: int
    reason: str
    noticed_s: float
    """Seconds from the last sign of life to the diagnosis."""
    #: Links and switches that have failed in this job, also those that work again, and how often.
    failed: tuple[tuple[str, int], ...] = ()
    #: Of step `commit` + 1, if its contributors stay: the elements that are final on all members already.
    final: tuple[tuple[int, int], ...] = ()
    #: Members that contribute nothing yet: they follow the steps while the training state reaches them.
    learners: tuple[int, ...] = ()
    #: The incarnations of those members that joined; the others are in their first.
    joined: tuple[Incarnation, ...] = ()
    #: The NICs that are slow, or were, in order.
    rates: tuple[Rate, ...] = ()

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members whose contributions are in the results."""
        if not self.learners:  # nearly always, and it is asked in every step
            return self.members
        return tuple(server for server in self.members if server not in self.learners)

    @property
    def halvings(self) -> dict[tuple[int, int], int]:
        """(server, level) of each NIC that is planned slow -> how often its rate is halved."""
        return {(each.server, each.level): each.halvings for each in self.rates if each.halvings}

    def incarnation(self, server: int) -> Incarnation | None:
        """The incarnation of a member; None: its first."""
        return next((incarnation for incarnation in self.joined if incarnation.server == server), None)


def slow_nics(view: View) -> dict[str, str]:
    """The NICs that a view plans slow: "server/level" -> the part of its nominal rate, such as "1/8"."""
    return {f"{each.server}/{each.level}": f"1/{2**each.halvings}" for each in view.rates if each.halvings}


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# --- coordinator to server ---------------------------------------------------------------------


class Who(_Message, frozen=True):
    """A coordinator introduces itself; the server answers with its Status, for epoch 0."""

    term: int


class Freeze(_Message, frozen=True):
    """Stop the step, drop traffic of older epochs, and report: a view with this epoch is coming.

    In Paxos' terms Freeze is prepare, and Status the promise.
    """

    term: int
    epoch: int
    reason: str


class Propose(_Message, frozen=True):
    """The decided view; it may take effect once every member has accepted it (Paxos: accept)."""

    term: int
    view: View


class Install(_Message, frozen=True):
    """Every member has accepted the view of this epoch: act on it (Paxos: learn)."""

    term: int
    epoch: int


class Evict(_Message, frozen=True):
    """The receiver is not a member of the view of this epoch."""

    term: int
    epoch: int
    reason: str


class Abort(_Message, frozen=True):
    """The job ends with an error; `kind` is one of ABORT_KINDS."""

    term: int
    kind: str
    text: str
    server: int = -1


class Shutdown(_Message, frozen=True):
    """Every member is done: leave."""

    term: int


class Returned(_Message, frozen=True):
    """The training function of `server` returned after `step`: it brings nothing to later ones."""

    term: int
    server: int
    step: int


class Noted(_Message, frozen=True):
    """A coordinator's answer to a server that asks whether it is there, or says again that it has ended."""

    term: int


class Inject(_Message, frozen=True):
    """Apply this fault now (fault injection; see faults/plan.py for the notation)."""

    fault: str


#: training: a training function raised. too-few: fewer than min_servers are left.
#: start: servers are missing at start-up.
ABORT_KINDS = ("training", "too-few", "start")

# --- server to coordinator ---------------------------------------------------------------------


class Status(_Message, frozen=True):
    """The report of a server: the answer to Who (epoch 0) and to Freeze (its epoch) of that `term`.

    `complete` is the step whose outputs are all final here although it is not committed, else -1.
    `outcome` is "" while the training function runs, then "done" or "failed".
    `incarnation`: None for the first.
    `final` are the elements of step `committed` + 1 that are final here, in the view that is installed, of
    `n_elements` in all (0: that step was not begun). `ready`: the training function of a joiner is where it
    takes the state; before, the joiner stays in no view. `behind`: this is a learner that must not contribute
    yet, because its user replays, or needs a later state.
    """

    server: int
    term: int
    epoch: int
    promised: int
    installed: View | None
    accepted: View | None
    committed: int
    complete: int
    outcome: str
    error: str
    incarnation: Incarnation | None = None
    final: tuple[tuple[int, int], ...] = ()
    n_elements: int = 0
    ready: bool = True
    behind: bool = False


class Accepted(_Message, frozen=True):
    """The view of this epoch that the coordinator of this term proposed is stored and will be honoured."""

    server: int
    term: int
    epoch: int


class Refused(_Message, frozen=True):
    """The answer to a ballot of this term: the server has promised a higher ballot."""

    server: int
    term: int
    promised: int


class Deposed(_Message, frozen=True):
    """The answer to a coordinator of an older term: this one has introduced itself since."""

    server: int
    term: int


class Suspect(_Message, frozen=True):
    """An observer cannot hear `peer` on its NIC of `level` any more. For `losing` see Suspicion."""

    observer: int
    peer: int
    level: int
    kind: str
    silent_s: float
    why: str
    losing: int | None = None


class Withdraw(_Message, frozen=True):
    """The observer hears `peer` again."""

    observer: int
    peer: int
    level: int


class Interrupted(_Message, frozen=True):
    """The connection to `peer` ended, and that is nothing against `peer`.

    Its heartbeats have come since, while no coordinator was there; or the observer itself did not run when
    the time was out. The next view makes the connection again. If it breaks in that one, it is suspected.
    """

    observer: int
    peer: int
    level: int


class Held(_Message, frozen=True):
    """The stand-in of `peer` sends heartbeats: `peer` lives, and answers nothing until its loop turns again.

    Said again and again while that is so.
    """

    observer: int
    peer: int
    level: int


class Healthy(_Message, frozen=True):
    """The observer has heard `peer`, over a link that is out of the view, for long enough to trust it."""

    observer: int
    peer: int
    level: int


class Relapsed(_Message, frozen=True):
    """The observer takes its Healthy back."""

    observer: int
    peer: int
    level: int


class Measured(_Message, frozen=True):
    """The server's connections in this view: (peer, level, bytes that arrived, µs in which it was busy).

    Of the last second or so, and only of those that were busy (bml.faults.throughput).
    """

    server: int
    epoch: int
    moved: tuple[tuple[int, int, int, int], ...]


class CanSendState(_Message, frozen=True):
    """The training function comes to step boundaries, at which its state can be sent to a joiner."""

    server: int


class CaughtUp(_Message, frozen=True):
    """A learner has the training state, and has followed all steps up to now: it can contribute."""

    server: int
    epoch: int


class NeedsState(_Message, frozen=True):
    """A learner has followed more steps than it keeps results of: it needs a later training state.

    The next view brings it, as every view begins a transfer to those of its learners that need one.
    """

    server: int
    epoch: int


class Leaves(_Message, frozen=True):
    """The server was asked to leave; it has contributed nothing to the next step, and will not."""

    server: int
    why: str


class Progress(_Message, frozen=True):
    """The last committed step, sent now and then for progress bars."""

    server: int
    step: int


class Ask(_Message, frozen=True):
    """The server needs a coordinator and has heard none for a while: is it there?"""

    server: int


class Ended(_Message, frozen=True):
    """The training function returned ("done") after `step`, or raised ("failed", with its error)."""

    server: int
    outcome: str
    error: str
    step: int


ToServer = Who | Freeze | Propose | Install | Evict | Abort | Shutdown | Returned | Noted | Inject
ToCoordinator = (
    Status
    | Accepted
    | Refused
    | Deposed
    | Suspect
    | Withdraw
    | Healthy
    | Relapsed
    | Interrupted
    | Held
    | Measured
    | CanSendState
    | CaughtUp
    | NeedsState
    | Leaves
    | Progress
    | Ask
    | Ended
    | Inject
)
Message = ToServer | ToCoordinator

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message that these bytes encode; raises MessageError if they encode none."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"malformed control message: {error}") from None
