"""Which rank runs the coordinator: one rank alone, and all ranks of a group on a virtual clock."""

import random

import pytest
from sampled import first

from bml.protocol.coordinator.election import CoordinatorElection, GiveUp, Prepare, Probe, Seen, Start
from bml.protocol.timeouts import Timeouts

TIMEOUTS = Timeouts.of(0.5)
ALL = (0, 1, 2, 3)


def seen(term: int = -1, is_open: bool = False, n: int = 0, members=None, suspected=(), unanswered=0) -> Seen:
    return Seen(term, is_open, n, members, frozenset(suspected), unanswered)


def one(rank: int, now: float = 0.0, *, joins: bool = False) -> CoordinatorElection:
    """A rank with a process that is ready."""
    election = CoordinatorElection(rank, 4, TIMEOUTS, now, joins)
    election.saw(seen(), now)
    election.look(now)
    election.ready()
    return election


def attended(rank: int, term: int = 1) -> CoordinatorElection:
    election = one(rank)
    election.saw(seen(term, True, 1, ALL), 1.0)
    election.look(1.0)
    election.ready()
    return election


def first_start(
    election: CoordinatorElection, state: Seen, start_s: float, stop_s: float
) -> tuple[float, int] | None:
    """The time and term of its first coordinator, if it looks every 10 ms."""
    for tick in range(int(start_s * 100), int(stop_s * 100)):
        now = tick / 100
        election.saw(state, now)
        order = election.look(now)
        if isinstance(order, Start):
            return now, order.term
    return None


def test_rank_0_starts_at_once_and_the_others_wait_for_it() -> None:
    assert one(0).look(0.0) == Start(1)
    assert first_start(one(1), seen(), 0.0, 4.9) is None
    assert first_start(one(1), seen(), 0.0, 6.0) == (5.0, 2)


@pytest.mark.parametrize(
    ("machines", "spares"), [("", {0, 1, 2}), ("aaaa", {0, 1, 2}), ("aabb", {0, 1, 2}), ("aaab", {0, 1, 3})]
)
def test_two_lowest_ranks_and_one_elsewhere_have_a_process_ready(machines: str, spares: set[int]) -> None:
    elections = [CoordinatorElection(rank, 4, TIMEOUTS, 0.0, machines=machines) for rank in range(4)]

    def prepare(now: float, state: Seen) -> set[int]:
        for election in elections:
            election.saw(state, now)
        return {rank for rank, election in enumerate(elections) if election.look(now) == Prepare()}

    assert prepare(0.0, seen()) == {0, 1}
    assert prepare(0.1, seen(1, True, 1, ALL)) == spares - {0, 1}
    assert prepare(0.2, seen(1, True, 1, ALL)) == set()
    # In place of the two, and once only; no other is left that would be the third.
    assert prepare(0.3, seen(1, True, 1, ALL, {0, 1})) == {2, 3} - spares


@pytest.mark.parametrize(
    ("rank", "suspected", "after_s"), [(1, {0}, 0.1), (1, set(), 0.2), (3, {0, 1, 2}, 0.1)]
)
def test_a_lost_line_starts_the_turns(rank: int, suspected: set[int], after_s: float) -> None:
    start = first_start(attended(rank), seen(1, False, 1, ALL, suspected), 2.0, 9.0)
    assert start is not None
    assert start[0] == pytest.approx(2.0 + after_s, abs=0.015)
    assert (start[1] - 1) % 4 == rank
    assert start[1] > 1


def test_another_coordinator_ends_the_turns() -> None:
    election = attended(2)
    election.saw(seen(1, False, 1, ALL, {0}), 2.0)
    election.saw(seen(2, True, 2, ALL, {0}), 2.1)  # that of rank 1
    assert first_start(election, seen(2, True, 2, ALL, {0}), 2.1, 20.0) is None


def test_a_coordinator_is_silent_whose_rank_is_suspected() -> None:
    election = attended(1)
    start = first_start(election, seen(1, True, 7, ALL, {0}), 2.0, 9.0)
    assert start == (pytest.approx(2.0 + TIMEOUTS.answer_s + TIMEOUTS.heartbeat_s, abs=0.03), 2)


@pytest.mark.parametrize("suspected", [{2}, {1}])
def test_a_coordinator_may_be_silent_while_its_rank_is_heard(suspected: set[int]) -> None:
    assert first_start(attended(3), seen(1, True, 7, ALL, suspected), 2.0, 60.0) is None


