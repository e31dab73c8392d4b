"""Servers that come, go and come again in real jobs: the same bits, every sample once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import UsageError

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

TRANSPORTS = ("tcp", "shm")
EPOCHS = 40
STEPS = 200
EVERYBODY = list(range(9))


def train(session: bml.Session, n_servers: int = 0) -> dict[str, Any]:
    """Long enough that a process can start meanwhile, until so many servers contribute (see `jobs.pace`)."""
    w = session.empty(jobs.LENGTH)
    w[:] = 0
    session.state(params=w)
    contributors = []

    def again(indices: Any) -> Any:
        time.sleep(0.004)
        return jobs.sample_rows(indices, w)

    for batch in session.batches(jobs.N_SAMPLES, global_batch=jobs.GLOBAL_BATCH, epochs=EPOCHS, seed=3):
        jobs.pace(session, n_servers)
        w -= np.float32(0.1) * batch.allreduce(again(batch.indices), recompute=again)
        contributors.append(session.contributors)
    return {"params": w, "contributors": contributors}


def train_four(session: bml.Session) -> dict[str, Any]:
    return train(session, 4)


def train_nine(session: bml.Session) -> dict[str, Any]:
    return train(session, 9)


def check(result: bml.Result, joined: tuple[int, ...]) -> None:
    report = result.report
    print("views:", *((v["epoch"], v["commit"], v["reason"]) for v in report["views"]), report["dead"])
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert report["samples"]["complete"], "a sample was used never, or twice"
    assert len({str(r.samples) for r in result.reports.values()}) == 1, "their ledgers differ"
    np.testing.assert_allclose(result.value["params"], jobs.reference(EPOCHS), rtol=1e-4, atol=1e-5)
    for server in joined:
        seen = result.values[server]["contributors"]
        assert 0 < len(seen) < STEPS, "it was there from the beginning, or never"
        assert server in seen[-1], "it never contributed"
        others = result.values[min(set(result.values) - set(joined))]["contributors"]
        assert seen == others[-len(seen) :]


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.smoke), "shm"])
def test_a_killed_server_joins_again_and_contributes(transport: str) -> None:
    result = jobs.launch(train_nine, faults=["kill:4@step=20", "join:4@step=30"], transport=transport)
    check(result, (4,))
    assert sorted(result.values) == EVERYBODY
    _, died, came, learnt = result.report["views"]
    assert died["failures"] == ["server:4"]
    assert (came["failures"], came["reason"]) == ([], "server 4 joins")
    assert learnt["reason"] == "server 4 has caught up"
    assert came["commit"] > died["commit"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_lowest_server_leaves_on_notice_and_comes_again(transport: str) -> None:
    faults = ["leave:0@step=20", "join:0@step=30"]
    result = jobs.launch(train_four, "bcube:2x2", faults=faults, transport=transport)
    check(result, (0,))
    gone = result.report["views"][1]
    assert gone["commit"] == 20, "it finished its step, and brought nothing to the next"
    assert "leaves" in gone["reason"]


def test_a_job_grows_by_a_server_that_was_absent() -> None:
    result = jobs.launch(train_four, "bcube:2x2", absent=[3], faults=["join:3@step=20"])
    check(result, (3,))
    assert result.report["views"][0]["failures"] == ["server:3"]


def test_lost_servers_are_started_again_if_asked_for() -> None:
    faults = ["kill:1@step=20", "exit:3@step=100"]  # if 1 is not back yet, 0 and 2 share a switch
    result = jobs.launch(train_four, "bcube:2x2", rejoin=True, faults=faults, transport="auto")
    check(result, (1, 3))
    assert result.dead == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_joiner_is_killed_while_the_state_comes_and_a_donor_too(transport: str) -> None:
    result = jobs.launch(
        train_nine,
        faults=["kill:4@step=20", "join:4@step=30", "kill:4@phase=transfer", "kill:1@phase=transfer"],
        rejoin=True,
        transport=transport,
    )
    check(result, (1, 4))
    assert sorted(result.values) == EVERYBODY


def test_the_coordinator_dies_while_a_server_joins() -> None:
    """Server 0 has it killed, when it is about to give its part: so a neighbour of it must join."""
    faults = ["kill:1@step=20", "join:1@step=30", "coordinator@phase=transfer"]
    seen = jobs.Seen()
    result = jobs.launch(train_nine, faults=faults, on_change=seen)
    check(result, (1,))
    assert seen.terms == [1, 2], "the coordinator did not die"


def train_when_told(session: bml.Session, go: Path, n_servers: int = 0) -> dict[str, Any]:
    """`train`, whose first step waits for this file: what is done to the job by hand may take its time."""
    while not go.exists():
        time.sleep(0.005)
    return train(session, n_servers)


def test_sigterm_is_the_notice_of_preemption(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with bml.start(
        lambda session: train_when_told(session, go), fabric="bcube:2x2", launcher="processes"
    ) as job:
        os.kill(jobs.process_of(job, 2), signal.SIGTERM)
        go.touch()
        result = job.wait(60)
    check(result, ())
    assert sorted(result.values) == [0, 1, 3]
    assert "leaves: it got SIGTERM" in result.left[2]
    assert all("silent" not in view["reason"] for view in result.report["views"])


def test_servers_come_and_go_by_hand(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with bml.start(
        lambda session: train_when_told(session, go, 4), fabric="bcube:2x2", launcher="processes"
    ) as job:
        job.inject("leave:3,step=20")
        job.inject("join:3,step=60")
        go.touch()
        result = job.wait(60)
    check(result, (3,))


def other_shape(session: bml.Session) -> float:
    late = session.joins
    w = session.empty(7 if late else 5)
    w[:] = 0
    session.state(params=w)
    for _ in session.steps(80):
        jobs.pace(session, 4, 0.1)
        w += session.allreduce(np.ones(5, np.float32))[0]
    return float(w[0])


def test_a_joiner_with_another_state_is_told_and_the_others_go_on() -> None:
    result = jobs.launch(other_shape, "bcube:2x2", faults=["kill:1@step=20", "join:1@step=30"])
    assert sorted(result.values) == [0, 2, 3]
    assert len(set(result.values.values())) == 1
    assert "this server begins with the state" in result.dead[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_joiner_is_let_in_when_it_has_loaded_its_data(transport: str, tmp_path: Path) -> None:
    """Results would be kept for it otherwise, as many as the others get meanwhile."""
    died, go = tmp_path / "died", tmp_path / "go"

    def train(session: bml.Session) -> str:
        x, refused = np.zeros(2), ""
        session.state(params=x)
        if died.exists():
            with pytest.raises(UsageError) as caught:
                session.allreduce(x)
            refused = str(caught.value)
            while not go.exists():
                time.sleep(0.005)
        for step in session.steps(300):
            if step > 150:
                jobs.pace(session, 4)
            x += session.allreduce(np.ones(2))
            time.sleep(0.002)
            if (session.server, step) == (0, 20):
                died.touch()
            elif (session.server, step) == (0, 150):
                go.touch()
        return refused

    faults = ["kill:3@step=20", "join:3@step=30"]
    result = jobs.launch(train, "bcube:2x2", faults=faults, transport=transport)
    assert "server 3 joins a running job" in result.values[3]
    assert len(set(result.report["digests"].values())) == 1
    _, gone, came, _ = result.report["views"]
    assert gone["failures"] == ["server:3"]
    assert came["commit"] > 150


def long_vector(session: bml.Session) -> float:
    """The state is tiny: it reaches a joiner while that still copies the result of the step before."""
    total = np.zeros(1)
    session.state(total=total)
    vector = session.empty(4 << 20)
    vector[:] = 1
    for step in session.steps(120):
        if step > 60:  # a server that starts slowly
            jobs.pace(session, 4)
        total += session.allreduce(vector)[-1]
        total[...] = np.round(total / 3)  # whatever it is, it must be the same everywhere
    return float(total[0])


def test_a_tiny_state_does_not_overtake_the_copy_of_a_long_result() -> None:
    faults = ["kill:3@step=10", "join:3@step=20"]
    result = jobs.launch(long_vector, "bcube:2x2", faults=faults, transport="shm")
    assert len(set(result.values.values())) == 1
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.dead == {}


def replayed(session: bml.Session, sleep_s: tuple[float, ...], steps: int) -> list[tuple[bool, float]]:
    """Two steps an iteration; a joiner sleeps so long in its first ones, and computes nothing it need not."""
    w = np.zeros(1)
    session.state(params=w)
    sleeps = iter(sleep_s if session.joins else ())
    seen = []
    for step in session.steps(steps):
        time.sleep(next(sleeps, 0.003))
        if step > steps // 2:  # a server that starts slowly
            jobs.pace(session, 4)
        nothing = session.replays
        brought = np.full(1 << 17, 0.0 if nothing else 1.0)
        for _ in range(2):
            total = session.allreduce(brought)
            assert (total == len(session.contributors)).all(), "what counts was not computed"
        w += total[0] / len(session.contributors)
        seen.append((nothing, float(session.server in session.contributors)))
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_joiner_that_keeps_too_much_is_given_a_later_state(transport: str) -> None:
    faults = ["kill:3@step=20", "join:3@step=30"]

    def train(session: bml.Session) -> list[tuple[bool, float]]:
        return replayed(session, (0.7,), 300)

    result = jobs.launch(train, "bcube:2x2", faults=faults, transport=transport, kept_mib=4)
    assert result.dead == {}
    assert len(result.report["digests"]) == 4
    assert len(set(result.report["digests"].values())) == 1
    later = [view["reason"] for view in result.report["views"]].count("server 3 needs a later state")
    assert 1 <= later <= 3
    seen = result.values[3]
    assert seen[0] == (True, 0.0)
    assert seen[-1] == (False, 1.0)
    assert not any(contributes for nothing, contributes in seen if nothing)


def test_a_joiner_that_is_slower_than_the_others_comes_in_with_a_later_state() -> None:
    def train(session: bml.Session) -> list[tuple[bool, float]]:
        return replayed(session, (0.1,) * 20, 300)

    faults = ["kill:3@step=20", "join:3@step=30"]
    result = jobs.launch(train, "bcube:2x2", faults=faults, kept_mib=4)
    assert result.dead == {}
    assert len(set(result.report["digests"].values())) == 1
    assert result.values[3][-1] == (False, 1.0)


@pytest.mark.parametrize("absent", [[4], [0, 1, 2, 3]])
def test_who_cannot_be_absent(absent: list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be absent"):
        jobs.launch(train, "bcube:2x2", absent=absent)


def test_nobody_is_absent_who_holds_the_others_together() -> None:
    with pytest.raises(UsageError, match="cannot reach each other"):
        jobs.launch(train, "bcube:2x2", absent=[1, 2])
