"""The end of a group with memory beside a device: once it is left, nothing is locked or copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from device_programs import OneDevice  # noqa: E402
from fake_device import FakeDevice, FakeMark  # noqa: E402
from modelled_ranks import run_ranks  # noqa: E402

from bml.topology.errors import UsageError  # noqa: E402
from bml.torch import process_group  # noqa: E402
from bml.torch.devices import pinned  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.reductions import Reduction  # noqa: E402

DESTROYED = "the process group was destroyed"


def alone(device: FakeDevice, function: Callable[[ProcessGroup], Any]) -> tuple[Any, list[dict[int, int]]]:
    """What one rank returns, and what was locked when the group left its memory."""
    locked: list[dict[int, int]] = []
    (found,) = run_ranks(
        1,
        function,
        devices=lambda rank: OneDevice(device),
        on_shutdown=lambda rank: lambda in_order: locked.append(dict(device.pinned)),
    )
    return found, locked


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_memory_is_unlocked_before_it_is_left(seed: int, aborts: bool) -> None:
    device = FakeDevice(seed)

    def rank(group: ProcessGroup) -> Any:
        x = device.tensor(torch.ones(1000))
        group.allreduce([x]).wait()
        group.abort() if aborts else group.shutdown()
        return device.read(x)

    found, locked = alone(device, rank)
    assert torch.equal(found, torch.ones(1000))
    assert locked == [{}]
    assert not device.violations


def test_what_is_reduced_while_another_thread_aborts_is_not_copied_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, store = FakeDevice(1), Reduction.store

    def rank(group: ProcessGroup) -> Any:
        def store_late(self: Reduction, *arguments: Any) -> None:
            aborting = threading.Thread(target=group.abort)
            aborting.start()
            aborting.join(30)
            store(self, *arguments)

        monkeypatch.setattr(Reduction, "store", store_late)
        x = device.tensor(torch.ones(1000))
        work = group.allreduce([x])
        with pytest.raises(UsageError, match=DESTROYED):
            work.wait()
        return device.read(x)

    found, locked = alone(device, rank)
    assert torch.equal(found, torch.ones(1000))
    assert locked == [{}]
    assert not device.pinned
    assert not device.violations


def test_an_abort_does_not_wait_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays locked, and nobody else gets it."""
    device, hangs = FakeDevice(1), threading.Event()
    monkeypatch.setattr(process_group, "_LEAVE_S", 0.05)
    monkeypatch.setattr(FakeMark, "wait", lambda self: hangs.wait(60))

    def rank(group: ProcessGroup) -> Any:
        x = device.tensor(torch.ones(1000))
        device.hang()
        group.allreduce([x])
        aborting = threading.Thread(target=group.abort, daemon=True)
        aborting.start()
        aborting.join(30)
        assert not aborting.is_alive()
        hangs.set()
        return [slab for slab in pinned._abandoned if slab.pages.ctypes.data in device.pinned]

    abandoned, locked = alone(device, rank)
    assert len(abandoned) == len(locked[0]) == 1
    assert not device.violations
    pinned._abandoned.remove(abandoned[0])


def test_calls_after_the_end_lock_nothing() -> None:
    device = FakeDevice(1)

    def rank(group: ProcessGroup) -> int:
        group.shutdown()
        for n in (10, 5000, 20000):
            with pytest.raises(UsageError, match=DESTROYED):
                group.allreduce([device.tensor(torch.ones(n))])
        return len(device.pinned)

    assert alone(device, rank)[0] == 0


# --- calls that fail before they have begun ---------------------------------------------------------


class NobodyAnswers:
    """A messenger whose messages never come."""

    def begin_recv(self, array: Any, source: int, tag: int = 0) -> Future[int]:
        return Future()

    begin_send = begin_recv


FAILURES = [
    (call, fails)
    for call in ("allreduce", "send", "recv")
    for fails in ("mark", "copy_out", "future", "tensors")
    if (call, fails) != ("recv", "copy_out")  # which it does not call
]


@pytest.mark.parametrize(("call", "fails"), FAILURES)
def test_memory_of_a_call_that_fails_is_used_again(
    call: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(1)
    calls = {
        "allreduce": lambda group, x: group.allreduce([x]),
        "send": lambda group, x: group.send([x], 0),
        "recv": lambda group, x: group.recv([x], 0),
    }

    def fail(*_: Any) -> Any:
        raise MemoryError("there is none")

    def rank(group: ProcessGroup) -> int:
        x = device.tensor(torch.ones(1000))
        device.run_all()
        with monkeypatch.context() as patched:
            patched.setattr(pinned.Slab if fails == "tensors" else device, fails, fail)
            for _ in range(3):
                with pytest.raises(MemoryError):
                    calls[call](group, x)
                device.run_all()
        return len(device.pinned)

    (found,) = run_ranks(
        1, rank, devices=lambda rank: OneDevice(device), messenger=lambda rank: NobodyAnswers()
    )
    assert found <= 1


@pytest.mark.parametrize("when", ["memory", "mark"])
def test_an_abort_while_a_call_begins(when: str) -> None:
    device = FakeDevice(1)

    def rank(group: ProcessGroup) -> int:
        x = device.tensor(torch.ones(1000))
        place: Any = group.staging if when == "memory" else device
        kept = getattr(place, when)

        def aborting(*arguments: Any) -> Any:
            found = kept(*arguments)
            group.abort()
            return found

        setattr(place, when, aborting)
        with pytest.raises(UsageError, match=DESTROYED):
            group.allreduce([x])
        setattr(place, when, kept)
        return len(device.pinned)

    assert alone(device, rank)[0] == 0
