"""Features of PyTorch that call torch.distributed themselves, on backend bml in real processes."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]


def test_states_are_broadcast_and_saved_beside_training(tmp_path: Path) -> None:
    for rank in run_group(2, "feature_programs.states", folder=str(tmp_path)):
        assert rank["broadcast"] == [7.0] * 3
        assert rank["loaded"] == [[7.0] * 4] * 3
        assert ".metadata" in rank["files"]


def test_compiled_steps_end_as_plain_ones_and_survive_a_kill() -> None:
    ways = ["plain", "torch.compile(ddp)", "ddp.compile()", "a compiled step"]
    found = run_group(3, "feature_programs.compiled", limit_s=180, ways=ways, kill=1)
    assert found.pop(1) == -9
    assert len({rank["plain"] for rank in found}) == 1
    for rank in found:
        assert rank["torch.compile(ddp)"] == rank["ddp.compile()"] == rank["plain"]
    assert found[0]["a compiled step"] == found[1]["a compiled step"] != found[0]["plain"], "one was lost"
