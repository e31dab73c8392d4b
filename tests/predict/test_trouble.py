"""Early warnings: seeded series of samples as a healthy, a busy, and a failing server would give them."""

from collections.abc import Callable
from random import Random

import pytest

from bml.predict.trouble import QUIET_S, HostSample, PeerSample, Trouble, Warning

INTERVAL_S = 0.1
LINKS = [(3, 0), (5, 0), (1, 1), (7, 1)]
GIB = 1 << 30
Peers = dict[tuple[int, int], PeerSample]


class World:
    """A second of a server's life: a network that loses little, and processes that wait for cores."""

    def __init__(self, seed: int, busy: bool):
        self.random = Random(seed)
        self.busy = busy

    def peers(self) -> Peers:
        crowded = self.random.random() < 0.3 if self.busy else False
        return {link: self.peer(crowded) for link in LINKS}

    def peer(self, crowded: bool) -> PeerSample:
        random = self.random
        sent = random.randrange(200, 3000)
        share = random.choice((0.0, 0.0005, 0.001, 0.002)) if self.busy else 0.0
        resent = int(sent * share * random.uniform(0, 2))
        late_s = INTERVAL_S * random.uniform(1.0, 1.3)
        if self.busy:
            late_s += random.expovariate(20) + (random.expovariate(3) if crowded else 0.0)
        rate = 10e6 * random.uniform(0.85, 1.15)
        busy_s = random.uniform(0.2, 0.9)
        return PeerSample(sent, resent, late_s, int(rate * busy_s), busy_s)

    def host(self) -> HostSample:
        stalled = self.random.expovariate(200) if self.busy else 0.0
        return HostSample(stalled, 0.0, 8 * GIB + self.random.uniform(-1, 1) * GIB / 8, 3, 30.0)


def changed(peers: Peers, links: list[tuple[int, int]], change: Callable[[PeerSample], PeerSample]) -> Peers:
    return {link: change(each) if link in links else each for link, each in peers.items()}


def lossy(peers: Peers, left_s: float, links: list[tuple[int, int]]) -> Peers:
    """Loss grows from a little to a fifth."""
    share = 0.2 * 0.5 ** (left_s / 3)
    return changed(peers, links, lambda each: each._replace(resent=each.resent + int(each.sent * share)))


def slower(peers: Peers, left_s: float, links: list[tuple[int, int]]) -> Peers:
    """As the fault `degrade`: to a fifth in ten seconds, before it fails four seconds later."""
    share = 1 - 0.8 * min(1.0, max(0.0, 14 - left_s) / 10)
    return changed(peers, links, lambda each: each._replace(nbytes=int(each.nbytes * share)))


def later(peers: Peers, left_s: float, links: list[tuple[int, int]]) -> Peers:
    """Heartbeats come later and later: by half a second in the end."""
    late_s = 0.5 * max(0.0, 1 - left_s / 20)
    return changed(peers, links, lambda each: each._replace(late_s=(each.late_s or 0.0) + late_s))


OWN = [link for link in LINKS if link[1] == 0]
CASES = {
    "loss on the own NIC": ("resent", (4, 0)),
    "loss on the NIC of a peer": ("resent", (3, 0)),
    "a rate that falls": ("falling", (4, 0)),
    "heartbeats that are late": ("late", (4, 0)),
    "memory that fills": ("filling", (4, None)),
    "processes that wait for memory": ("memory", (4, None)),
    "a carrier that flaps": ("flaps", (4, 1)),
    "errors of memory": ("errors", (4, None)),
    "heat": ("heat", (4, None)),
}


def warned_before_s(case: str, seed: int, busy: bool) -> float:
    """How many seconds before the failure the right warning came; below 0: it did not come before."""
    kind, part = CASES[case]
    world, trouble = World(seed, busy), Trouble(4, INTERVAL_S)
    fails_s = 30.0 + world.random.uniform(20, 40)
    now = 0.0
    while now < fails_s:
        now, left_s = now + 1.0, fails_s - now - 1.0
        peers, host, flaps = world.peers(), world.host(), 0
        match case:
            case "loss on the own NIC":
                peers = lossy(peers, left_s, OWN)
            case "loss on the NIC of a peer":
                peers = lossy(peers, left_s, [(3, 0)])
            case "a rate that falls":
                peers = slower(peers, left_s, OWN)
            case "heartbeats that are late":
                peers = later(peers, left_s, OWN)
            case "memory that fills":
                host = host._replace(free_nbytes=min(8.0, 0.25 * left_s) * GIB)
            case "processes that wait for memory":
                host = host._replace(stalled_share=max(0.0, 0.6 * (1 - left_s / 20)))
            case "a carrier that flaps":
                flaps = int(left_s < 15 and world.random.random() < 0.4)
            case "errors of memory":
                host = host._replace(corrected_errors=3 + int(max(0.0, 15 - left_s)))
            case "heat":
                host = host._replace(headroom_c=min(30.0, 1.5 * left_s))
        new = trouble.sample(peers, {1: flaps}, host, 1, now)
        for warning in new:
            if (warning.kind, (warning.server, warning.level)) == (kind, part):
                return fails_s - now
    return -1.0


def test_45_of_50_degradations_are_warned_of_2_s_before_the_failure() -> None:
    cases = [list(CASES)[seed % len(CASES)] for seed in range(50)]
    early = [warned_before_s(case, seed, busy=seed % 2 == 0) for seed, case in enumerate(cases)]
    missed = [
        (case, seed, early_s)
        for seed, (case, early_s) in enumerate(zip(cases, early, strict=True))
        if early_s < 2
    ]
    assert len(missed) <= 5, missed


