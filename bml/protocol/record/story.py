"""The story of a part that went, from the recordings of a job: who noticed what, when, and what followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from bml.protocol.record.inputs import EVENT, Input
from bml.protocol.record.recording import Recording, ServerRecording
from bml.protocol.record.replay import Replayed, last_core, replay
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.history import ViewRecord
from bml.protocol.wire import messages as msg
from bml.topology import Fabric, Failure, LinkFailure, ServerFailure, parse
from bml.topology.errors import BmlError
from bml.topology.failure import parse_failure

_MOST_LINES = 20
_MOST_BEFORE = 4
"""Of earlier times at which the part went, so many get a line."""
_MOST_TIMES = 5
"""Of the times at which a part was suspected, so many get a line."""
_APART_S = 5.0
"""Suspicions that came later after the one before have another cause: servers notice one at about a time."""
_KINDS = {
    "silence": ("hears nothing", "hear nothing"),
    "reset": ("lost its connections", "lost their connections"),
    "stall": ("has connections that stand still", "have connections that stand still"),
    "own-nic": ("has no carrier", "have no carrier"),
}
"""What one server says of itself, and what several say."""


class Moment(NamedTuple):
    """Something that server `server` did or heard at `at_s`, in seconds since 1970."""

    at_s: float
    server: int
    what: msg.Suspect | msg.Withdraw | msg.Interrupted | msg.Freeze | msg.Evict | msg.Abort | ev.Stop


class Seen(NamedTuple):
    """A view as a server saw it; `record` has that server's clock, which `wall_s` makes wall time."""

    server: int
    wall_s: float
    record: ViewRecord

    @property
    def installed_at_s(self) -> float:
        """When it was in force there, in seconds since 1970."""
        return self.record.installed_at_s + self.wall_s


class Told(NamedTuple):
    """All that the recordings of a job tell."""

    fabric: Fabric
    replays: tuple[Replayed, ...]
    moments: tuple[Moment, ...]
    views: dict[int, list[Seen]]
    """Epoch -> the view on each server that saw it."""
    recorded: frozenset[int]


def tell(recording: Recording) -> Told:
    """Replay all servers and gather what happened. Raises RecordingError."""
    moments: list[Moment] = []
    views: dict[int, list[Seen]] = {}
    replays = []
    for each in recording.servers:
        replays.append(replay(each, _Noting(each, moments)))
        for record in last_core(each).views:
            seen = Seen(each.setup.server, each.setup.wall_s, record)
            views.setdefault(record.view.epoch, []).append(seen)
    recorded = frozenset(each.setup.server for each in recording.servers)
    return Told(parse(recording.fabric), tuple(replays), tuple(sorted(moments, key=_at)), views, recorded)


def _at(moment: Moment) -> float:
    return moment.at_s


class _Noting:
    """Notes the moments of one server's replay."""

    def __init__(self, recording: ServerRecording, moments: list[Moment]):
        self._server = recording.setup.server
        self._wall_s = recording.setup.wall_s
        self._moments = moments

    def __call__(
        self, now: float, core: ServerCore, given: Input, outcome: list[ev.Instruction] | BmlError
    ) -> None:
        at_s = now + self._wall_s
        if given[0] == EVENT and isinstance(given[2], ev.Control):
            message = given[2].message
            if isinstance(message, msg.Freeze | msg.Evict | msg.Abort):
                self._moments.append(Moment(at_s, self._server, message))
        for each in [] if isinstance(outcome, BmlError) else outcome:
            if isinstance(each, ev.Stop):
                self._moments.append(Moment(at_s, self._server, each))
            if isinstance(each, ev.Tell) and isinstance(
                each.message, msg.Suspect | msg.Withdraw | msg.Interrupted
            ):
                self._moments.append(Moment(at_s, self._server, each.message))


