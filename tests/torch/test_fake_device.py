"""The fake device itself: it is late, it keeps the order that marks make, and shows what is forgotten."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_device import BUGS, FakeDevice  # noqa: E402

from bml.io.memory import address_of  # noqa: E402
from bml.torch.devices.pages import whole_pages  # noqa: E402

SEEDS = range(20)


def pinned(device: FakeDevice, n: int) -> torch.Tensor:
    """A tensor of n float32 in locked memory."""
    pages = whole_pages(4 * n, np.empty)
    device.pin(pages)
    return torch.from_numpy(pages[: 4 * n].view(np.float32))


def round_trip(device: FakeDevice) -> torch.Tensor:
    """Compute on the device, copy out, change on the host, copy in over what is still read, compute on."""
    host = pinned(device, 5)
    x = device.tensor(torch.arange(5.0))
    seen = device.tensor(torch.zeros(5))
    device.compute(lambda: x.add_(1))
    device.copy_out(x, host, device.mark()).wait()
    host.mul_(2)
    device.compute(lambda: seen.copy_(x))
    came = device.copy_in(host, x, device.mark())
    device.follow(came)
    device.compute(lambda: x.add_(100))
    if came.is_reached():
        host.fill_(-1)  # as somebody who uses the memory again
    return torch.stack([device.read(seen), device.read(x)])


AWAITED = torch.stack([torch.arange(1.0, 6.0), 100 + 2 * torch.arange(1.0, 6.0)])


@pytest.mark.parametrize("seed", SEEDS)
def test_marks_make_the_order(seed: int) -> None:
    assert torch.equal(round_trip(FakeDevice(seed)), AWAITED)


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_forgotten_is_seen(bug: str) -> None:
    found = [round_trip(FakeDevice(seed, bug)) for seed in SEEDS]
    assert any(not torch.equal(each, AWAITED) for each in found)


def test_work_is_late_and_its_order_differs() -> None:
    orders = set()
    for seed in SEEDS:
        device, order = FakeDevice(seed), list[str]()
        device.compute(lambda order=order: order.append("a"))
        with device.stream():
            device.compute(lambda order=order: order.append("b"))
        early = "".join(order)
        device.run_all()
        orders.add((early, "".join(order)))
    assert {"ab", "ba"} == {order for _, order in orders}
    assert "" in {early for early, _ in orders}


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_is_copied_out_holds_poison_before(seed: int) -> None:
    device = FakeDevice(seed)
    host, x = pinned(device, 3), device.tensor(torch.ones(3))
    host.zero_()
    mark = device.copy_out(x, host, device.mark())
    before = host.clone()
    assert mark.reached == torch.equal(before, torch.ones(3))
    assert torch.equal(before, torch.ones(3)) or not before.eq(0).any()
    mark.wait()
    assert torch.equal(host, torch.ones(3))


def test_copies_take_locked_memory_alone_and_it_stays_locked() -> None:
    device = FakeDevice(1)
    x = device.tensor(torch.ones(3))
    with pytest.raises(AssertionError, match="not locked"):
        device.copy_out(x, torch.empty(3), device.mark())
    pages = whole_pages(12, np.empty)
    device.pin(pages)
    mark = device.copy_out(x, torch.from_numpy(pages[:12].view(np.float32)), device.mark())
    was_reached = mark.reached
    device.unpin(pages)
    assert not device.pinned
    assert bool(device.violations) == (not was_reached)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_a_future_follows_the_stream_of_its_callback(seed: int) -> None:
    device = FakeDevice(seed)
    x = device.tensor(torch.ones(3))
    settled = device.future()
    called = device.mark()

    def twice(_: object) -> torch.Tensor:
        device.follow(called)
        device.compute(lambda: x.mul_(2))
        return x

    doubled = settled.then(twice)
    settled.set_result(None)
    assert torch.equal(device.read(doubled.wait()), torch.full((3,), 2.0))


def test_errors_come_through_futures() -> None:
    settled = FakeDevice(1).future()

    def fail(_: object) -> None:
        raise RuntimeError("the step failed")

    failed = settled.then(fail)
    settled.set_result(None)
    with pytest.raises(RuntimeError, match="the step failed"):
        failed.wait()


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_pages_are_whole(nbytes: int) -> None:
    made = np.empty(2 * mmap.PAGESIZE + 256 + nbytes, np.uint8)

    def empty(size: int, dtype: object) -> np.ndarray:
        return made[256 : 256 + size]

    pages = whole_pages(nbytes, empty)
    assert address_of(pages) % mmap.PAGESIZE == 0
    assert pages.nbytes % mmap.PAGESIZE == 0
    assert nbytes <= pages.nbytes < nbytes + mmap.PAGESIZE + 1
    assert address_of(made) + 256 <= address_of(pages)
    assert address_of(pages) + pages.nbytes <= address_of(made) + made.nbytes
