"""The parts of the simulation: clock, processes, wires; and that they tell the truth about time and order."""

from typing import get_args

import pytest

from bml.faults.stalls import Flow
from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Quit, Sum
from bml.protocol.wire.frame import Header, Kind
from bml.sim.simulation import Simulation
from bml.sim.world.delays import NONE
from bml.sim.world.network import Network
from bml.sim.world.ports import Ports
from bml.sim.world.process import Process
from bml.sim.world.settings import Settings
from bml.sim.world.wires import Parcel, Wires
from bml.topology import parse


def header(step: int) -> Header:
    return Header(Kind.TOKEN, 1, step, 0, 1, 0, 0, 0, 0)


class Ends:
    """Two servers joined by `Wires`, and the events that they saw."""

    def __init__(self, seed: int = 0):
        self.network = Network(seed)
        self.processes = {0: Process(), 1: Process()}
        self.seen: list[tuple[int, int]] = []
        self.lost: list[tuple[int, str]] = []
        self.heartbeats: list[int] = []
        self.proofs: list[int] = []
        self.wires = Wires(
            Ports(self.network, 0.0, seed),
            connect_s=2.0,
            process=lambda server: self.processes[server],
            arrived=self.arrived,
            lost=lambda server, peer, level, why: self.lost.append((server, why)),
            heard=lambda to, *_: self.heartbeats.append(to),
            proved=lambda to, origin, level: self.proofs.append(to),
            delays=NONE,
        )
        for server in (0, 1):
            self.wires.want(server, {(1 - server, 0)})

    def arrived(self, to: int, origin: int, level: int) -> None:
        parcel = self.wires.peek(to, origin, level)
        assert parcel is not None
        self.wires.take(to, origin, level)
        self.seen.append((to, parcel.header.step))

    def send(self, *steps: int) -> None:
        for step in steps:
            self.wires.send(0, 1, 0, Parcel(header(step), b"", None))

    def run(self, for_s: float = 5.0) -> None:
        self.network.at(self.network.now + for_s, lambda: None)
        self.network.run(lambda: False, self.network.now + for_s)


def test_the_clock_runs_in_order_and_equal_times_as_asked() -> None:
    network, done = Network(0), []
    for name, when in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        network.at(when, lambda name=name: done.append(name))
    assert not network.run(lambda: False, 1.5)
    assert done == ["a", "b"]
    assert network.run(lambda: len(done) == 4, 9.0)
    assert done == ["a", "b", "c", "d"]


def test_a_channel_keeps_its_order() -> None:
    network, done = Network(3), []
    for index in range(50):
        network.deliver("one", lambda index=index: done.append(index))
    network.run(lambda: False, 9.0)
    assert done == list(range(50))


def test_a_frozen_process_does_everything_later_and_its_timer_last() -> None:
    process, done = Process(), []
    process.freeze()
    process.tick(lambda: done.append("tick"))
    process.run(lambda: done.append("a"))
    process.run(lambda: done.append("b"))
    assert done == []
    process.thaw()
    assert done == ["a", "b", "tick"]


def test_frost_in_the_middle_of_a_list_goes_on_with_the_rest() -> None:
    process, done = Process(), []

    def do(item: int) -> None:
        done.append(item)
        if item == 2:
            process.freeze()

    process.each([1, 2, 3], do)
    process.run(lambda: done.append(9))
    assert done == [1, 2]
    process.thaw()
    assert done == [1, 2, 3, 9]


def test_the_dead_do_nothing() -> None:
    process, done = Process(), []
    process.freeze()
    process.run(lambda: done.append(1))
    process.die()
    process.thaw()
    process.run(lambda: done.append(2))
    process.each([3], done.append)
    assert done == []


def test_frames_come_in_order_over_a_connection_that_both_want() -> None:
    ends = Ends()
    ends.send(1, 2, 3)
    ends.run()
    assert ends.seen == [(1, 1), (1, 2), (1, 3)]
    assert ends.lost == []


def test_a_blocked_path_gives_no_sign_and_is_late_when_it_heals() -> None:
    ends = Ends()
    ends.run()
    ends.wires.paths.block("silent", (1, 0))
    ends.send(1, 2)
    ends.wires.heartbeat(0, 1, 0)
    ends.run()
    assert (ends.seen, ends.lost, ends.heartbeats) == ([], [], [])
    ends.wires.heal("silent", (1, 0))
    ends.send(3)
    ends.run()
    assert ends.seen == [(1, 1), (1, 2), (1, 3)]


