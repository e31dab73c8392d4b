"""Faults of the same NIC, cable or connection that overlap: the part works again when the last has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bml.cluster.injection.actuators import Actuators
from bml.cluster.injection.injection import Injection
from bml.fabric.condition import Condition, Damage, setting
from bml.fabric.injector import FabricInjector
from bml.fabric.layout import Layout
from bml.faults import Fault, FaultPlan
from bml.faults.busy import Slowdown
from bml.faults.holds import Holds
from bml.topology import FabricError, parse

FABRIC = parse("bcube:3x2")
DEADLINE_S = 10.0


def test_a_part_is_free_when_the_last_fault_has_let_go() -> None:
    holds = Holds()
    assert [holds.take("a"), holds.take("b"), holds.take("a")] == [True, True, False]
    assert [holds.let_go("a"), holds.let_go("b"), holds.let_go("a")] == [False, True, True]
    assert holds.take("a")


class Bench:
    """A server whose NICs are only noted, on a clock that is turned by hand."""

    def __init__(
        self,
        plan: str,
        joined_after: int | None = None,
        fabric: str = "bcube:3x2",
        was_there: bool = False,
    ):
        self.now = 0.0
        self.dead: set[object] = set()
        self._timers: list[tuple[float, int, Any]] = []
        transport = SimpleNamespace(
            silence=self.dead.add,
            unsilence=self.dead.discard,
            stall=lambda *key: self.dead.add(key),
            pace=self._pace,
            stand_still=lambda level: self.dead.add(("still", level)),
            go_on=lambda level: self.dead.discard(("still", level)),
            unstall=lambda *key: self.dead.discard(key),
        )
        poller = SimpleNamespace(now_s=lambda: self.now, after=self._after)
        nothing = lambda *_: None  # noqa: E731
        healthy = parse(fabric)
        actuators = Actuators(
            1, healthy, transport, poller, nothing, nothing, nothing, nothing, Slowdown(lambda: 0.0, nothing)
        )  # type: ignore[arg-type]
        self._injection = Injection(FaultPlan.parse(plan), healthy, actuators, was_there)
        self._injection.start(0.0, joined_after)
        self._core = SimpleNamespace(step=(joined_after or 0) + 1, phase="", view=None, progress=0.0)

    def _pace(self, *pace: int) -> Any:
        self.dead.add(pace)
        return lambda: self.dead.discard(pace)

    def _after(self, delay_s: float, action: Any) -> None:
        self._timers.append((self.now + delay_s, len(self._timers), action))

    def until(self, now: float) -> set[object]:
        """Let it become `now`, in steps of 0.1 s; returns what does not work then."""
        while self.now < now - 1e-9:
            self.now = round(self.now + 0.1, 3)
            due = sorted(timer for timer in self._timers if timer[0] <= self.now + 1e-9)
            self._timers = [timer for timer in self._timers if timer not in due]
            for _, _, action in due:
                action()
            self._injection.poll(self._core, self.now)  # type: ignore[arg-type]
        return set(self.dead)


def test_a_flap_has_ended_when_its_time_is_over() -> None:
    """`for` is the same for all kinds: it ended with the half period that had begun."""
    bench = Bench("flap:1/0@t=1s,every=0.4s,for=0.5s")
    seen = {now: bench.until(now) for now in (1.1, 1.3, 1.4, 1.5)}
    assert seen == {1.1: {0}, 1.3: set(), 1.4: {0}, 1.5: set()}
    assert bench.until(3.0) == set()


@pytest.mark.parametrize(
    ("fault", "paced"),
    [
        ("slow:1/0@t=1s,rate=16mbit,for=2s", {(0, 0, 10**6), (2, 0, 10**6)}),
        ("slow:1/0@t=1s,rate=16mbit,direction=out,for=2s", {(0, 0, 10**6), (2, 0, 10**6)}),
        ("slow:1/0@t=1s,rate=16mbit,direction=in,for=2s", set()),
        ("slow:2/0@t=1s,rate=16mbit,for=2s", {(2, 0, 10**6)}),
        ("slow:2/0@t=1s,rate=16mbit,direction=in,for=2s", {(2, 0, 10**6)}),
        ("slow:2/0@t=1s,rate=16mbit,direction=out,for=2s", set()),
        ("slow:5/0@t=1s,rate=16mbit,for=2s", set()),
    ],
)
def test_both_ends_of_a_slow_cable_pace_their_connections(fault: str, paced: set[object]) -> None:
    """Server 1 has a connection to servers 0 and 2 on level 0, and none to server 5."""
    bench = Bench(fault)
    assert bench.until(2.0) == paced
    assert bench.until(4.0) == set()


@pytest.mark.parametrize(("was_there", "struck"), [(False, {0}), (True, set())])
def test_a_fault_of_the_step_under_way_strikes_no_server_that_comes_again(
    was_there: bool, struck: set[object]
) -> None:
    """A spare joins within the step in which its predecessor was killed, by a fault of that step."""
    bench = Bench("blackhole:1/0@step=6 blackhole:1/1@step=7", joined_after=5, was_there=was_there)
    bench._core.progress = 1.0
    assert bench.until(1.0) == struck
    bench._core.step = 7
    assert bench.until(2.0) == {*struck, 1}


@pytest.mark.parametrize(
    ("fault", "paced"),
    [
        ("slow:1/0@step=3,rate=16mbit", {(0, 0, 10**6), (2, 0, 10**6)}),
        ("slow:2/0@step=5,rate=16mbit", {(2, 0, 10**6)}),
        ("slow:1/0@step=5,rate=16mbit,direction=in", set()),
        ("slow:1/0@step=3,rate=16mbit,for=9s", set()),
        ("blackhole:1/0@step=3", set()),
        ("slow:1/0@step=7,rate=16mbit", set()),
    ],
)
def test_a_cable_is_slow_for_a_server_that_joins_again_too(fault: str, paced: set[object]) -> None:
    """Step 5 was the last one without it; a joiner cannot know when a fault that ends some time began."""
    bench = Bench(fault, joined_after=5)
    assert bench.until(0.1) == paced
    assert bench.until(9.0) == paced


def test_a_nic_without_a_peer_can_be_slow() -> None:
    bench = Bench("slow:1/2@t=1s,rate=16mbit", fabric="torus:3x1")
    assert bench.until(2.0) == set()


@pytest.mark.parametrize(
    ("plan", "dead_at", "dead_for_ever"),
    [
        ("blackhole:1/0@t=1s blackhole:1/0@t=2s,for=1s", {0}, True),
        ("blackhole:1/0@t=1s,for=5s blackhole:1/0@t=2s,for=1s", {0}, False),
        ("switch:0/0@t=1s cut:1/0@t=2s,for=1s", {0}, True),
        ("switch:0/0@t=1s flap:1/0@t=2s,every=0.4s,for=1s", {0}, True),
        ("flap:1/0@t=2s,every=0.4s,for=1s cut:1/0@t=2.1s", {0}, True),
        ("stall:1/0,peer=0@t=1s stall:1/0,peer=0@t=2s,for=1s", {(0, 0)}, True),
        ("blackhole:1/1@t=1s switch:0/0@t=1s,for=3s", {0, 1}, None),
    ],
)
def test_a_shorter_fault_ends_no_longer_one(
    plan: str, dead_at: set[object], dead_for_ever: bool | None
) -> None:
    bench = Bench(plan)
    assert bench.until(0.5) == set()
    for now in (2.2, 2.9, 3.5):
        assert bench.until(now) == dead_at, now
    assert bench.until(9.0) == ({1} if dead_for_ever is None else dead_at if dead_for_ever else set())


class Network:
    """What an injector does its work with: a condition, and a note of every change."""

    def __init__(self, *by_hand: str):
        self.condition = Condition(10**6, 10**6, frozenset(map(Damage.parse, by_hand)))
        self.changed = threading.Condition()

    def apply(self, damage: Damage, job: str) -> bool:
        return (damage, job) in self._set(lambda now: now.with_damage(damage, job)).holds

    def undo(self, damage: Damage, job: str) -> None:
        self._set(lambda now: now.without_damage(damage, job))

    def _set(self, change: Callable[[Condition], Condition]) -> Condition:
        with self.changed:
            self.condition = change(self.condition)
            self.changed.notify_all()
            return self.condition

    @property
    def broken(self) -> set[str]:
        return {str(damage) for damage in self.condition.damages}

    def until(self, *broken: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.broken == set(broken), DEADLINE_S), self.broken


def test_on_cables_every_fault_ends_by_itself() -> None:
    network = Network("cut:7/0")
    injector = FabricInjector(network)  # type: ignore[arg-type]
    for text in (
        "blackhole:1/0",
        "blackhole:1/0,for=0.1s",
        "cut:1/0,for=0.2s",
        "switch:0/0",
        "cut:7/0,for=0.05s",
    ):
        injector.apply_fault(Fault.parse(text, at_once=True), lambda: None)
    network.until("blackhole:1/0", "switch:0/0", "cut:1/0", "cut:7/0")
    network.until("blackhole:1/0", "switch:0/0", "cut:7/0")
    injector.close()
    assert network.broken == {"cut:7/0"}, "what was done by hand stays"


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_cable_that_two_jobs_break_heals_with_the_last_of_them(first_ends_first: bool) -> None:
    network = Network()
    jobs = [FabricInjector(network), FabricInjector(network)]  # type: ignore[arg-type]
    for job in jobs:
        done = threading.Event()
        job.apply_fault(Fault.parse("cut:1/0", at_once=True), done.set)
        assert done.wait(DEADLINE_S)
    earlier, later = jobs if first_ends_first else jobs[::-1]
    earlier.close()
    assert network.broken == {"cut:1/0"}, "the other job's fault lasts"
    later.close()
    assert network.broken == set()


def test_a_cable_gets_slower_and_slower_and_heals() -> None:
    network = Network()
    injector = FabricInjector(network)  # type: ignore[arg-type]
    rates: list[str] = []
    fault = Fault.parse("degrade:1/0,rate=200kbit,over=0.2s,direction=in,for=0.5s", at_once=True)
    with network.changed:
        injector.apply_fault(fault, lambda: None)
        while network.changed.wait(DEADLINE_S) and network.broken:
            rates += [each for each in network.broken if each not in rates]
    injector.close()
    assert rates == [f"slow:1/0,rate={kbit}kbit,direction=in" for kbit in (800, 600, 400, 200)]


def test_only_the_next_step_of_a_rate_that_falls_is_queued() -> None:
    """Over 100,000 s there are 200,000 steps, which took 69 MB."""
    network = Network()
    injector = FabricInjector(network)  # type: ignore[arg-type]
    applied, text = threading.Event(), "degrade:1/0,rate=8kbit,over=100000s,for=99999s"
    injector.apply_fault(Fault.parse(text, at_once=True), applied.set)
    assert applied.wait(DEADLINE_S)
    assert len(injector._tasks) == 2, "its next step, and its end"
    injector.close()


def test_what_degrades_to_the_end_is_healed_at_the_end() -> None:
    network = Network("slow:7/0,rate=100kbit")
    injector = FabricInjector(network)  # type: ignore[arg-type]
    injector.apply_fault(Fault.parse("degrade:1/0,rate=200kbit,over=0s", at_once=True), lambda: None)
    network.until("slow:7/0,rate=100kbit", "slow:1/0,rate=200kbit")
    injector.close()
    assert network.broken == {"slow:7/0,rate=100kbit"}


class Stubborn(Network):
    """A network in which what is done cannot be undone the first time."""

    n_failed = 0

    def undo(self, damage: Damage, job: str) -> None:
        with self.changed:
            self.n_failed += 1
            self.changed.notify_all()
        if self.n_failed == 1:
            raise OSError("the kernel is busy")
        super().undo(damage, job)


@pytest.mark.parametrize("text", ["cut:1/0,for=0.05s", "degrade:1/0,rate=200kbit,over=0.2s,for=0.3s"])
def test_what_could_not_be_healed_is_healed_at_the_end(text: str) -> None:
    network = Stubborn()
    injector = FabricInjector(network)  # type: ignore[arg-type]
    with network.changed:
        injector.apply_fault(Fault.parse(text, at_once=True), lambda: None)
        assert network.changed.wait_for(lambda: network.n_failed, DEADLINE_S)
    injector.close()
    assert network.broken == set()


def test_a_cable_does_what_its_damages_do_together() -> None:
    layout = Layout(FABRIC)
    cable = layout.cable((1, 0))
    condition = Condition(10**8, 10**8)
    for text in ("cut:1/0", "slow:1/0,rate=10mbit", "slow:1/0,rate=20mbit", "switch:0/0"):
        condition = condition.with_damage(Damage.parse(text), "job")
    assert not setting(cable, cable.far, condition).up
    condition = condition.without_damage(Damage.parse("cut:1/0"), "job")
    assert not setting(cable, cable.far, condition).up, "its switch is dead"
    condition = condition.without_damage(Damage.parse("switch:0/0"), "job")
    assert setting(cable, cable.far, condition).up
    assert setting(cable, cable.far, condition).rate_bit == 10**7
    assert setting(cable, cable.far, condition.healed(Damage.parse("cut:1/0"))).rate_bit == 10**8


class Gone:
    """A network of which somebody has removed a part."""

    def apply(self, damage: Damage, job: str) -> bool:
        raise FabricError(f"no device for {damage}")

    def undo(self, damage: Damage, job: str) -> None:
        raise OSError("it is not whole")

    def kill_machine(self, server: int) -> int:
        raise KeyError(server)


def test_a_fault_that_cannot_be_done_is_said_and_stops_no_other() -> None:
    injector = FabricInjector(Gone())  # type: ignore[arg-type]
    texts = ["node:3", "cut:1/0", "flap:1/1"]
    for text in texts:
        answered = threading.Event()
        injector.apply_fault(Fault.parse(text, at_once=True), answered.set)
        assert answered.wait(DEADLINE_S), f"the server that asked for {text} stands still"
    assert [(str(fault), why) for fault, why in injector.take_failed()] == [
        ("node:3", "3"),
        ("cut:1/0", "no device for cut:1/0"),
        ("flap:1/1", "no device for cut:1/1"),
    ]
    assert injector.take_failed() == []
    injector.close()


def test_what_a_server_was_to_have_done_when_it_died_is_done_by_the_next() -> None:
    said: list[str] = []
    nothing = lambda *_: None  # noqa: E731
    poller, transport = SimpleNamespace(), SimpleNamespace()
    actuators = Actuators(
        1,
        FABRIC,
        transport,
        poller,
        lambda what: said.append(what.fault),
        nothing,
        nothing,
        nothing,
        Slowdown(lambda: 0.0, nothing),
    )  # type: ignore[arg-type, union-attr]
    plan = FaultPlan.parse("coordinator@step=5 join:0@step=5 coordinator@step=7")
    injection = Injection(plan, FABRIC, actuators)
    injection.start(0.0, None)

    def at(step: int, commit: int, *members: int) -> list[str]:
        view = SimpleNamespace(contributors=members, commit=commit)
        injection.poll(SimpleNamespace(step=step, phase="", view=view, progress=0.5), 1.0)  # type: ignore[arg-type]
        return said

    assert at(5, 0, 0, 1, 2) == [], "server 0 has it done"
    assert injection.armed
    assert at(6, 5, 1, 2) == ["coordinator@step=5", "join:0@step=5"], "it died in that step"
    assert at(7, 6, 0, 1, 2) == said[:2]
    assert at(8, 6, 0, 1, 2) == said[:2]
    assert at(9, 8, 1, 2) == said[:2], "it lived on, so it had it done"
    assert not injection.armed
