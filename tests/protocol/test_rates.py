"""Slow NICs are found within three steps' samples, planned round, used again; a wander changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache

import pytest
from fluid import Port, bytes_of, step

from bml.faults.slowness import MOST_HALVINGS, Path, Throughput, halvings_of, in_words, slowed
from bml.protocol.coordinator.core import Connected, Coordinator, From
from bml.protocol.coordinator.rates import LEAST_GAIN, Rates, gain, halvings
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.schedule import bound
from bml.topology import Fabric, Link, bcube, parse

FABRICS = ("bcube:3x2", "bcube:2x2", "bcube:2x3", "torus:3x2", "switch:5", "fattree:4/4")
Slow = dict[Port, float]
"""Port -> its share of the nominal rate."""


@lru_cache(maxsize=256)
def traffic(fabric: Fabric, planned: tuple[tuple[Link, int], ...]) -> dict[Path, float]:
    return bytes_of(fabric, dict(planned), 1e6)


class Job:
    """Steps on a fabric, each of them one round of what servers measure; `now` is in seconds.

    A round is a second: of a step that takes longer it is a part.
    """

    def __init__(self, name: str, seed: int = 0, failures: Iterable[str] = (), wander: float = 0.2):
        self.fabric = parse(name)
        self.rates = Rates(self.fabric, Timeouts.of(0.5))
        self.alive = self.fabric.without(*failures)
        self.view = msg.View(1, self.alive.servers, tuple(failures), 0, "start", 0.0)
        self.now, self.reasons = 0.0, [""]
        self._chance, self._wander = random.Random(seed), wander
        self._traffic = traffic(self.alive, ())

    @property
    def planned(self) -> dict[Link, int]:
        return halvings(self.view)

    def step(self, slow: Slow, only: Callable[[tuple[int, int, int]], bool] = lambda _: True) -> bool:
        """A step, of which the paths for which `only` holds are measured; was there a new view?"""
        self.say(slow, only)
        return self.judge()

    def say(self, slow: Slow, only: Callable[[tuple[int, int, int]], bool] = lambda _: True) -> None:
        """What all servers say of a step."""
        wander = self._wander
        shares = {
            (*nic, out): self._chance.uniform(1 - wander, 1 + wander) * slow.get((*nic, out), 1.0)
            for nic in self.alive.links
            for out in (True, False)
        }
        moved = step(self._traffic, lambda port: 1e6 * shares[port])
        part = min(1.0, 1.0 / max(busy_s for _, busy_s in moved.values()))
        for (sender, receiver, level), (nbytes, busy_s) in moved.items():
            if only((sender, receiver, level)):
                said = ((receiver, level, int(part * nbytes), int(part * busy_s * 1e6)),)
                self.rates.measured(msg.Measured(sender, self.view.epoch, said), self.now)

    def judge(self) -> bool:
        """Let the round end; was there a new view?"""
        self.now += 1.0
        if not self.rates.judge(self.view, self.now):
            return False
        self.reasons.append(self.rates.news(self.view))
        self.enter(*self.rates.following(self.view, self.alive))
        return True

    def enter(self, *rates: msg.Rate) -> None:
        """Put a view with these rates in force."""
        view = self.view
        self.view = msg.View(view.epoch + 1, view.members, view.failures, 0, "", 0.0, rates=rates)
        self.rates.installed(self.view)
        self._traffic = traffic(self.alive, tuple(sorted(self.planned.items())))

    def steps(self, n: int, slow: Slow) -> int:
        """So many steps; how many new views there were."""
        return sum(self.step(slow) for _ in range(n))


def slow(nics: Iterable[Link], share: float, ports: tuple[bool, ...] = (True, False)) -> Slow:
    return {(*nic, out): share for nic in nics for out in ports}


def same(fabric: Fabric, found: Iterable[Link], nic: Link) -> bool:
    """Whether this NIC was found, or its equal: the other one of a switch with two ports."""
    (one,) = found
    twins = fabric.neighbours(*nic)
    return one == nic or (len(twins) == 1 and one == (twins[0], nic[1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FABRICS)
def test_a_wander_changes_nothing(name: str) -> None:
    for seed in range(8):
        assert Job(name, seed).steps(12, {}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x2", "torus:3x2"])
def test_a_wander_changes_nothing_on_a_damaged_fabric(name: str) -> None:
    for seed, failures in enumerate([["server:0"], ["link:4/0"], ["switch:0/1"], ["server:1", "link:5/1"]]):
        assert Job(name, seed, failures).steps(12, {}) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ports", [(True, False), (True,), (False,)], ids=["both", "out", "in"])
@pytest.mark.parametrize("name", FABRICS)
def test_any_nic_at_a_tenth_is_found_within_three_steps_and_kept(name: str, ports: tuple[bool, ...]) -> None:
    links = parse(name).links
    for seed, nic in enumerate(random.Random(name).sample(links, min(3, len(links)))):
        job = Job(name, seed)
        assert job.steps(3, slow([nic], 0.1, ports)) == 1
        assert same(job.fabric, job.planned, nic)
        assert {*job.planned.values()} <= {3, 4}, "0.1 is 1/16; with a wander perhaps 1/8"
        assert job.steps(15, slow([nic], 0.1, ports)) <= 1
        assert same(job.fabric, job.planned, nic)


def test_the_reason_says_which_nic() -> None:
    job = Job("bcube:3x2", wander=0.0)
    job.steps(3, slow([(4, 0)], 0.1))
    assert job.reasons[-1] == "NIC 4/0 runs at 1/16, trees avoid it"
    job.steps(4, {})
    assert job.reasons[-1] == "NIC 4/0 runs at its full rate again"


@pytest.mark.parametrize(("share", "halvings"), [(0.5, 1), (0.25, 2), (0.1, 4), (0.05, 5)])
def test_a_nic_that_was_well_for_long_is_planned_as_slow_as_it_is_now(share: float, halvings: int) -> None:
    job = Job("bcube:3x2", wander=0.0)
    job.steps(20, {})
    job.steps(6, slow([(4, 0)], share))
    assert job.planned == {(4, 0): halvings}


@pytest.mark.parametrize(("name", "switch"), [("bcube:3x2", (0, 1)), ("bcube:4x2", (1, 3))])
def test_a_slow_switch_is_named(name: str, switch: Link) -> None:
    level, group = switch
    job = Job(name)
    nics = [(server, level) for server in job.fabric.members(level, group)]
    assert job.steps(3, slow(nics, 0.25)) == 1
    halvings = max(job.planned.values())
    assert halvings in (2, 3), "0.25 is 1/4; with a wander perhaps 1/8"
    assert job.planned == dict.fromkeys(nics, halvings)
    assert job.reasons[-1] == f"switch {level}/{group} runs at 1/{2**halvings}, trees avoid it"


def _apart(fabric: Fabric, chance: random.Random) -> list[Link]:
    """Two NICs of different switches: of three on one switch, two slow ones look like a slow switch."""
    one = chance.choice(fabric.links)
    others = [nic for nic in fabric.links if nic[1] != one[1] or nic[0] not in fabric.neighbours(*one)]
    return [one, chance.choice([nic for nic in others if nic != one])]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3"])
def test_two_slow_nics_are_found(name: str) -> None:
    for seed in range(6):
        job = Job(name, seed)
        nics = _apart(job.fabric, random.Random(seed))
        job.steps(8, slow(nics[:1], 0.1) | slow(nics[1:], 0.2))
        assert len(job.planned) == 2
        for nic in nics:
            assert any(same(job.fabric, [found], nic) for found in job.planned)


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_nic_that_is_less_slow_than_another_is_planned_round_with_it(share: float) -> None:
    """It delays nobody yet, as all wait for the other one; trees round that one alone would wait for it."""
    job = Job("bcube:3x2", wander=0.0)
    assert job.steps(3, slow([(4, 0)], 0.1) | slow([(2, 1)], share)) == 1
    assert {*job.planned} == {(4, 0), (2, 1)}


def test_a_nic_at_half_beside_a_slower_one_is_planned_round_when_it_delays_others() -> None:
    """Before, it may only rest between the bytes of the slower one."""
    job = Job("bcube:3x2", wander=0.0)
    slow_now = slow([(4, 0)], 0.1) | slow([(2, 1)], 0.5)
    assert job.steps(3, slow_now) == 1
    assert {*job.planned} == {(4, 0)}
    assert job.steps(4, slow_now) == 1
    assert job.planned[2, 1] == 1


def test_a_competing_job_at_half_is_planned_round() -> None:
    for seed in range(10):
        job = Job("bcube:3x2", seed, wander=0.1)
        assert job.steps(3, slow([(4, 0)], 0.5)) == 1
        assert job.planned in ({(4, 0): 1}, {(4, 0): 2})


@pytest.mark.parametrize("name", FABRICS)
def test_what_is_fast_again_is_used_again(name: str) -> None:
    job = Job(name)
    nic = job.fabric.links[0]
    job.steps(3, slow([nic], 0.1))
    assert job.planned
    job.steps(8, {})
    assert not job.planned
    assert [rate.times for rate in job.view.rates] == [1], "that it was slow is known to the next coordinator"


@pytest.mark.slow
def test_a_nic_that_flaps_is_tried_less_and_less_often() -> None:
    """Ten seconds slow, ten fast: without patience that would be 24 views in 240 s."""
    job = Job("bcube:3x2")
    views = [sum(job.step(slow([(4, 0)], 0.1 if at % 20 < 10 else 1.0)) for at in range(240)) for _ in "12"]
    assert views[0] <= 12
    assert views[1] <= 4
    assert {(rate.server, rate.level): rate.times for rate in job.view.rates}[4, 0] >= 3


@pytest.mark.parametrize("known", [0, 1, 2])
def test_views_that_change_no_rate_do_not_keep_a_healed_nic_out(known: int) -> None:
    """Servers that come and go bring a view every third round; the NIC is to be heard for 8 s.

    It is measured in every round, in every other one, or never.
    """
    job = Job("bcube:3x2", wander=0.0)
    job.enter(msg.Rate(4, 0, halvings=3, times=4))
    for at in range(60):
        if not job.planned:
            break
        shown = known == 0 or (known == 1 and at % 2 == 0)
        job.step({}, only=lambda path, shown=shown: shown or 4 not in path[:2])
        if at % 3 == 2:
            job.enter(*job.view.rates)
    assert not job.planned
    assert (32.0 if known == 2 else 8.0) <= job.now <= (40.0 if known == 2 else 12.0)


def test_the_wait_of_a_nic_begins_anew_when_its_rate_changes() -> None:
    job = Job("bcube:3x2", wander=0.0)
    job.enter(msg.Rate(4, 0, halvings=4, times=4))
    job.steps(6, {})
    job.enter(msg.Rate(4, 0, halvings=2, times=5))
    job.steps(15, {})
    assert job.planned
    job.steps(3, {})
    assert not job.planned


def test_a_nic_of_which_nothing_is_known_is_tried_again() -> None:
    job = Job("bcube:3x2")
    job.steps(3, slow([(4, 0)], 0.1))
    at_s = job.now
    while job.planned:
        job.step({}, only=lambda path: (4, 0) not in ((path[0], path[2]), (path[1], path[2])))
    assert 4.0 <= job.now - at_s <= 14.0, "four times 1 s, after the last rounds are forgotten"


def test_a_nic_of_which_only_the_other_direction_is_known_is_not_called_fast() -> None:
    """Trees that avoid it send it so little that nothing waits, so nothing is measured on the way in."""
    job = Job("bcube:3x2", wander=0.0)
    way_in = slow([(4, 0)], 0.1, (False,))
    job.steps(3, way_in)
    assert job.planned == {(4, 0): 4}
    for _ in range(4):  # then it is tried again, as any of which nothing is known
        assert not job.step(way_in, only=lambda path: (path[1], path[2]) != (4, 0))


def test_rounds_in_which_nothing_moves_say_nothing() -> None:
    job = Job("bcube:3x2")
    for _ in range(5):
        for sender, receiver, level in job._traffic:
            job.rates.measured(msg.Measured(sender, 1, ((receiver, level, 0, 900_000),)), job.now)
        assert not job.judge()
    assert job.steps(6, slow([(4, 0)], 0.1)) == 1


def test_one_round_alone_changes_nothing() -> None:
    job = Job("bcube:3x2")
    for _ in range(10):
        assert job.step(slow([(4, 0)], 0.1)) is False
        job.rates.installed(job.view)  # as another view does


def test_a_slow_nic_that_rests_for_most_of_the_time_is_left_alone() -> None:
    """Trees round it would save less than the time in which it is busy, which is less than LEAST_GAIN."""
    for rest_s, views in ((9.0, 0), (0.0, 1)):
        job = Job("bcube:3x2", wander=0.0)
        for _ in range(8):
            job.now += rest_s
            views -= job.step(slow([(4, 0)], 0.5))
        assert views == 0


def test_a_nic_that_delays_nobody_is_no_reason_for_a_view() -> None:
    """NIC 4/0 at a half rests for most of the time. NIC 2/1 at an eighth has little to carry."""
    job = Job("bcube:3x2", wander=0.0)
    for _ in range(8):
        job.now += 7.0
        job.say(slow([(4, 0)], 0.5), only=lambda path: (2, 1) not in ((path[0], path[2]), (path[1], path[2])))
        for peer in job.fabric.neighbours(2, 1):
            for sender, receiver in ((2, peer), (peer, 2)):
                said = msg.Measured(sender, 1, ((receiver, 1, 10_000, 80_000),))
                job.rates.measured(said, job.now)
        assert not job.judge(), job.reasons


def test_what_a_server_says_twice_in_a_round_counts_together() -> None:
    job = Job("bcube:3x2", wander=0.0)
    for _ in range(3):
        job.say(slow([(4, 0)], 0.1))
        for sender, receiver, level in job._traffic:  # and all say that little went fast just now
            job.rates.measured(msg.Measured(sender, 1, ((receiver, level, 10_000, 10_000),)), job.now)
        job.judge()
    assert job.planned == {(4, 0): 4}


def test_too_little_is_known_if_few_servers_measure() -> None:
    job = Job("bcube:3x2")
    for _ in range(10):
        assert not job.step(slow([(4, 0)], 0.1), only=lambda path: path[0] in (3, 4, 5) and path[2] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 4, 1)])
def test_a_slow_host_of_several_ranks_is_found_and_no_other(sizes: tuple[int, ...]) -> None:
    """Ranks share the NIC of their host. What goes from rank to rank inside of one is not measured."""
    host = [number for number, n_ranks in enumerate(sizes) for _ in range(n_ranks)]
    for slow_host in (None, 0):
        job, found = Job(f"switch:{len(host)}", wander=0.1), set[Link]()
        shares: Slow = {}
        for rank, own in enumerate(host):
            share = (0.1 if own == slow_host else 1.0) / sizes[own]
            shares |= slow([(rank, 0)], share)
            found |= {(rank, 0)} if own == slow_host else set()
        for _ in range(8):
            job.step(shares, only=lambda path: host[path[0]] != host[path[1]])
        assert {*job.planned} == found


def test_a_gain_is_by_the_known_optima() -> None:
    """On bcube:3x2 trees for one NIC at 1/8 take 16 / 17.125 T, those for a healthy one 8 · 16/18 T."""
    fabric = bcube(3, 2)
    one, less = {(4, 0): 3}, {(4, 0): 1}
    assert gain(fabric, {}, one, one) == 1 - Fraction(16, 18 * 8 - 7) * 8 / (8 * Fraction(16, 18))
    assert gain(fabric, {}, less, less) > LEAST_GAIN
    assert gain(fabric, {}, less, less | {(2, 1): 3}) < gain(fabric, {}, less, less), "2/1 delays nobody now"
    everything = dict.fromkeys(fabric.links, 1)
    assert gain(fabric, {}, everything, everything) == 0, "no tree is better where all is slow"


def test_nothing_is_done_for_too_small_a_gain() -> None:
    job = Job("switch:3")
    everywhere = slow(job.fabric.links, 0.3)
    assert job.steps(10, everywhere) == 0


def test_a_share_becomes_the_power_of_two_below_it() -> None:
    shares = {1.2: 0, 0.75: 0, 0.6: 0, 0.59: 1, 0.5: 1, 0.47: 1, 0.46: 2, 0.3: 2, 0.1: 4, 0.001: 5, 0.0: 5}
    assert {share: halvings_of(share) for share in shares} == shares


@pytest.mark.parametrize("nics", [[(4, 0)], [(3, 0), (4, 0), (5, 0)], [(4, 0), (2, 1)]], ids=str)
@pytest.mark.parametrize("share", ["9/20", "2/5", "1/3", "1/5", "1/10", "1/25"])
def test_trees_for_the_share_that_is_planned_are_near_the_optimum(nics: list[Link], share: str) -> None:
    """A step waits for the NIC that is latest by its plan: planned at 1/8, at 1/10 in truth, 1.25 times."""
    fabric = bcube(3, 2)
    halvings = halvings_of(float(Fraction(share)))
    late = max(Fraction(1), Fraction(1, 2**halvings) / Fraction(share))
    planned_t = late * bound(slowed(fabric, dict.fromkeys(nics, halvings)))
    assert planned_t <= Fraction(110, 100) * bound(fabric.with_rates(dict.fromkeys(nics, share)))


def test_rates_multiply_those_of_the_fabric() -> None:
    fabric = bcube(2, 2).with_rates({(0, 0): "2/5", (1, 1): 10})
    made = slowed(fabric, {(0, 0): 1, (3, 1): MOST_HALVINGS})
    assert [made.rate(*nic) for nic in ((0, 0), (1, 1), (3, 1))] == [Fraction(1, 5), 10, Fraction(1, 32)]


def test_words_name_every_change() -> None:
    fabric = bcube(3, 2)
    before, after = {(4, 0): 3, (1, 1): 2}, {(4, 0): 3, (8, 1): 1}
    said = in_words(fabric, before, after)
    assert said == "NIC 1/1 runs at its full rate again, NIC 8/1 runs at 1/2"
    assert in_words(fabric, after, after) == ""


def test_old_measurements_are_forgotten() -> None:
    throughput, fabric = Throughput(), bcube(2, 2)
    throughput.add(step(bytes_of(fabric, {}, 1.0), lambda _: 1.0), 1.0)
    assert throughput.judge(fabric, {}) is not None
    for _ in range(8):
        throughput.add({}, 1.0)
    assert throughput.judge(fabric, {}) is None


@pytest.mark.parametrize("adapts", [True, False])
def test_a_schedule_without_rates_takes_no_notice_of_them(adapts: bool) -> None:
    fabric = bcube(2, 2)
    coordinator = Coordinator(fabric, 1, Timeouts.of(0.5), None, 0.0, adapts=adapts)
    for epoch in (0, 1):
        for server in fabric.servers:
            if epoch == 0:
                coordinator.handle(Connected(server), 0.0)
            status = msg.Status(server, 1, epoch, epoch, None, None, 0, -1, "", "")
            coordinator.handle(From(server, status), 0.0)
    for server in fabric.servers:
        coordinator.handle(From(server, msg.Accepted(server, 1, 1)), 0.0)
    assert coordinator.state == "steady"
    coordinator.handle(From(1, msg.Measured(1, 1, ((0, 0, 90_000, 90_000),))), 1.0)
    assert (coordinator._agreement.rates.act_at is not None) == adapts
