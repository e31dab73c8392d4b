"""What the page says of a job, from its status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bml.topology import parse
from bml.web import model
from bml.web.model import Pace, Page
from bml.web.parts import Parts


def answer(**other: Any) -> dict[str, Any]:
    nics = [
        {"level": level, "carrier": True, "sent_per_s": 10.0 + level, "received_per_s": 1.0}
        for level in (0, 1)
    ]
    said = {"epoch": 1, "step": 7, "phase": "reduce", "progress": 0.5, "waits_for": "slices", "nics": nics}
    return {**said, "suspects": [], "transport": {"name": "tcp"}, "shares": None, **other}


def status(servers: dict[int, dict[str, Any]] | None = None, **other: Any) -> dict[str, Any]:
    """A job on bcube:3x2 that is well, with these answers and keys in the place of others. Passes JSON."""
    now: dict[str, Any] = {
        "job": "j",
        "fabric": "bcube:3x2",
        "algorithm": "auto",
        "launcher": "processes",
        "emulated": None,
        "running": True,
        "state": "steady",
        "epoch": 2,
        "members": list(range(9)),
        "failures": [],
        "slow": {},
        "reason": "start",
        "noticed_s": 0.0,
        "step": 5,
        "suspicions": [],
        "learners": [],
        "waiting": [],
        "awaited": [],
        "spares": 0,
        "ended": {},
        "lost": {},
        "left": {},
        "absent": [],
        "views": [],
        "events": [],
        "servers": {**{server: answer() for server in range(9)}, **(servers or {})},
    }
    return json.loads(json.dumps({**now, **other}))  # type: ignore[no-any-return]


#: What the status of a job has beside that when all servers have ended well.
ENDED: dict[str, Any] = {"ended": dict.fromkeys(range(9), "done")}


def page(servers: dict[int, dict[str, Any]] | None = None, **other: Any) -> Page:
    return model.page_of(status(servers, **other), Pace(), 100.0)


def without(*servers: int) -> dict[str, Any]:
    """A view and answers without these servers."""
    left = [server for server in range(9) if server not in servers]
    return {"members": left, "servers": {server: {} for server in servers}}


def test_a_job_that_is_well() -> None:
    made = page()
    assert made.mood == "fine"
    assert made.headline == "All 9 servers work"
    assert (made.step, made.epoch, made.reason, made.phase) == (7, 2, "start", "reduce")
    assert made.counts == {"working": 9}
    assert made.trouble == made.detours == made.warnings == made.predicted == []
    assert made.servers[4].nics[1].sent_per_s == 11.0
    assert made.about == "bcube:3x2: 9 servers, algorithm auto, launcher processes, transport tcp"
    json.dumps(model.as_json(made), allow_nan=False)


def test_a_dead_server_is_said_once_with_its_reason() -> None:
    lost = {"lost": {4: "server 4 is out of view 2: it was silent"}, "failures": ["server:4"]}
    made = page(**without(4), **lost)
    assert made.mood == "hurt"
    assert made.headline == "8 of 9 servers in the view; 1 server dead"
    assert [each.text for each in made.trouble] == ["Server 4 is dead: it was silent"]
    assert {nic.state for nic in made.servers[4].nics} == {"dead"}
    assert made.servers[4].step is None


@pytest.mark.parametrize(
    ("other", "state", "words"),
    [
        ({"learners": [4]}, "joining", "follows the steps"),
        ({"waiting": [4], "lost": {4: "it was killed"}}, "joining", "asks to join"),
        ({"awaited": [4], "failures": ["server:4"]}, "joining", "still to come"),
        ({"absent": [4], "failures": ["server:4"]}, "absent", "not been started"),
        ({"left": {4: "server 4 is out of view 2: server 4 leaves: SIGTERM"}}, "absent", "server 4 leaves"),
        ({"left": {4: "it was drained"}, "awaited": [4]}, "joining", "still to come"),
        ({"servers": {4: answer()}, "failures": ["server:4"]}, "absent", "it runs"),
        ({"failures": ["server:4"]}, "dead", "not in the view"),
        ({"ended": {4: "done"}}, "ended", "done"),
        ({}, "absent", "not been started"),
    ],
)
def test_states_of_a_server_that_is_out_of_the_view(other: dict[str, Any], state: str, words: str) -> None:
    made = page(**{**without(4), **other}).servers[4]
    assert made.state == state
    assert words in made.why


def test_of_a_job_that_is_over_no_server_is_silent_or_in_trouble() -> None:
    made = page(running=False, servers={}, ended={0: "done"}, left={1: "it got SIGTERM"}, waiting=[2])
    assert made.counts == {"absent": 1, "ended": 8}
    assert made.trouble == []


def test_a_server_that_does_not_answer_and_one_that_computes_slowly() -> None:
    shares = {"batch": 9, "samples": {}, "speeds": {"2": 0.5}}
    made = page({3: {"answers": False}, 2: answer(shares=shares)})
    assert (made.servers[3].state, made.servers[2].state) == ("silent", "slow")
    assert "50% of the fastest's speed" in made.servers[2].why
    assert [each.state for each in made.trouble] == ["silent", "slow"]


@pytest.mark.parametrize(
    ("other", "state", "words"),
    [
        ({"failures": ["link:4/0"]}, "dead", "the NIC or its cable"),
        ({"slow": {"4/0": "1/8"}}, "slow", "1/8 of its rate"),
        (
            {
                "servers": {
                    1: answer(suspects=[{"peer": 4, "level": 0, "kind": "silence", "why": "heard nothing"}])
                }
            },
            "suspected",
            "heard nothing",
        ),
        ({"servers": {4: answer(nics=[{"level": 0, "carrier": False}])}}, "dead", "no carrier"),
    ],
)
def test_states_of_a_nic(other: dict[str, Any], state: str, words: str) -> None:
    answers = other.pop("servers", {})
    made = page(answers, **other)
    nic, further = made.servers[4].nics
    assert (nic.state, further.state, made.servers[4].state) == (state, "working", "working")
    assert words in nic.why
    assert [(each.kind, each.part, each.state) for each in made.trouble] == [("nic", "4/0", state)]


def test_a_server_whose_nics_are_all_suspected_is_suspected() -> None:
    suspects = [{"peer": 4, "level": level, "kind": "silence", "why": "silent"} for level in (0, 1)]
    assert page({1: answer(suspects=suspects)}).servers[4].state == "suspected"


def test_a_dead_switch_is_listed_and_its_nics_are_not() -> None:
    made = page(failures=["switch:0/1"])
    assert made.dead_switches == ["0/1"]
    assert [each.text for each in made.trouble] == ["Switch 0/1 is dead: it joined servers 3, 4 and 5"]
    assert [made.servers[server].nics[0].state for server in (2, 3, 4, 5, 6)] == [
        "working",
        *["dead"] * 3,
        "working",
    ]


def test_detours_lead_over_living_parts_between_former_neighbours() -> None:
    made = page(failures=["link:4/0", "server:1"], **without(1))
    fabric = parse("bcube:3x2").without("link:4/0", "server:1")
    assert [(each.source, each.target) for each in made.detours] == [(3, 4), (4, 5)]
    for detour in made.detours:
        at = detour.source
        for start, level, end in detour.hops:
            assert start == at
            assert end in fabric.neighbours(start, level)
            at = end
        assert at == detour.target
    assert made.detours[1].text == "From 4 to 5: NIC 4/1 to 7, NIC 7/0 to 8, NIC 8/1 to 5"
    parted = page(failures=["link:4/0", "link:4/1"])
    assert parted.detours == [], "there is no way round"


def test_many_detours_are_cut_short() -> None:
    failures = tuple(parse("bcube:16x2").without("switch:0/0").failures)
    assert len(model.detours(parse("bcube:16x2"), failures)) == 12


def test_while_servers_agree_the_page_says_so() -> None:
    assert page(state="freezing").headline == "The servers agree on the next view"
    assert page(state="gathering", epoch=0).mood == "starting"


def test_what_is_to_come_is_said_in_words() -> None:
    steps = {"epoch": 2, "step_s": 0.793, "wires_s": 0.7, "basis": "the rate", "measured_s": None, "steps": 0}
    made = page(
        warnings=[{"part": "NIC 4/0", "text": "its heartbeats come late", "for_s": 6.2, "evidence": {}}],
        predicted=steps,
        remaining={"done": 0.38, "seconds": 440.0, "low_s": 41.0, "high_s": 470.0},
    )
    assert made.warnings == ["NIC 4/0: its heartbeats come late (for 6 s)"]
    assert made.predicted == [
        ["Time left", "0:07:20"],
        ["Nine times in ten", "41 s to 0:07:50"],
        ["Done of the loop", "38%"],
        ["A step, predicted", "793 ms"],
        ["From", "the rate"],
    ]
    measured = page(predicted={**steps, "measured_s": 0.00772, "steps": 31}, remaining=None).predicted
    assert measured[:2] == [["A step, predicted", "793 ms"], ["A step, measured", "7.72 ms (31 steps)"]]


def test_the_end_keeps_what_was_known_and_says_how() -> None:
    before = model.as_json(page(failures=["link:4/0"]))
    well = model.ended(before, {"ended_well": True, "text": "9 servers reached the end", "steps": 70})
    assert (well["mood"], well["step"], well["ended"]) == ("well", 70, True)
    assert well["headline"] == "The job has ended well: 9 servers reached the end."
    assert well["servers"] == before["servers"]
    asked = {"ended_well": False, "interrupted": True, "text": "it was interrupted", "kind": "SystemExit"}
    over = model.ended(before, asked)
    assert (over["mood"], over["headline"]) == ("ended", "The job was ended: it was interrupted")
    failed = model.ended(before, {"ended_well": False, "text": "TooFewServers", "kind": "X"})
    assert (failed["mood"], failed["headline"]) == ("failed", "The job has failed: TooFewServers")


def test_a_job_that_ended_well_has_made_the_steps_that_its_end_says() -> None:
    """Servers count the steps of the runtime, too, such as the one that compares their parameters."""
    before = model.as_json(page())
    end = {"ended_well": True, "text": "9 servers reached the end after 6 steps", "steps": 6}
    assert model.ended(before, end)["step"] == 6
    assert model.ended(before, {"ended_well": False, "text": "died", "steps": 6})["step"] == before["step"]


@pytest.mark.parametrize(("failure", "part"), [("link:4/0", "4/0"), ("switch:0/1", "0/1")])
def test_a_part_that_was_broken_when_its_job_ended_is_listed(failure: str, part: str) -> None:
    made = page(**ENDED, failures=[failure])
    assert [each.part for each in made.trouble] == [part]
    assert [nic.state for nic in made.servers[4].nics] == ["dead", "ended"]
    assert made.servers[4].state == "ended"


def test_a_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    assert pace.per_s(0, 0.0) is None
    rates = [pace.per_s(step, step / 10) for step in range(5, 200, 5)]
    assert rates[-1] == 10.0
    assert pace.per_s(195, 25.0) == 0.0, "nothing has come for five seconds"


def test_a_pace_after_nobody_looked_and_after_the_fastest_server_died() -> None:
    pace = Pace()
    pace.per_s(0, 0.0)
    pace.per_s(10, 1.0)
    assert pace.per_s(400, 3600.0) is None
    assert pace.per_s(410, 3602.0) == 5.0
    assert pace.per_s(300, 3603.0) == 0.0


def test_at_the_start_servers_that_do_not_answer_yet_are_no_trouble_for_the_job() -> None:
    made = page({3: {"answers": False}}, epoch=0, members=[])
    assert (made.mood, made.headline) == ("starting", "The servers start")
    assert made.trouble[0].text == "Server 3 does not answer: it is frozen or too busy"


def test_while_a_new_coordinator_takes_over_the_job_does_not_start_anew() -> None:
    made = page(epoch=0, members=[], state="gathering", views=[{"epoch": 1, "members": [0, 1]}])
    assert (made.mood, made.headline) == ("changing", "The servers agree on the next view")


def test_numbers_of_json_are_servers() -> None:
    assert Parts(status(lost={4: "gone"}), parse("bcube:3x2")).lost == {4: "gone"}
