"""FSDP2 with replicas: a rank that dies takes its replica with it, and the others go on."""

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402
from sharded_programs import N_STEPS, fault_free  # noqa: E402

pytestmark = pytest.mark.real

ALL, LEFT = [0, 1, 2, 3], [0, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["mesh", "gloo", "hook"])
def test_replicas_of_shards_train_as_one_process(way: str) -> None:
    found = run_group(4, "sharded_programs.train", way=way)
    wanted = torch.tensor(fault_free([ALL] * N_STEPS))
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank["parameters"]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["mesh", "gloo", "hook"])
def test_a_replica_goes_on_without_the_other(way: str) -> None:
    """Rank 3 dies before step 5; rank 2 cannot go on without its shards, and says so."""
    found = run_group(4, "sharded_programs.train", way=way, kill=3)
    assert found[3] == -9
    assert ("ContributorLost" if way == "mesh" else "by peer") in found[2]  # gloo: closed, or reset
    wanted = torch.tensor(fault_free([ALL] * 5 + [LEFT] * (N_STEPS - 5)))
    for rank in (0, 1):
        torch.testing.assert_close(torch.tensor(found[rank]["parameters"]), wanted, rtol=1e-4, atol=1e-5)
        assert found[rank]["contributors"] == (0,), "of its two replicas"


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["mesh", "gloo"])
def test_a_replica_is_lost_in_backward(way: str) -> None:
    found = run_group(4, "sharded_programs.train", way=way, kill=3, phase="backward")
    assert found[3] == -9
    assert isinstance(found[2], str)
    assert found[0]["parameters"] == found[1]["parameters"]
    wanted = torch.tensor(fault_free([ALL] * 5 + [LEFT] * (N_STEPS - 5)))
    off = torch.tensor(found[0]["parameters"]) - wanted
    assert off.norm() / wanted.norm() < 0.1, "one step has gradients of some layers from the lost replica"
