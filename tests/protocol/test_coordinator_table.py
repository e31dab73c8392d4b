"""Every row of the state table in bml/protocol/coordinator/agreement.py, and the failures around it."""

from __future__ import annotations

from typing import Any

import pytest

from bml.faults.detector import MOST_PATIENT
from bml.protocol.coordinator import core as coord
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.topology import parse

TIMES = Timeouts.of(0.5)


class Driver:
    """A coordinator whose servers are played by the test."""

    def __init__(self, fabric: str = "bcube:3x1", term: int = 1, min_servers: int | None = None):
        self.fabric = parse(fabric)
        self.now = 100.0
        self.core = coord.Coordinator(self.fabric, term, TIMES, min_servers, self.now)
        self.term = term
        self.at: dict[int, dict[str, Any]] = {
            server: {"promised": 0, "installed": None, "accepted": None, "committed": 0, "complete": -1}
            for server in self.fabric.servers
        }

    def give(self, event: coord.Event) -> list[coord.Instruction]:
        return self.core.handle(event, self.now)

    def heard(self, server: int, message: msg.ToCoordinator) -> list[coord.Instruction]:
        return self.give(coord.From(server, message))

    def tick(self, later_s: float = 0.0) -> list[coord.Instruction]:
        """Time passes, in which it looks as often as it asks for."""
        until, done = self.now + later_s, self.give(coord.Tick())
        while self.now < until:
            self.now = min(until, max(self.core.next_deadline(self.now), self.now + 0.01))
            done += self.give(coord.Tick())
        return done

    def suspect(self, observer: int, peer: int) -> list[coord.Instruction]:
        """Nothing is heard of a server on level 0."""
        return self.heard(observer, msg.Suspect(observer, peer, 0, "silence", 0.6, "nothing heard"))

    def suspected(self, observer: int, peer: int) -> None:
        """The same, and its window is over: the coordinator has acted on it."""
        self.suspect(observer, peer)
        self.core._findings.act_at = None

    def pause(self, for_s: float) -> list[coord.Instruction]:
        """The coordinator itself does not run for so long."""
        self.now += for_s
        return self.give(coord.Tick())

    def status(self, server: int, epoch: int = 0, term: int | None = None, **other: Any) -> msg.Status:
        stands = {"outcome": "", "error": "", **self.at[server], **other}
        return msg.Status(server=server, epoch=epoch, term=self.term if term is None else term, **stands)

    def appear(self, *servers: int) -> list[coord.Instruction]:
        """Connect and answer Who."""
        done: list[coord.Instruction] = []
        for server in servers or self.fabric.servers:
            done += self.give(coord.Connected(server))
            done += self.heard(server, self.status(server))
        return done

    def answer(self, *servers: int) -> list[coord.Instruction]:
        """Report to the Freeze of now."""
        done: list[coord.Instruction] = []
        for server in servers or self.asked():
            self.at[server]["promised"] = self.core._known.epoch
            done += self.heard(server, self.status(server, self.core._known.epoch))
        return done

    def accept(self, *servers: int) -> list[coord.Instruction]:
        done: list[coord.Instruction] = []
        for server in servers or self.asked():
            self.at[server]["accepted"] = self.ballot.proposal
            done += self.heard(server, msg.Accepted(server, self.term, self.core._known.epoch))
        return done

    @property
    def ballot(self) -> Any:
        assert self.core._agreement.ballot is not None, "no view is being agreed on"
        return self.core._agreement.ballot

    def asked(self) -> tuple[int, ...]:
        return self.ballot.members  # type: ignore[no-any-return]

    def installed(self) -> None:
        for server in self.core.members:
            self.at[server]["installed"] = self.core.view

    def start(self) -> Driver:
        """Bring view 1 into force."""
        self.appear()
        self.answer()
        self.accept()
        self.installed()
        return self

    def die(self, server: int) -> list[coord.Instruction]:
        """A death, and the window of evidence that follows."""
        assert self.give(coord.Gone(server, "killed")) == []
        return self.tick(TIMES.proof_window_s)


def posts(kind: type, done: list[coord.Instruction]) -> list[int]:
    return [one.server for one in done if isinstance(one, coord.Post) and isinstance(one.message, kind)]


def message(kind: type, done: list[coord.Instruction]) -> Any:
    return next(one.message for one in done if isinstance(one, coord.Post) and isinstance(one.message, kind))


def abort(done: list[coord.Instruction]) -> msg.Abort:
    found = [one.abort for one in done if isinstance(one, coord.Finished)]
    assert len(found) == 1, done
    assert found[0] is not None
    return found[0]


@pytest.fixture
def steady() -> Driver:
    driver = Driver().start()
    assert driver.core.state == "steady"
    return driver


# --- gathering: start-up ---------------------------------------------------------------------------


def test_every_server_that_appears_is_asked() -> None:
    driver = Driver()
    assert driver.give(coord.Connected(2)) == [coord.Post(2, msg.Who(1))]


