"""Page-locked memory that is kept between calls: who gets which, and when it is unlocked."""

from __future__ import annotations

import mmap
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_device import FakeDevice  # noqa: E402

from bml.io.memory import address_of  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.devices import pinned  # noqa: E402
from bml.torch.devices.pinned import PinnedMemory  # noqa: E402

PAGE = mmap.PAGESIZE


def bytes_of(n: int) -> list[torch.Tensor]:
    return [torch.empty(n, dtype=torch.uint8)]


def test_tensors_lie_apart_and_are_like_the_given() -> None:
    device = FakeDevice(1)
    like = [
        torch.empty(2, 3),
        torch.empty(0),
        torch.empty((), dtype=torch.bfloat16),
        torch.empty(5, dtype=torch.bool),
        torch.empty(4, 2, dtype=torch.complex64).t(),
        torch.empty(3, dtype=torch.float8_e4m3fn),
    ]
    slab = PinnedMemory(device, np.empty).take(like)
    made = slab.tensors(like)
    assert [each.shape for each in made] == [each.shape for each in like]
    assert [each.dtype for each in made] == [each.dtype for each in like]
    assert all(each.is_contiguous() for each in made)
    used = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in made if each.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(used))
    assert used[0][0] >= address_of(slab.pages)
    assert used[-1][1] <= address_of(slab.pages) + slab.pages.nbytes
    assert all(start % 64 == 0 for start, _ in used)


class Copy:
    """The mark of a copy."""

    carried_out = False

    def is_reached(self) -> bool:
        return self.carried_out

    def wait(self) -> None:
        self.carried_out = True


def test_a_slab_is_used_again_once_its_copies_were_carried_out() -> None:
    memory, copies = PinnedMemory(FakeDevice(1), np.empty), [Copy(), Copy()]
    first = memory.take(bytes_of(PAGE))
    memory.give_back(first, copies)
    assert memory.take(bytes_of(PAGE)) is not first
    copies[0].wait()
    assert memory.take(bytes_of(PAGE)) is not first
    copies[1].wait()
    assert memory.take(bytes_of(PAGE)) is first
    assert memory.take(bytes_of(PAGE)) is not first, "it is in use"


def test_a_slab_is_used_for_what_needs_at_least_half_of_it() -> None:
    memory = PinnedMemory(FakeDevice(1), np.empty)
    large = memory.take(bytes_of(8 * PAGE))
    memory.give_back(large, [])
    assert memory.take(bytes_of(2 * PAGE)) is not large
    assert memory.take(bytes_of(8 * PAGE + 1)) is not large
    assert memory.take(bytes_of(5 * PAGE)) is large


def test_memory_that_was_not_needed_for_long_is_unlocked() -> None:
    device = FakeDevice(1)
    memory = PinnedMemory(device, np.empty)
    memory.give_back(memory.take(bytes_of(64 * PAGE)), [])
    for _ in range(16 * 64 // 4 + 1):
        memory.give_back(memory.take(bytes_of(4 * PAGE)), [])
    assert list(device.pinned.values()) == [4 * PAGE]


def test_what_is_in_use_when_the_group_ends_is_unlocked_when_it_is_given_back() -> None:
    device = FakeDevice(1)
    memory = PinnedMemory(device, np.empty)
    used, free = memory.take(bytes_of(PAGE)), memory.take(bytes_of(PAGE))
    memory.give_back(free, [])
    memory.close()
    memory.close()
    assert list(device.pinned) == [address_of(used.pages)]
    assert used in pinned._abandoned
    with pytest.raises(UsageError, match="the process group was destroyed"):
        memory.take(bytes_of(PAGE))
    memory.give_back(used, [device.mark()])
    assert not device.pinned
    assert used not in pinned._abandoned
    assert not device.violations
