"""Faults for a job that runs: how long answers are waited for, and joins of servers that are there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRay

from bml.cluster.fleets.fleet import Changed, Died, FleetEvent, NoSpares, Patience
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.running import Job
from bml.cluster.spec.job import JobSpec
from bml.errors import FabricError, UsageError

pytestmark = pytest.mark.timeout(60)

WITHIN_S = 60.0
NOTHING, ACTS = {"done": ""}, {"done": "server 1 does it"}


def wait_for(holds: Callable[[], object]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


# --- how long answers are waited for -----------------------------------------------------------------


def test_an_answer_that_says_something_ends_the_longer_wait() -> None:
    patience = Patience(1.0, 5.0)
    assert patience.left_s({}, 2.0) == 3.0
    assert patience.left_s({0: NOTHING}, 2.0) == 3.0
    assert patience.left_s({0: NOTHING, 1: ACTS}, 0.25) == 0.75
    assert patience.left_s({0: {"error": "wrong"}}, 2.0) == 0.0
    assert patience.left_s({}, 6.0) == 0.0
    assert Patience(1.0).left_s({}, 0.25) == 0.75


class Child:
    """A server that answers at once, or as soon as `go` is set."""

    def __init__(self, fleet: Any, server: int, answer: dict[str, Any], go: threading.Event | None = None):
        self.fleet, self.server, self.answer, self.go = fleet, server, answer, go
        self.unanswered = 0

    def send(self, what: str, number: int, request: Any) -> None:
        threading.Thread(target=self._answer, args=(number,), daemon=True).start()

    def _answer(self, number: int) -> None:
        if self.go is None or self.go.wait(WITHIN_S):
            self.fleet._take_answer(self.server, self, number, self.answer)


@pytest.mark.slow
@pytest.mark.parametrize("quick", [{}, {0: NOTHING}])
def test_processes_are_waited_for_until_one_acts(quick: dict[int, dict[str, Any]]) -> None:
    fleet: Any = ProcessFleet(JobSpec("bcube:3x1"), prints=False)
    go, never = threading.Event(), threading.Event()
    fleet._servers = {server: Child(fleet, server, answer) for server, answer in quick.items()}
    fleet._servers |= {1: Child(fleet, 1, ACTS, go), 2: Child(fleet, 2, NOTHING, never)}
    assert 1 not in fleet.ask(("inject", "kill:1"), Patience(0.2)), "it takes longer"
    threading.Timer(0.5, go.set).start()
    begun_s = time.monotonic()
    assert fleet.ask(("inject", "kill:1"), Patience(0.2, 50.0))[1] == ACTS
    assert 0.4 < time.monotonic() - begun_s < 40.0, "frozen servers are not waited for"
    never.set()


def test_actors_of_ray_are_waited_for_until_one_acts(ray: FakeRay, fleet: Any) -> None:
    ray.answers["ServerActor 0", "answer"] = NOTHING
    assert fleet.ask(("inject", "kill:1"), Patience(0.0)) == {0: NOTHING}
    wait = ray.wait

    def wait_on(refs: list[int], num_returns: int = 1, timeout: float = 0.0) -> Any:
        while True:  # FakeRay waits for 10 ms at most
            ready, others = wait(refs, num_returns, timeout)
            if ready or timeout <= 0:
                return ready, others
            timeout -= 0.01

    ray.wait = wait_on  # type: ignore[method-assign]
    late = threading.Timer(0.5, ray.answers.__setitem__, [("ServerActor 1", "answer"), ACTS])
    late.start()
    assert fleet.ask(("inject", "kill:1"), Patience(0.1, 50.0)) == {0: NOTHING, 1: ACTS}


# --- joins of servers that are there -----------------------------------------------------------------


class Fleet:
    """Four servers, all in step 10; what happens to them is put into `events`."""

    def __init__(self) -> None:
        self.spec = JobSpec("bcube:2x2")
        self.spares = NoSpares()
        self.events: queue.SimpleQueue[FleetEvent] = queue.SimpleQueue()
        self.asked: list[str] = []
        self.joined: list[int] = []

    def start(self, train: bytes) -> None:
        """Nothing is to be started."""

    def ask(self, request: tuple[str, str], patience: Patience) -> dict[int, dict[str, Any]]:
        if request[0] == "status":
            return {0: {"step": 9}, 1: {"step": 10}}
        self.asked.append(request[1])
        return {0: {"done": "server 0 has it started, to join"}}

    def join(self, server: int, incarnation: int, give_up: threading.Event) -> None:
        self.joined.append(server)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        try:
            return [self.events.get(timeout=0.01)]
        except queue.Empty:
            return []

    def view(self, epoch: int, *members: int, asked: tuple[tuple[int, str], ...] = ()) -> None:
        self.events.put(
            Changed(
                {
                    "term": 1,
                    "epoch": epoch,
                    "state": "steady",
                    "reason": "",
                    "members": list(members),
                    "learners": [],
                    "joined": {},
                    "asked": list(asked),
                    "abort": None,
                }
            )
        )

    def close(self) -> None:
        """Nothing is to be closed."""


def test_a_join_of_a_server_that_is_there_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    fleet: Any = Fleet()
    fleet.view(1, 0, 1, 2, 3)
    with Job(fleet, fleet.spec, "processes", Teller(None)) as job:
        job.begin(b"")
        for late in ("", "@step=9"):
            with pytest.raises(UsageError, match=r"server 1 is in the job; it can join when it is out of"):
                job.inject(f"join:1{late}")
        assert fleet.asked == []
        job.inject("join:1@step=10")  # its moment is still to come
        fleet.view(1, 0, 1, 2, 3, asked=((1, "join:1@step=10"),))
        wait_for(lambda: "join:1@step=10 changes nothing: server 1 is in the job" in caplog.text)
        assert fleet.joined == []
        fleet.view(2, 0, 2, 3)
        wait_for(lambda: job.status()["epoch"] == 2)
        job.inject("join:1@step=9")
        fleet.view(2, 0, 2, 3, asked=((1, "join:1@step=10"), (2, "join:1@step=9")))
        wait_for(lambda: fleet.joined == [1])
        assert fleet.asked == ["join:1@step=10", "join:1@step=9"]


def test_a_server_whose_death_is_known_can_join_though_the_view_has_it() -> None:
    fleet: Any = Fleet()
    fleet.view(1, 0, 1, 2, 3)
    with Job(fleet, fleet.spec, "processes", Teller(None)) as job:
        job.begin(b"")
        fleet.events.put(Died(1, "it was killed"))
        wait_for(lambda: 1 in job.status()["lost"])
        assert job.inject("join:1")["done"] == ["server 0 has it started, to join"]


def test_a_fault_that_nobody_applies_is_an_error() -> None:
    fleet: Any = Fleet()
    fleet.ask = lambda request, patience: {0: NOTHING}
    fleet.view(1, 0, 1, 2, 3)
    with Job(fleet, fleet.spec, "processes", Teller(None)) as job:
        job.begin(b"")
        with pytest.raises(FabricError, match="no server can apply kill:2"):
            job.inject("kill:2")
