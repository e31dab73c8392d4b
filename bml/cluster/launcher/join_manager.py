"""The servers that are started while a job runs: those that are lost, asked for, or still to come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from bml.cluster.fleets.fleet import Spares
from bml.cluster.launcher.join_starter import Join, JoinStarter
from bml.cluster.launcher.restarts import DIED, RestartPolicy, is_replaced, is_worth_it
from bml.cluster.launcher.result import Result
from bml.cluster.launcher.start_backoff import StartBackoff
from bml.cluster.spec.leaving import DRAINED
from bml.faults import Fault
from bml.topology import ServerFailure

_LOG = logging.getLogger(__name__)


class JoinManager:
    """Starts servers with `join`, and keeps the lists of `result`; one thread uses it, but for `close`.

    `spares` take the places of servers that are lost, and are started when no server is awaited.
    `is_here` says whether a server is in the view, `is_over` whether the job has ended: a joiner would not be
    let in any more.
    """

    def __init__(
        self,
        join: Join,
        spares: Spares,
        result: Result,
        is_here: Callable[[int], bool],
        is_over: Callable[[], bool],
    ):
        self._join_starter = JoinStarter(join)
        self._result = result
        self._is_here, self._is_over = is_here, is_over
        self._restart_policy = RestartPolicy()
        self._start_backoff = StartBackoff()
        self._spares = spares
        self._wanted: list[tuple[int, str]] = []  # each with the fault that asked for it, if one did
        self._asked = (0, 0)
        self.incarnations: dict[int, int] = {}
        """The newest incarnations of servers that join."""

    @property
    def awaited(self) -> list[int]:
        """The servers without which the job began, and that are still to come; any thread may ask."""
        return self._start_backoff.awaited

    @property
    def to_come(self) -> list[int]:
        """The servers that are awaited, or that are being started; any thread may ask."""
        return sorted({*self.awaited, *self._join_starter.coming})

    @property
    def expected(self) -> set[int]:
        """The servers that run, as far as is known; any thread may ask."""
        result = self._result
        known = {*result.spec.servers, *self.incarnations}
        return known - result.gone.keys() - result.reports.keys() - {*self.to_come}

    @property
    def never_there(self) -> list[int]:
        """The servers that were not started, and are not to come; any thread may ask."""
        return sorted({*self._result.spec.absent} - self.incarnations.keys() - {*self.to_come})

    def await_late(self, late: Iterable[int]) -> None:
        """The job has begun without these servers: they are to join when they come."""
        self._start_backoff.begin(late, time.monotonic())

    def lost(self, server: int, kind: str = DIED) -> None:
        """A server is lost, with a report of some kind: have it started again, or its place taken, if it may.

        A server that is still to come is started again later. Others are replaced by spares, or are started
        again if the job rejoins servers. One whose machine is drained is still to come then, and also if the
        job grows.
        """
        result, again = self._result, is_worth_it(kind)
        if not again:
            self._start_backoff.give_up(server)
        if self._is_over() or self._start_backoff.failed(server, time.monotonic()):
            return
        place = self._spares.set_aside(server, self._free()) if is_replaced(kind) else None
        if place is not None and place != server:
            result.add_to_why(server, f"a spare joins as server {place}, where it is plugged in")
        if kind == DRAINED and (result.spec.rejoin or result.spec.min_start is not None):
            # It waits for a machine for as long as it takes, also if the spare does not come.
            self._start_backoff.begin([server if place is None else place], time.monotonic())
            return
        if place is not None:
            self._wanted.append((place, ""))
            return
        if not (again and result.spec.rejoin):
            return
        refusal = self._restart_policy.refusal(server, time.monotonic())
        if refusal:
            result.add_to_why(server, refusal)
        else:
            self._wanted.append((server, ""))

    def _free(self) -> list[int]:
        """The addresses at which no server is, and none is to be."""
        to_come = {*self.to_come, *(server for server, _ in self._wanted)}
        return sorted({*self.never_there, *self._result.gone} - to_come)

    def seen(self, snapshot: dict[str, Any], inside: Iterable[int]) -> None:
        """Note what a coordinator says: its view, whose members are `inside`, and the joins it was asked for.

        Each is noted once; a successor counts from the start.
        """
        contributors = {*inside} - {*snapshot["learners"]}
        self._restart_policy.came_in(contributors)
        self._start_backoff.came_in(contributors)
        for number, text in snapshot["asked"]:
            if (snapshot["term"], number) > self._asked:
                self._asked = (snapshot["term"], number)
                self._wanted.append((server_of(Fault.parse(text, at_once=True)), text))

    def start(self, missing: set[int]) -> None:
        """Start the wanted servers that are gone, into `missing`, and note those that cannot be started.

        A server that waits for a machine takes a spare: that one may wait for the same machine.
        """
        result = self._result
        for server, why in self._join_starter.failed():
            result.stays_away(server, why)
            self.lost(server)
        due = self._start_backoff.due(time.monotonic())
        for server in due:
            self._spares.set_aside(server, ())
        wanted = [*self._wanted, *((server, "") for server in due)]
        self._wanted = []
        for server, asked in wanted:
            if server in self._join_starter.coming:
                if server in result.gone:  # it died again: the current start must be over before the next one
                    self._wanted.append((server, asked))
                continue
            if self._is_over():
                continue
            if self._is_here(server):
                if asked:
                    _LOG.warning("%s changes nothing: server %d is in the job", asked, server)
                continue
            result.begun.add(asked)
            result.comes(server)
            self.incarnations[server] = 1 + max(self.incarnations.values(), default=0)
            missing.add(server)
            self._join_starter.begin(server, self.incarnations[server])
        if not (self.awaited or self._is_over()):
            self._spares.start()

    def close(self) -> None:
        """Give up all starts, and wait until they have ended. Idempotent."""
        self._join_starter.close()


def server_of(join: Fault) -> int:
    """Return the server that a join is about."""
    assert isinstance(join.target, ServerFailure)
    return join.target.server
