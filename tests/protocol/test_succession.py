"""When a launcher starts another coordinator, and under which term: the table of `Succession`, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bml.protocol.coordinator.succession import GiveUp, Kill, Order, Start, Succession
from bml.protocol.timeouts import Timeouts

TIMES = Timeouts.of(0.5)
STARTS_S = 10.0


class Driver:
    """A launcher with a clock: `run` lets the newest coordinator live and the launcher look meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self.succession = Succession(TIMES, STARTS_S, self.now)
        self.orders: list[Order] = []

    @property
    def term(self) -> int:
        return self.succession.term

    def look(self) -> list[Order]:
        found: list[Order] = []
        while (order := self.succession.look(self.now)) is not None:
            found.append(order)
        self.orders += found
        return found

    def run(self, for_s: float, heartbeats: bool = True) -> list[Order]:
        found: list[Order] = []
        until = self.now + for_s
        while self.now < until:
            self.now = min(self.succession.next_deadline(self.now), self.now + TIMES.heartbeat_s, until)
            if heartbeats:
                self.succession.heartbeat(self.term, self.now)
            found += self.look()
        return found

    def said(self, state: str, highest: int = 0) -> None:
        self.succession.reported(self.term, state, highest or self.term)

    def ended(self, why: str = "was killed", done: bool = False) -> None:
        self.succession.ended(self.term, why, self.now, done)


@pytest.fixture
def working() -> Driver:
    driver = Driver()
    assert driver.look() == [Start(1)]
    assert driver.run(2.0) == []
    driver.said("steady")
    return driver


def test_terms_are_counted(working: Driver) -> None:
    for term in range(2, 40):
        working.ended()
        assert working.look() == [Start(term)], "at once, however often, if each came to something"
        working.run(0.3)
        working.said("steady")


def test_a_successor_is_above_every_term_that_was_heard_of(working: Driver) -> None:
    working.said("deposed", highest=70)
    working.ended("was deposed")
    assert working.look() == [Start(71)]


def test_a_report_of_an_older_coordinator_counts_for_its_term_alone(working: Driver) -> None:
    working.ended()
    working.look()
    working.succession.reported(1, "deposed", 2)
    working.succession.ended(1, "deposed, and ended", working.now)
    assert working.run(1.0) == [], "an older one that thaws, learns that it is deposed, and ends"
    working.ended()
    assert working.look() == [Start(3)], "two coordinators do not drive each other's terms up"


def test_a_silent_one_is_killed_and_replaced(working: Driver) -> None:
    kill, start = working.run(0.7, heartbeats=False)
    assert isinstance(kill, Kill)
    assert "was silent for 0." in kill.why
    assert start == Start(2)


def test_silence_is_judged_by_how_regular_the_signs_of_life_were(working: Driver) -> None:
    for gap_s in (0.1, 0.45) * 20:
        working.run(gap_s, heartbeats=False)
        working.succession.heartbeat(1, working.now)
    assert working.run(1.0, heartbeats=False) == []
    assert [type(order) for order in working.run(0.6, heartbeats=False)] == [Kill, Start], (
        "3 detect_s at most"
    )


def test_the_launcher_forgives_its_own_pause(working: Driver) -> None:
    working.now += 30.0
    assert working.look() == [], "it did not run itself: messages that came meanwhile are not read yet"
    assert working.run(0.4, heartbeats=False) == []
    assert working.run(0.3) == []
    assert [type(order) for order in working.run(0.7, heartbeats=False)] == [Kill, Start]


def test_before_its_first_sign_of_life_it_has_time_to_start() -> None:
    driver = Driver()
    driver.look()
    assert driver.run(STARTS_S - 0.2, heartbeats=False) == []
    kill, start = driver.run(0.4, heartbeats=False)
    assert kill == Kill("gave no sign of life within 10 s")
    assert start == Start(2)


def test_one_that_ended_the_job_is_not_replaced(working: Driver) -> None:
    working.said("stopped")
    working.ended(done=True)
    assert working.run(100.0) == []
    assert working.succession.over


def test_one_that_ended_otherwise_is_replaced_whatever_it_said(working: Driver) -> None:
    working.said("stopped")
    working.ended("was killed before it had told all")
    assert working.look() == [Start(2)]


def test_of_those_that_come_to_nothing_there_is_an_end_with_the_cause() -> None:
    driver = Driver()
    began = driver.now
    while not driver.succession.over:
        driver.run(0.05, heartbeats=False)
        driver.ended(f"exited with status {driver.term}")
        assert driver.now < began + 10.0
    *starts, end = driver.orders
    assert starts == [Start(term) for term in range(1, 11)]
    assert end == GiveUp("10 coordinators in a row failed; the last exited with status 10")
    assert driver.run(10.0) == []


def test_those_that_are_replaced_for_silence_again_and_again_get_more_time() -> None:
    """On a host that is too busy for them to speak in time; else no coordinator would ever succeed."""
    driver = Driver()
    driver.look()
    lived_s = []
    for _ in range(6):
        driver.run(0.2)
        lived_s.append(-driver.now)
        while not any(isinstance(order, Kill) for order in driver.run(0.1, heartbeats=False)):
            pass
        lived_s[-1] += driver.now
        driver.run(2.0, heartbeats=False)
    assert lived_s == pytest.approx([0.5, 1.0, 2.0, 4.0, 4.0, 4.0], abs=0.25)
    driver.run(0.2)
    driver.said("steady")
    driver.ended()
    driver.run(0.3)
    assert driver.run(3.0, heartbeats=False) == [], "that one came to something is no sign that it is fast"
    driver.run(33.0)
    driver.ended()
    driver.run(0.3)
    assert [type(order) for order in driver.run(0.7, heartbeats=False)] == [Kill, Start], "one lived for long"


def test_one_that_is_steady_and_silent_in_turn_is_not_replaced_as_fast_for_ever() -> None:
    driver = Driver()
    driver.look()
    for _ in range(20):
        driver.run(0.3)
        driver.said("steady")
        driver.run(1.2, heartbeats=False)
    assert driver.term <= 3, "a silence of 1.2 s is borne by then"


def test_coordinators_that_come_to_nothing_are_started_ever_more_slowly(working: Driver) -> None:
    pauses = []
    for _ in range(6):
        working.ended()
        ended = working.now
        while not working.look():
            working.now = working.succession.next_deadline(working.now)
        pauses.append(working.now - ended)
    assert pauses[:2] == [0.0, 0.0]
    assert all(later == pytest.approx(2 * pause) for pause, later in pairwise(pauses[2:]))