def test_a_server_that_asks_whether_it_is_there_is_answered_at_once(steady: Driver) -> None:
    """Also before its Status, for which other messages wait, and while it gathers."""
    driver = Driver()
    driver.give(coord.Connected(2))
    assert driver.heard(2, msg.Ask(2)) == [coord.Post(2, msg.Noted(1))]
    assert steady.heard(0, msg.Ask(0)) == [coord.Post(0, msg.Noted(1))]


def test_it_waits_for_all_servers_then_freezes() -> None:
    driver = Driver()
    assert posts(msg.Freeze, driver.appear(0, 1)) == []
    assert posts(msg.Freeze, driver.appear(2)) == [0, 1, 2]
    assert driver.core.state == "freezing"
    assert driver.core.view is None


def test_start_up_ends_in_the_first_view() -> None:
    driver = Driver()
    driver.appear()
    assert posts(msg.Propose, driver.answer(0, 1)) == []
    propose = message(msg.Propose, driver.answer(2))
    assert driver.core.state == "proposing"
    assert (propose.view.epoch, propose.view.members, propose.view.commit) == (1, (0, 1, 2), 0)
    assert posts(msg.Install, driver.accept(0, 1)) == []
    assert posts(msg.Install, driver.accept(2)) == [0, 1, 2]
    assert driver.core.state == "steady"
    assert driver.core.view == propose.view


def test_a_server_that_does_not_appear_is_named() -> None:
    driver = Driver()
    driver.appear(0, 2)
    assert driver.tick(TIMES.start_s - 0.01) == []
    end = abort(driver.tick(0.02))
    assert (end.kind, end.text) == ("start", "cannot start: server 1 did not appear")


def test_with_min_servers_it_starts_with_those_that_came() -> None:
    driver = Driver(min_servers=2)
    driver.appear(0, 2)
    assert posts(msg.Freeze, driver.tick(TIMES.start_s + 0.01)) == [0, 2]


# --- steady -> freezing ----------------------------------------------------------------------------


def test_a_death_freezes_the_others_after_its_window(steady: Driver) -> None:
    assert steady.give(coord.Gone(2, "killed by signal 9")) == []
    assert steady.tick(TIMES.proof_window_s / 2) == []
    done = steady.tick(TIMES.proof_window_s)
    assert posts(msg.Freeze, done) == [0, 1]
    assert posts(msg.Evict, done) == []
    freeze = message(msg.Freeze, done)
    assert freeze == msg.Freeze(1, 2, "server 2 is dead: killed by signal 9")


def test_silence_is_diagnosed_after_its_window() -> None:
    driver = Driver("bcube:3x2").start()
    for observer in (3, 5):
        driver.heard(observer, msg.Suspect(observer, 4, 0, "silence", 0.6, "nothing heard"))
    assert driver.tick(TIMES.silence_window_s * 0.9) == []
    freeze = message(msg.Freeze, driver.tick(TIMES.silence_window_s * 0.2))
    assert freeze.reason == "NIC 4/0 is silent towards 3 and 5"
    view = message(msg.Propose, driver.answer()).view
    assert view.failures == ("link:4/0",)
    assert view.members == tuple(range(9))
    assert view.noticed_s == pytest.approx(TIMES.silence_window_s + 0.6)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_silence_that_has_just_begun_is_not_settled_with_another_failure(withdrawn: bool) -> None:
    """Server 0 is frozen; server 2 has been deaf for a moment and waits for a heartbeat of server 4."""
    driver = Driver("bcube:5x1").start()
    for observer in (1, 2, 3, 4):
        driver.suspect(observer, 0)
    assert driver.tick(TIMES.heartbeat_s) == []
    driver.suspect(2, 4)
    assert driver.tick(TIMES.silence_window_s - TIMES.heartbeat_s + 0.01) == [], "its window is over"
    if withdrawn:
        driver.heard(2, msg.Withdraw(2, 4, 0))
    done = driver.tick(2 * TIMES.silence_window_s)
    (frozen,) = {tuple(posts(msg.Freeze, done))}
    assert frozen == ((1, 2, 3, 4) if withdrawn else (1, 2, 3))


def test_new_silences_do_not_postpone_the_diagnosis_for_ever() -> None:
    driver = Driver("bcube:8x1", min_servers=1).start()
    for observer in range(1, 8):
        driver.suspect(observer, 0)
    done: list[coord.Instruction] = []
    for peer in range(2, 8):
        done += driver.tick(TIMES.heartbeat_s / 2)
        if done:
            break
        driver.suspect(peer - 1, peer)
    assert driver.now <= 100.0 + 2 * TIMES.silence_window_s + TIMES.heartbeat_s
    assert 0 not in posts(msg.Freeze, done)
    assert posts(msg.Freeze, done)


def test_a_withdrawn_suspicion_changes_nothing() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(3, msg.Suspect(3, 4, 0, "silence", 0.6, "nothing heard"))
    driver.heard(3, msg.Withdraw(3, 4, 0))
    assert driver.tick(1.0) == []
    assert driver.core.suspicions == []
    assert driver.core.next_deadline(driver.now) == pytest.approx(driver.now + TIMES.heartbeat_s)


