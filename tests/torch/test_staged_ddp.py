"""DDP in real processes, on a device that copies at once: the real memory, threads and futures of a group."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402

pytestmark = pytest.mark.real


def test_two_ranks_train_to_the_bits_of_host_memory() -> None:
    staged = run_group(2, "staged_programs.train", n_steps=40)
    plain = run_group(2, "train", backend="bml", n_steps=40)
    assert len({rank["digest"] for rank in staged + plain}) == 1
    for rank in staged:
        assert 0 < rank["pinned"] < 20, "memory is locked once, and kept between steps"
        assert rank["left"] == 0
        assert not rank["violations"]


def test_survivors_of_a_kill_end_well_and_alike() -> None:
    found = run_group(4, "staged_programs.train", kill=2)
    assert found.pop(2) == -9
    assert {rank["contributors"] for rank in found} == {(0, 1, 3)}
    assert len({rank["digest"] for rank in found}) == 1
    assert all(rank["left"] == 0 and not rank["violations"] for rank in found)
