"""The runs of servers on Ray: the calls that end with the server's report, or with its death."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError

from bml.cluster.fleets.fleet import Known
from bml.cluster.ray.asking import DEATHS
from bml.cluster.spec.job import ServerReport
from bml.io.interruptible import Condition

_LOOK_S = 1.0  # how often an actor that Ray does not reach is asked again
#: After the first report, servers that have reported ask the others: after how many seconds, and how many
#: servers each of them asks at a time.
_RELAY_S = 2.0
_RELAYS = 4


@dataclass(frozen=True)
class Ended:
    """The run of a server has ended: with a report, or with its death, of which Ray says what `lost` says."""

    server: int
    report: ServerReport | None
    lost: str = ""


class Reports:
    """Lets servers run, and takes their reports, also where Ray does not reach an actor for a while.

    `actors` are those of the servers and `known` their addresses, as they are now. `changing` guards them.
    Any thread may call its methods, but only one `calls` and `heard`.
    """

    def __init__(self, actors: Mapping[int, Any], known: Known, changing: Condition):
        self._actors, self._known, self._changing = actors, known, changing
        self._train: Any = None
        self._runs: dict[Any, int] = {}
        self._unheard: dict[int, float] = {}
        self._relays: dict[Any, int] = {}
        self._relays_at = math.inf

    def prepare(self, train: Any) -> None:
        """Servers will run this function, which is in Ray's object store."""
        self._train = train

    def run(self, server: int) -> None:
        """Let a server run its training function, once, or ask for its report again."""
        with self._changing:
            self._runs[self._actors[server].run.remote(self._known.contacts, self._train)] = server

    def running(self) -> set[int]:
        """Return the servers that have neither reported nor died."""
        with self._changing:
            return {*self._runs.values(), *self._unheard}

    def forget(self, server: int) -> None:
        """Do not wait for the report of a server any more."""
        with self._changing:
            self._runs = {ref: of for ref, of in self._runs.items() if of != server}
            self._unheard.pop(server, None)

    def job_ends(self) -> None:
        """A server has ended with the job: from soon on, ask for the others' reports by those that have."""
        self._relays_at = min(self._relays_at, time.monotonic() + _RELAY_S)

    def calls(self) -> list[Any]:
        """Return the calls to be waited for, to hand those that have ended to `heard`."""
        with self._changing:
            self._ask_again()
            self._ask_by_others()
            return [*self._runs, *self._relays]

    def heard(self, ref: Any) -> Ended | None:
        """Take the end of a call. None if it tells nothing of a server that runs."""
        if ref in self._relays:
            return self._relayed(ref)
        pickled, lost = b"", ""
        try:
            pickled = ray.get(ref)
        except (ActorUnavailableError, ObjectLostError):
            # Ray does not reach it now, or has lost its report. The other servers notice if it is dead.
            with self._changing:
                if ref in self._runs:
                    self._unheard[self._runs.pop(ref)] = time.monotonic() + _LOOK_S
            return None
        except DEATHS as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            lost = f"its process is gone (Ray: {first})"
        with self._changing:
            server = self._runs.pop(ref, None)
        if server is None:
            return None  # it was ended meanwhile, to be started again
        return Ended(server, None, lost) if lost else self._reported(server, pickled)

    def _relayed(self, ref: Any) -> Ended | None:
        """Take a report that another server has asked for; a missing report means nothing."""
        server = self._relays.pop(ref)
        try:
            pickled = ray.get(ref)
        except RayError:
            return None
        return self._reported(server, pickled) if server in self.running() else None

    def _reported(self, server: int, pickled: bytes) -> Ended:
        self.forget(server)
        report: ServerReport = cloudpickle.loads(pickled)
        return Ended(server, report)

    def _ask_again(self) -> None:
        """Ask servers that Ray did not reach for their reports again."""
        for server in [each for each, at in self._unheard.items() if time.monotonic() >= at]:
            del self._unheard[server]
            self.run(server)

    def _ask_by_others(self) -> None:
        """After the end of the job, let servers that have reported ask those that have not.

        A connection from here to an actor may be dead, and Ray may take minutes to notice.
        """
        if time.monotonic() < self._relays_at or not self._runs:
            return
        self._relays_at = time.monotonic() + _RELAY_S
        missing = {*self._runs.values()}
        helpers = sorted(self._actors.keys() - missing - self._unheard.keys() - self._known.gone.keys())
        for server in sorted(missing - {*self._relays.values()})[: _RELAYS * len(helpers)]:
            helper = self._actors[helpers[server % len(helpers)]]
            ref = helper.relay.remote(self._actors[server], self._known.contacts, self._train)
            self._relays[ref] = server