@pytest.mark.parametrize("busy", [False, True])
def test_ten_minutes_without_trouble_have_no_warning(busy: bool) -> None:
    found: list[tuple[int, Warning]] = []
    for seed in range(2):
        world, trouble = World(seed, busy), Trouble(4, INTERVAL_S)
        for second in range(600):
            new = trouble.sample(world.peers(), {0: 0, 1: 0}, world.host(), 1 + second // 200, float(second))
            found += [(second, each) for each in new]
    assert not found


def test_a_program_that_loads_its_data_is_no_trouble() -> None:
    trouble, world = Trouble(4, INTERVAL_S), World(1, False)
    for second in range(60):
        host = world.host()._replace(free_nbytes=(24 - min(16, max(0, second - 20))) * GIB)
        assert not trouble.sample(world.peers(), {}, host, 1, float(second))


def test_a_warning_is_new_once_and_ends_when_it_is_quiet() -> None:
    trouble, world, times = Trouble(4, INTERVAL_S), World(1, False), 0
    for second in range(60):
        peers = lossy(world.peers(), 5.0, OWN) if 10 <= second < 20 else world.peers()
        times += len(trouble.sample(peers, {}, world.host(), 1, float(second)))
        if second == 19:
            (standing,) = trouble.recent(19.0)
            shown = standing.shown(19.0)
            assert (shown["part"], shown["for_s"], shown["kind"]) == ("NIC 4/0", 7.0, "resent")
        if second == 30:
            assert trouble.warnings
            assert not trouble.recent(30.0), "it stands, but nothing was seen for some time"
    assert times == 1
    assert not trouble.warnings
    assert QUIET_S < 40


def test_a_nic_that_the_view_plans_slow_is_warned_of_at_once() -> None:
    trouble, world = Trouble(4, INTERVAL_S), World(1, False)
    assert not trouble.sample(world.peers(), {}, world.host(), 1, 0.0)
    (warning,) = trouble.sample(world.peers(), {}, world.host(), 2, 1.0, {1: 3})
    assert (warning.server, warning.level, warning.kind) == (4, 1, "slow")
    assert warning.text == "it runs at 1/8 of its rate"


def test_what_is_late_everywhere_is_the_host_and_not_a_nic() -> None:
    trouble, world = Trouble(4, INTERVAL_S), World(1, False)
    for second in range(60):
        peers = changed(world.peers(), LINKS, lambda each: each._replace(late_s=1.0))
        assert not trouble.sample(peers, {}, world.host(), 1, float(second))


def test_a_single_neighbour_that_is_late_may_be_busy() -> None:
    """On bcube:2xk each NIC has one: that its process waits for a core is no trouble of the NIC between."""
    trouble = Trouble(0, INTERVAL_S)
    for second in range(30):
        peers = {
            (1, 0): PeerSample(2000, 0, 0.5 if second >= 6 else INTERVAL_S),
            (2, 1): PeerSample(2000, 0, INTERVAL_S),
        }
        assert not trouble.sample(peers, {}, HostSample(), 1, float(second))


STAR = [(1, 0), (2, 0), (3, 0)]
"""The connections of a server with one NIC."""


@pytest.mark.parametrize("since", [0, 6])
def test_with_one_nic_the_lateness_of_all_is_not_held_against_it(since: int) -> None:
    """There is no other NIC to compare with, and a training function may hold the interpreter for so long."""
    trouble = Trouble(0, INTERVAL_S)
    for second in range(30):
        late_s = 0.3 if second >= since else INTERVAL_S
        peers = {link: PeerSample(2000, 0, late_s) for link in STAR}
        assert not trouble.sample(peers, {}, HostSample(), 1, float(second))


def test_with_one_nic_loss_says_nothing_before_it_is_known_what_is_usual() -> None:
    trouble = Trouble(0, INTERVAL_S)
    for second in range(30):
        peers = {link: PeerSample(2000, 30, INTERVAL_S) for link in STAR}
        assert not trouble.sample(peers, {}, HostSample(), 1, float(second))


def test_with_one_nic_loss_that_grows_is_still_warned_of() -> None:
    trouble, found = Trouble(0, INTERVAL_S), []
    for second in range(30):
        resent = 100 if second >= 10 else 1
        peers = {link: PeerSample(2000, resent, INTERVAL_S) for link in STAR}
        found += trouble.sample(peers, {}, HostSample(), 1, float(second))
    assert [(each.server, each.level, each.kind, each.since_s) for each in found] == [(0, 0, "resent", 12.0)]


def test_a_slow_peer_is_not_the_own_nic() -> None:
    """One connection is busy all the time and carries little; the other one is as fast as ever."""
    trouble, world = Trouble(4, INTERVAL_S), World(1, False)
    for second in range(60):
        peers = world.peers()
        if second >= 30:
            peers[3, 0] = peers[3, 0]._replace(nbytes=10_000, busy_s=1.0)
        assert not trouble.sample(peers, {}, world.host(), 1, float(second))


def test_other_trees_in_another_view_are_no_falling_rate() -> None:
    trouble, world = Trouble(4, INTERVAL_S), World(1, False)
    for second in range(60):
        peers = world.peers() if second < 30 else slower(world.peers(), 0.0, OWN)
        assert not trouble.sample(peers, {}, world.host(), 1 + second // 30, float(second))