def test_a_coordinator_that_answers_nothing_is_replaced() -> None:
    """Its line is open, and its rank is heard."""
    election = attended(1)
    assert first_start(election, seen(1, True, 7, ALL, unanswered=1), 2.0, 60.0) is None
    start = first_start(election, seen(1, True, 7, ALL, unanswered=2), 60.0, 70.0)
    assert start == (pytest.approx(60.0 + 2 * TIMEOUTS.heartbeat_s, abs=0.02), 2)


def test_questions_for_those_before_do_not_count_against_a_coordinator() -> None:
    """They were asked while no line was open: it has just been reached, and has said nothing yet."""
    election = attended(1)
    for tick in range(200, 205):
        election.saw(seen(1, False, 1, ALL, {0}, unanswered=(tick - 200)), tick / 100)
    assert first_start(election, seen(2, True, 1, ALL, unanswered=4), 2.05, 9.0) is None
    assert first_start(election, seen(2, True, 1, ALL, unanswered=6), 9.0, 19.0) is not None


def test_successors_that_answer_nothing_may_be_slower_each_and_for_a_while() -> None:
    election, now, patience = attended(3), 2.0, []
    for n in (10, 20, 30, 40, 50):
        election.saw(seen(n, True, n, ALL), now)
        for unanswered in range(100):
            election.saw(seen(n, True, n, ALL, unanswered=unanswered), now)
            if isinstance(election.look(now + 1.0), Start):
                patience.append(unanswered)
                break
        now += 2.0 if n < 40 else 1000.0
    assert patience == [2, 4, 8, 16, 2]


def deposed(by: int) -> CoordinatorElection:
    """Rank 1, whose coordinator was deposed 3 s after the beginning by that of this term."""
    election = attended(1)
    assert first_start(election, seen(1, False, 1, ALL, {0}), 2.0, 3.0) == (pytest.approx(2.1, abs=0.02), 2)
    election.ended(2, 3.0, by)
    return election


def test_a_rank_that_was_deposed_leaves_the_next_coordinator_alone() -> None:
    """As long as its rank is there: it may need hold_s to make a view without this one."""
    state = seen(2, False, 1, ALL, {0})
    start = first_start(deposed(by=8), state, 3.0, 60.0)
    assert start is not None
    assert start[0] == pytest.approx(3.0 + TIMEOUTS.hold_s + TIMEOUTS.connect_s, abs=0.1)
    assert start[1] > 8


@pytest.mark.parametrize("state", [seen(2, False, 1, ALL, {0, 3}), seen(2, False, 1, (0, 1, 2), {0})])
def test_it_does_not_wait_for_one_whose_rank_is_gone(state: Seen) -> None:
    start = first_start(deposed(by=8), state, 3.0, 60.0)
    assert start is not None
    assert start[0] < 3.5


def test_a_coordinator_that_has_ended_undeposed_makes_no_rank_wait() -> None:
    start = first_start(deposed(by=0), seen(2, False, 1, ALL, {0}), 3.0, 60.0)
    assert start is not None
    assert start[0] < 3.5


def test_a_message_shows_that_the_coordinator_lives() -> None:
    election = attended(1)
    for n in range(100):
        election.saw(seen(1, True, n, ALL, {0}), 2.0 + n * 0.5)
        assert election.look(2.0 + n * 0.5) is None


@pytest.mark.parametrize("members", [None, (0, 1, 3)])
def test_a_rank_outside_of_the_view_starts_none(members: tuple[int, ...] | None) -> None:
    election = CoordinatorElection(2, 4, TIMEOUTS, 0.0, joins=True)
    election.ready()
    assert first_start(election, seen(1, False, 1, members), 0.0, 100.0) is None


def test_one_that_joins_gives_up_when_the_processes_of_all_others_are_gone() -> None:
    election = CoordinatorElection(2, 4, TIMEOUTS, 0.0, joins=True)
    assert election.look(0.9) is None
    assert election.next_deadline(0.9) == 1.0
    assert election.look(1.0) == Probe()
    assert election.look(1.0) is None, "it waits for what the probe finds"
    election.probed(False, 1.1)
    assert election.look(2.2) == Probe()
    election.probed(False, 2.3)
    assert election.look(3.4) == GiveUp()
    assert election.look(100.0) is None


def test_one_that_joins_waits_while_somebody_may_be_there() -> None:
    election = CoordinatorElection(2, 4, TIMEOUTS, 0.0, joins=True)
    for second in range(1, 100):
        assert election.look(float(second)) == Probe()
        election.probed(second % 2 == 0, float(second))


@pytest.mark.parametrize("state", [seen(1, True, 3), seen(1, False, 3, ALL)])
def test_one_that_is_called_or_in_a_view_looks_for_nobody(state: Seen) -> None:
    election = CoordinatorElection(2, 4, TIMEOUTS, 0.0, joins=True)
    election.saw(state, 5.0)
    assert not isinstance(election.look(5.0), Probe)