def test_a_server_that_leaves_is_neither_dead_nor_suspected(steady: Driver) -> None:
    steady.heard(2, msg.Leaves(2, "it got SIGTERM"))
    assert steady.core.suspicions == []
    assert message(msg.Freeze, steady.tick(0.0)).reason == "server 2 leaves: it got SIGTERM"


def test_evidence_about_an_excluded_part_changes_nothing(steady: Driver) -> None:
    steady.die(2)
    steady.answer()
    steady.accept()
    assert steady.give(coord.Gone(2, "still dead")) == []
    assert steady.heard(2, msg.Suspect(2, 1, 0, "silence", 1.0, "")) == []
    assert steady.tick(1.0) == []


# --- freezing -> proposing -> steady ---------------------------------------------------------------


@pytest.mark.parametrize(("complete", "commit"), [((7, 7), 7), ((7, -1), 6)])
def test_it_decides_when_all_have_reported(steady: Driver, complete: tuple[int, int], commit: int) -> None:
    for server in (0, 1):
        steady.at[server].update(committed=6, complete=complete[server])
    steady.die(2)
    assert steady.answer(0) == []
    assert message(msg.Propose, steady.answer(1)).view.commit == commit


def test_answers_to_another_ballot_do_not_count(steady: Driver) -> None:
    steady.die(2)
    assert steady.heard(0, steady.status(0, epoch=1)) == []
    assert steady.heard(0, steady.status(0, epoch=2, term=7)) == []
    assert steady.ballot.statuses == {}
    steady.answer()
    assert steady.heard(0, msg.Accepted(0, 1, 1)) == []
    assert steady.heard(0, msg.Accepted(0, 7, 2)) == []
    assert steady.ballot.accepted == set()


def test_no_answer_in_time_is_a_death() -> None:
    steady = Driver("bcube:4x1").start()
    steady.heard(0, msg.Progress(0, 2))
    steady.die(3)
    steady.answer(0, 1)
    steady.suspected(0, 2)
    assert steady.tick(TIMES.answer_s - 0.01) == []
    end = steady.tick(0.02)
    assert abort(end).text.startswith("only 2 of 4 servers are left, [0, 1]")


def test_answers_are_awaited_for_longer_during_the_first_steps() -> None:
    driver = Driver("bcube:3x2").start()
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    driver.suspected(7, 8)
    assert driver.tick(TIMES.answer_s) == []
    assert posts(msg.Freeze, driver.tick(TIMES.warm_up_s)) == [0, 1, 2, 4, 5, 6, 7]


def test_no_accept_in_time_is_a_death() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer()
    driver.accept(0, 1, 2, 4, 5, 6, 7)
    driver.suspected(7, 8)
    done = driver.tick(TIMES.answer_s)
    assert posts(msg.Freeze, done) == [0, 1, 2, 4, 5, 6, 7]
    assert message(msg.Freeze, done).epoch == 3


@pytest.mark.parametrize("phase", ["freezing", "proposing"])
def test_a_server_whose_heartbeats_come_may_take_longer_to_answer(phase: str) -> None:
    """On a host with 32 servers a core twelve healthy ones were evicted: no server suspected them."""
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    if phase == "proposing":
        driver.answer()
    answer = driver.answer if phase == "freezing" else driver.accept
    answer(0, 1, 2, 4, 5, 6)
    assert driver.tick(MOST_PATIENT * TIMES.answer_s - 0.01) == []
    assert driver.core.awaited == [7, 8]
    answer(7)
    assert posts(msg.Propose if phase == "freezing" else msg.Install, answer(8)) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_no_server_is_awaited_for_ever_because_its_heartbeats_come() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    assert driver.tick(TIMES.hold_s - 0.01) == []
    done = driver.tick(0.02)
    assert posts(msg.Freeze, done) == [0, 1, 2, 4, 5, 6, 7]
    assert message(msg.Freeze, done).reason.endswith("server 8 gave no answer within 30 s")


def test_a_server_that_is_suspected_after_its_time_is_given_up_at_once() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6)
    assert driver.tick(TIMES.answer_s + 0.1) == []
    assert driver.suspect(7, 8) == []
    assert driver.core.next_deadline(driver.now) == driver.now
    assert posts(msg.Freeze, driver.tick()) == [0, 1, 2, 4, 5, 6, 7], "7 is awaited on"
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    assert driver.core.state == "proposing"


def test_an_accuser_that_the_view_excludes_does_not_shorten_the_time_of_others() -> None:
    """Server 1 is cut off, and hears nobody; server 0 only takes long to answer."""
    driver = Driver("switch:3").start()
    driver.heard(0, msg.Progress(0, 2))
    for observer, peer in ((1, 2), (1, 0), (2, 1), (0, 1)):
        driver.suspect(observer, peer)
    assert posts(msg.Freeze, driver.tick(TIMES.silence_window_s)) == [0, 2]
    driver.answer(2)
    assert driver.tick(TIMES.answer_s + TIMES.heartbeat_s) == []
    assert posts(msg.Propose, driver.answer(0)) == [0, 2]


