"""The watch of one server: connections that stand still, time-outs, and probes."""

from __future__ import annotations

import pytest

from bml.faults.stalls import Flow
from bml.protocol.server.events import Heartbeat, LossyNics, Probe, Proved, StoodIn, Tell
from bml.protocol.server.watch import Watch
from bml.protocol.wire import messages as msg
from bml.topology import parse

DETECT_S = 0.5
LINKS = frozenset({(1, 0), (2, 0), (3, 1), (6, 1)})


def view(epoch: int = 1, failures: tuple[str, ...] = ()) -> msg.View:
    return msg.View(epoch, tuple(range(9)), failures, 0, "test", 0.0)


class Driver:
    """Server 0 of bcube:3x2; those in `beating` are heard at every tick."""

    def __init__(self) -> None:
        self.watch = Watch(0, parse("bcube:3x2"), DETECT_S, 0.0)
        self.watch.set_view(view(), LINKS, 0.0)
        self.now = 0.0
        self.alive = set(LINKS)
        self.flows: dict[tuple[int, int], Flow] = {}

    def run(self, seconds: float) -> list[msg.ToCoordinator]:
        told: list[msg.ToCoordinator] = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for peer, level in self.alive:
                self.watch.heard(peer, level, self.now)
            self.watch.flows(self.flows, self.now)
            told += [one.message for one in self.watch.tick(self.now) if isinstance(one, Tell)]
        return told


def test_a_stall_is_told_once_and_withdrawn_when_it_moves_again() -> None:
    driver = Driver()
    driver.flows = {(1, 0): Flow(True, 5, 2), (2, 0): Flow(False, 5, 0)}
    assert driver.run(0.5) == []
    (suspect,) = driver.run(2.0)
    assert isinstance(suspect, msg.Suspect)
    assert (suspect.observer, suspect.peer, suspect.level, suspect.kind) == (0, 1, 0, "stall")
    assert suspect.silent_s == pytest.approx(0.5, abs=0.11)
    driver.flows = {(1, 0): Flow(True, 6, 0)}
    assert driver.run(1.0) == [msg.Withdraw(0, 1, 0)]


@pytest.mark.parametrize(
    ("nics", "losing"),
    [([(0, 0)], 0), ([(1, 0)], 1), ([(0, 0), (1, 0)], None), ([(0, 1), (1, 1)], None), ([(2, 0)], None)],
)
def test_a_stall_names_the_end_that_loses_segments(nics: list[tuple[int, int]], losing: int | None) -> None:
    driver = Driver()
    driver.watch.handle(LossyNics(((1, 0), (0, 0), (2, 0))), 0.0)
    driver.watch.handle(LossyNics(tuple(nics)), 0.0)
    driver.flows = {(1, 0): Flow(True, 5, 2)}
    (suspect,) = driver.run(2.5)
    assert isinstance(suspect, msg.Suspect)
    assert suspect.losing == losing


def test_silence_accuses_its_peer_alone() -> None:
    driver = Driver()
    driver.watch.handle(LossyNics(((0, 0),)), 0.0)
    driver.alive -= {(1, 0)}
    (suspect,) = (one for one in driver.run(3.0) if isinstance(one, msg.Suspect))
    assert suspect.losing is None


def test_a_stall_is_borne_as_long_as_silence() -> None:
    """In the first steps both may be signs of one mute NIC, and only the stall would be told."""
    driver = Driver()
    driver.watch.be_patient(10.0)
    driver.flows = {(1, 0): Flow(True, 5, 2)}
    assert driver.run(9.5) == []
    assert [one.kind for one in driver.run(1.5) if isinstance(one, msg.Suspect)] == ["stall"]


def test_without_heartbeats_it_is_silence_and_a_server_that_is_to_blame() -> None:
    driver = Driver()
    driver.alive -= {(1, 0)}
    driver.flows = {(1, 0): Flow(True, 5, 3)}
    kinds = [one.kind for one in driver.run(3.0) if isinstance(one, msg.Suspect)]
    assert kinds == ["silence"]


def test_a_stall_comes_up_again_when_silence_that_hid_it_is_over() -> None:
    driver = Driver()
    driver.alive -= {(1, 0)}
    driver.flows = {(1, 0): Flow(True, 5, 3)}
    driver.run(1.0)
    driver.alive |= {(1, 0)}
    told = driver.run(0.3)
    assert told[0] == msg.Withdraw(0, 1, 0)
    assert [one.kind for one in told[1:] if isinstance(one, msg.Suspect)] == ["stall"]


def test_flows_of_links_that_are_not_watched_do_not_count() -> None:
    driver = Driver()
    driver.flows = {(8, 0): Flow(True, 5, 3)}
    assert driver.run(2.0) == []


@pytest.mark.parametrize(("heard", "kinds"), [(True, ["stall"]), (False, ["reset"])])
def test_a_time_out_is_a_stall_while_the_peer_is_heard(heard: bool, kinds: list[str]) -> None:
    driver = Driver()
    driver.alive = set(LINKS) if heard else LINKS - {(1, 0)}
    driver.run(0.4)
    told = driver.watch.lost(1, 0, "timeout", "no answer", driver.now)
    assert [one.message.kind for one in told if isinstance(one.message, msg.Suspect)] == kinds
    driver.flows = {}
    assert not [one for one in driver.run(0.3) if isinstance(one, msg.Withdraw)], "it does not move again"


