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
    first.until += copies
    memory.give_back(first)
    assert memory.take(bytes_of(PAGE)) is not first
    copies[0].wait()
    assert memory.take(bytes_of(PAGE)) is not first
    copies[1].wait()
    assert memory.take(bytes_of(PAGE)) is first
    assert memory.take(bytes_of(PAGE)) is not first, "it is in use"


def test_a_slab_is_used_for_what_needs_at_least_half_of_it() -> None:
    memory = PinnedMemory(FakeDevice(1), np.empty)
    large = memory.take(bytes_of(8 * PAGE))
    memory.give_back(large)
    assert memory.take(bytes_of(2 * PAGE)) is not large
    assert memory.take(bytes_of(8 * PAGE + 1)) is not large
    assert memory.take(bytes_of(5 * PAGE)) is large


def test_memory_that_was_not_needed_for_long_is_unlocked() -> None:
    device = FakeDevice(1)
    memory = PinnedMemory(device, np.empty)
    memory.give_back(memory.take(bytes_of(64 * PAGE)))
    for _ in range(16 * 64 // 4 + 1):
        memory.give_back(memory.take(bytes_of(4 * PAGE)))
    assert list(device.pinned.values()) == [4 * PAGE]


def test_what_is_in_use_when_the_group_ends_is_unlocked_and_copied_no_more() -> None:
    device = FakeDevice(1)
    memory = PinnedMemory(device, np.empty)
    like = bytes_of(PAGE)
    used, free = memory.take(like), memory.take(like)
    memory.give_back(free)
    there = device.tensor(torch.zeros(PAGE, dtype=torch.uint8))
    memory.copy_out(used, there, used.tensors(like)[0], device.mark())
    memory.close(30)
    memory.close(30)
    assert not device.pinned
    assert not device.violations
    with pytest.raises(UsageError, match="the process group was destroyed"):
        memory.copy_in(used, used.tensors(like)[0], there, device.mark())
    with pytest.raises(UsageError, match="the process group was destroyed"):
        memory.take(like)
    memory.give_back(used)


def test_what_is_copied_when_the_group_has_ended_is_unlocked_when_it_is_given_back() -> None:
    device, copy = FakeDevice(1), Copy()
    memory = PinnedMemory(device, np.empty)
    slabs = [memory.take(bytes_of(PAGE)) for _ in range(2)]
    slabs[0].until.append(copy)
    memory.close(0.01)
    assert list(device.pinned) == [address_of(slabs[0].pages)]
    assert slabs[0] in pinned._abandoned
    assert slabs[1] not in pinned._abandoned
    copy.wait()
    memory.give_back(slabs[0])
    assert not device.pinned
    assert slabs[0] not in pinned._abandoned


def test_the_memory_of_a_device_that_has_failed_stays_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    device, copy = FakeDevice(1), Copy()
    memory = PinnedMemory(device, np.empty)
    slab = memory.take(bytes_of(PAGE))
    memory.take(bytes_of(PAGE))
    slab.until.append(copy)
    monkeypatch.setattr(copy, "is_reached", lambda: 1 / 0)
    memory.close(30)
    assert list(device.pinned) == [address_of(slab.pages)]
    pinned._abandoned.remove(slab)