def test_a_stall_of_the_view_before_is_forgotten(steady: Driver) -> None:
    """Other bytes go other ways now; a server whose bytes stand still again says so again."""
    assert posts(msg.Freeze, steady.die(0)) == [1, 2]
    steady.heard(1, msg.Suspect(1, 2, 0, "stall", 0.6, "nothing acknowledged"))
    steady.answer()
    steady.accept()
    steady.installed()
    assert steady.core.state == "steady"
    assert steady.core.suspicions == []
    assert steady.tick(2 * TIMES.stall_window_s) == []


def test_suspicions_read_after_a_pause_of_its_own_make_connections_anew(steady: Driver) -> None:
    """It may have been stopped while its Install went out: server 0 had it, and heard nobody."""
    steady.now += 2.6
    for peer in (1, 2):
        assert steady.heard(0, msg.Suspect(0, peer, 0, "reset", 0.0, "timeout")) == []
    assert steady.core.suspicions == []
    assert posts(msg.Freeze, steady.tick(TIMES.silence_window_s)) == [0, 1, 2]


@pytest.mark.parametrize("for_s", [2.0, 2.3, 10.0])
def test_a_pause_of_all_processes_ends_no_job(for_s: float) -> None:
    """As of a container that is paused: no server can have answered before the coordinator looks."""
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    assert driver.pause(for_s) == []
    driver.answer()
    assert driver.ballot.proposal is not None


def test_what_is_doubted_counts_for_the_time_to_answer() -> None:
    """The server may be dead: the others do not repeat what they have said until there is another view."""
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.now += 0.6
    for observer in (3, 5, 1, 7):
        driver.heard(
            observer, msg.Suspect(observer, 4, 0 if observer in (3, 5) else 1, "silence", 0.6, "quiet")
        )
    assert posts(msg.Freeze, driver.tick(TIMES.silence_window_s)) == list(range(9))
    driver.answer(0, 1, 2, 3, 5, 6, 7, 8)
    assert posts(msg.Freeze, driver.tick(TIMES.answer_s + TIMES.heartbeat_s)) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_what_is_withdrawn_is_doubted_no_more() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.now += 0.6
    for observer in (3, 5):
        driver.suspect(observer, 4)
        driver.heard(observer, msg.Withdraw(observer, 4, 0))
    assert posts(msg.Freeze, driver.tick(TIMES.silence_window_s)) == list(range(9))
    driver.answer(0, 1, 2, 3, 5, 6, 7, 8)
    assert driver.tick(1.2) == []
    assert posts(msg.Propose, driver.answer(4)) == list(range(9))


def test_a_coordinator_that_is_always_late_believes_what_it_is_told_again() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    for view, suspected in enumerate((True, True)):
        driver.now += 0.6
        if suspected:
            for observer in (3, 5):
                driver.suspect(observer, 4)
        done = driver.pause(0.6)
        assert posts(msg.Freeze, done) == list(range(9))
        assert driver.ballot.next.failures == (() if view == 0 else ("link:4/0",))
        driver.answer()
        driver.accept()
        driver.installed()


def test_a_nic_that_reports_itself_is_not_doubted(steady: Driver) -> None:
    steady.now += 2.6
    steady.heard(0, msg.Suspect(0, 0, 0, "own-nic", 0.0, "no carrier"))
    done = steady.tick(TIMES.silence_window_s)
    assert posts(msg.Freeze, done) == [1, 2]


def test_a_pause_of_its_own_is_not_held_against_a_server_that_it_calls(steady: Driver) -> None:
    taken = takeover(steady)
    taken.appear(0)
    taken.suspect(0, 2)
    taken.now += 2.3
    assert taken.give(coord.Unreached(2, "cannot be reached", 2.3)) == []
    taken.appear(1, 2)
    assert taken.core.members == (0, 1, 2)


def test_an_answer_that_is_not_read_yet_is_not_missed() -> None:
    """A coordinator that waited for its turn found a suspicion and, behind it, the answer that it awaited."""
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    driver.now += MOST_PATIENT * TIMES.answer_s
    assert driver.suspect(2, 3) == []
    assert posts(msg.Propose, driver.answer(8)) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_pause_of_its_own_is_not_held_against_those_that_it_awaits() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    driver.suspected(7, 8)
    driver.tick(TIMES.answer_s - 0.1)
    assert driver.pause(1.0) == [], "messages that came meanwhile are not read yet"
    assert posts(msg.Freeze, driver.tick(0.15)) == [0, 1, 2, 4, 5, 6, 7]


def test_however_often_it_pauses_it_does_not_wait_for_ever() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(0, msg.Progress(0, 2))
    driver.die(3)
    driver.answer(0, 1, 2, 4, 5, 6, 7)
    driver.suspected(7, 8)
    assert [driver.pause(0.6) for _ in range(3)] == [[], [], []]
    assert posts(msg.Freeze, driver.pause(0.6)) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize(("suspected", "gone_after_s"), [(True, TIMES.connect_s), (False, TIMES.hold_s)])
