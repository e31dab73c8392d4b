"""What a job does for servers that are lost, on a fleet of the test's own making."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from bml.cluster.fleets.fleet import Changed, Died, FleetEvent, NoSpares
from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.restarts import MOST_STARTS
from bml.cluster.launcher.running import Job
from bml.cluster.spec.job import JobSpec

pytestmark = pytest.mark.timeout(30)

LOST = 3


def view(epoch: int, joined: dict[int, int], state: str = "steady") -> Changed:
    """The snapshot of a coordinator that does not know yet that the lost server is gone."""
    return Changed(
        {
            "term": 1,
            "epoch": epoch,
            "state": state,
            "members": [0, 1, 2, LOST],
            "learners": [],
            "joined": joined,
            "asked": [],
            "abort": None,
        }
    )


class Fleet:
    """Server 3 is lost and dies whenever it is started again; `seen` is what the coordinator says then.

    It is heard of one by one, or of all `at_once` that has come meanwhile.
    """

    def __init__(self, seen: list[Changed], at_once: bool) -> None:
        self.spec = JobSpec("bcube:2x2", rejoin=True)
        self.spares = NoSpares()
        self.incarnations: list[int] = []
        self._seen = deque(seen)
        self._at_once = at_once
        self._events: deque[FleetEvent] = deque(
            [view(1, {}), Died(LOST, "it was killed"), self._seen.popleft()]
        )
        self._changed = threading.Condition()
        self._looks_left = 20

    def start(self, train: bytes) -> None:
        """Nothing is to be started."""

    def ask(self, request: Any, patience: Any) -> dict[int, Any]:
        """No server answers."""
        return {}

    def join(self, server: int, incarnation: int, give_up: threading.Event) -> None:
        with self._changed:
            self.incarnations.append(incarnation)
            news: list[FleetEvent] = [self._seen.popleft()] if self._seen else []
            self._events += [*news, Died(server, "it died again")]
            self._changed.notify()

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        with self._changed:
            if not self._events and not self._changed.wait_for(lambda: self._events, 0.05):
                self._looks_left -= 1
                if self._looks_left == 0:  # enough was heard: nobody is left
                    self._events += [view(99, {}, "stopped"), *(Died(each, "it ended") for each in range(3))]
            count = len(self._events) if self._at_once else min(1, len(self._events))
            return [self._events.popleft() for _ in range(count)]

    def close(self) -> None:
        """Nothing is to be closed."""


def run(seen: list[Changed], at_once: bool) -> Any:
    fleet: Any = Fleet(seen, at_once)
    with Job(fleet, fleet.spec, "processes", Teller(None)) as job:
        job.begin(b"")
        while job.running:
            job._over.wait(0.1)
        assert job._error is None, job._error
        return fleet.incarnations, job._result.dead[LOST]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_a_view_of_the_incarnation_before_is_no_sign_of_a_server_that_comes(at_once: bool) -> None:
    # Of a server that died it is heard first that its connections are lost: a view with it goes before the
    # one without it, and may be heard of after the server was started again.
    incarnations, why = run([view(2, {}), view(3, {}), view(4, {LOST: 1})], at_once)
    assert incarnations == [1, 2, 3]
    assert f"it was started {MOST_STARTS} times" in why


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_that_came_in_is_started_again(at_once: bool) -> None:
    incarnations, _ = run(
        [view(2, {}), *(view(2 + incarnation, {LOST: incarnation}) for incarnation in range(1, 4))], at_once
    )
    assert incarnations == list(range(1, len(incarnations) + 1))
    assert len(incarnations) > MOST_STARTS
