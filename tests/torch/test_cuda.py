"""Backend bml with CUDA tensors, in real processes that share one GPU; host memory is the oracle."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and PyTorch with CUDA"),
]


def test_collectives() -> None:
    for rank, found in enumerate(run_group(3, "cuda_programs.collectives")):
        ones = [1.0] * 4
        assert found.pop("all_reduce SUM") == [6.0] * 4
        assert found.pop("all_reduce MAX") == [3.0] * 4
        assert found.pop("all_reduce AVG") == [2.0] * 4
        assert found.pop("all_reduce torch.bfloat16") == [6.0] * 4
        assert found.pop("all_reduce torch.int64") == [6.0] * 4
        assert found.pop("all_reduce torch.bool") == ones
        assert found.pop("then") == [60.0] * 4
        assert found.pop("broadcast") == [3.0] * 4
        gathered = [1.0] * 4 + [2.0] * 4 + [3.0] * 4
        for name in ("all_gather", "all_gather_into_tensor", "all_to_all_single"):
            assert found.pop(name) == gathered, name
        assert found.pop("reduce_scatter_tensor") == [6.0 * (rank + 1)] * 4
        assert found.pop("scatter") == [float(rank)] * 4
        assert found.pop("send and recv") == [1.0 if rank == 1 else rank + 1.0] * 4
        assert not found


def test_large_all_reduces_give_the_bits_of_host_memory() -> None:
    assert run_group(2, "cuda_programs.large") == [[True] * 5] * 2


@pytest.mark.parametrize("wide", [64, 2048])
def test_ranks_train_alike_and_as_in_host_memory(wide: int) -> None:
    """The wider model has buckets that are cut into slices."""
    there, here = (
        run_group(2, "cuda_programs.train", device=device, wide=wide) for device in ("cuda:0", "cpu")
    )
    assert len({rank["digest"] for rank in there}) == 1
    torch.testing.assert_close(
        torch.tensor(there[0]["parameters"]), torch.tensor(here[0]["parameters"]), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_kill_end_alike(victim: int) -> None:
    found = run_group(3, "cuda_programs.train", device="cuda:0", kill=victim)
    assert found.pop(victim) == -9
    left = tuple(rank for rank in range(3) if rank != victim)
    assert {rank["contributors"] for rank in found} == {left}
    assert len({rank["digest"] for rank in found}) == 1
