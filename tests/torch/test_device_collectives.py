"""Collectives of tensors on a fake device: the same bits as in host memory, whatever its streams do."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_programs import Host, Mailbox, OneDevice, Program, options  # noqa: E402
from fake_device import BUGS, FakeDevice  # noqa: E402
from modelled_ranks import run_ranks  # noqa: E402

from bml.errors import ContributorLost, StepMismatch  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.devices import slices  # noqa: E402
from bml.torch.devices.found import CudaDevices  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402

N = 3
Kills = dict[int, tuple[int, str]]


def in_host_memory(seed: int, kills: Kills | None = None) -> list[Any]:
    return run_ranks(N, lambda group: Program(seed, group, Host()).run(), kills)


def on_devices(seed: int, kills: Kills | None = None, bug: str = "") -> list[Any]:
    devices = [FakeDevice(100 * seed + rank, bug) for rank in range(N)]
    found = run_ranks(
        N,
        lambda group: Program(seed, group, devices[group.rank()]).run(),
        kills,
        devices=lambda rank: OneDevice(devices[rank]),
    )
    return found if all_is_unlocked(devices, kills) else ["memory is locked"] * N


def all_is_unlocked(devices: list[FakeDevice], kills: Kills | None = None) -> bool:
    """Whether the groups of ranks that lived have unlocked all memory, and none that was still copied."""
    for device in devices:
        device.run_all()
    return all(
        not device.violations and (rank in (kills or {}) or not device.pinned)
        for rank, device in enumerate(devices)
    )


def same(found: list[Any], awaited: list[Any], kills: Kills | None = None) -> bool:
    """Whether all ranks that were not killed have the same values, or the same kind of error."""
    return all(
        rank in (kills or {}) or _alike(one, other)
        for rank, (one, other) in enumerate(zip(awaited, found, strict=True))
    )


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, list) or not isinstance(other, list):
        return type(one) is type(other)
    return len(one) == len(other) and all(
        torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # NaN is not equal to itself


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_programs_give_the_bits_of_host_memory(seed: int) -> None:
    awaited = in_host_memory(seed)
    assert all(isinstance(each, list) for each in awaited), awaited
    assert same(on_devices(seed), awaited)


@pytest.mark.few(4)
@pytest.mark.parametrize("when", ["before", "brought", "committed"])
@pytest.mark.parametrize("seed", range(20, 24))
def test_programs_give_them_when_a_rank_is_lost(seed: int, when: str) -> None:
    """A rank that was lost after it brought its part may be in the result or not."""
    kills = {seed % N: (1 + seed % 5, when)}
    found = on_devices(seed, kills)
    ends = ["before", "committed"] if when == "brought" else [when]
    awaited = [in_host_memory(seed, {seed % N: (1 + seed % 5, end)}) for end in ends]
    assert any(same(found, each, kills) for each in awaited)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "after of copy in"])
def test_what_is_forgotten_is_found_within_few_seeds(bug: str) -> None:
    assert any(not same(on_devices(seed, bug=bug), in_host_memory(seed)) for seed in range(8))


# --- messages, and outputs of calls without inputs --------------------------------------------------


def received(seed: int, bug: str = "") -> list[Any]:
    """Rank 0 sends to rank 1 what it computes, and sends it back; what both have, and what 1 read before."""
    mailbox, devices = Mailbox(), [FakeDevice(100 * seed + rank, bug) for rank in range(2)]

    def rank(group: ProcessGroup) -> list[torch.Tensor]:
        place = devices[group.rank()]
        x, seen = place.tensor(torch.arange(5.0)), place.tensor(torch.zeros(5))
        if group.rank() == 0:
            place.compute(lambda: x.add_(10))
            group.send([x], 1, 3).wait()
            place.compute(lambda: x.zero_())
            group.recv([x], 1, 4).wait()
        else:
            place.compute(lambda: seen.copy_(x))
            work = group.recv([x], 0, 3)
            work.get_future().wait()
            assert work.source_rank() == 0
            place.compute(lambda: x.mul_(2))
            group.send([x], 0, 4).wait()
        return [place.read(x), place.read(seen)]

    found = run_ranks(2, rank, devices=lambda rank: OneDevice(devices[rank]), messenger=mailbox.of)
    return found if all_is_unlocked(devices) else ["memory is locked"] * 2


MESSAGES = [
    [2 * torch.arange(10.0, 15.0), torch.zeros(5)],
    [2 * torch.arange(10.0, 15.0), torch.arange(5.0)],
]


@pytest.mark.parametrize("seed", range(10))
def test_messages(seed: int) -> None:
    assert same(received(seed), MESSAGES)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "reached"])
def test_what_is_forgotten_of_messages_is_found(bug: str) -> None:
    assert any(not same(received(seed, bug), MESSAGES) for seed in range(40))


# --- large all-reduces, in slices -------------------------------------------------------------------

BASE_NBYTES = 4 * 4
N_ELEMENTS = 103  # five slices, of unequal lengths


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_BASE_NBYTES", BASE_NBYTES)
    assert slices.n_slices(4 * N_ELEMENTS) == 5


def large(group: ProcessGroup, place: FakeDevice, op: str, strided: bool = False) -> torch.Tensor:
    """A vector whose values say which ranks' parts are in it, reduced twice."""
    values = torch.full((N_ELEMENTS, 2), float(4 ** group.rank()))[:, : 1 if strided else 2]
    x = place.tensor(values[: N_ELEMENTS if strided else N_ELEMENTS // 2])
    place.compute(lambda: x.mul_(3))
    group.allreduce([x], options(dist.AllreduceOptions, op)).wait()
    place.compute(lambda: x.div_(3))
    return place.read(x)


def reduced_in_slices(seed: int, kills: Kills | None = None, op: str = "SUM", **more: Any) -> list[Any]:
    devices = [FakeDevice(100 * seed + rank) for rank in range(N)]
    return run_ranks(
        N,
        lambda group: large(group, devices[group.rank()], op, **more),
        kills,
        devices=lambda rank: OneDevice(devices[rank]),
    )


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_slices_give_the_whole(seed: int, strided: bool) -> None:
    for found in reduced_in_slices(seed, strided=strided):
        assert torch.equal(found, torch.full(found.shape, 1.0 + 4 + 16))


LOSSES = [(step, when) for step in range(1, 6) for when in ("before", "brought", "committed")]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("step", "when"), LOSSES)
def test_all_slices_have_the_same_contributors(step: int, when: str) -> None:
    """A rank is lost between two slices: all elements have its part, or none has."""
    found = reduced_in_slices(step, {1: (step, when)}, "MAX")
    survivors = [each for rank, each in enumerate(found) if rank != 1]
    assert all(torch.equal(each, survivors[0]) for each in survivors)
    sums = reduced_in_slices(step, {1: (step, when)})
    for each in (sums[0], sums[2]):
        assert set(each.view(-1).tolist()) in ({21.0}, {17.0 * 3 / 2}), "one factor, the same ranks"
        assert torch.equal(each, sums[0])


@pytest.mark.usefixtures("small_slices")
def test_slices_of_different_contributors_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(self: slices.SlicedAllReduce, steps: Any) -> None:
        for number in range(len(self.given)):
            self.brought[number].wait()
            self._reduce(steps, number)
            self.copy_in(self.results[number], self.targets[number])

    monkeypatch.setattr(slices.SlicedAllReduce, "run", run_once)
    found = reduced_in_slices(3, {1: (3, "before")})
    assert set(found[0].view(-1).tolist()) == {21.0, 17.0 * 3 / 2}


@pytest.mark.usefixtures("small_slices")
def test_ranks_with_slices_of_other_shapes_are_told_so() -> None:
    devices = [FakeDevice(rank) for rank in range(2)]

    def rank(group: ProcessGroup) -> None:
        x = devices[group.rank()].tensor(torch.zeros((4, 25) if group.rank() else (25, 4)))
        group.allreduce([x]).wait()

    for found in run_ranks(2, rank, devices=lambda rank: OneDevice(devices[rank])):
        assert isinstance(found, StepMismatch)
        assert "float32 [25, 4]" in str(found)
        assert "float32 [4, 25]" in str(found)


def test_slices_follow_from_the_size_alone() -> None:
    mib = 1 << 20
    assert [slices.n_slices(n * mib) for n in (0, 1, 11, 12, 25, 27, 64, 1024)] == [1, 1, 1, 2, 2, 3, 4, 18]
    parts = slices.cut(torch.arange(103), 5)
    assert torch.equal(torch.cat(parts), torch.arange(103))
    assert {len(each) for each in parts} == {20, 21}


# --- errors and limits ------------------------------------------------------------------------------


def test_a_lost_root_is_an_error_of_waits_and_futures() -> None:
    devices = [FakeDevice(rank) for rank in range(N)]

    def rank(group: ProcessGroup) -> Any:
        place = devices[group.rank()]
        output = place.tensor(torch.zeros(3))
        inputs = [[place.tensor(torch.ones(3)) for _ in range(N)]] if group.rank() == 1 else []
        work = group.scatter([output], inputs, options(dist.ScatterOptions, root=1))
        with pytest.raises(RuntimeError, match="rank 1 was lost"):
            work.get_future().wait()
        with pytest.raises(ContributorLost, match="rank 1 was lost"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        group.allreduce([output]).wait()
        return place.read(output)

    found = run_ranks(N, rank, {1: (1, "before")}, devices=lambda rank: OneDevice(devices[rank]))
    assert torch.equal(found[0], torch.zeros(3))
    assert torch.equal(found[2], torch.zeros(3))


def test_wrong_tensors_are_refused_before_anything_is_copied() -> None:
    device = FakeDevice(1)

    def rank(group: ProcessGroup) -> None:
        there, here = device.tensor(torch.ones(3)), torch.ones(3)
        for begin in (
            lambda: group.allgather([[there]], [here]),
            lambda: group.allreduce_coalesced([here, there]),
        ):
            with pytest.raises(UsageError, match="on different devices"):
                begin()
        with pytest.raises(UsageError, match="outputs"):
            group.allgather([[there, there]], [there])
        with pytest.raises(UsageError, match="one tensor"):
            group.send([there, there], 0)
        with pytest.raises(UsageError, match="no channels"):
            group.recv([there], 0)
        group.allreduce([there]).wait()

    assert run_ranks(1, rank, devices=lambda rank: OneDevice(device)) == [None]
    device.run_all()
    assert not device.pinned


def test_tensors_of_a_device_that_is_not_supported() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(UsageError, match="was given a tensor on meta, which has no elements"):
            group.allreduce([torch.empty(3, device="meta")])

    assert run_ranks(1, rank) == [None]


def test_a_work_is_over_when_its_results_are_on_the_device() -> None:
    device = FakeDevice(3)

    def rank(group: ProcessGroup) -> None:
        x = device.tensor(torch.ones(3))
        work = group.allreduce([x])
        work.wait()  # the host waits for nothing on the device
        device.run_all()
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is x

    assert run_ranks(1, rank, devices=lambda rank: OneDevice(device)) == [None]


def test_cuda_is_a_device_of_the_backend() -> None:
    """So that torch.distributed takes device_id, and meshes of "cuda"."""
    import bml.torch

    bml.torch.backend.register()
    assert dist.Backend.backend_capability["bml"] == ["cpu", "cuda"]


class Elsewhere:
    """A tensor as it looks on another accelerator."""

    device = torch.device("xpu", 0)


def test_accelerators_that_are_not_supported_are_refused() -> None:
    with pytest.raises(UsageError, match=r"GPUs of CUDA, not on xpu:0: give tensor\.cpu\(\)"):
        CudaDevices().find(Elsewhere())
    assert CudaDevices().find(torch.ones(1)) is None
