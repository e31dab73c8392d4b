"""The trace of a server: its actions with their times, per slice and link, in a form for Perfetto.

A server without a trace pays nothing: only if one was asked for, a trace stands between the transport and the
server, and in place of the workspace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from bml.protocol.step.dataflow import Reduce
from bml.protocol.step.workspace import Workspace
from bml.protocol.wire.frame import Header, Kind
from bml.sharedmem.registration_page import boot_id
from bml.transport.interface import Handler, LinkKey, LostKind, Verdict

MOST_EVENTS = 200_000
"""Most events of one server; the newest are kept."""

_STEPS, _ARITHMETIC, _NICS = 0, 1, 10
_NEIGHBOURS = 10_000  # tracks of one NIC
_NAMES = {Kind.REDUCE: "sum", Kind.BROADCAST: "result", Kind.TOKEN: "token", Kind.DESCRIBE: "call"}


class Event(NamedTuple):
    """An action from `start_s` to `stop_s` on the monotonic clock of this machine."""

    start_s: float
    stop_s: float
    track: int
    name: str
    args: dict[str, Any]


class ServerTrace(NamedTuple):
    """All events of one server. `boot` identifies the clock, `wall_s` is wall time minus that clock."""

    server: int
    boot: str
    wall_s: float
    events: list[Event]


class Trace:
    """Records the calls of one server's transport to its handler; see bml.transport.interface.Handler."""

    def __init__(self, server: int, handler: Handler):
        self._server = server
        self._handler = handler
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._admitted_at: dict[LinkKey, float] = {}
        self._step: tuple[int, float] | None = None

    def admit(self, peer: int, level: int, header: Header) -> memoryview | Verdict:
        """See Handler; the time of a frame begins when there is a place for it."""
        verdict = self._handler.admit(peer, level, header)
        if not isinstance(verdict, Verdict):
            self._admitted_at[peer, level] = time.monotonic()
        return verdict

    def received(self, peer: int, level: int, header: Header) -> None:
        """See Handler."""
        start_s, track = self._admitted_at[peer, level], _NICS + level * _NEIGHBOURS + peer
        kind, epoch, step, origin, dest, _, start, stop, nbytes = header
        args = {"step": step, "epoch": epoch, "origin": origin, "dest": dest, "nbytes": nbytes}
        if kind <= Kind.BROADCAST:
            args.update(start=start, stop=stop)
        self._events.append(Event(start_s, time.monotonic(), track, _NAMES[kind], args))
        self._handler.received(peer, level, header)

    def heard(self, peer: int, level: int) -> None:
        """See Handler."""
        self._handler.heard(peer, level)

    def stood_in(self, peer: int, level: int) -> None:
        """See Handler."""
        self._handler.stood_in(peer, level)

    def proved(self, peer: int, level: int) -> None:
        """See Handler."""
        self._handler.proved(peer, level)

    def lost(self, peer: int, level: int, kind: LostKind, why: str) -> None:
        """See Handler."""
        now = time.monotonic()
        track = _NICS + level * _NEIGHBOURS + peer
        self._events.append(Event(now, now, track, "lost", {"kind": kind, "why": why}))
        self._handler.lost(peer, level, kind, why)

    def opened(self, step: int) -> None:
        """A try of a step begins."""
        self.ended("tried again")
        self._step = (step, time.monotonic())

    def ended(self, outcome: str) -> None:
        """The current try of a step, if there is one, ended in this way."""
        if self._step is not None:
            step, start_s = self._step
            args = {"outcome": outcome}
            self._events.append(Event(start_s, time.monotonic(), _STEPS, f"step {step}", args))
            self._step = None

    def reduced(self, start_s: float, start: int, stop: int, terms: int) -> None:
        """`terms` terms were added from `start_s` until now."""
        args = {"start": start, "stop": stop, "terms": terms}
        self._events.append(Event(start_s, time.monotonic(), _ARITHMETIC, "add", args))

    def taken(self) -> ServerTrace:
        """Return all recorded events."""
        wall_s = time.time() - time.monotonic()
        return ServerTrace(self._server, boot_id(), wall_s, list(self._events))


class TracedWorkspace(Workspace):
    """A workspace that records the sums that it makes."""

    def __init__(self, trace: Trace, *workspace: Any) -> None:
        super().__init__(*workspace)
        self._trace = trace

    def reduce(self, instruction: Reduce) -> None:
        """See Workspace."""
        start_s = time.monotonic()
        super().reduce(instruction)
        self._trace.reduced(start_s, instruction.start, instruction.stop, len(instruction.terms))


def merged(traces: Iterable[ServerTrace]) -> dict[str, Any]:
    """Return the traces of several servers in the Trace Event Format, with times in µs since the first event.

    A process is a server; its tracks are the steps, the additions, and each neighbour on each NIC. Servers
    of one machine share its clock; those of several are as well aligned as the machines' wall clocks.
    """
    known = list(traces)
    ahead_s: dict[str, float] = {}
    for each in known:
        ahead_s.setdefault(each.boot, each.wall_s)
    if len(ahead_s) < 2:
        ahead_s = dict.fromkeys(ahead_s, 0.0)
    starts = [ahead_s[each.boot] + event.start_s for each in known for event in each.events]
    zero_s = min(starts, default=0.0)
    found: list[dict[str, Any]] = []
    for each in known:
        found += _of_server(each, ahead_s[each.boot] - zero_s)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _of_server(trace: ServerTrace, shift_s: float) -> list[dict[str, Any]]:
    pid = trace.server
    found = [_metadata("process_name", pid, 0, name=f"server {pid}")]
    for track in sorted({event.track for event in trace.events}):
        found.append(_metadata("thread_name", pid, track, name=_track_name(track)))
        found.append(_metadata("thread_sort_index", pid, track, sort_index=track))
    found += [
        {
            "ph": "X",
            "pid": pid,
            "tid": event.track,
            "name": event.name,
            "ts": round((event.start_s + shift_s) * 1e6, 3),
            "dur": round((event.stop_s - event.start_s) * 1e6, 3),
            "args": event.args,
        }
        for event in sorted(trace.events, key=lambda event: event[:3])
    ]
    return found


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _track_name(track: int) -> str:
    if track == _STEPS:
        return "steps"
    if track == _ARITHMETIC:
        return "additions"
    level, peer = divmod(track - _NICS, _NEIGHBOURS)
    return f"NIC {level} from server {peer}"