def test_a_server_that_cannot_be_called_is_gone_sooner_if_it_is_suspected(
    steady: Driver, suspected: bool, gone_after_s: float
) -> None:
    if suspected:
        steady.suspected(0, 2)
    assert steady.give(coord.Unreached(2, "cannot be reached", gone_after_s - 0.01)) == []
    assert steady.core._findings.gone == {}
    steady.give(coord.Unreached(2, "cannot be reached", gone_after_s + 0.01))
    assert steady.core._findings.gone == {2: "is dead: cannot be reached"}


def test_before_the_first_view_a_server_that_cannot_be_called_may_still_import() -> None:
    driver = Driver()
    driver.appear(0, 1)
    assert driver.give(coord.Unreached(2, "cannot be reached", 30.0)) == []
    assert posts(msg.Freeze, driver.appear(2)) == [0, 1, 2]


@pytest.mark.parametrize("phase", ["freezing", "proposing"])
def test_a_second_death_during_recovery_means_a_higher_epoch(phase: str) -> None:
    driver = Driver("bcube:3x2").start()
    driver.die(3)
    if phase == "proposing":
        driver.answer()
    assert driver.core.state == phase
    done = driver.die(4)
    assert driver.core.state == "freezing"
    assert message(msg.Freeze, done).epoch == 3
    assert posts(msg.Freeze, done) == [0, 1, 2, 5, 6, 7, 8]
    driver.answer()
    driver.accept()
    assert driver.core.view is not None
    assert driver.core.view.failures == ("server:3", "server:4")
    assert driver.tick(2.0) == [], "all evidence is answered"


def test_a_refusal_raises_the_epoch(steady: Driver) -> None:
    steady.die(2)
    done = steady.heard(0, msg.Refused(0, 1, 9))
    assert message(msg.Freeze, done).epoch == 10


def test_a_late_refusal_changes_nothing(steady: Driver) -> None:
    steady.die(2)
    assert steady.heard(0, msg.Refused(0, 1, 1)) == []
    assert steady.heard(0, msg.Refused(0, 9, 5)) == [], "an answer to another coordinator"
    assert steady.core.state == "freezing"


def test_a_newer_promise_in_an_answer_raises_the_epoch(steady: Driver) -> None:
    """It was taken over silently: then no further answer to the Freeze fitted, and all were called dead."""
    steady.die(2)
    done = steady.heard(0, steady.status(0, promised=9))
    assert message(msg.Freeze, done).epoch == 10
    assert steady.core.state == "freezing"


# --- reconnecting ----------------------------------------------------------------------------------


def test_a_server_that_reconnects_gets_the_messages_it_missed(steady: Driver) -> None:
    steady.die(2)
    assert posts(msg.Freeze, steady.give(coord.Connected(0))) == [0]
    steady.answer()
    assert posts(msg.Propose, steady.give(coord.Connected(0))) == [0]
    assert posts(msg.Freeze, steady.give(coord.Connected(0))) == []


def test_a_server_that_missed_only_the_install_is_told_it(steady: Driver) -> None:
    steady.at[1].update(installed=None)
    assert posts(msg.Install, steady.appear(1)) == [1]
    assert posts(msg.Freeze, steady.tick(TIMES.proof_window_s)) == []


def test_a_server_that_comes_back_without_the_view_gets_a_new_one(steady: Driver) -> None:
    steady.at[1].update(installed=None, accepted=None)
    steady.appear(1)
    steady.appear(0)  # another one that comes back has no say in that
    done = steady.tick(TIMES.proof_window_s)
    assert message(msg.Freeze, done).reason == "server 1 came back without the view"
    assert posts(msg.Freeze, done) == [0, 1, 2]


def test_no_server_is_evicted_before_a_view_without_it_is_in_force() -> None:
    """Until then the servers that are asked may turn out to be dead."""
    driver = Driver("bcube:2x2", min_servers=2).start()
    driver.heard(0, msg.Progress(0, 2))
    for observer, peer in ((0, 1), (1, 0), (2, 3), (3, 2)):
        driver.heard(observer, msg.Suspect(observer, peer, 0, "silence", 0.5, "nothing heard"))
    done = driver.tick(TIMES.silence_window_s)
    assert posts(msg.Freeze, done) == [0, 2]
    assert posts(msg.Evict, driver.appear(1)) == []
    done = driver.tick(TIMES.answer_s)
    assert posts(msg.Freeze, done) == [1, 3]
    driver.answer()
    done = driver.accept()
    assert (posts(msg.Install, done), posts(msg.Evict, done)) == ([1, 3], [0, 2])


def test_an_evicted_server_that_comes_back_is_told_again(steady: Driver) -> None:
    """It would wait for ever: its first Evict may have been lost with its connection."""
    steady.die(2)
    steady.answer()
    assert posts(msg.Evict, steady.accept()) == [2]
    assert posts(msg.Evict, steady.appear(2)) == [2]


def test_an_end_that_was_lost_with_the_connection_is_learnt_when_it_is_back(steady: Driver) -> None:
    """All are done, but the last one said so while its connection was down: no server would ever leave."""
    for server in (0, 1):
        steady.heard(server, msg.Ended(server, "done", "", 1))
    steady.give(coord.Connected(2))
    assert posts(msg.Shutdown, steady.heard(2, steady.status(2, outcome="done"))) == [0, 1, 2]


