"""The detector on a virtual clock: heartbeats with delays, losses and stalls from seeds."""

import heapq

import numpy as np
import pytest

from bml.faults.detector import Detector, Suspicion
from bml.topology import UsageError

DETECT_S = 0.5
INTERVAL_S = DETECT_S / 5
LINKS = [(1, 0), (2, 0), (3, 1), (6, 1)]


def run(
    detector: Detector,
    arrivals: list[tuple[float, int, int]],
    until_s: float,
    *,
    stalls: list[tuple[float, float]] | None = None,
    late_s: float = 0.0,
) -> list[tuple[float, Suspicion]]:
    """Drive the detector like a real loop: wake at its deadline or an arrival, read, heartbeat, check.

    In a stall (from, to) the loop does not run; `late_s` is how late every wake-up by time is.
    """
    queue, now, raised = list(arrivals), 0.0, []
    heapq.heapify(queue)
    while now < until_s:
        wake = detector.next_deadline(now) + late_s
        if queue and queue[0][0] < wake:
            wake = queue[0][0]
        now = max(now, wake)
        now = next((end for start, end in stalls or [] if start <= now < end), now)
        while queue and queue[0][0] <= now:
            _, peer, level = heapq.heappop(queue)
            detector.heard(peer, level, now)
        detector.heartbeats_due(now)
        raised += [(now, suspicion) for suspicion in detector.check(now)]
    return raised


def heartbeats(
    rng: np.random.Generator, until_s: float, mean_delay_s: float = 0.0, loss: float = 0.0
) -> list[tuple[float, int, int]]:
    """Arrivals of all links: sent once an interval, delayed (gamma, shape 2), some lost, in order."""
    arrivals = []
    for peer, level in LINKS:
        sent = np.arange(rng.uniform(0, INTERVAL_S), until_s, INTERVAL_S)
        delayed = sent + rng.gamma(2, mean_delay_s / 2, len(sent)) if mean_delay_s else sent
        kept = np.maximum.accumulate(delayed)[rng.random(len(sent)) >= loss]
        arrivals += [(float(at), peer, level) for at in kept]
    return arrivals


@pytest.mark.parametrize("seed", range(20))
def test_a_silent_link_is_noticed_in_time_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dead_from_s = float(rng.uniform(1, 3))
    arrivals = [a for a in heartbeats(rng, 6, mean_delay_s=0.002) if a[1:] != (3, 1) or a[0] < dead_from_s]
    detector = Detector(0, LINKS, DETECT_S, 0.0)
    raised = run(detector, arrivals, 6)
    assert [(s.observer, s.peer, s.level, s.kind) for _, s in raised] == [(0, 3, 1, "silence")]
    at_s, suspicion = raised[0]
    assert at_s - dead_from_s <= DETECT_S + 1.5 * INTERVAL_S
    assert suspicion.silent_s >= DETECT_S - 1e-9
    assert "server 0 heard nothing from server 3 on level 1" in suspicion.why
    assert detector.suspected == (suspicion,)


@pytest.mark.parametrize("seed", range(10))
def test_random_delays_under_load_are_no_failure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert (
        run(Detector(0, LINKS, DETECT_S, 0.0), heartbeats(rng, 60, mean_delay_s=0.08), 60, late_s=0.01) == []
    )


@pytest.mark.parametrize("seed", range(10))
def test_lost_heartbeats_are_no_failure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert run(Detector(0, LINKS, DETECT_S, 0.0), heartbeats(rng, 60, 0.005, loss=0.03), 60) == []


@pytest.mark.parametrize("seed", range(10))
def test_the_threshold_learns_jitter_but_stays_within_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = [(float(at), 1, 0) for at in np.cumsum(rng.uniform(0.06, 0.9, 100) * DETECT_S)]
    raised = run(Detector(0, [(1, 0)], DETECT_S, 0.0), arrivals, arrivals[-1][0] + 5)
    assert [suspicion.peer for _, suspicion in raised] == [1]
    assert 1.2 * DETECT_S < raised[0][1].silent_s <= 3 * DETECT_S + 0.001


def test_the_loop_does_not_spin_at_a_deadline_that_rounds_down() -> None:
    # Found by seed 19 of the latency test: last + threshold - last < threshold in floats.
    for last_s in np.random.default_rng(0).uniform(0, 100, 2000).tolist():
        detector = Detector(0, [(1, 0)], DETECT_S, last_s)
        now = last_s
        for _ in range(8):
            detector.heartbeats_due(now)
            detector.check(now)
            deadline = detector.next_deadline(now)
            assert deadline > now
            now = deadline
        assert detector.suspected


def test_heavy_jitter_reaches_the_upper_bound_only() -> None:
    detector = Detector(0, [(1, 0)], DETECT_S, 0.0)
    now = 0.0
    for i in range(60):
        for _ in range(12 if i % 2 else 1):
            now += 0.09
            detector.check(now)
        detector.heard(1, 0, now)
    silences = [i * 0.09 for i in range(1, 40) if detector.check(now + i * 0.09)]
    assert silences == [pytest.approx(3 * DETECT_S, abs=0.09)]


