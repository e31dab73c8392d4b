"""Random traffic packet by packet beside a plain simulator that shares no code: arrivals, pauses, marks."""

import numpy as np
import pytest
from by_hand import RATE, sent
from slow_packets import Link, Plain, Sender

from bml.lab.flows.network import wire
from bml.lab.flows.traffic import Traffic
from bml.lab.packets.ports import ports_of
from bml.lab.packets.settings import Settings
from bml.topology import parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

FABRICS = ("switch:5", "bcube:3x2", "fattree:4", "torus:3x2", "bcube:2x3")
VECTOR = 400_000
#: All packets are marked above one length of a queue, so that chance has no say.
SHARP = {"mark_from": 20e3, "mark_all_from": 20e3 + 1e-6}


def drawn_traffic(fabric, chance, n_transfers=40):
    pairs = [
        (server, level, peer)
        for server, level in fabric.links
        for peer in fabric.members(level, fabric.group(server, level))
        if peer != server
    ]
    # Few receivers, so that queues grow.
    few = [pair for pair in pairs if pair[2] < 3]
    chosen = np.array([few[at] for at in chance.integers(0, len(few), n_transfers)], np.int32)
    chosen[chance.random(n_transfers) < 0.1] = -1  # meetings
    after = np.arange(1, n_transfers)
    kept = chance.random(n_transfers - 1) < 0.5
    before = (after * chance.random(n_transfers - 1)).astype(np.int32)
    share = chance.random(n_transfers) * (chosen[:, 0] >= 0)
    priority = chance.integers(0, 3, n_transfers).astype(np.int32)
    columns = (np.ascontiguousarray(column) for column in chosen.T)
    return Traffic(*columns, share, priority, before[kept], after[kept].astype(np.int32))


def plainly(traffic, fabric, settings, seed):
    network = wire(traffic, fabric, RATE)
    ports = ports_of(network, fabric)
    links = [
        Link(*each)
        for each in zip(ports.capacity.tolist(), ports.source.tolist(), ports.target.tolist(), strict=True)
    ]
    ranks = np.random.default_rng(seed).permutation(len(network.sender)).tolist()
    paths = np.split(ports.path, ports.path_start[1:-1])
    senders = [
        Sender(path.tolist(), rank, links[path[0]].capacity) for path, rank in zip(paths, ranks, strict=True)
    ]
    shared = [settings.shared_nbytes(RATE) * int(number) for number in ports.ports]
    for link in links:
        if link.target >= 0:
            shared[link.target] += settings.shared_nbytes(link.capacity) - settings.shared_nbytes(RATE)
    sizes = np.rint(traffic.share * VECTOR).tolist()
    transfers = list(zip(network.connection.tolist(), sizes, traffic.priority.tolist(), strict=True))
    arrows = list(zip(traffic.before.tolist(), traffic.after.tolist(), strict=True))
    plain = Plain(links, senders, shared, transfers, arrows, settings)
    plain.run()
    return plain


@pytest.fixture
def rates(monkeypatch):
    """Every link has a rate of its own, each way, so that next to nothing happens twice at one time."""
    monkeypatch.setattr(
        "bml.lab.flows.network._capacity", lambda link, _: np.random.default_rng(link).uniform(0.3, 1)
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("dcqcn", [False, True])
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_does_what_a_plain_simulator_says(seed, name, dcqcn, rates):
    chance, fabric = np.random.default_rng(seed), parse(name)
    traffic = drawn_traffic(fabric, chance)
    settings = {"buffer_nbytes": 40e3, "dcqcn": dcqcn, "counter_nbytes": 150e3, **SHARP}
    plain = plainly(traffic, fabric, Settings(**settings), seed)
    ours = sent(traffic, fabric, VECTOR, seed, **settings)
    assert ours.arrived == pytest.approx(np.array(plain.arrived), rel=1e-9)
    assert ours.pauses.tolist() == [link.pauses for link in plain.links]
    assert ours.paused_s == pytest.approx(
        np.array([link.paused_s for link in plain.links]), rel=1e-6, abs=1e-12
    )
    assert ours.most_held == pytest.approx(np.array(plain.most_held), rel=1e-9)
    assert (ours.n_marked, ours.n_notified) == (plain.marked, plain.notified)


def test_the_random_cases_have_pauses_marks_and_notifications(rates):
    chance, fabric = np.random.default_rng(0), parse("switch:5")
    plain = plainly(drawn_traffic(fabric, chance), fabric, Settings(buffer_nbytes=40e3, **SHARP), 0)
    assert sum(link.pauses for link in plain.links) > 20
    assert plain.marked > 20
    assert plain.notified > 5
