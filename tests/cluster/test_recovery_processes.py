"""Real processes, real sockets, real SIGKILL: the survivors finish the same step with the right bits."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
from descriptors import opened

import bml
from bml.errors import StartError, TooFewServers, UsageError

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def commit_gaps(result: bml.Result) -> dict[int, float]:
    """Longest time between two commits on each survivor: an upper bound of fault -> next commit."""
    return {server: metrics["step_max_s"] for server, metrics in result.report["metrics"].items()}


def check_sound(result: bml.Result, steps: int = 40) -> None:
    report = result.report
    assert len(set(report["digests"].values())) == 1
    assert report["steps"] == steps
    assert all(outcome == "done" for outcome in report["outcomes"].values())
    histories = {server: value["history"] for server, value in result.values.items()}
    first = histories[min(histories)]
    assert [step for step, _, _ in first] == list(range(1, steps + 1))  # no step lost, none doubled
    assert all(history == first for history in histories.values())


@pytest.mark.smoke
def test_fault_free_run_equals_one_process() -> None:
    result = jobs.launch(jobs.descend)
    check_sound(result)
    assert sorted(result.values) == list(range(9))
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


@pytest.mark.smoke
def test_kill_and_silent_cable_in_mid_step() -> None:
    result = jobs.launch(jobs.descend, faults=["kill:4@step=12", "blackhole:2/0@step=22"])
    check_sound(result)
    assert sorted(result.values) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert "signal 9" in result.dead[4]
    assert result.report["samples"]["complete"], "every sample exactly once per epoch"
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)
    _, killed, silent = result.report["views"]
    assert killed["failures"] == ["server:4"]
    assert killed["commit"] == 11, "the step of the kill was tried again"
    assert "server 4" in killed["reason"]
    assert set(silent["failures"]) == {"server:4", "link:2/0"}
    assert silent["commit"] == 21
    assert "NIC 2/0" in silent["reason"]


@pytest.mark.serial("recovery in well under a second is what bml promises")
def test_a_kill_and_a_silent_cable_are_survived_in_time() -> None:
    result = jobs.launch(jobs.descend, faults=["kill:4@step=12", "blackhole:2/0@step=22"])
    _, killed, silent = result.report["views"]
    assert killed["noticed_s"] + killed["recover_s"] < jobs.DEATH_S
    assert silent["noticed_s"] + silent["recover_s"] < jobs.SILENCE_S
    assert max(commit_gaps(result).values()) < jobs.SILENCE_S


@pytest.mark.smoke
def test_three_servers_and_the_coordinator_die() -> None:
    faults = ["kill:0@step=8", "coordinator@step=13", "kill:4@step=18", "kill:8@step=28"]
    seen = jobs.Seen()
    result = jobs.launch(jobs.descend, faults=faults, on_change=seen)
    check_sound(result)
    assert seen.terms == [1, 2], "the coordinator did not die"
    assert sorted(result.values) == [1, 2, 3, 5, 6, 7]
    assert [len(view["members"]) for view in result.report["views"]] == [9, 8, 7, 6]
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


def test_a_server_and_a_cable_fail_at_once() -> None:
    result = jobs.launch(jobs.descend, faults=["kill:4@step=12", "blackhole:2/0@step=12"])
    check_sound(result)
    assert sorted(result.values) == [0, 1, 2, 3, 5, 6, 7, 8], "nobody else was taken for dead"
    assert set(result.report["views"][-1]["failures"]) == {"server:4", "link:2/0"}
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


def test_without_recompute_the_mean_is_of_what_contributed() -> None:
    result = jobs.launch(lambda session: jobs.descend(session, recompute=False), faults=["kill:4@step=12"])
    check_sound(result)
    samples = result.report["samples"]
    assert samples["left_out"] == 4  # 36 samples on 9 servers: the share of server 4 in step 12
    epoch = samples["loops"][0]["epochs"][2]
    assert (epoch["used_once"], epoch["used_never"], epoch["used_more"]) == (176, 4, 0)
    batch = 11  # the session's twelfth step, as its first was the agreement on the state
    used = np.concatenate([value["shares"][batch - 1] for value in result.values.values()])
    assert len(used) == len(np.unique(used)) == 32
    mean = jobs.reference(instead={batch: used})
    np.testing.assert_allclose(result.value["params"], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.serial("the end of a cut cable is noticed before silence would be")
def test_dead_switch_and_cut_cable() -> None:
    detect_s = 3.0
    result = jobs.launch(jobs.descend, faults=["switch:1/0@step=10", "cut:5/0@step=20"], detect_s=detect_s)
    check_sound(result)
    assert sorted(result.values) == list(range(9)), "no server was lost"
    last = result.report["views"][-1]
    assert set(last["failures"]) == {"switch:1/0", "link:5/0"}
    assert last["noticed_s"] < detect_s, "the end of a cut cable notices at once, not by silence"
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


@pytest.mark.serial("recovery in well under a second is what bml promises")
def test_frozen_server_is_evicted_and_cannot_disturb_when_it_thaws() -> None:
    def longer(session: bml.Session) -> dict[str, object]:
        return jobs.descend(session, epochs=60, pause_s=0.01)  # it wakes before the others end

    result = jobs.launch(longer, faults=["freeze:3@step=10,for=2s"])
    check_sound(result, steps=300)
    assert sorted(result.values) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert "out of view 2: server 3 is silent" in result.dead[3], "it woke, and was told"
    evicted = result.report["views"][1]
    assert evicted["failures"] == ["server:3"]
    assert evicted["noticed_s"] + evicted["recover_s"] < 2.5
    np.testing.assert_allclose(result.value["params"], jobs.reference(60), rtol=1e-3, atol=1e-5)


def test_of_two_halves_the_one_that_lives_goes_on() -> None:
    """Two dead cables explain as well what the others see; then servers 0 and 1 would be put before them."""
    faults = ["freeze:0@step=20", "freeze:1@step=20"]
    result = jobs.launch(jobs.descend, "bcube:2x2", min_servers=2, faults=faults)
    check_sound(result)
    assert sorted(result.values) == [2, 3]
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-4, atol=1e-6)


def test_nobody_comes_back_to_a_job_that_was_given_up() -> None:
    """All are started again after their death, but the coordinator has given up, with nobody to tell."""
    faults, before = [f"kill:{server}@step=5" for server in range(4)], jobs.children()
    with pytest.raises(TooFewServers, match=r"only [012] of 4 servers are left"):
        jobs.launch(jobs.descend, "bcube:2x2", faults=faults, rejoin=True)
    assert jobs.children() <= before


def test_too_few_servers_stop_with_the_state_intact() -> None:
    def train(session: bml.Session) -> dict[str, object]:
        w = np.zeros(5, np.float32)
        done = 0
        try:
            for _ in range(30):
                w += session.allreduce(np.ones(5, np.float32))
                done += 1
        except TooFewServers as error:
            return {"error": str(error), "w": w, "steps": done}
        return {"w": w, "steps": done}

    with pytest.raises(
        TooFewServers, match=r"only 2 of 3 servers are left, \[0, 2\]: min_servers is 3"
    ) as caught:
        jobs.launch(train, "bcube:2x2", min_servers=3, faults=["kill:1@step=5", "kill:3@step=10"])
    reports = caught.value.result.reports  # type: ignore[attr-defined]
    assert sorted(reports) == [0, 2]
    for report in reports.values():
        assert report.outcome == "stopped"
        assert report.value["steps"] == 9
        np.testing.assert_array_equal(
            report.value["w"],
            np.full(5, 4 * 4 + 5 * 3, np.float32),
            "steps 1-4 of four servers, 5-9 of three",
        )


def test_by_default_more_than_half_of_the_view_must_survive() -> None:
    with pytest.raises(TooFewServers, match="more than half of the 2 before"):
        jobs.launch(jobs.descend, "bcube:2x1", faults=["kill:1@step=5"])


def test_a_training_function_that_raises_on_one_server() -> None:
    def train(session: bml.Session) -> None:
        for step in range(20):
            if step == 7 and session.server == 3:
                raise KeyError("the 7th batch is missing")
            session.allreduce(np.ones(3))

    with pytest.raises(bml.TrainingError, match=r"server 3 raised KeyError.*7th batch") as caught:
        jobs.launch(train, "bcube:2x2")
    assert caught.value.server == 3
    assert "in train" in str(caught.value), "the traceback is there"
    outcomes = {server: report.outcome for server, report in caught.value.result.reports.items()}  # type: ignore[attr-defined]
    assert outcomes == {0: "stopped", 1: "stopped", 2: "stopped", 3: "failed"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fabric": "bcube:3"}, "bcube:3"),
        ({"fabric": "ring:9"}, "ring:9"),
        ({"faults": ["kill:12@step=3"]}, "no server 12"),
        ({"faults": ["kill:4"]}, "kill:4"),
        ({"faults": ["blackhole:4/7@step=1"]}, "4/7"),
        ({"min_servers": 10}, "min_servers is 10"),
        ({"detect_s": 0.0}, "detect_s is 0.0"),
        ({"algorithm": "magic"}, "magic"),
        ({"launcher": "slurm"}, "slurm"),
        ({"address": "127.0.0.1:1"}, "address is for the launcher ray"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_starts(
    settings: dict[str, object], message: str
) -> None:
    before = jobs.children()
    with pytest.raises(UsageError, match=message):
        bml.launch(jobs.descend, **{"launcher": "processes", "fabric": "bcube:2x2", **settings})  # type: ignore[arg-type]
    assert jobs.children() == before


def test_nothing_is_left_behind() -> None:
    processes, descriptors = jobs.children(), opened()
    jobs.launch(jobs.descend, "bcube:2x2", faults=["kill:1@step=5", "freeze:3@step=9"], min_servers=2)
    assert jobs.children() == processes
    assert opened() <= descriptors


def test_a_server_that_dies_at_start_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(StartError, match="no process could be made: /bin/false exited with status 1"):
        jobs.launch(jobs.descend, "bcube:2x1")


def test_a_server_that_cannot_start_says_why_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BML_RDMA_SLOTS", "many")
    with pytest.raises(StartError, match=r"^server \d cannot start: BML_RDMA_SLOTS is 'many': give a"):
        jobs.launch(jobs.descend, "bcube:2x1")
    assert "Traceback" not in capfd.readouterr().err


def large(session: bml.Session) -> bool:
    """Three sums of 12 MB, inexact ones: another order of addition would show in the last bits."""
    base = np.arange(3_000_001, dtype=np.float32)
    x = np.sin(base * np.float32(session.server + 1))
    totals = [session.allreduce(x) for _ in range(3)]
    for server in range(9):  # one by one: a long call that holds the interpreter's lock would be a failure
        for total in totals:
            total -= np.sin(base * np.float32(server + 1))
    return all(float(np.abs(total).max()) < 1e-4 for total in totals)


def test_what_was_final_everywhere_is_not_sent_again() -> None:
    result = jobs.launch(large, faults=["cut:4/0@step=2,phase=complete"])
    cut = result.report["views"][1]
    print(*((view["reason"], view["kept"]) for view in result.report["views"]), result.dead)
    assert result.values == dict.fromkeys(range(9), True)
    assert cut["failures"] == ["link:4/0"]
    assert cut["commit"] == 2 or 0 < cut["kept"] < 3_000_001
