"""PyTorch's own tests of torch.distributed on backend bml; make test-torch runs all that are selected."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

from torch_selection import AS_GLOO, SAMPLE, n_ranks, reason, selected

SUITE = Path(__file__).with_name("torch_suite.py")


def run_suite(folder: Path, *names: str) -> dict[str, str]:
    results = folder / "results.json"
    subprocess.run([sys.executable, str(SUITE), str(results), *names], check=True, timeout=110)
    found: dict[str, str] = json.loads(results.read_text())
    return found


def test_the_selection_has_reasons() -> None:
    names = ["test_all_reduce_sum", "test_all_reduce_sum_cuda", "test_ddp_inference", "test_barrier_group"]
    assert selected(names) == ["test_all_reduce_sum", "test_barrier_group"]
    assert "GPU" in reason("test_ddp_inference")
    assert [n_ranks(name) for name in ("test_reduce_group_max", "test_reduce_full_group_max")] == [8, 4]
    assert selected(SAMPLE) == SAMPLE
    assert len(set(SAMPLE)) == 15
    assert not reason(f"test_{AS_GLOO}")


@pytest.mark.real
def test_a_sample_of_the_tests_of_pytorch_passes(tmp_path: Path) -> None:
    found = run_suite(tmp_path, *SAMPLE)
    assert found == dict.fromkeys(SAMPLE, "passed")


@pytest.mark.real
def test_a_test_that_fails_or_is_skipped_is_no_pass(tmp_path: Path) -> None:
    """PyTorch's classes pass tests that they never started; this runner starts them."""
    found = run_suite(tmp_path, "test_sparse_all_reduce_sum", "test_all_gather_cuda", "test_get_rank")
    assert "to_dense" in found["test_sparse_all_reduce_sum"]
    assert found["test_sparse_all_reduce_sum"].startswith("failed")
    assert found["test_all_gather_cuda"].startswith("skipped")
    assert found["test_get_rank"] == "passed"
