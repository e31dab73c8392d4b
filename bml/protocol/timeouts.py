"""All time-outs of the protocol. Most derive from `detect_s`; start_s, orphan_s and warm_up_s do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from bml.faults.detector import MOST_PATIENT
from bml.faults.throughput import window_s
from bml.topology.errors import UsageError

DEFAULT_DETECT_S = 0.5  # a dead server is noticed as late; on busy machines live ones are silent for longer

_WARM_UP_S = 10.0  # imports and compilers of most training functions need less
_WARM_UP_STEPS = 2
"""Until so many steps are committed, training functions do things for the first time: they import, initialise
devices, compile. That may hold Python's interpreter lock for seconds, and nothing is sent without it."""


_HOLDS = 60.0
"""The training function may hold the interpreter's lock for so many detect_s."""


def detect_s_from(environ: Mapping[str, str]) -> float:
    """The `detect_s` of a job that names none: that of BML_DETECT_S, else the default.

    Raises UsageError for one that cannot be.
    """
    text = environ.get("BML_DETECT_S", "")
    try:
        return Timeouts.of(float(text)).detect_s if text else DEFAULT_DETECT_S
    except (ValueError, UsageError):  # UsageError: a number with which no time-outs can be
        raise UsageError(f"BML_DETECT_S is {text!r}: give 0.05 to 60 seconds") from None


@dataclass(frozen=True)
class Timeouts:
    """How long each wait of the protocol may last, in seconds.

    The order is what makes them safe: several heartbeats fit into `detect_s`, so that one lost
    datagram is no suspicion; the window in which the coordinator gathers suspicions is longer than
    a heartbeat, so that all observers of one fault are heard before it is diagnosed; and an answer
    is waited for at least as long as silence takes to be noticed.
    """

    detect_s: float
    heartbeat_s: float
    #: A proof (a process is gone) is acted on after this time, in which other servers notice the same death.
    proof_window_s: float
    #: Suspicions of silence are gathered for this long before they are diagnosed.
    silence_window_s: float
    #: A server that does not answer the coordinator for this long counts as failed, if another suspects it.
    answer_s: float
    #: A connection that cannot be made within this counts as lost.
    connect_s: float
    #: During the first steps (_WARM_UP_STEPS) silence is tolerated, and an answer awaited, for this long.
    warm_up_s: float
    #: At start-up every server must have appeared within this.
    start_s: float
    #: A server that needs a view from a coordinator gives up after this.
    orphan_s: float
    #: So long the stand-in of a server speaks while its loop does not turn, and a server is awaited that no
    #: other one suspects. All wait for the view meanwhile, and must not take the coordinator for gone.
    hold_s: float = _HOLDS * DEFAULT_DETECT_S

    @classmethod
    def of(cls, detect_s: float = DEFAULT_DETECT_S, start_s: float = 60.0) -> Timeouts:
        """Derive all time-outs from `detect_s`, the silence in seconds after which a failure is suspected.

        Raises UsageError for a `detect_s` outside 0.05-60 s.
        """
        if not 0.05 <= detect_s <= 60:
            raise UsageError(f"detect_s is {detect_s}: give 0.05 to 60 seconds (default {DEFAULT_DETECT_S})")
        orphan_s = 2 * max(start_s, 8 * detect_s)
        made = cls(
            detect_s=detect_s,
            heartbeat_s=detect_s / 5,
            proof_window_s=detect_s / 25,
            silence_window_s=detect_s / 4,
            answer_s=1.5 * detect_s,
            connect_s=4 * detect_s,
            warm_up_s=max(_WARM_UP_S, 5 * detect_s),
            start_s=max(start_s, 8 * detect_s),
            orphan_s=orphan_s,
            hold_s=min(_HOLDS * detect_s, orphan_s / 2),
        )
        made.check()
        return made

    def patience_s(self, committed: int) -> float:
        """How much silence is tolerated in any case, in seconds, when `committed` steps are committed."""
        return self.warm_up_s if committed < _WARM_UP_STEPS else 0.0

    @property
    def measure_s(self) -> float:
        """A server says what its connections carry, in rounds of so many seconds."""
        return window_s(self.detect_s)

    @property
    def stall_window_s(self) -> float:
        """Stalls are gathered for this long: an end notices its own only when it has sent something."""
        return 2 * self.silence_window_s

    @property
    def longest_answer_s(self) -> float:
        """How long a suspected server may take to answer, however often the coordinator pauses."""
        return MOST_PATIENT * self.answer_s

    @property
    def unanswered_s(self) -> float:
        """How long a server that leaves waits for a word of a coordinator, which may have to be started."""
        return self.warm_up_s

    def check(self) -> None:
        """Raise UsageError unless the time-outs stand in their safe order."""
        order = [
            self.proof_window_s,
            self.heartbeat_s,
            self.silence_window_s,
            self.detect_s,
            self.answer_s,
            self.connect_s,
            self.start_s,
            self.orphan_s,
        ]
        if any(a >= b for a, b in pairwise(order)):
            raise UsageError(f"time-outs out of order: {self}")