def to_a_new_coordinator(driver: Driver) -> list[str]:
    told = [one.message for one in driver.watch.for_new_coordinator(driver.now)]
    return [one.kind if isinstance(one, msg.Suspect) else type(one).__name__ for one in told]


@pytest.mark.parametrize("kind", ["timeout", "reset"])
def test_a_lost_connection_is_no_suspicion_once_its_peer_has_been_heard_for_long(kind: str) -> None:
    driver = Driver()
    driver.alive -= {(1, 0)}
    driver.run(1.0)
    driver.watch.lost(1, 0, kind, "it broke", driver.now)
    assert to_a_new_coordinator(driver) == ["reset"]
    driver.alive |= {(1, 0)}
    driver.run(0.3)
    assert to_a_new_coordinator(driver) == ["reset"], "a server that heard it before it died would say so"
    driver.run(0.5)
    assert to_a_new_coordinator(driver) == ["Interrupted"]
    driver.alive -= {(1, 0)}
    driver.run(0.5)
    assert to_a_new_coordinator(driver) == ["reset"]
    driver.watch.set_view(view(2), LINKS, driver.now)
    assert to_a_new_coordinator(driver) == []


def test_a_time_out_while_the_server_was_stopped_is_no_evidence() -> None:
    driver = Driver()
    driver.run(1.0)
    driver.now += 3.0  # it was stopped
    told = [one.message for peer in (1, 2) for one in driver.watch.lost(peer, 0, "timeout", "", driver.now)]
    assert told == [msg.Interrupted(0, 1, 0), msg.Interrupted(0, 2, 0)]
    assert to_a_new_coordinator(driver) == ["Interrupted", "Interrupted"]
    (closed,) = driver.watch.lost(3, 1, "eof", "it was closed", driver.now)
    assert isinstance(closed.message, msg.Suspect), "some process must have closed it"
    driver.run(0.5)
    (late,) = driver.watch.lost(6, 1, "timeout", "no answer", driver.now)
    assert isinstance(late.message, msg.Suspect)


def test_a_part_that_is_out_is_trusted_after_a_probe_only() -> None:
    driver = Driver()
    links = LINKS - {(1, 0), (2, 0)}
    driver.watch.set_view(view(2, ("link:0/0",)), frozenset(links), 0.0)
    probes, healthy, heartbeats = [], [], []
    for tick in range(1, 60):
        now = tick / 10
        for peer, level in LINKS:
            driver.watch.heard(peer, level, now)
        for one in driver.watch.tick(now):
            match one:
                case Probe(peer, level):
                    probes.append((peer, level, now))
                    if peer == 1:
                        assert driver.watch.handle(Proved(peer, level), now) == []
                case Tell(msg.Healthy(_, peer, level)):
                    healthy.append((peer, level))
                case Heartbeat(peer, level) if level == 0:
                    heartbeats.append(peer)
    assert {*heartbeats} == {1, 2}
    assert healthy == [(1, 0)]
    assert [peer for peer, _, _ in probes].count(1) == 1
    assert [now for peer, _, now in probes if peer == 2] == pytest.approx([1.1, 2.7, 4.3, 5.9], abs=0.21)


def test_a_server_without_links_is_heard_all_the_same() -> None:
    """Else no link of it could ever be trusted again."""
    driver = Driver()
    driver.watch.set_view(view(2, ("link:0/0", "link:0/1")), frozenset(), 0.0)
    heartbeats = {(one.peer, one.level) for one in driver.watch.tick(0.1) if isinstance(one, Heartbeat)}
    assert heartbeats == LINKS


def test_lost_links_get_heartbeats_with_the_others_and_no_oftener() -> None:
    driver = Driver()
    driver.watch.set_view(view(2, ("link:1/0",)), LINKS - {(1, 0)}, 0.0)
    assert any(isinstance(one, Heartbeat) for one in driver.watch.tick(0.2))
    assert not [one for one in driver.watch.tick(0.2 + 1e-6) if isinstance(one, Heartbeat)]


def test_a_stand_in_is_told_of_now_and_then_and_excuses_connections_that_cannot_be_made() -> None:
    driver = Driver()
    told = [each for tick in range(10) for each in driver.watch.handle(StoodIn(1, 0), tick / 10)]
    assert told == [Tell(msg.Held(0, 1, 0))] * 4, "twice in detect_s"
    (interrupted,) = driver.watch.lost(1, 0, "timeout", "no answer", 1.0)
    assert interrupted == Tell(msg.Interrupted(0, 1, 0))
    assert driver.watch.handle(StoodIn(7, 0), 1.0) == [], "it is no neighbour"
    assert driver.watch.lost(1, 0, "reset", "it is dead", 1.1)[0].message.kind == "reset"  # type: ignore[union-attr]