def explain(told: Told, part: str) -> list[str]:
    """Say in at most 20 lines why a part (`server:4`, `link:4/0`, `switch:0/2`) went, and when.

    Raises UsageError if the fabric has no such part.
    """
    failure = parse_failure(part)
    told.fabric.without(failure)
    gone = [epoch for epoch in sorted(told.views) if _went(told, epoch, failure)]
    if not gone:
        return _stayed(told, failure)
    lines = [_when(told, epoch, failure) for epoch in gone[:-1]][-_MOST_BEFORE:]
    lines += _occurrence(told, gone[-1], failure)
    back = [epoch for epoch in sorted(told.views) if epoch > gone[-1] and not _is_out(told, epoch, failure)]
    lines.append(
        f"it is back since view {back[0]}" if back else "it is still out at the end of the recording"
    )
    if isinstance(failure, ServerFailure) and failure.server not in told.recorded:
        lines.append(f"there is no recording of server {failure.server}")
    return lines[:_MOST_LINES]


def view_lines(told: Told) -> list[str]:
    """A line for each view of the job, and one for the error with which it ended."""
    lines = [
        f"view {epoch}: {len(seen[0].record.view.members)} servers, after step {seen[0].record.view.commit} "
        f"({seen[0].record.view.reason})"
        for epoch, seen in sorted(told.views.items())
    ]
    return lines + [f"the job ended: {end.text}" for _, end in _ends(told)]


# --- the parts of the text -----------------------------------------------------------------------


def _is_out(told: Told, epoch: int, failure: Failure) -> bool:
    view = told.views[epoch][0].record.view
    if isinstance(failure, ServerFailure):
        return failure.server not in view.members
    return str(failure) in view.failures


def _went(told: Told, epoch: int, failure: Failure) -> bool:
    before = [each for each in told.views if each < epoch]
    return _is_out(told, epoch, failure) and bool(before) and not _is_out(told, max(before), failure)


def _stayed(told: Told, failure: Failure) -> list[str]:
    epochs = sorted(told.views)
    if not epochs:
        return [f"{failure}: the recording has no view"]
    was = "out of all views" if _is_out(told, epochs[0], failure) else "in use in all views"
    span = f"view {epochs[0]}" if len(epochs) == 1 else f"views {epochs[0]} to {epochs[-1]}"
    suspicions = [each for each in told.moments if _is_about(told, each, failure)]
    ends = _ends(told)
    if suspicions and ends:
        lines = [f"{failure} is {was} of the recording ({span}); the job ended before the next one"]
    else:
        lines = [f"{failure} did not go: it is {was} of the recording ({span})"]
    zero_s = min([each.at_s for each in suspicions] or [at_s for at_s, _ in ends] or [0.0])
    lines += [line for _, line in _suspicions(suspicions, zero_s)]
    for at_s, end in ends:
        lines.append(f"{_time(at_s, zero_s)} the job ended: {end.text}")
    return lines[:_MOST_LINES]


def _ends(told: Told) -> list[tuple[float, msg.Abort]]:
    """The error with which the coordinator ended the job, and when the first server heard it; or nothing."""
    return [(each.at_s, each.what) for each in told.moments if isinstance(each.what, msg.Abort)][:1]


def _when(told: Told, epoch: int, failure: Failure) -> str:
    view = told.views[epoch][0].record.view
    return f"{failure} went in view {epoch}, after step {view.commit}: {view.reason}"


def _occurrence(told: Told, epoch: int, failure: Failure) -> Iterator[str]:
    seen = told.views[epoch]
    first, last = min(each.installed_at_s for each in seen), max(each.installed_at_s for each in seen)
    before = [each.installed_at_s for number in told.views if number < epoch for each in told.views[number]]
    within = [each for each in told.moments if max(before) <= each.at_s <= last]
    suspicions = [each for each in within if _is_about(told, each, failure)]
    freezes = [each for each in within if isinstance(each.what, msg.Freeze)]
    zero_s = min((each.at_s for each in (*suspicions, *freezes)), default=first)
    yield _when(told, epoch, failure)
    yield f"times count from {datetime.fromtimestamp(zero_s, UTC):%Y-%m-%d %H:%M:%S.%f} UTC"
    noticed = [*_suspicions(suspicions, zero_s), *_asked(freezes, zero_s)]
    yield from (line for _, line in sorted(noticed))
    on = _servers(each.server for each in seen)
    spread = f", the last at {_time(last, zero_s)}" if len(seen) > 1 else ""
    yield f"{_time(first, zero_s)} view {epoch} is in force on {on}{spread}"
    recovered = [each for each in seen if each.record.recover_s is not None]
    if recovered:
        took_s = max(each.record.recover_s or 0.0 for each in recovered)
        yield f"the first step after it was committed {took_s:.3f} s after the servers stopped for it"
    if isinstance(failure, ServerFailure):
        yield from _own_end(told, failure.server, zero_s)


