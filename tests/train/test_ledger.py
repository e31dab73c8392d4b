import hashlib
import subprocess
import sys

import numpy as np
import pytest

from bml.topology.errors import InvariantError, UsageError
from bml.train.batches import BatchPlan, GlobalBatch, assignment, used_indices
from bml.train.ledger import Ledger


def enter(
    ledger: Ledger, batch: GlobalBatch, base: list[int], members: list[int], *, recomputed: bool
) -> None:
    used = used_indices(assignment(batch.indices, base, members), recomputed=recomputed)
    ledger.commit(batch.step, batch, members, used)


def test_every_sample_once_although_servers_are_lost() -> None:
    plan = BatchPlan(1437, 144, 3, seed=0)
    ledger = Ledger(1437)
    base = list(range(9))
    for batch in plan:
        members = [s for s in base if not (s == 4 and batch.step == 5) and not (s == 0 and batch.step == 17)]
        enter(ledger, batch, base, members, recomputed=True)
        base = members
    summary = ledger.summary()
    assert summary["complete"]
    assert summary["steps"] == 30
    assert sum(epoch["steps"] for epoch in summary["epochs"]) == 30
    assert [epoch["used_once"] for epoch in summary["epochs"]] == [1437, 1437, 1437]
    assert summary["left_out"] == 0


def test_a_share_that_was_left_out_is_visible() -> None:
    ledger = Ledger(90)
    for batch in BatchPlan(90, 45, 2, seed=0):
        members = list(range(8)) if batch.step == 1 else list(range(9))
        enter(ledger, batch, list(range(9)), members, recomputed=False)
    first, second = ledger.summary()["epochs"]
    assert (first["used_once"], first["used_never"], first["left_out"]) == (85, 5, 5)
    assert not first["complete"]
    assert second["complete"]
    assert not ledger.summary()["complete"]


def test_an_unfinished_epoch_is_not_complete_but_leaves_nothing_out() -> None:
    ledger = Ledger(10)
    enter(ledger, BatchPlan(10, 4, 1).batch(0), [0, 1], [0, 1], recomputed=True)
    (epoch,) = ledger.summary()["epochs"]
    assert (epoch["used_once"], epoch["used_never"], epoch["left_out"], epoch["complete"]) == (4, 6, 0, False)


def test_a_doubled_sample_is_counted_as_such() -> None:
    ledger = Ledger(4)
    batch = GlobalBatch(0, 0, 0, np.array([0, 1, 2, 3]))
    ledger.commit(0, batch, [0, 1], {0: np.array([0, 1]), 1: np.array([1, 2])})
    (epoch,) = ledger.summary()["epochs"]
    assert (epoch["used_once"], epoch["used_more"], epoch["used_never"], epoch["left_out"]) == (2, 1, 1, 1)


def test_no_step_twice() -> None:
    ledger = Ledger(10)
    plan = BatchPlan(10, 5, 1)
    enter(ledger, plan.batch(0), [0], [0], recomputed=True)
    with pytest.raises(InvariantError, match="doubled"):
        enter(ledger, plan.batch(0), [0], [0], recomputed=True)
    with pytest.raises(InvariantError, match="doubled"):
        ledger.commit(1, plan.batch(0), [0], {})


def test_samples_need_a_contributor_and_must_exist() -> None:
    batch = BatchPlan(10, 5, 1).batch(0)
    with pytest.raises(InvariantError, match=r"servers \[3\]"):
        Ledger(10).commit(0, batch, [0], {3: batch.indices})
    with pytest.raises(InvariantError, match="outside 0-4"):
        Ledger(5).commit(0, GlobalBatch(0, 0, 0, np.array([7])), [0], {0: np.array([7])})
    with pytest.raises(UsageError, match="at least one sample"):
        Ledger(0)


def test_digests_agree_if_and_only_if_the_histories_do() -> None:
    plan = BatchPlan(20, 10, 1)
    histories = [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 2])]
    digests = []
    for base, members in histories:
        ledger = Ledger(20)
        for batch in plan:
            enter(ledger, batch, base, members, recomputed=True)
        digests.append(ledger.digest())
    assert digests[0] == digests[1] != digests[2]


def test_servers_with_empty_shares_are_fine() -> None:
    ledger = Ledger(2)
    enter(ledger, BatchPlan(2, 2, 1).batch(0), list(range(9)), list(range(1, 9)), recomputed=True)
    assert ledger.summary()["complete"]


@pytest.mark.slow
def test_threads_that_load_their_first_ledgers_at_once_do_not_end_the_process() -> None:
    program = """
import sys
from threading import Barrier, Thread
from bml.train.ledger import Ledger
sys.setswitchinterval(1e-6)
dumped, begin = Ledger(100).dump(), Barrier(8)
def load():
    begin.wait()
    assert Ledger.load(dumped).dump() == dumped
threads = [Thread(target=load) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")


def record(chain: bytes, batch: GlobalBatch, members: list[int], used: dict[int, np.ndarray]) -> bytes:
    """What a step adds to the digest, word by word."""
    hashed = hashlib.sha256(chain)
    words = [batch.step + 1, batch.epoch_no, batch.batch_no, len(members), *members]
    for server in members:
        part = used.get(server, batch.indices[:0])
        words += [server, len(part), *part.tolist()]
    for word in words:
        hashed.update(int(word).to_bytes(8, "little", signed=True))
    return hashed.digest()


@pytest.mark.parametrize("n_servers", [0, 1, 2, 9, 50])
def test_a_digest_is_that_of_all_words_in_their_order(n_servers: int) -> None:
    """Joiners of another version hash it otherwise, perhaps, but must come to the same."""
    plan, ledger, chain = BatchPlan(90, 30, 2, 0), Ledger(90), Ledger(90)._chain
    members = list(range(n_servers))
    for step in range(5):
        batch = plan.batch(step)
        used = used_indices(assignment(batch.indices, range(60), members), recomputed=True) if members else {}
        ledger.commit(step + 1, batch, members, used)
        chain = record(chain, batch, members, used)
        assert ledger.digest() == hashlib.sha256(chain).hexdigest()
