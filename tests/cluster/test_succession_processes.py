"""Real coordinators that are stopped, deposed or crash: the job gets another one, or ends with the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import jobs
import numpy as np
import pytest

import bml
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.spec.job import JobSpec, Place, default_nics
from bml.errors import StartError
from bml.io.poller import Poller
from bml.protocol.wire import messages as msg
from bml.transport.handshake import control
from bml.transport.handshake.auth import Identity

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

STEPS, WAITS_AT = 150, 50
WITHIN_S = 6.0
"""Two silences one after the other, each noticed as late as promised, and a wait for an answer."""
#: No time of anybody's clock is above this, and it fits into a message.
HIGH_TERM = 1 << 62


def train(session: bml.Session, go: Path | None = None) -> float:
    """Steps of 10 ms and more; the longest time from one commit to the next.

    All wait in the middle until the file is there, so that the faults come in order, and before the end.
    """
    longest_s, last = 0.0, time.monotonic()
    for step in range(STEPS):
        session.allreduce(np.ones(1000, np.float32))
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last), now
        time.sleep(0.01)
        while step == WAITS_AT and go is not None and not go.exists():
            time.sleep(0.01)
            last = time.monotonic()
    return longest_s


@pytest.mark.serial("a coordinator that is silent is replaced in the time that is promised")
@pytest.mark.parametrize(
    "faults",
    [
        ["freeze:coordinator@step=20,for=20s", "kill:4@step=20"],
        ["freeze:coordinator@step=20", "freeze:4@step=20"],
        ["freeze:coordinator@step=20,for=20s", "coordinator@step=60", "kill:1@step=60"],
        pytest.param(["coordinator@step=20", "kill:0@step=20"], marks=pytest.mark.smoke),
    ],
    ids=" ".join,
)
def test_a_stopped_coordinator_is_replaced(faults: list[str], tmp_path: Path) -> None:
    terms, replaced = set[int](), tmp_path / "replaced"

    def note(now: dict[str, Any]) -> None:
        terms.add(now["term"])
        if now["term"] > 1 and now["epoch"]:
            replaced.touch()

    result = jobs.launch(lambda session: train(session, replaced), faults=faults, on_change=note)
    assert len(result.values) == 8
    assert terms == set(range(1, len([fault for fault in faults if "coordinator" in fault]) + 2))
    assert max(result.values.values()) < WITHIN_S


def _claim(contact: Any, spec: JobSpec) -> None:
    """Ask a server as a coordinator with a high term would, and hang up.

    The coordinator of the job dials again at once, which may end this connection before the answer.
    """
    poller, said, opens = Poller(), list[bytes](), list[control.Channel]()

    def opened(channel: control.Channel) -> None:
        opens.append(channel)
        channel.listen(said.append, lambda end: None if said else dial())
        channel.send(msg.encode(msg.Who(HIGH_TERM)))

    def dial() -> None:
        control.dial(
            *contact.control, identity=Identity.of(spec.token, spec.job, control.COORDINATOR), poller=poller,
            on_open=opened, on_fail=lambda end: pytest.fail(str(end)), expect_server=contact.server,
        )  # fmt: skip

    dial()
    deadline = time.monotonic() + 40
    while not said:
        assert time.monotonic() < deadline
        poller.poll(0.1)
    opens[-1].close()
    poller.close()


@pytest.mark.serial("a coordinator that is silent is replaced in the time that is promised")
def test_a_coordinator_with_a_lower_term_than_its_servers_know_gets_a_successor_above_it(
    tmp_path: Path,
) -> None:
    """As when terms were read from a clock that had stepped back: it was deposed, ended, and nobody came."""
    terms, go = set[int](), tmp_path / "go"
    with bml.start(
        lambda session: train(session, go),
        launcher="processes",
        transport="tcp",
        on_change=lambda now: terms.add(now["term"]),
    ) as job:
        fleet = job._fleet
        assert isinstance(fleet, ProcessFleet)
        for server in (0, 5):
            _claim(fleet._known.contacts[server], job.spec)
        job.inject("kill:4")
        go.touch()
        result = job.wait(60)
    assert len(result.values) == 8
    assert max(result.values.values()) < WITHIN_S
    assert max(terms) == HIGH_TERM + 1


def test_a_coordinator_that_crashes_on_every_start_ends_the_job_with_the_cause() -> None:
    spec = JobSpec("bcube:2x1", transport="tcp")

    def place(server: int | None) -> Place:
        return Place(namespace="/nowhere") if server is None else Place(default_nics(server, 1))

    fleet = ProcessFleet(spec, prints=False, place=place)
    began = time.monotonic()
    try:
        fleet.start(cloudpickle.dumps(train))
        with pytest.raises(StartError, match=r"10 coordinators in a row failed; the last was start"):
            _wait_for_long(fleet)
    finally:
        fleet.close()
    assert time.monotonic() - began < 40


def _wait_for_long(fleet: ProcessFleet) -> None:
    until = time.monotonic() + 40
    while time.monotonic() < until:
        fleet.wait(0.2)


def test_the_launcher_learns_of_no_more_than_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that has ended the job and exits is not replaced."""
    started: list[int] = []
    look: Callable[..., Any] = ProcessFleet._look_after_coordinator

    def counted(fleet: ProcessFleet) -> None:
        look(fleet)
        started.append(fleet._succession.term)

    monkeypatch.setattr(ProcessFleet, "_look_after_coordinator", counted)
    jobs.launch(lambda session: session.allreduce(np.ones(3)), "bcube:2x1")
    assert set(started) == {1}