def test_a_lost_process_is_prepared_again() -> None:
    election = attended(0)
    election.lost(3.0)
    election.saw(seen(1, False, 1, ALL), 3.0)
    assert election.look(3.0) == Prepare()
    assert election.look(9.0) is None  # nothing can be started in it yet
    election.ready()
    assert election.look(9.0) == Start(5)
    assert election.leads


def test_a_process_that_does_not_start_is_not_tried_all_the_time() -> None:
    election = CoordinatorElection(0, 4, TIMEOUTS, 0.0)
    n_tries = 0
    for tick in range(500):
        election.saw(seen(), tick / 100)
        if election.look(tick / 100) == Prepare():
            n_tries += 1
            election.lost(tick / 100)
    assert n_tries == 5


def test_a_coordinator_that_never_calls_is_replaced() -> None:
    election = one(0)
    assert election.look(0.0) == Start(1)
    start = first_start(election, seen(), 0.0, 20.0)
    assert start == (pytest.approx(5.0, abs=0.2), 5)


@pytest.mark.parametrize("rank", range(4))
def test_terms_grow_and_name_their_rank(rank: int) -> None:
    for highest in range(40):
        election = attended(rank, highest)
        start = first_start(election, seen(highest, False, 1, ALL), 2.0, 9.0)
        assert start is not None
        assert highest < start[1] <= highest + 4
        assert (start[1] - 1) % 4 == rank


class Group:
    """Ranks on a virtual clock; a coordinator calls every rank `CALLS_S` after its start."""

    CALLS_S = 0.03

    def __init__(self, rng: random.Random, size: int):
        self.rng, self.size = rng, size
        self.ranks = {rank: CoordinatorElection(rank, size, TIMEOUTS, 0.0) for rank in range(size)}
        self.prepared: dict[int, float] = {}
        self.started: list[tuple[float, int]] = []
        self.dead_terms: set[int] = set()
        self.heard = dict.fromkeys(range(size), -1)

    def running(self, now: float) -> int:
        """The highest term of a coordinator that calls, -1 if there is none."""
        living = [
            term for at, term in self.started if term not in self.dead_terms and now >= at + self.CALLS_S
        ]
        return max(living, default=-1)

    def step(self, now: float) -> None:
        term = self.running(now)
        dead = frozenset(range(self.size)) - self.ranks.keys()
        for rank, election in self.ranks.items():
            if self.prepared.get(rank, now + 1) <= now:
                del self.prepared[rank]
                election.ready()
            self.heard[rank] = max(self.heard[rank], term)
            # A rank may notice deaths a little later than others.
            noticed = frozenset(each for each in dead if self.rng.random() < 0.9)
            election.saw(Seen(self.heard[rank], term > 0, 0, tuple(range(self.size)), noticed), now)
            while (order := election.look(now)) is not None:
                if isinstance(order, Start):
                    self.started.append((now, order.term))
                else:
                    self.prepared[rank] = now + self.rng.uniform(0.3, 0.8)

    def kill(self, now: float, whole_rank: bool) -> None:
        """Kill the coordinator, and with it its rank or not."""
        term = self.running(now)
        rank = (term - 1) % self.size
        self.dead_terms |= {each for _, each in self.started if (each - 1) % self.size == rank}
        if whole_rank:
            del self.ranks[rank]
            self.prepared.pop(rank, None)
        else:
            self.ranks[rank].lost(now)


@pytest.mark.few(7)
@pytest.mark.parametrize("seed", first(20, range(60)))
def test_a_group_always_gets_another_coordinator(seed: int) -> None:
    rng = random.Random(seed)
    group = Group(rng, rng.randint(2, 9))
    now, kill_at, gaps = 0.0, 3.0, []
    lost_at: float | None = None
    while now < 60 and (len(group.ranks) > 1 or lost_at is not None):
        now += 0.01
        group.step(now)
        if lost_at is not None and group.running(now) > 0:
            gaps.append(now - lost_at)
            lost_at, kill_at = None, now + rng.uniform(1.5, 4.0)
        elif lost_at is None and now >= kill_at:
            group.kill(now, whole_rank=rng.random() < 0.6)
            lost_at = now
    terms = [term for _, term in group.started]
    assert len(terms) == len(set(terms))
    assert gaps
    # With a process ready, the lowest rank that is left takes over within two turns and a call.
    assert max(gaps) < 3 * TIMEOUTS.heartbeat_s + 0.1
