"""Every interleaving of the commit protocol of a few servers, up to a bound: a small model, the real cores.

Real `ServerCore`s and a real `Coordinator` run one step over a vector of one element. Nothing has a time. The
next event may be the delivery of any message that is first in its channel, the contribution of any user, a
crash, freeze or thaw of any server that may still fail, or the notice of a failure: a process is gone, a
server is silent, or it is heard again. The search does not go on from a state that was reached before.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from bml.faults import Suspicion
from bml.protocol.coordinator import core as coord
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Send
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import Header
from bml.schedule import Programs, Schedules
from bml.sim.judge.history import History
from bml.sim.judge.promises import PromiseBroken, Promises
from bml.sim.world.settings import TREES
from bml.topology import BmlError, Fabric, parse
from bml.topology.errors import InvariantError

_TIMES = Timeouts.of()
_STEP = 1
_NOTHING = np.zeros(0)


class Faults(NamedTuple):
    """How often each fault may happen; `servers` are those that may crash or freeze."""

    crashes: int = 1
    freezes: int = 1
    coordinator_crashes: int = 0
    servers: tuple[int, ...] = (0, 1, 2)


class Choice(NamedTuple):
    """The next event: its kind, and the server or the channel (from, to); -1 is the coordinator."""

    kind: str
    a: int = -1
    b: int = -1

    def __str__(self) -> str:
        return " ".join([self.kind, *(str(each) if each >= 0 else "-" for each in (self.a, self.b))])


_Path: TypeAlias = "tuple[_Path, Choice] | None"
Packet: TypeAlias = tuple[Header, msg.View | None]


def _programs(fabric: Fabric, server: int) -> Programs:
    return Programs(Schedules(fabric, constants=TREES), server)


@dataclass
class Result:
    """`complete`: all reachable states were seen. `path` leads to what is `broken`."""

    states: int = 0
    ends: int = 0
    complete: bool = False
    broken: PromiseBroken | None = None
    path: list[Choice] = field(default_factory=list)


def _slice_nbytes(nbytes: int) -> int:
    return nbytes  # whole


def _unjudged(lost: Iterable[int], view: msg.View) -> list[int]:
    """Evictions are not judged here: the explorer may give up any server that is frozen."""
    return []


def _never_slow(server: int, level: int) -> bool:
    """No link has a rate here."""
    return False


class Model:
    """One state of the small model; `choices` can happen next, `make` lets one happen."""

    def __init__(self, fabric: str, faults: Faults):
        self.faults = faults
        self.fabric = parse(fabric)
        self.cores = {
            s: ServerCore(s, self.fabric, _programs, _TIMES, _slice_nbytes, 0.0) for s in self.fabric.servers
        }
        self.alive = dict.fromkeys(self.cores, True)
        self.frozen = dict.fromkeys(self.cores, False)
        self.noticed = dict.fromkeys(self.cores, False)
        self.suspected: dict[int, tuple[int, ...]] = {}  # by whom
        self.ready: dict[int, int] = {}  # servers whose users have a contribution, and for which epoch
        self.opened: dict[int, msg.View] = {}
        self.stopped: set[int] = set()
        self.data: dict[tuple[int, int], deque[Packet]] = {}
        self.down: dict[int, deque[msg.ToServer]] = {s: deque() for s in self.cores}
        self.up: dict[int, deque[msg.ToCoordinator]] = {s: deque() for s in self.cores}
        self.promises = Promises(History(recorded=False), _unjudged, _never_slow)
        self.term = 0
        self.coordinator = self._coordinator()
        self._settle()

    def choices(self) -> Iterator[Choice]:
        """Everything that can happen next."""
        running = [s for s in self.cores if self.alive[s] and not self.frozen[s]]
        for server in running:
            if self.down[server]:
                yield Choice("told", server)
            if server in self.ready:
                yield Choice("submit", server)
            for (origin, to), packets in self.data.items():
                if to == server and packets and self._welcome(origin, server):
                    yield Choice("frame", origin, server)
        for server, messages in self.up.items():
            if messages:
                yield Choice("heard", server)
        for server in self.cores:
            if not (self.alive[server] and not self.frozen[server]) and not self.noticed[server]:
                yield Choice("notice", server)
            if self.frozen[server]:
                yield Choice("thaw", server)
            elif self.alive[server] and server in self.suspected:
                yield Choice("heard again", server)
        if self._due():
            yield Choice("tick")
        if self.faults.crashes:
            yield from (Choice("crash", s) for s in self.faults.servers if self.alive[s])
        if self.faults.freezes:
            yield from (Choice("freeze", s) for s in self.faults.servers if s in running)
        if self.faults.coordinator_crashes:
            yield Choice("takeover")

    def make(self, choice: Choice) -> None:
        """Let it happen; raises PromiseBroken if it should not."""
        match choice.kind:
            case "told":
                self._give(choice.a, ev.Control(self.down[choice.a].popleft()))
            case "submit":
                epoch = self.ready.pop(choice.a)
                self._give(choice.a, ev.Submit(_STEP, epoch, Call("sum", "<f8", 1, "sum"), 7))
            case "frame":
                self._frame(choice.a, choice.b)
            case "heard":
                self._coordinate(coord.From(choice.a, self.up[choice.a].popleft()), 0.0)
            case "notice":
                self._notice(choice.a)
            case "heard again":
                for observer in self.suspected.pop(choice.a):
                    self._coordinate(coord.From(observer, msg.Withdraw(observer, choice.a, 0)), 0.0)
            case "thaw":
                self.frozen[choice.a] = self.noticed[choice.a] = False
            case "tick":
                self._tick()
            case "crash":
                self.faults = self.faults._replace(crashes=self.faults.crashes - 1)
                self.alive[choice.a], self.frozen[choice.a] = False, False
            case "freeze":
                self.faults = self.faults._replace(freezes=self.faults.freezes - 1)
                self.frozen[choice.a] = True
            case "takeover":
                left = self.faults.coordinator_crashes - 1
                self.faults = self.faults._replace(coordinator_crashes=left)
                self.coordinator = self._coordinator()

    def check_end(self) -> None:
        """Nothing can happen any more: every server that runs must have the step, or know of its eviction."""
        waiting = [
            f"server {s}: {core.waits_for()}"
            for s, core in self.cores.items()
            if self.alive[s] and core.committed < _STEP and s not in self.stopped
        ]
        if waiting:
            raise PromiseBroken(4, "nothing can happen any more\n" + "\n".join(waiting))

    # --- inside ----------------------------------------------------------------------------------

    def _coordinator(self) -> coord.Coordinator:
        """Start one; control connections to an older one, and all that is on them, are gone."""
        self.term += 1
        made = self.coordinator = coord.Coordinator(self.fabric, self.term, _TIMES, None, 0.0)
        for server, alive in self.alive.items():
            self.up[server].clear()
            self.down[server].clear()
            self.noticed[server] = False
            self.suspected.pop(server, None)
            if alive:
                self._coordinate(coord.Connected(server), 0.0)
        return made

    def _notice(self, server: int) -> None:
        """A process is known to be gone, or the others that run do not hear one that is frozen."""
        self.noticed[server] = True
        if not self.alive[server]:
            self._coordinate(coord.Gone(server, "noticed"), 0.0)
            return
        others = [s for s in self.cores if self.alive[s] and not self.frozen[s]]
        self.suspected[server] = tuple(others)
        for observer in others:
            suspect = msg.Suspect(observer, server, 0, "silence", 0.0, f"{observer} does not hear {server}")
            self._coordinate(coord.From(observer, suspect), 0.0)

    def _settle(self) -> None:
        """Bring the first view into force, in one fixed order."""
        while len(self.ready) < len(self.cores):
            self.make(next(choice for choice in self.choices() if choice.kind in ("told", "heard")))

    def _due(self) -> bool:
        """Whether a wait of the coordinator may end now: it has evidence, or those it waits for are stuck."""
        core = self.coordinator
        if core.state == "stopped":
            return False
        if core._findings.act_at is not None:
            return True
        awaited = core.awaited
        stuck = [server for server in awaited if not self.alive[server] or self.frozen[server]]
        return bool(stuck) and stuck == awaited

    def _tick(self) -> None:
        core = self.coordinator
        now = core._findings.act_at if core._findings.act_at is not None else core._agreement.answer_by
        self._coordinate(coord.Tick(), now)
        # Time starts anew, so that states which differ in nothing else are the same.
        core._agreement.answer_by -= now
        core._findings.since_s = 0.0
        if core._findings.act_at is not None:
            core._findings.act_at -= now

    def _coordinate(self, event: coord.Event, now: float) -> None:
        for instruction in self.coordinator.handle(event, now):
            if isinstance(instruction, coord.Post) and self.alive[instruction.server]:
                self.down[instruction.server].append(instruction.message)

    def _welcome(self, origin: int, server: int) -> bool:
        header = self.data[origin, server][0][0]
        core = self.cores[server]
        return core.admit(origin, header) is not ev.Verdict.WAIT or core.urgent

    def _frame(self, origin: int, server: int) -> None:
        core = self.cores[server]
        header, theirs = self.data[origin, server][0]
        verdict = core.admit(origin, header)
        if verdict is ev.Verdict.WAIT:
            self._give(server, ev.Tick())
            return
        self.data[origin, server].popleft()
        if verdict not in (ev.Verdict.DROP, ev.Verdict.TEXT):
            self.promises.admitted(server, origin, theirs, core.view)
            self._carry_out(server, core.received(origin, header, "", 0.0))

    def _give(self, server: int, event: ev.Event) -> None:
        self._carry_out(server, self.cores[server].handle(event, 0.0))

    def _carry_out(self, server: int, instructions: list[ev.Instruction]) -> None:
        core = self.cores[server]
        for instruction in instructions:
            match instruction:
                case Send(peer, _, header, _, _):
                    if header.nbytes == 0:
                        self.promises.entered(server, header.step, header.epoch)
                    self.data.setdefault((server, peer), deque()).append((header, core.view))
                case ev.Tell(message) if not isinstance(message, msg.Progress):
                    self.up[server].append(message)
                case ev.Open():
                    assert core.view is not None
                    self.opened[server] = core.view
                case ev.Installed(view):
                    self.promises.installed(server, view, self.fabric.without(*view.failures))
                    if len(core.views) == 1:
                        self.ready[server] = view.epoch
                case ev.Retry(step, epoch):
                    self.promises.retried(server, step, epoch)
                    self.ready[server] = epoch
                case ev.Commit(step):
                    assert core.view is not None
                    view = self.opened[server]
                    self.promises.committed(server, step, view, core.view, _NOTHING, _NOTHING)
                case ev.Stop():
                    self.stopped.add(server)


def explore(
    fabric: str = "bcube:3x1",
    faults: Faults | None = None,
    most_states: int = 20_000,
    seed: int = 0,
    first: Callable[[Model], None] = lambda model: None,
) -> Result:
    """Go through the states depth first: until all were seen, a promise is broken, or at the bound.

    The seed decides the order of choices, so that bounded searches with other seeds see other states. `first`
    makes the choices that lead to the state from which all is tried.
    """
    chance = random.Random(seed)
    result = Result()
    model = Model(fabric, faults or Faults())
    first(model)
    seen = {_fingerprint(model)}
    stack: list[tuple[bytes, _Path]] = [(pickle.dumps(model), None)]
    while stack and result.states < most_states:
        state, path = stack.pop()
        result.states += 1
        model = pickle.loads(state)
        choices = list(model.choices())
        chance.shuffle(choices)
        choice: Choice | None = None
        try:
            if not choices:
                result.ends += 1
                model.check_end()
            for choice in choices:
                model = pickle.loads(state)
                model.make(choice)
                known = _fingerprint(model)
                if known not in seen:
                    seen.add(known)
                    stack.append((pickle.dumps(model), (path, choice)))
        except InvariantError as error:
            result.broken = error if isinstance(error, PromiseBroken) else PromiseBroken(0, str(error))
            result.path = [*_listed(path), *([choice] if choice else [])]
            return result
    result.complete = not stack
    return result


def _listed(path: _Path) -> list[Choice]:
    found: list[Choice] = []
    while path is not None:
        path, choice = path
        found.append(choice)
    return found[::-1]


#: Derived from the view or without meaning where nothing has a time.
_LEFT_OUT = frozenset(
    (
        *("fabric", "timeouts", "_fabric", "_base", "_planner", "programs", "_phases", "_timeouts"),
        *(
            "_known",
            "_findings",
            "_joiners",
            "_ending",
            "_detector",
            "_recovery",
            "_engines",
            "_slice_nbytes",
            "_control_frames",
        ),
        *("_layout", "_units", "_starts", "place"),
        *("_view_history", "_texts", "_history", "steps", "handle_shared"),
    )
)


def _fingerprint(model: Model) -> int:
    """A hash that is equal for states with the same futures."""
    return hash((_plain(model), _plain(model.promises._history.commits)))


def _plain(value: Any) -> Hashable:
    """The value as nested tuples, whatever the order in which dicts and sets were filled."""
    if value is None or isinstance(value, int | float | str | bytes | Struct | Enum):
        return value
    if isinstance(value, dict):
        return tuple(sorted(((_plain(k), _plain(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(_plain, value), key=repr))
    if isinstance(value, tuple | list | deque):
        return tuple(map(_plain, value))
    if isinstance(value, Fabric):
        return str(value), value.rates
    if isinstance(value, BmlError | Suspicion):
        return str(value)
    fields = vars(value)
    return tuple(_plain(fields[name]) for name in fields if name not in _LEFT_OUT)