def test_suspicions_that_are_not_repeated_are_over() -> None:
    """The Withdraw may have been lost with the connection."""
    driver = Driver("bcube:3x2").start()
    driver.heard(3, msg.Suspect(3, 4, 0, "silence", 0.6, "nothing heard"))
    driver.appear(3)
    assert driver.tick(1.0) == []


# --- takeover --------------------------------------------------------------------------------------


def takeover(old: Driver, term: int = 2) -> Driver:
    new = Driver(old.fabric.name, term)
    new.at = old.at
    return new


def test_a_takeover_in_quiet_times_changes_nothing(steady: Driver) -> None:
    new = takeover(steady)
    assert posts(msg.Freeze, new.appear()) == []
    assert new.core.state == "steady"
    assert new.core.view == steady.core.view


def test_a_takeover_in_a_view_with_dead_servers_changes_nothing() -> None:
    old = Driver("bcube:3x2").start()
    old.die(4)
    old.answer()
    old.accept()
    old.installed()
    new = takeover(old)
    new.give(coord.Gone(4, "refused"))
    done = new.appear(*(server for server in range(9) if server != 4))
    assert posts(msg.Freeze, done) == []
    assert new.core.state == "steady"


@pytest.mark.parametrize(("suspected", "after_s"), [(True, TIMES.answer_s), (False, TIMES.hold_s)])
def test_a_takeover_waits_no_longer_than_a_connection_takes(
    steady: Driver, suspected: bool, after_s: float
) -> None:
    """For a server that no other suspects, as long as its neighbours may be unable to."""
    new = takeover(steady)
    new.appear(0, 1)
    if suspected:
        new.suspect(0, 2)
    assert new.tick(after_s - 0.01) == []
    done = new.tick(0.02)
    assert posts(msg.Freeze, done) == [0, 1]
    assert message(msg.Freeze, done).reason == "server 2 did not appear"


def test_a_takeover_has_lost_connections_made_again(steady: Driver) -> None:
    """Of one level, with all connections of a server lost and its heartbeats well: no server is evicted."""
    new = takeover(steady)
    for observer, peer in ((0, 2), (1, 2)):
        new.give(coord.Connected(observer))
        new.heard(observer, msg.Interrupted(observer, peer, 0))
        new.heard(observer, new.status(observer))
    new.appear(2)
    done = new.tick(TIMES.silence_window_s)
    assert posts(msg.Freeze, done) == [0, 1, 2]
    assert "lost their connection" in message(msg.Freeze, done).reason
    assert new.heard(2, msg.Interrupted(2, 0, 0)) == [], "the view that comes is enough"
    new.answer()
    done = new.accept()
    assert posts(msg.Install, done) == [0, 1, 2]
    assert (new.core.members, new.core.view and new.core.view.failures) == ((0, 1, 2), ())
    assert posts(msg.Freeze, new.tick(5.0)) == []


def test_a_takeover_goes_on_with_the_accepted_view(steady: Driver) -> None:
    """View 2 decided COMMIT and may be in force at the server that died."""
    for server in (0, 1):
        steady.at[server].update(committed=6, complete=7)
    steady.die(2)
    steady.answer()
    steady.accept()
    new = takeover(steady)
    new.give(coord.Gone(2, "refused"))
    done = new.appear(0, 1)
    assert message(msg.Freeze, done).epoch == 3
    assert message(msg.Propose, new.answer()).view.commit == 7


def test_a_takeover_that_finds_a_frozen_server_thaws_all(steady: Driver) -> None:
    steady.at[1].update(promised=2)
    new = takeover(steady)
    done = new.appear()
    assert posts(msg.Freeze, done) == [0, 1, 2]
    assert message(msg.Freeze, done).epoch == 3


def test_a_takeover_learns_that_training_failed(steady: Driver) -> None:
    new = takeover(steady)
    new.appear(0, 1)
    new.give(coord.Connected(2))
    end = abort(new.heard(2, new.status(2, outcome="failed", error="Traceback")))
    assert (end.kind, end.text, end.server) == ("training", "Traceback", 2)


def test_a_takeover_evicts_whoever_was_never_told(steady: Driver) -> None:
    steady.die(2)
    steady.answer()
    steady.accept()
    steady.installed()
    steady.at[2].update(promised=1)
    new = takeover(steady)
    assert set(posts(msg.Evict, new.appear())) == {2}


def test_a_majority_is_counted_in_the_view_that_is_in_force() -> None:
    """Not in one that only some accepted: three of its five are no majority of the nine before.

    The other six of the nine may be going on under a coordinator that never heard of it.
    """
    old = Driver("bcube:3x2").start()
    for server in (5, 6, 7, 8):
        old.give(coord.Gone(server, "cannot be reached"))
    old.tick(TIMES.proof_window_s)
    old.answer()
    old.accept(0)  # and no other
    new = takeover(old)
    new.appear(0, 1, 2)
    end = abort(new.tick(TIMES.hold_s))
    assert end.kind == "too-few"
    assert end.text.startswith("only 3 of 9 servers are left, [0, 1, 2]: more than half of the 9 before")


