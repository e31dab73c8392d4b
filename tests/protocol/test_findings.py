"""Evidence as a coordinator gathers it: the time to act on it, the views that answer it, how long it took."""

from __future__ import annotations

import pytest

from bml.protocol.coordinator.evidence import Findings
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.topology import parse

TIMES = Timeouts.of(0.5)
FABRIC = parse("bcube:3x1")


def suspect(observer: int, peer: int, kind: str = "silence", silent_s: float = 0.6) -> msg.Suspect:
    return msg.Suspect(observer, peer, 0, kind, silent_s, f"{observer} does not hear {peer}")


def view(*failures: str) -> msg.View:
    return msg.View(2, FABRIC.without(*failures).servers, failures, 0, "", 0.0)


@pytest.fixture
def findings() -> Findings:
    return Findings(TIMES, 10.0)


def test_a_stream_of_suspicions_does_not_postpone_the_diagnosis(findings: Findings) -> None:
    for nth in range(20):
        findings.note_suspicion(suspect(0, 1), 20.0 + nth * TIMES.silence_window_s / 2)
    assert findings.act_at == pytest.approx(20.0 + TIMES.silence_window_s)


def test_proof_is_acted_on_sooner_than_silence_whatever_came_first(findings: Findings) -> None:
    findings.note_suspicion(suspect(0, 1), 20.0)
    findings.note_proof(20.01)
    assert findings.act_at == pytest.approx(20.01 + TIMES.proof_window_s)


def test_a_broken_connection_is_proof_and_silence_is_not(findings: Findings) -> None:
    findings.note_suspicion(suspect(0, 1, "reset", 0.0), 20.0)
    assert findings.act_at == pytest.approx(20.0 + TIMES.proof_window_s)


def test_the_time_to_detect_counts_from_the_first_silence(findings: Findings) -> None:
    assert findings.noticed_s(20.0) == 0.0
    findings.note_suspicion(suspect(0, 1, silent_s=0.6), 20.0)
    findings.note_suspicion(suspect(2, 1, silent_s=0.1), 20.05)
    assert findings.noticed_s(20.125) == pytest.approx(0.725)


def test_a_view_answers_evidence_about_the_parts_it_excludes_alone(findings: Findings) -> None:
    findings.gone[2] = "is dead: killed"
    for message in (suspect(0, 2), suspect(0, 1)):
        findings.suspect(message)
        findings.note_suspicion(message, 20.0)
    findings.trusted.add((0, 1, 0))
    findings.healed = frozenset({"link:1/0"})
    findings.answered(view("server:2"), FABRIC.without("server:2"))
    assert findings.gone == {}
    assert findings.texts == ["0 does not hear 1"]
    assert (findings.trusted, findings.healed) == (set(), frozenset())
    findings.settle()
    assert findings.fresh, "one suspicion stands"
    findings.answered(view("server:1", "server:2"), FABRIC.without("server:1", "server:2"))
    findings.settle()
    assert (findings.fresh, findings.act_at) == (False, None)


@pytest.mark.parametrize("left", ["gone", "suspicion", "stale"])
def test_it_rests_when_nothing_is_left(findings: Findings, left: str) -> None:
    findings.note_proof(20.0)
    if left == "gone":
        findings.gone[1] = "is dead: killed"
    elif left == "suspicion":
        findings.suspect(suspect(0, 1))
    else:
        findings.stale.add(1)
    findings.settle()
    assert findings.fresh
    findings.gone.clear()
    findings.stale.clear()
    findings.forget(lambda each: each.observer == 0)
    findings.settle()
    assert (findings.fresh, findings.act_at) == (False, None)


def test_only_parts_of_the_fabric_are_evidence(findings: Findings) -> None:
    findings.gone.update({1: "is dead: killed", 2: "killed"})
    for message in (suspect(0, 1), suspect(0, 2)):
        findings.suspect(message)
    evidence = findings.evidence(FABRIC.without("server:2"))
    assert dict(evidence.gone) == {1: "is dead: killed"}
    assert [(each.observer, each.peer) for each in evidence.suspicions] == [(0, 1)]


def test_servers_outside_the_view_are_forgotten(findings: Findings) -> None:
    findings.gone.update({1: "is dead: killed", 2: "killed"})
    findings.forget_gone((0, 1))
    assert findings.gone == {1: "is dead: killed"}
