"""What ranks run in tests of the backend: ordinary scripts of torch.distributed."""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from reconfigured_ranks import run as reconfigured  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bml.torch


def batches(rank: int, n_steps: int) -> Iterator[tuple[Any, Any]]:
    """A rank's batches: 16 samples of 20 numbers, in 10 classes."""
    seeded = torch.Generator().manual_seed(100 + rank)
    for _ in range(n_steps):
        yield torch.randn(16, 20, generator=seeded), torch.randint(0, 10, (16,), generator=seeded)


def vector(model: Any) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def digest(model: Any) -> str:
    return hashlib.sha256(vector(model).numpy().tobytes()).hexdigest()


def train(backend: str, n_steps: int = 100, kill: int = -1, at: int = 50) -> dict[str, Any]:
    """Plain DDP. Rank `kill` gets SIGKILL before step `at`."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP makes the models alike
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    times = []
    for step, (x, y) in enumerate(batches(rank, n_steps)):
        if (rank, step) == (kill, at):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        times.append(time.monotonic())
    dist.barrier()
    writes = backend == "bml" and bml.torch.is_writer()
    contributors = bml.torch.contributors() if backend == "bml" else ()
    dist.destroy_process_group()
    gap_s = max(after - before for before, after in pairwise(times))
    return {
        "digest": digest(model),
        "parameters": vector(model).tolist(),
        "gap_s": gap_s,
        "writes": writes,
        "contributors": contributors,
    }


class Branches(nn.Module):
    """Two branches, of which a batch uses one; batch normalisation before them."""

    def __init__(self, uses_both: bool):
        super().__init__()
        self.uses_both = uses_both
        self.norm = nn.BatchNorm1d(20)
        self.left, self.right = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        if self.uses_both:
            return self.left(x) + self.right(x)
        return self.left(x) if x.sum() > 0 else self.right(x)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0005},
    "own_buffers": {"broadcast_buffers": False},
}


def variant(group: Any, name: str) -> Any:
    """Train with DDP in one way; returns parameters and buffers as one vector."""
    torch.manual_seed(7)
    model = Branches(uses_both=name != "unused").double()
    ddp = DistributedDataParallel(model, process_group=group, **VARIANTS.get(name, {}))
    if name == "fp16_hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(group, fp16_compress_hook)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    n_steps = 12 + (dist.get_rank() if name == "uneven" else 0)
    with ddp.join() if name == "uneven" else contextlib.nullcontext():
        for step, (x, y) in enumerate(batches(dist.get_rank(), n_steps)):
            waits = name == "no_sync" and step % 3 != 2
            with ddp.no_sync() if waits else contextlib.nullcontext():
                nn.functional.cross_entropy(ddp(x.double()), y).backward()
            if not waits:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([vector(model), *(each.double().view(-1) for each in model.buffers())])


def variants() -> dict[str, tuple[Any, Any]]:
    """Every way of DDP on bml and on gloo: what both end with."""
    dist.init_process_group("bml")
    gloo = dist.new_group(backend="gloo")
    names = [*VARIANTS, "no_sync", "uneven", "fp16_hook"]
    found = {name: tuple(variant(group, name).tolist() for group in (None, gloo)) for name in names}
    dist.destroy_process_group()
    return found


def with_loader(n_workers: int) -> list[float]:
    """Two epochs with DataLoader's forked workers; returns the sums of the batches seen."""
    dist.init_process_group("bml")
    data = TensorDataset(torch.arange(64.0))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=n_workers)
    sums = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (samples,) in loader:
            total = samples.sum()
            dist.all_reduce(total)
            sums.append(total.item())
    dist.destroy_process_group()
    return sums


def ends_oddly(how: str) -> str:
    """Rank 1 ends in another way than the others, which go on after it."""
    dist.init_process_group("bml")
    others = [dist.new_group([0, 1, 2]) for _ in range(2)]
    try:
        for step in range(20):
            if how.startswith("raises") and dist.get_rank() == 1 and step == 10:
                raise ValueError("of the user")
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1), group=others[step % 2])
        if how == "no destroy":
            return "returned"
        if how == "orders":
            for each in others if dist.get_rank() else reversed(others):
                dist.destroy_process_group(each)
    finally:
        if how == "raises, finally destroys":
            dist.destroy_process_group()
    if how != "raises, finally destroys":
        dist.destroy_process_group()
    return "destroyed"


def refuses_static_graph() -> str:
    dist.init_process_group("bml")
    ddp = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True, static_graph=True)
    try:
        bml.torch.resumable(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    except bml.UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "taken"


def waits_in_a_callback() -> float:
    """As PowerSGD's hook does: a callback of a future begins another collective, and waits for it."""
    dist.init_process_group("bml")
    first, second = torch.ones(1), torch.ones(1)

    def then(done: Any) -> Any:
        (value,) = done.value()
        second.mul_(value)
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    found = dist.all_reduce(first, async_op=True).get_future().then(then).wait()
    dist.destroy_process_group()
    return float(found.item())


def groups() -> dict[str, Any]:
    """Groups of two of four ranks, and objects in them."""
    dist.init_process_group("bml")
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    cast = [{"from": rank}]
    dist.broadcast_object_list(cast, src=2 if rank > 1 else 0, group=mine)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"to {to}" for to in range(4)] if rank == 3 else None, src=3)
    names = [dist.get_backend(), dist.get_backend(mine)]
    dist.destroy_process_group()
    return {"sum": tensor.item(), "objects": objects, "cast": cast, "scattered": scattered, "names": names}


def objects_of_a_lost_rank() -> list[Any]:
    """Objects and a tensor from rank 0, which died, and objects from one that is left."""
    dist.init_process_group("bml")
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    found: list[Any] = []
    for src in (0, 0, 1):
        cast: list[Any] = [{"from": rank}, "more"]
        try:
            dist.broadcast_object_list(cast, src=src)
            found.append(cast)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=0)
    found.append(tensor.item())
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, "x" * rank)
    found.append(gathered)
    try:
        dist.scatter_object_list(scattered := [None], None, src=0)
        found.append(scattered)
    except Exception as error:
        found.append(type(error).__name__)
    dist.destroy_process_group()
    return found


def group_with_a_lost_rank() -> list[str]:
    """new_group after rank 3 died: known to be lost, and not known yet."""
    dist.init_process_group("bml")
    rank = dist.get_rank()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for _ in range(2):
        try:
            dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=3))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        total = torch.ones(1)
        dist.all_reduce(total)
        found.append(str(total.item()))
    dist.destroy_process_group()
    return found
