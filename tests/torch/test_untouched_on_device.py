"""Tensors that a collective leaves as they are in host memory are not written on a device either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_programs import OneDevice, options  # noqa: E402
from fake_device import FakeDevice  # noqa: E402
from modelled_ranks import run_ranks  # noqa: E402

from bml.torch.process_group import ProcessGroup  # noqa: E402

Call = Callable[[ProcessGroup, Callable[[torch.Tensor], torch.Tensor]], tuple[Any, torch.Tensor]]


def on_device(seed: int, call: Call) -> list[list[float]]:
    """What two ranks have in the tensor of a call."""
    devices = [FakeDevice(100 * seed + rank) for rank in range(2)]

    def rank(group: ProcessGroup) -> list[float]:
        place = devices[group.rank()]
        work, tensor = call(group, place.tensor)
        work.wait()
        found: list[float] = place.read(tensor).tolist()
        return found

    return run_ranks(2, rank, devices=lambda rank: OneDevice(devices[rank]))


@pytest.mark.parametrize("seed", range(3))
def test_a_root_broadcasts_a_tensor_that_cannot_be_written(seed: int) -> None:
    def call(group: ProcessGroup, tensor: Any) -> tuple[Any, torch.Tensor]:
        x = tensor(torch.full((1,), 5.0)).expand(4) if group.rank() == 0 else tensor(torch.zeros(4))
        return group.broadcast([x], options(dist.BroadcastOptions, root=0)), x

    assert on_device(seed, call) == [[5.0] * 4] * 2


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_gives_one_to_the_reduction_of_another(seed: int) -> None:
    def call(group: ProcessGroup, tensor: Any) -> tuple[Any, torch.Tensor]:
        x = tensor(torch.full((1,), 5.0)).expand(4) if group.rank() == 0 else tensor(torch.ones(4))
        return group.reduce([x], options(dist.ReduceOptions, "SUM", 1)), x

    assert on_device(seed, call) == [[5.0] * 4, [6.0] * 4]


@pytest.mark.parametrize("seed", range(3))
def test_outputs_of_a_gather_elsewhere_stay_as_they_are(seed: int) -> None:
    """torch.distributed gives none there; who calls the group may."""

    def call(group: ProcessGroup, tensor: Any) -> tuple[Any, torch.Tensor]:
        outputs = [tensor(torch.full((3,), 7.0)) for _ in range(2)]
        x = tensor(torch.full((3,), float(group.rank())))
        return group.gather([outputs], [x], options(dist.GatherOptions, root=0)), outputs[1]

    assert on_device(seed, call) == [[1.0] * 3, [7.0] * 3]