def test_an_own_proposal_that_was_not_accepted_by_all_is_no_view() -> None:
    """A member that reconnects reports it as accepted; that must not make it the view to go on from."""
    driver = Driver("bcube:3x2").start()
    before = driver.core.view
    driver.die(8)
    driver.answer()
    driver.accept(0, 1)
    driver.appear(0)
    assert driver.core.view == before
    assert driver.core.state == "proposing"


def test_a_member_that_the_view_never_reached_is_not_called_silent(steady: Driver) -> None:
    """The old coordinator died between two Installs: server 2 sends no heartbeats, but lives, and waits."""
    steady.at[2].update(installed=None)
    new = takeover(steady)
    new.appear(0, 1)
    for observer in (0, 1):
        new.heard(observer, msg.Suspect(observer, 2, 0, "silence", 0.5, "nothing heard"))
    done = new.appear(2)
    assert posts(msg.Freeze, done) == [0, 1, 2]
    assert posts(msg.Evict, done) == []


def test_nor_while_it_is_being_asked(steady: Driver) -> None:
    """Seed 184 of the simulation: the suspicion came after server 2 had answered the Freeze."""
    steady.at[2].update(installed=None)
    new = takeover(steady)
    new.appear()
    assert new.core.state == "freezing"
    new.answer(2)
    new.heard(0, msg.Suspect(0, 2, 0, "silence", 0.5, "nothing heard"))
    done = new.tick(TIMES.silence_window_s)
    assert posts(msg.Evict, done) == []
    assert posts(msg.Freeze, done) == [0, 1, 2]


# --- two coordinators ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["gathering", "steady", "freezing", "proposing"])
def test_a_deposed_coordinator_says_nothing_more(phase: str) -> None:
    driver = Driver()
    if phase != "gathering":
        driver.start()
    if phase in ("freezing", "proposing"):
        driver.die(2)
    if phase == "proposing":
        driver.answer()
    assert driver.core.state == phase
    assert driver.heard(0, msg.Deposed(0, 2)) == [coord.Finished(None, deposed_by=2)]
    assert driver.tick(1000.0) == []
    assert driver.give(coord.Connected(1)) == []


def test_a_coordinator_that_gave_up_is_deposed_too(steady: Driver) -> None:
    """Seed 11109: thawed, it found no server, gave up, and took its successor's connections."""
    steady.heard(1, msg.Ended(1, "failed", "no answer", 1))
    assert steady.heard(0, msg.Deposed(0, 2)) == [coord.Finished(None, deposed_by=2)]
    assert steady.give(coord.Connected(1)) == []


def test_only_a_successor_deposes(steady: Driver) -> None:
    assert steady.heard(0, msg.Deposed(0, 1)) == []
    assert steady.core.state == "steady"


# --- the end ---------------------------------------------------------------------------------------


def test_the_job_ends_when_every_member_is_done(steady: Driver) -> None:
    told = steady.heard(0, msg.Ended(0, "done", "", 1))
    assert told == [coord.Post(server, msg.Returned(1, 0, 1)) for server in (0, 1, 2)]
    assert steady.heard(0, msg.Ended(0, "done", "", 1)) == [coord.Post(0, msg.Noted(1))], "it is there"
    assert steady.heard(1, msg.Ended(1, "done", "", 1)) == []
    done = steady.heard(2, msg.Ended(2, "done", "", 1))
    assert posts(msg.Shutdown, done) == [0, 1, 2]
    assert done[-1] == coord.Finished(None)
    assert steady.give(coord.Connected(0)) == [coord.Post(0, msg.Shutdown(1))]


def test_the_first_return_is_told_to_all_that_might_wait_for_it(steady: Driver) -> None:
    def told(done: list[coord.Instruction]) -> list[tuple[int, int, int]]:
        posted = [each for each in done if isinstance(each, coord.Post)]
        return [
            (each.server, each.message.server, each.message.step)
            for each in posted
            if isinstance(each.message, msg.Returned)
        ]

    assert told(steady.heard(1, msg.Ended(1, "done", "", 7))) == [(0, 1, 7), (1, 1, 7), (2, 1, 7)]
    assert told(steady.heard(0, msg.Ended(0, "done", "", 8))) == []
    assert told(steady.give(coord.Connected(2))) == [(2, 1, 7)]
    new = takeover(steady)
    new.appear()
    assert told(new.heard(1, new.status(1, outcome="done")))
    steady.die(1)
    steady.answer()
    assert told(steady.accept()) == [(0, 0, 8), (2, 0, 8)]


def test_the_dead_need_not_be_done(steady: Driver) -> None:
    for server in (0, 1):
        steady.heard(server, msg.Ended(server, "done", "", 1))
    assert posts(msg.Shutdown, steady.die(2)) == [0, 1, 2]


