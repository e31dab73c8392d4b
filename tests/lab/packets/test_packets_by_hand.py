"""A few transfers packet by packet: closed forms, fair shares, lossless buffers, pauses and rate control."""

import math

import numpy as np
import pytest
from by_hand import RATE, sent, transfers

from bml.errors import UsageError
from bml.topology import parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

PACKET, DELAY_S = 4096, 1e-6
PACKET_S = PACKET / RATE
BURST = 2_000_000
"""Bytes from each sender that fill queues."""


def incast(n_senders, fabric="switch:9", nbytes=BURST, **settings):
    """All send to server 0 at once."""
    traffic = transfers([(sender, 0) for sender in range(1, n_senders + 1)], [1.0] * n_senders)
    return sent(traffic, fabric, nbytes, **settings)


@pytest.mark.parametrize(
    ("fabric", "pair", "links"),
    [
        ("torus:4x1", (0, 1), 1),
        ("switch:4", (0, 1), 2),
        ("bcube:3x2", (0, 1), 2),
        ("fattree:4", (0, 1), 2),
        ("fattree:4", (0, 2), 4),
        ("fattree:4", (0, 15), 6),
    ],
)
@pytest.mark.parametrize("n_packets", [1, 7])
def test_packets_alone_follow_one_another_over_all_links(fabric, pair, links, n_packets):
    outcome = sent(transfers([pair], [1.0]), fabric, n_packets * PACKET)
    assert outcome.seconds == pytest.approx(links * (PACKET_S + DELAY_S) + (n_packets - 1) * PACKET_S)
    assert (outcome.n_packets, outcome.n_crossings) == (n_packets, n_packets * links)


def test_a_slow_link_is_the_time_of_its_bytes():
    fabric = parse("switch:3").with_rates({(1, 0): "1/10"})
    outcome = sent(transfers([(0, 1)], [1.0]), fabric, 100 * PACKET, dcqcn=False)
    assert outcome.seconds == pytest.approx(PACKET_S + 2 * DELAY_S + 1000 * PACKET_S)


def test_a_cable_is_as_fast_as_its_slower_end():
    fabric = parse("torus:4x1").with_rates({(1, 0): "1/4"})
    outcome = sent(transfers([(0, 1)], [1.0]), fabric, PACKET)
    assert outcome.seconds == pytest.approx(4 * PACKET_S + DELAY_S)


def test_the_last_packet_is_what_is_left():
    outcome = sent(transfers([(0, 1)], [1.0]), "switch:2", 2.5 * PACKET)
    assert outcome.n_packets == 3
    assert outcome.seconds == pytest.approx(2 * DELAY_S + (1 + 2.5) * PACKET_S), "the switch sends it last"


def test_a_transfer_waits_for_another_one_to_arrive_whole():
    outcome = sent(transfers([(0, 1), (1, 2)], [1.0, 1.0], [(0, 1)]), "switch:3", 10 * PACKET)
    first, second = outcome.arrived
    assert first == pytest.approx(2 * DELAY_S + 11 * PACKET_S)
    assert second == pytest.approx(2 * first)


def test_one_bottleneck_is_busy_and_shared_fairly():
    outcome = incast(4, dcqcn=False)
    whole_s = 4 * BURST / RATE
    assert outcome.seconds == pytest.approx(whole_s, rel=0.01)
    assert outcome.arrived == pytest.approx(np.full(4, whole_s), rel=0.01)


def test_two_connections_of_a_nic_take_turns():
    outcome = sent(transfers([(0, 1), (0, 2)], [1.0, 1.0]), "switch:3", BURST)
    assert outcome.arrived == pytest.approx(np.full(2, 2 * BURST / RATE), rel=0.01)


def test_an_incast_into_a_small_buffer_pauses_and_loses_nothing():
    outcome = incast(8, buffer_nbytes=60_000, dcqcn=False)
    assert outcome.pauses.sum() > 8
    assert outcome.paused_s.sum() > 0
    # That every packet arrived in order, and that no switch is left with one, is checked in every run.
    assert outcome.n_packets == 8 * math.ceil(BURST / PACKET)
    assert outcome.most_held <= outcome.buffer_nbytes
    assert outcome.seconds == pytest.approx(8 * BURST / RATE, rel=0.02), "pauses do not idle a bottleneck"


def test_an_incast_into_an_endless_buffer_does_not_pause():
    outcome = incast(8, buffer_nbytes=1e15, dcqcn=False)
    assert (outcome.pauses.sum(), outcome.paused_s.sum()) == (0, 0)
    assert outcome.most_queued.max() == pytest.approx(7 * BURST, rel=0.01)


