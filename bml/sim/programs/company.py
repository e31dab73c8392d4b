"""Servers in threads of one process: the communicator of each is a model of what the runtime promises.

A step is committed when all contributors have brought their contribution, which is read then and not before,
as memory that is sent without a copy is. Servers die and leave at moments that the program's faults name; the
others are told to prepare their contribution anew. Servers that join get the state at the first boundary that
all others still have before them, follow, and contribute from the step on that they have caught up with.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bml.errors import BmlError, Evicted, StepMismatch, TooFewServers, TrainingError
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import OPS, Array
from bml.protocol.wire.messages import View
from bml.train import session as session_module
from bml.train.communicator import Committed, Outcome, Retried

DEADLINE_S = 20.0
"""What a wait may take before it is a hang: everything else takes milliseconds."""


Report = Callable[["Line", Any, Any, BaseException | None], None]
_OF_THE_SESSION = str(Path(session_module.__file__).parent)


class Dead(BaseException):
    """This server has died: nothing of its training function is run any more."""


class Interrupted(BaseException):
    """What the handler of a signal raises."""


class Hang(BaseException):
    """A wait that nothing would end."""


@dataclass
class Faults:
    """What befalls whom: `kills` and `leaves` by server, `joins` after how many committed steps.

    A server dies in its `kills[0]`-th call: "before" it contributes, when it has "brought" its contribution,
    or when its step is "committed" and it has not been told. One that joined dies in such a call of `doomed`,
    those counted that it replays. `interrupts`: a signal's handler raises in this server's training thread,
    after so many calls of functions by or in the session. What is never reached does nothing.
    """

    absent: tuple[int, ...] = ()
    kills: dict[int, tuple[int, str]] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    joins: list[tuple[int, int]] = field(default_factory=list)
    doomed: dict[int, tuple[int, str]] = field(default_factory=dict)
    interrupts: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"server {server} dies in call {call}, {when}" for server, (call, when) in self.kills.items()]
        said += [f"server {server} leaves at boundary {number}" for server, number in self.leaves.items()]
        said += [f"server {server} joins after step {step}" for step, server in self.joins]
        said += [f"joined, {each} dies in call {call}, {when}" for each, (call, when) in self.doomed.items()]
        said += [f"server {server} is interrupted in function {n}" for server, n in self.interrupts.items()]
        return "; ".join([*(f"server {each} is absent" for each in self.absent), *said]) or "no faults"


class _Brought(NamedTuple):
    contribution: Array
    op: str
    text: str
    signature: int
    shared: bool


class Company:
    """All servers of one job. `start` is called, in no particular thread, with a server that is to join."""

    def __init__(self, servers: Iterable[int], faults: Faults, start: Callable[[Line], None]):
        self.servers = tuple(servers)
        self.faults = faults
        self.error: BmlError | None = None
        self.violations: list[str] = []
        self.changed = threading.Condition()
        self.committed = 0
        self.epoch = 1
        self.contributors = tuple(each for each in self.servers if each not in faults.absent)
        self._start = start
        self._results: dict[int, Committed] = {}
        self.called: dict[int, _Brought] = {}
        """What was called in each step."""
        self._brought: dict[int, _Brought] = {}
        self._ended: set[int] = set()
        self._to_join = sorted(faults.joins)
        self._asking: dict[int, Line] = {}
        self._alive = set(self.contributors)
        self.n_faults = 0
        """How many servers died, left or joined."""

    @property
    def view(self) -> View:
        """The view in force."""
        return View(self.epoch, self.contributors, (), self.committed, "by seed", 0.0)

    @property
    def over(self) -> bool:
        """Whether no step will be committed any more, as all who contribute have ended."""
        return self._ended.issuperset(self.contributors)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, holding `changed`; raises the error that ended the job, or Hang."""
        if not self.changed.wait_for(lambda: condition() or self.error is not None, DEADLINE_S):
            self.violations.append(f"hang: {what}")
            self.fail(BmlError("hang"))
            raise Hang(what)
        if self.error is not None and not condition():
            raise self.error

    def fail(self, error: BmlError) -> None:
        """End the job."""
        self.error = self.error or error
        self.changed.notify_all()

    # --- steps -----------------------------------------------------------------------------------

    def bring(self, server: int, brought: _Brought) -> None:
        """A contribution to the next step; the last one commits it."""
        self._brought[server] = brought
        self._commit_if_whole()

    def _commit_if_whole(self) -> None:
        if self.error is not None or not self.contributors or not self._brought:
            return
        gone = sorted(self._ended.intersection(self.contributors))
        if gone:
            text = next(iter(self._brought.values())).text
            self.fail(StepMismatch(f"server {gone[0]} has ended, others call {text}"))
        elif set(self.contributors) <= set(self._brought):
            self._commit()

    def _commit(self) -> None:
        calls = [self._brought[server] for server in self.contributors]
        if (
            len(
                {(call.signature, call.op, call.contribution.dtype, call.contribution.size) for call in calls}
            )
            > 1
        ):
            self.fail(StepMismatch(" but ".join(sorted({call.text for call in calls}))))
            return
        reduce = OPS[calls[0].op]
        total = calls[0].contribution.copy()
        with np.errstate(all="ignore"):
            for call in calls[1:]:
                reduce(total, call.contribution, out=total)
        self.committed += 1
        self.called[self.committed] = calls[0]
        self._results[self.committed] = Committed(self.committed, self.epoch, self.contributors, total)
        self._brought.clear()
        while self._to_join and self._to_join[0][0] <= self.committed:
            self._begin_joining(self._to_join.pop(0)[1])
        self.changed.notify_all()

    def _begin_joining(self, server: int) -> None:
        if server not in self.contributors and server not in self._alive:
            self._alive.add(server)
            self.n_faults += 1
            self._start(Line(self, server, joins=True))

    def result(self, step: int, shared: bool) -> Committed:
        """What a server is given: memory of its own, or that may not be written."""
        found = self._results[step]
        total = found.result.copy()
        total.flags.writeable = not shared
        return Committed(found.step, found.epoch, found.contributors, total)

    # --- who is there ----------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """A server has died, or left: the others prepare anew."""
        self.n_faults += 1
        self._alive.discard(server)
        self._asking.pop(server, None)
        if server in self.contributors:
            self._change(tuple(each for each in self.contributors if each != server))
        self.changed.notify_all()

    def promote(self, server: int) -> None:
        """A joiner contributes from the next step on."""
        self._asking.pop(server, None)
        self._change(tuple(sorted((*self.contributors, server))))

    def _change(self, contributors: tuple[int, ...]) -> None:
        self.contributors = contributors
        self.epoch += 1
        self._brought.clear()
        for line in self._asking.values():  # another transfer begins
            if line.state is None:
                line.from_step = self.committed + 1
        if not contributors:
            self.fail(TooFewServers("no server is left"))
        if self.over:
            for line in self._asking.values():
                line.nobody_gives = True
        self.changed.notify_all()

    def end(self, server: int, error: BaseException | None) -> None:
        """A training function has ended; that of a joiner which does not contribute harms nobody."""
        with self.changed:
            self._alive.discard(server)
            self._asking.pop(server, None)
            if server in self.contributors:
                if error is not None:
                    text = f"server {server} raised {type(error).__name__}: {error}"
                    self.fail(error if isinstance(error, BmlError) else TrainingError(text, server))
                self._ended.add(server)
                self._commit_if_whole()
                if self.over:
                    for line in self._asking.values():
                        line.nobody_gives = True
            self.changed.notify_all()

    # --- the state -------------------------------------------------------------------------------

    def ask(self, line: Line) -> None:
        """A joiner wants the state: of the first boundary that nobody can have behind it."""
        line.from_step = self.committed + 1
        self._asking[line.server] = line
        if self.over:
            line.nobody_gives = True

    def give(self, server: int, step: int, state: Callable[[], SegmentedBytes]) -> None:
        """A boundary of a contributor, after this step: all must give the same there."""
        for line in list(self._asking.values()):
            if step < line.from_step or server in line.given_by:
                continue
            line.given_by.add(server)
            rope = state()
            found = bytes(rope[0 : len(rope)])
            if line.state is None:
                line.state, line.given_in = (step, found), self.epoch
                self.changed.notify_all()
            elif (line.given_in, line.state[0]) == (self.epoch, step) and line.state[1] != found:
                self.violations.append(f"server {server} gives another state after step {step} than others")