def test_a_takeover_in_the_middle_of_the_shutdown_ends_well(steady: Driver) -> None:
    """Servers 0 and 1 have left; that is no reason to call the job of the third a failure."""
    new = takeover(steady)
    for server in (0, 1):
        new.give(coord.Gone(server, "refused"))
    new.give(coord.Connected(2))
    done = new.heard(2, new.status(2, outcome="done"))
    assert 2 in posts(msg.Shutdown, done)
    assert done[-1] == coord.Finished(None)


@pytest.mark.parametrize("phase", ["steady", "freezing", "proposing"])
def test_a_training_error_ends_the_job_for_all(phase: str) -> None:
    driver = Driver("bcube:3x2").start()
    if phase != "steady":
        driver.die(2)
    if phase == "proposing":
        driver.answer()
    end = driver.heard(1, msg.Ended(1, "failed", "ValueError: no", 1))
    assert abort(end) == msg.Abort(1, "training", "ValueError: no", 1)
    assert posts(msg.Abort, end) == list(range(9))
    assert driver.give(coord.Connected(5)) == [coord.Post(5, abort(end))]


def test_an_error_of_an_evicted_server_is_its_own(steady: Driver) -> None:
    """Whatever a server raises that is out must not end the job of the others."""
    steady.die(2)
    steady.answer()
    steady.accept()
    assert steady.heard(2, msg.Ended(2, "failed", "ValueError: no", 1)) == []
    assert steady.core.state == "steady"


@pytest.mark.parametrize(
    ("fabric", "dead", "min_servers", "goes_on"),
    [
        ("bcube:3x1", (2,), None, True),
        ("bcube:2x1", (1,), None, False),  # half is not more than half
        ("bcube:4x1", (2, 3), None, False),
        ("bcube:4x1", (2, 3), 2, True),
        ("bcube:3x1", (2,), 3, False),
        ("bcube:2x1", (1,), 1, True),
    ],
)
def test_enough_servers_must_be_left(
    fabric: str, dead: tuple[int, ...], min_servers: int | None, goes_on: bool
) -> None:
    driver = Driver(fabric, min_servers=min_servers).start()
    for server in dead:
        driver.give(coord.Gone(server, "killed"))
    done = driver.tick(TIMES.proof_window_s)
    if goes_on:
        assert posts(msg.Freeze, done)
    else:
        end = abort(done)
        assert end.kind == "too-few"
        assert "min_servers" in end.text
        assert f"server {dead[0]} is dead: killed" in end.text


def test_without_any_live_server_there_are_too_few() -> None:
    driver = Driver("bcube:2x1", min_servers=1).start()
    for server in (0, 1):
        driver.give(coord.Gone(server, "killed"))
    assert abort(driver.tick(TIMES.proof_window_s)).kind == "too-few"


def test_a_run_may_shrink_step_by_step() -> None:
    driver = Driver("bcube:3x2").start()
    for server in (0, 1, 2, 3, 4, 5, 6):
        driver.die(server)
        driver.answer()
        driver.accept()
        driver.installed()
    assert driver.core.members == (7, 8)
    assert abort(driver.die(8)).kind == "too-few"


def test_deadlines_are_those_of_the_state(steady: Driver) -> None:
    """It looks at its clock once a heartbeat at least, lest it miss that it was stopped itself."""
    steady.heard(0, msg.Progress(0, 2))
    assert steady.core.next_deadline(steady.now) == pytest.approx(steady.now + TIMES.heartbeat_s)
    steady.give(coord.Gone(2, "killed"))
    assert steady.core.next_deadline(steady.now) == pytest.approx(steady.now + TIMES.proof_window_s)
    steady.tick(TIMES.proof_window_s)
    assert steady.core.next_deadline(steady.now) == pytest.approx(steady.now + TIMES.heartbeat_s)
    steady.core._agreement.stop()
    assert steady.core.next_deadline(steady.now) > steady.now + 60


def test_a_late_suspicion_of_an_excluded_nic_is_no_news() -> None:
    """A server that has the new view closes its connection over it; another, in the old one, sees that."""
    driver = Driver("bcube:3x2").start()
    for observer in (3, 5):
        driver.heard(observer, msg.Suspect(observer, 4, 0, "stall", 0.6, "nothing acknowledged"))
    driver.tick(TIMES.stall_window_s)
    late = msg.Suspect(3, 4, 0, "reset", 0.0, "closed")
    assert driver.heard(3, late) == []
    assert driver.tick(TIMES.proof_window_s) == [], "the ballot under way says so"
    driver.answer()
    driver.accept()
    driver.installed()
    epoch = driver.core._known.epoch
    assert driver.core.view is not None
    assert driver.core.view.failures == ("link:4/0",)
    assert driver.heard(3, late) == []
    assert driver.tick(TIMES.proof_window_s) == []
    assert driver.core._known.epoch == epoch
    assert driver.core.suspicions == [], "and it is not remembered when the NIC works again"
    driver.heard(3, msg.Suspect(3, 6, 1, "reset", 0.0, "closed"))
    assert posts(msg.Freeze, driver.tick(TIMES.proof_window_s)) == list(range(9)), "others are"