@pytest.mark.parametrize("share", [0.01, 1 / 8, 8.0])
@pytest.mark.parametrize("buffer_nbytes", [23_000, 40_000, 375_000])
@pytest.mark.parametrize("delay_s", [0.0, 1e-6])
def test_a_buffer_is_never_exceeded(share, buffer_nbytes, delay_s):
    """Whatever the threshold: the headroom takes what comes after a pause. `play` raises else."""
    settings = {"share": share, "buffer_nbytes": buffer_nbytes, "delay_s": delay_s, "dcqcn": False}
    outcome = incast(8, nbytes=500_000, **settings)
    assert outcome.n_packets == 8 * math.ceil(500_000 / PACKET)


def test_pauses_spread_to_connections_that_go_elsewhere():
    """Head-of-line blocking: 0 and 2 share an edge switch; 2 sends to a server whose link is free."""
    pairs = [(0, 15), (1, 15), (4, 15), (8, 15), (2, 14)]
    small, large = (
        sent(transfers(pairs, [1.0] * 5), "fattree:4", BURST, buffer_nbytes=size, dcqcn=False)
        for size in (40_000, 1e12)
    )
    assert large.pauses.sum() == 0
    upstream = [at for at, name in enumerate(small.ports.name) if " to " in name and small.pauses[at]]
    assert upstream, "pauses go back over links between switches"


def test_no_marks_below_the_threshold_and_all_above():
    alone = sent(transfers([(0, 1)], [1.0]), "switch:2", BURST)
    assert alone.n_marked == 0
    outcome = incast(8, buffer_nbytes=1e12, dcqcn=False)
    assert 0.7 * outcome.n_packets < outcome.n_marked < outcome.n_packets


@pytest.mark.parametrize("n_senders", [2, 4, 8])
def test_dcqcn_comes_to_fair_shares_with_short_queues(n_senders):
    """At first rates fall too far, as alpha begins at 1; later each has its share of a busy bottleneck."""
    nbytes, turns = 40_000_000, 10
    pairs = [(sender, 0) for sender in range(1, n_senders + 1) for _ in range(turns)]
    traffic = transfers(pairs, [1.0] * len(pairs))
    controlled = sent(traffic, "switch:9", nbytes)
    ends = np.sort(controlled.arrived.reshape(n_senders, turns), axis=1)
    rates = nbytes / np.diff(ends, axis=1)[:, 1:-1]
    assert rates == pytest.approx(np.full_like(rates, RATE / n_senders), rel=0.2)
    free = sent(traffic, "switch:9", nbytes, dcqcn=False)
    assert controlled.n_notified > 0
    assert controlled.n_marked < free.n_marked / 5
    assert controlled.pauses.sum() < free.pauses.sum() / 10
    assert controlled.most_queued.max() <= free.most_queued.max()


def test_dcqcn_keeps_queues_short():
    controlled, free = (incast(4, nbytes=40_000_000, dcqcn=on, buffer_nbytes=1e12) for on in (True, False))
    assert controlled.most_queued.max() < free.most_queued.max() / 10


def test_dcqcn_leaves_a_connection_alone_that_meets_nobody():
    with_it, without = (sent(transfers([(0, 1)], [1.0]), "switch:2", BURST, dcqcn=on) for on in (True, False))
    assert with_it.seconds == without.seconds


def test_a_seed_decides_everything():
    first, again, other = (incast(8, nbytes=5_000_000, seed=seed) for seed in (3, 3, 4))
    assert (first.arrived == again.arrived).all()
    assert (first.n_marked, first.n_notified) == (again.n_marked, again.n_notified)
    assert (first.arrived != other.arrived).any()


def test_a_buffer_without_room_beside_the_headroom_is_refused():
    with pytest.raises(UsageError, match="22288 bytes may come after a pause"):
        incast(2, buffer_nbytes=20_000)


def test_too_many_packets_are_refused_with_the_calculation():
    with pytest.raises(UsageError, match=r"would go 2000000000 times over a link.* 1\d\d\d s"):
        sent(transfers([(0, 1)], [1.0]), "switch:2", 1e9 * PACKET)


def test_packets_that_no_record_can_count_are_refused_too():
    with pytest.raises(UsageError, match=r"would go 10000000000 times over a link"):
        sent(transfers([(0, 1)], [1.0]), "switch:2", 5e9 * PACKET)
