"""Turns and what becomes of peers that fail, with contenders that only pretend; and the orders of ranks."""

import socket
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bml.lab.bench.contenders import JobSettings
from bml.lab.bench.contest import Contest, Settings, bound_s, theory_s
from bml.lab.bench.host import RankError, Ranks
from bml.lab.bench.ranks import contribution, serve, total
from bml.lab.bench.rows import Block
from bml.schedule.select.model import Constants
from bml.topology import parse


class Pretender:
    def __init__(self, who, step_s, log, fails_at=None):
        self.who, self.members = who, (0, 1, 2)
        self.step_s, self.log, self.fails_at = step_s, log, fails_at

    def start(self):
        pass

    def check(self, nbytes):
        if self.fails_at == "check":
            raise RankError(f"{self.who} broke")
        return 0

    def time(self, nbytes, times):
        self.log.append((self.who, times))
        if len(self.log) == self.fails_at:
            raise RankError(f"{self.who} broke")
        return Block((self.step_s,) * times, self.step_s / 2, self.step_s / 4)

    def close(self):
        self.log.append((self.who, "closed"))


def contest(contenders, **changes):
    settings = Settings(
        JobSettings(parse("bcube:3x1")), (4096,), (), Constants(), repetitions=3, block_s=0.1, **changes
    )
    return Contest(settings, lambda text: None, contenders=contenders)


def test_all_take_turns_and_another_begins_each_time():
    log = []
    (table,) = contest([Pretender("bml", 0.02, log), Pretender("gloo", 0.04, log)]).measure()
    assert log[2:] == [("bml", 5), ("gloo", 2), ("gloo", 2), ("bml", 5), ("bml", 5), ("gloo", 2)]
    assert [(row.who, row.samples, row.speedup) for row in table] == [("bml", 15, 1.0), ("gloo", 6, 2.0)]
    assert [row.cpu_speedup for row in table] == [1.0, 2.0]


@pytest.mark.parametrize("fails_at", ["check", 2, 4, 5])
def test_a_peer_that_fails_is_out_and_the_rest_goes_on(fails_at):
    log = []
    running = contest([Pretender("bml", 0.02, log), Pretender("gloo", 0.04, log, fails_at)])
    (table,) = running.measure()
    assert [(row.who, row.samples) for row in table] == [("bml", 15)]
    assert running.absent == {"gloo": "gloo broke"}
    assert ("gloo", "closed") in log


def test_without_bml_there_is_nothing_to_say():
    log = []
    running = contest([Pretender("bml", 0.02, log, fails_at=1), Pretender("gloo", 0.04, log)])
    with pytest.raises(RankError, match="bml broke"):
        list(running.measure())


def test_theory_is_the_plan_or_the_ring_of_peers():
    constants = Constants(0.0, 1e-9, 0.0, 0.0, 0.0)
    settings = Settings(JobSettings(parse("bcube:3x2")), (1,), (), constants)
    assert theory_s("bml", 9000, settings) == pytest.approx(8e-6)
    assert theory_s("gloo", 9000, settings) == pytest.approx(16e-6)
    shaped = Settings(JobSettings(parse("bcube:3x2")), (1,), (), constants, goodput=1e6)
    assert theory_s("bml", 9000, shaped) == pytest.approx(8e-3)


def test_the_bound_is_that_of_the_damaged_fabric_and_of_one_nic_for_peers():
    constants = Constants(0.0, 1e-9, 0.0, 0.0, 0.0)
    damaged = JobSettings(parse("bcube:3x2").without("switch:0/1"))
    settings = Settings(damaged, (1,), (), constants, goodput=1e6, peer_goodput=2e6)
    assert bound_s("bml", 9000, settings) == pytest.approx(9e-3 * 16 / 15)
    assert bound_s("gloo", 9000, settings) == pytest.approx(9e-3 * 16 / 9 / 2)
    assert bound_s("bml", 9000, replace(settings, goodput=None)) == pytest.approx(9e-6 * 16 / 15)


def test_failures_are_faults_at_the_start():
    fabric = parse("bcube:3x2").without("server:4", "link:0/0", "switch:1/2")
    assert set(JobSettings(fabric).faults) == {"kill:4@t=0s", "cut:0/0@t=0s", "switch:1/2@t=0s"}


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_total_is_the_exact_sum_of_contributions(count):
    ranks = [0, 1, 3, 7]
    summed = sum(contribution(rank, count) for rank in ranks)
    assert np.array_equal(total(ranks, count), summed)
    twice_and_missing = summed + contribution(1, count) - contribution(3, count)
    assert np.count_nonzero(twice_and_missing != summed) == count


class Pretend:
    """Ranks in threads: the right sum, but of rank 1 one element is wrong."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def prepare(self, data):
        self.count = len(data)

    def run(self):
        result = total(self.ranks, self.count)
        result[-1] += self.rank
        return result

    def failures(self):
        return ["link:0/0"]


def test_ranks_carry_out_orders_until_the_host_hangs_up():
    with tempfile.TemporaryDirectory() as folder:
        host = Ranks("pretend", Path(folder))
        threads = [
            threading.Thread(target=serve, args=(host.path, rank, Pretend(rank, [0, 1]))) for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        host.gather([0, 1], lambda: None, 5)
        order = {"do": "check", "count": 10, "of": [0, 1]}
        assert host.ask([0, 1], lambda: None, **order) == {0: {"wrong": 0}, 1: {"wrong": 1}}
        assert host.ask([0], lambda: None, do="failures") == {0: {"failures": ["link:0/0"]}}
        timed = host.ask([0], lambda: None, do="time", count=10, times=3)[0]
        ends_s = timed["ends_s"]
        assert timed["cpu_s"] >= timed["system_s"] >= 0
        assert len(ends_s) == 4
        assert sorted(ends_s) == ends_s
        host.close()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


def test_a_rank_that_does_not_come_is_named():
    with tempfile.TemporaryDirectory() as folder:
        host = Ranks("pretend", Path(folder))
        with pytest.raises(RankError, match="rank 3 did not start in 0 s"):
            host.gather([3], lambda: None, 0)
        host.close()


def test_a_rank_that_dials_in_and_is_killed_before_it_says_a_word_does_not_end_the_others():
    with tempfile.TemporaryDirectory() as folder:
        host = Ranks("pretend", Path(folder))
        with socket.socket(socket.AF_UNIX) as killed:
            killed.connect(host.path)
        survivor = threading.Thread(target=serve, args=(host.path, 1, Pretend(1, [1])))
        survivor.start()
        with closing(host):
            host.gather([1], lambda: None, 5)
        survivor.join(5)
        assert not survivor.is_alive()