def test_frames_under_way_when_a_path_heals_do_not_overtake_those_held_back() -> None:
    ends = Ends()
    ends.run()
    ends.wires.paths.block("silent", (1, 0))
    ends.send(1)
    ends.run()
    ends.send(2)
    ends.wires.heal("silent", (1, 0))
    ends.send(3)
    ends.run()
    assert ends.seen == [(1, 1), (1, 2), (1, 3)]


def test_the_sender_knows_acknowledgements_and_a_stall_holds_back_those_alone() -> None:
    ends = Ends()
    ends.run()
    assert not ends.wires.flows(0)[1, 0].outstanding
    ends.wires.paths.block("stall", (0, 1, 0))
    ends.send(1)
    ends.wires.heartbeat(0, 1, 0)
    ends.run()
    assert (ends.seen, ends.heartbeats) == ([], [1])
    assert ends.wires.flows(0)[1, 0].outstanding
    ends.wires.heal("stall", (0, 1, 0))
    ends.run()
    assert ends.seen == [(1, 1)]
    assert ends.wires.flows(0)[1, 0][:3] == Flow(outstanding=False, answers=1, tries=0)[:3]


def test_a_mute_nic_brings_in_frames_that_are_not_acknowledged() -> None:
    ends = Ends()
    ends.run()
    ends.wires.paths.block("mute", (1, 0))
    ends.send(1)
    ends.wires.probe(0, 1, 0)
    ends.run()
    assert ends.seen == [(1, 1)]
    assert ends.wires.flows(0)[1, 0].outstanding
    assert ends.proofs == []
    ends.wires.heal("mute", (1, 0))
    ends.wires.probe(0, 1, 0)
    ends.run()
    assert not ends.wires.flows(0)[1, 0].outstanding
    assert ends.proofs == [0]


def test_a_partition_blocks_those_on_different_sides() -> None:
    ends = Ends()
    ends.wires.paths.block("parted", frozenset({1}))
    assert not ends.wires.paths.connects(0, 1, 0)
    ends.wires.heal("parted", frozenset({1}))
    assert ends.wires.paths.connects(0, 1, 0)


def test_a_reset_is_noticed_by_both_and_loses_frames_under_way() -> None:
    ends = Ends()
    ends.run()
    ends.send(1)
    ends.wires.reset(0, 1, 0)
    ends.send(2)
    ends.run()
    assert ends.seen == []
    assert sorted(ends.lost) == [(0, "reset"), (1, "reset")]


def test_a_broken_connection_is_made_again_when_both_ask_again() -> None:
    ends = Ends()
    ends.run()
    ends.wires.reset(0, 1, 0)
    ends.run()
    ends.send(1)
    for server in (0, 1):
        ends.wires.want(server, {(1 - server, 0)})
    ends.send(2)
    ends.run()
    assert ends.seen == [(1, 2)]


def test_death_is_noticed_behind_frames_that_were_sent() -> None:
    seen = set()
    for seed in range(20):
        ends = Ends(seed)
        ends.run()
        ends.send(1)
        ends.processes[0].die()
        ends.wires.die(0)
        ends.run()
        assert ends.lost == [(1, "eof")]
        seen.add(tuple(ends.seen))
    assert seen == {(), ((1, 1),)}, "by chance it is a reset, and the frame is lost"


def test_a_connection_that_one_side_never_wants_is_given_up() -> None:
    ends = Ends()
    ends.wires.want(1, set())
    ends.run()
    assert ends.lost == [(0, "timeout")]


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_simulated_server_carries_out_every_instruction(shared_memory: bool) -> None:
    simulation = Simulation(parse("bcube:2x1"), 1, settings=Settings(shared_memory=shared_memory))
    needs_shared_memory = set() if shared_memory else {Post, Sum, Quit, ev.FetchResult}
    assert {*simulation.machines[0]._handlers} == {*get_args(ev.Instruction)} - needs_shared_memory


def test_frames_that_wait_on_a_nic_without_a_rate_are_not_measured() -> None:
    ends = Ends()
    ends.run()
    ends.send(*range(1, 20))
    ends.run()
    assert len(ends.seen) == 19
    assert ends.wires.flows(0)[1, 0][3:] == (0, 0.0)