def _suspicions(suspicions: Iterable[Moment], zero_s: float) -> Iterator[tuple[float, str]]:
    """A line for each kind and time of suspicions, with the words of the first, and when that was."""
    times = _times(suspicions)
    if older := times[:-_MOST_TIMES]:
        begin_s, end_s = older[0][0][0].at_s, older[-1][-1][0].at_s
        until = f"{len(older)} times until {_time(end_s, zero_s)}"
        yield begin_s, f"{_time(begin_s, zero_s)} it was suspected {until}"
    for found in times[-_MOST_TIMES:]:
        (first, said), (last, _) = found[0], found[-1]
        servers = {each.server for each, _ in found}
        does = _KINDS.get(said.kind, (said.kind, said.kind))[len(servers) > 1]
        until = f" (until {_time(last.at_s, zero_s)})" if len(found) > 1 else ""
        yield first.at_s, f"{_time(first.at_s, zero_s)} {_servers(servers)} {does}{until}: {said.why}"


def _times(suspicions: Iterable[Moment]) -> list[list[tuple[Moment, msg.Suspect]]]:
    """Suspicions of one kind that came close together, in the order in which they began."""
    times: list[list[tuple[Moment, msg.Suspect]]] = []
    newest: dict[str, list[tuple[Moment, msg.Suspect]]] = {}
    for each in suspicions:
        if isinstance(each.what, msg.Suspect):
            found = newest.get(each.what.kind)
            if found is None or each.at_s - found[-1][0].at_s > _APART_S:
                found = newest[each.what.kind] = []
                times.append(found)
            found.append((each, each.what))
    return times


def _asked(freezes: list[Moment], zero_s: float) -> Iterator[tuple[float, str]]:
    """A line for each ballot of a coordinator, and its time; most views need one."""
    ballots: dict[tuple[int, int], tuple[Moment, msg.Freeze]] = {}
    for each in freezes:
        if isinstance(each.what, msg.Freeze):
            ballots.setdefault((each.what.epoch, each.what.term), (each, each.what))
    for (epoch, term), (first, asked) in [*ballots.items()][-3:]:
        when, why = _time(first.at_s, zero_s), asked.reason
        yield first.at_s, f"{when} coordinator {term} stops the step and asks for view {epoch}: {why}"


def _own_end(told: Told, server: int, zero_s: float) -> Iterator[str]:
    for each in told.moments:
        if each.server == server and isinstance(each.what, ev.Stop):
            yield f"{_time(each.at_s, zero_s)} server {server} itself ends: {each.what.error}"
            return


def _is_about(told: Told, moment: Moment, failure: Failure) -> bool:
    what = moment.what
    if not isinstance(what, msg.Suspect):
        return False
    if isinstance(failure, ServerFailure):
        return what.peer == failure.server
    if what.level != failure.level:
        return False
    if isinstance(failure, LinkFailure):
        return failure.server in (what.peer, what.observer)
    return told.fabric.group(what.peer, what.level) == failure.group


def _servers(servers: Iterable[int]) -> str:
    known = sorted(set(servers))
    if len(known) == 1:
        return f"server {known[0]}"
    shown = ", ".join(map(str, known[:8]))
    return f"servers {shown}" + (f" and {len(known) - 8} more" if len(known) > 8 else "")


def _time(at_s: float, zero_s: float) -> str:
    return f"{at_s - zero_s:+.3f} s"
