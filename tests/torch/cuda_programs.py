"""What ranks run in tests with a GPU: all ranks of this machine share the first one."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from rank_programs import batches, digest, vector
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bml.torch

DEVICE = "cuda:0"


def _begin() -> tuple[int, int]:
    dist.init_process_group("bml")
    torch.cuda.set_device(0)
    return dist.get_rank(), dist.get_world_size()


def collectives() -> dict[str, list[float]]:
    """All collectives of what the GPU is still computing, and what it computes of their results."""
    rank, n = _begin()
    own = torch.full((4,), float(rank + 1), device=DEVICE)
    found = {}

    def note(name: str, *tensors: Any) -> None:
        found[name] = torch.cat([each.reshape(-1).float() for each in tensors]).tolist()

    for op in ("SUM", "MAX", "AVG"):
        x = own.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        note(f"all_reduce {op}", x)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        x = own.to(dtype)
        dist.all_reduce(x)
        note(f"all_reduce {dtype}", x)
    x = own.clone()
    work = dist.all_reduce(x, async_op=True)
    work.get_future().then(lambda done: done.value()[0].mul_(10)).wait()
    note("then", x)
    x = own.clone()
    dist.broadcast(x, n - 1)
    note("broadcast", x)
    outputs = [torch.zeros_like(own) for _ in range(n)]
    dist.all_gather(outputs, own)
    note("all_gather", *outputs)
    single = torch.zeros(4 * n, device=DEVICE)
    dist.all_gather_into_tensor(single, own)
    note("all_gather_into_tensor", single)
    x = torch.zeros_like(own)
    dist.reduce_scatter_tensor(x, torch.cat([own * (each + 1) for each in range(n)]))
    note("reduce_scatter_tensor", x)
    x = torch.zeros_like(own)
    dist.scatter(x, [own * each for each in range(n)] if rank == 0 else None, src=0)
    note("scatter", x)
    dist.all_to_all_single(single, torch.cat([own] * n))
    note("all_to_all_single", single)
    x = own.clone()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    note("send and recv", x)
    dist.barrier()
    dist.destroy_process_group()
    return found


def large(n_mib: int = 64, n_times: int = 5) -> list[bool]:
    """All-reduces in slices, each of what the GPU computes of the last, while a long computation runs."""
    rank, n = _begin()
    x = torch.arange(n_mib << 18, device=DEVICE, dtype=torch.float32).remainder_(1000).add_(rank)
    host = x.cpu()
    busy = torch.randn(4096, 4096, device=DEVICE)
    found = []
    for _ in range(n_times):
        for _ in range(10):
            busy = torch.nn.functional.normalize(busy @ busy)
        x.add_(busy.sum() * 0)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x.div_(n)
        dist.all_reduce(host)
        host.div_(n)
        found.append(torch.equal(x.cpu(), host))
    dist.destroy_process_group()
    return found


def train(device: str, n_steps: int = 30, kill: int = -1, at: int = 15, wide: int = 64) -> dict[str, Any]:
    """Plain DDP on a device. Rank `kill` gets SIGKILL before step `at`."""
    rank, _ = _begin()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(20, wide), nn.ReLU(), nn.Linear(wide, wide), nn.Linear(wide, 10)).to(
        device
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches(rank, n_steps)):
        if (rank, step) == (kill, at):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
        optimizer.step()
    contributors = bml.torch.contributors()
    dist.destroy_process_group()
    model.cpu()
    return {
        "digest": digest(model),
        "parameters": vector(model)[:1000].tolist(),
        "contributors": contributors,
    }