@pytest.mark.parametrize("stall_s", [0.15, 0.3, 0.6, 3.0, 60.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_was_itself_frozen_suspects_nobody(seed: int, stall_s: float) -> None:
    rng = np.random.default_rng(seed)
    start_s = float(rng.uniform(1, 2))
    # What arrives during the stall waits in the sockets; here it is even lost.
    arrivals = [a for a in heartbeats(rng, stall_s + 5) if not start_s < a[0] < start_s + stall_s]
    stalls = [(start_s, start_s + stall_s)]
    assert run(Detector(0, LINKS, DETECT_S, 0.0), arrivals, stall_s + 5, stalls=stalls) == []


def test_after_its_own_freeze_it_still_finds_who_died_meanwhile() -> None:
    rng = np.random.default_rng(0)
    arrivals = [a for a in heartbeats(rng, 10) if a[1] != 2 or a[0] < 2]
    raised = run(Detector(0, LINKS, DETECT_S, 0.0), arrivals, 10, stalls=[(1.9, 5.0)])
    assert [s.peer for _, s in raised] == [2]
    assert 5.0 + DETECT_S <= raised[0][0] <= 5.0 + DETECT_S + 1.5 * INTERVAL_S


def test_a_loop_that_is_always_late_still_detects() -> None:
    rng = np.random.default_rng(0)
    arrivals = [a for a in heartbeats(rng, 10) if a[1:] != (6, 1) or a[0] < 2]
    stalls = [(i * 0.16, i * 0.16 + 0.155) for i in range(100)]
    raised = run(Detector(0, LINKS, DETECT_S, 0.0), arrivals, 10, stalls=stalls)
    assert [s.peer for _, s in raised] == [6]
    assert raised[0][0] < 2 + 3 * DETECT_S


def test_raised_once_and_withdrawn_when_heard_again() -> None:
    detector = Detector(0, [(1, 0), (2, 0)], DETECT_S, 0.0)
    raised = []
    for i in range(1, 13):
        detector.heard(2, 0, i * 0.09)
        raised += detector.check(i * 0.09)
    assert [suspicion.peer for suspicion in raised] == [1]
    assert detector.take_withdrawn() == []
    detector.heard(1, 0, 1.1)
    assert detector.take_withdrawn() == raised
    assert detector.take_withdrawn() == []
    assert detector.suspected == ()
    again = [s for i in range(13, 30) for s in detector.check(i * 0.09)]
    assert [suspicion.peer for suspicion in again] == [1, 2]


def test_who_hears_nobody_says_so_however_patient_he_is() -> None:
    detector = Detector(0, [(1, 0), (2, 0), (3, 0), (3, 1)], DETECT_S, 0.0)
    detector.patience_s = 10.0
    for i in range(1, 10):
        detector.heard(3, 1, i * 0.09)
        assert detector.check(i * 0.09) == []
    assert [s.peer for s in detector.deaf(0, 1, 0.81)] == [2, 3]
    assert detector.deaf(0, 1, 0.82) == [], "each is raised once"
    detector.heard(2, 0, 0.83)
    assert [s.peer for s in detector.take_withdrawn()] == [2]
    assert detector.deaf(0, 1, 0.84) == [], "his NIC works, so he says no more"


def test_who_did_not_run_himself_has_not_heard_that_all_are_silent() -> None:
    """Whatever has come meanwhile is unread: he may have been importing for so long."""
    detector = Detector(0, [(1, 0), (2, 0), (3, 0)], DETECT_S, 0.0)
    detector.patience_s = 10.0
    assert detector.check(0.1) == []
    assert detector.deaf(0, 1, 3.0) == []


def test_all_links_send_heartbeats_together_once_an_interval() -> None:
    detector = Detector(0, LINKS, DETECT_S, 0.0)
    sent = [i for i in range(100) if detector.heartbeats_due(i * 0.01 + 1e-9) == LINKS]
    assert sent == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert detector.heartbeats_due(7.03) == LINKS
    assert detector.heartbeats_due(7.1) == []
    assert detector.next_deadline(7.1) <= 7.03 + INTERVAL_S


def test_a_new_view_gives_a_suspected_link_another_chance_once() -> None:
    detector = Detector(0, [(1, 0), (2, 0)], DETECT_S, 0.0)
    first = [s.peer for i in range(1, 8) for s in detector.check(i * 0.09)]
    assert first == [1, 2]
    detector.set_links([(1, 0), (5, 1)], 0.63)
    assert detector.suspected == ()
    assert detector.check(0.7) == []
    detector.heard(2, 0, 0.7)
    again = [(i, s.peer) for i in range(8, 20) for s in detector.check(i * 0.09)]
    assert again == [(13, 1), (13, 5)]


def test_deadline_without_links_is_the_next_heartbeat() -> None:
    detector = Detector(0, [], DETECT_S, 3.0)
    assert detector.heartbeats_due(3.0) == []
    assert detector.next_deadline(3.05) == pytest.approx(3.1)
    assert detector.next_deadline(9.0) == 9.0


@pytest.mark.parametrize("detect_s", [0.0, -1.0, float("inf"), float("nan")])
def test_detect_s_must_be_positive(detect_s: float) -> None:
    with pytest.raises(UsageError, match="detect_s must be a positive"):
        Detector(0, LINKS, detect_s, 0.0)
