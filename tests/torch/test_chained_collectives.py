"""Collectives on a device that take what others give, begun without a wait between them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_programs import OneDevice, options  # noqa: E402
from fake_device import FakeDevice  # noqa: E402
from modelled_ranks import run_ranks  # noqa: E402

from bml.torch.devices import slices  # noqa: E402
from bml.torch.devices.order import Arrivals  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402

N = 2


def chained(seed: int, n_elements: int) -> list[list[float]]:
    """The values of an all-reduce of an all-reduce, and those of an all-gather of a broadcast."""
    devices = [FakeDevice(100 * seed + rank) for rank in range(N)]

    def rank(group: ProcessGroup) -> list[float]:
        place = devices[group.rank()]
        x = place.tensor(torch.full((n_elements,), float(group.rank() + 1)))
        works = [group.allreduce([x]) for _ in range(2)]
        z = place.tensor(torch.full((n_elements,), 10.0 * (group.rank() + 1)))
        gathered = [place.tensor(torch.zeros(n_elements)) for _ in range(N)]
        works.append(group.broadcast([z], options(dist.BroadcastOptions, root=1)))
        works.append(group.allgather([gathered], [z.view(-1)]))
        for each in works:
            each.wait()
        found = [place.read(each) for each in (x, *gathered)]
        assert all(torch.equal(each, each[:1].expand(n_elements)) for each in found)
        return [each[0].item() for each in found]

    return run_ranks(N, rank, devices=lambda rank: OneDevice(devices[rank]))


@pytest.mark.parametrize("n_elements", [4, 103])
@pytest.mark.parametrize("seed", range(8))
def test_a_call_takes_what_the_one_before_gives(
    seed: int, n_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_BASE_NBYTES", 16)  # five slices, or one
    assert chained(seed, n_elements) == [[6.0, 20.0, 20.0]] * N


class Reached:
    """A mark that is reached when it is waited for."""

    def __init__(self) -> None:
        self.reached = False

    def wait(self) -> None:
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached


def test_results_are_awaited_until_their_copies_were_carried_out() -> None:
    arrivals, whole, other, mark = Arrivals(), torch.zeros(8), torch.zeros(8), Reached()
    arrival = arrivals.expect([whole[:4]])
    assert arrivals.of([whole[4:], other]) == [arrival], "they share their memory"
    assert arrivals.of([other]) == []
    arrival.is_under_way(mark)
    assert arrivals.of([whole]) == [arrival]
    arrival.wait()
    assert mark.reached
    assert arrivals.of([whole]) == []


def test_results_of_a_call_that_failed_are_awaited_no_more() -> None:
    arrivals, tensor = Arrivals(), torch.zeros(8)
    arrivals.expect([tensor]).is_under_way(None)
    assert arrivals.of([tensor]) == []