class Line:
    """One server's communicator, see bml.train.communicator; `incarnation` of its training function."""

    def __init__(self, company: Company, server: int, joins: bool = False):
        self.server = server
        self.joins = joins
        self.servers = company.servers
        self.state: tuple[int, bytes] | None = None
        self.from_step = 0
        self.given_by: set[int] = set()
        self.given_in = 0
        self.nobody_gives = False
        self._company = company
        self._step = 1
        self._calls = 0
        self._boundaries = 0
        self._took = not joins
        self._level = self._replays = self.is_lost = False

    @property
    def view(self) -> View:
        """The view in force."""
        with self._company.changed:
            self._check()
            return self._company.view

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        return self._replays

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Memory with anything in it."""
        made: Array = np.empty(shape, dtype)
        made.view(np.uint8 if made.ndim else made.dtype).fill(0xA5)
        return made

    def sync(
        self, epoch: int, contribution: Array, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        """Bring a contribution; see Communicator."""
        company = self._company
        with company.changed:
            self._check()
            self._calls += 1
            if self._replays or self._step <= company.committed:
                self._die_if("before")
                company.wait_for(
                    lambda: company.committed >= self._step or company.over,
                    f"the kept result of step {self._step}",
                )
                if company.committed < self._step:
                    raise Evicted("the others ended the job without it")
                called = company.called[self._step]
                if called.signature != signature:
                    raise StepMismatch(
                        f"the others called {called.text} in step {self._step}, this is {text}"
                    )
                return self._given(shared)
            self._die_if("before")
            if epoch != company.epoch:
                return Retried(self._step, company.epoch)
            company.bring(self.server, _Brought(contribution, op, text, signature, shared))
            self._die_if("brought")
            company.wait_for(
                lambda: company.committed >= self._step or company.epoch != epoch,
                f"step {self._step}: {text}",
            )
            if company.committed < self._step:
                return Retried(self._step, company.epoch)
            self._die_if("committed")
            return self._given(shared)

    def _given(self, shared: bool) -> Committed:
        self._step += 1
        return self._company.result(self._step - 1, shared)

    def _die_if(self, when: str) -> None:
        faults = self._company.faults
        kills = faults.doomed if self.joins else faults.kills
        if kills.get(self.server) == (self._calls, when):
            self.is_lost = True
            self._company.lose(self.server)
            raise Dead

    def _check(self) -> None:
        if self.is_lost:
            raise Dead  # in another thread of it
        if self._company.error is not None:
            raise self._company.error

    def joined(self) -> memoryview | None:
        """See Communicator."""
        if self._took:
            return None
        company = self._company
        with company.changed:
            company.ask(self)
            company.wait_for(lambda: self.state is not None or self.nobody_gives, "the state for a joiner")
            if self.state is None:
                raise Evicted("the others had ended")
            (step, state), self._took = self.state, True
            self._step = step + 1
            return memoryview(state)

    def draw_level(self) -> None:
        """See Communicator."""
        company = self._company
        with company.changed:
            self._check()
            if not self.joins or self.server in company.contributors:
                self._replays = False
                return
            self._replays = self._step <= company.committed
            if self._replays:
                return
            if self._level:
                company.promote(self.server)
            else:
                self._level = self._replays = True

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """See Communicator."""
        company = self._company
        with company.changed:
            self._check()
            self._boundaries += 1
            if self.server in company.contributors:
                if not self.joins and company.faults.leaves.get(self.server) == self._boundaries:
                    self.is_lost = True
                    company.lose(self.server)
                    raise Evicted("it was asked to leave")
                company.give(self.server, self._step - 1, state)


def run(train: Callable[[Any], Any], servers: Iterable[int], faults: Faults, report: Report) -> Company:
    """Run a job to its end; `report` is given each server's line, session, value and error, in its thread."""
    threads: list[threading.Thread] = []

    def serve(line: Line) -> None:
        session, value, error = session_module.Session(line), None, None
        if not line.joins and line.server in faults.interrupts:
            sys.setprofile(_interrupting(faults.interrupts[line.server]))
        try:
            value = train(session)
            session.finish()
        except BaseException as raised:
            error = raised
        sys.setprofile(None)
        report(line, session, value, error)
        if not line.is_lost:  # perhaps it is there again, in another thread
            company.end(line.server, error)
        session.close()

    def start(line: Line) -> None:
        thread = threading.Thread(target=serve, args=(line,), name=f"server-{line.server}", daemon=True)
        threads.append(thread)
        thread.start()

    company = Company(servers, faults, start)
    for server in company.contributors:
        start(Line(company, server))
    for thread in threads:
        thread.join(3 * DEADLINE_S)
        if thread.is_alive():
            company.violations.append(f"hang: {thread.name} did not end")
    return company


def _interrupting(n_calls: int) -> Callable[[FrameType, str, Any], None]:
    """A profile function that raises where a signal's handler could: in the n-th call in or by the session.

    Python looks for signals where a function begins and where one that is written in C has returned.
    """
    left = n_calls

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_OF_THE_SESSION):
            left -= 1
            if left == 0:
                raise Interrupted

    return look
