"""DDP with the hook that computes the samples of lost ranks, as ranks run it, and the same in one process."""

import contextlib
import hashlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bml.torch

BATCH_SIZE, N_SAMPLES = 8, 250


class Scale(nn.Module):
    """Multiplies by a buffer, which backward needs."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, size))

    def forward(self, x: Any) -> Any:
        return x * self.scale


def make_model(in_channels_last: bool = False, in_float64: bool = False, has_buffers: bool = False) -> Any:
    """2 MiB in four layers, which DDP puts into more than one bucket, or in another order of memory.

    With `has_buffers` the gradients before one are still to be made when DDP has the first bucket. In
    float64 many epochs end alike: in float32 the order of summation is seen after twenty.
    """
    torch.manual_seed(11)
    if in_channels_last:
        model = nn.Sequential(
            nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 64, 2, padding=1), nn.ReLU(), *make_head()
        )
        return model.to(memory_format=torch.channels_last)
    model = nn.Sequential(
        *(nn.Linear(20, 512), Scale(512) if has_buffers else nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        *(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    return model.double() if in_float64 else model


def make_head() -> Any:
    return nn.Flatten(), nn.Linear(64 * 9, 256), nn.ReLU(), nn.Linear(256, 10)


def make_loader(rank: int, n_ranks: int) -> Any:
    """Batches of 8 samples, the last of an epoch of fewer; two samples are there twice."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N_SAMPLES, 20, generator=generator)
    data = TensorDataset(x, (3 * x.sum(dim=1)).long() % 10)
    return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, n_ranks, rank, seed=1))


def loss(model: Any, samples: Any) -> Any:
    x, y = samples
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def vector(model: Any) -> Any:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def fault_free(n_ranks: int, n_epochs: int, **model_settings: bool) -> Any:
    """The oracle: plain torch in one process, the mean over the shares of all ranks."""
    model = make_model(**model_settings)
    optimizer = optimizer_of(model)
    loaders = [make_loader(rank, n_ranks) for rank in range(n_ranks)]
    for epoch in range(n_epochs):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for shares in zip(*loaders, strict=True):
            optimizer.zero_grad()
            for share in shares:
                (loss(model, share) / n_ranks).backward()
            optimizer.step()
    return vector(model)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(kills: dict[str, int], n_epochs: int, **model_settings: bool) -> dict[str, Any]:
    """Ranks of `kills` get SIGKILL in backward of such a step, when the last layers' gradients are made."""
    dist.init_process_group("bml")
    rank = dist.get_rank()
    model = make_model(**model_settings)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = optimizer_of(ddp)
    hook = bml.torch.recompute_hook(ddp, loss)
    loader, step = make_loader(rank, dist.get_world_size()), 0
    for epoch in range(n_epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in hook.batches(loader):
            optimizer.zero_grad()
            made = loss(ddp, (x, y))
            if kills.get(str(rank)) == step:
                next(model.parameters()).register_hook(die)
            made.backward()
            optimizer.step()
            step += 1
    found = vector(model)
    dist.destroy_process_group()
    return {
        "parameters": found.tolist(),
        "digest": hashlib.sha256(found.numpy().tobytes()).hexdigest(),
        "samples": hook.samples(),
    }


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.01},
    "no_sync": {},
    "bfloat16": {},
}


def ways() -> dict[str, Any]:
    """Train in several ways of DDP, without faults, with the hook and without it: what both end with."""
    dist.init_process_group("bml")
    found = {
        name: tuple(vector(trained(name, hooked)).float().tolist() for hooked in (True, False))
        for name in WAYS
    }
    dist.destroy_process_group()
    return found


def trained(way: str, hooked: bool) -> Any:
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(dtype)
    ddp = DistributedDataParallel(model, **WAYS[way])
    optimizer = optimizer_of(ddp)
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    hook = bml.torch.recompute_hook(
        ddp, lambda model, samples: loss(model, (samples[0].to(dtype), samples[1]))
    )
    if not hooked:
        ddp = DistributedDataParallel(model, **WAYS[way])
    for index, (x, y) in enumerate(hook.batches(loader) if hooked else loader):
        waits = way == "no_sync" and index % 3 != 0  # the last of 16 does not wait
        with ddp.no_sync() if waits else contextlib.nullcontext():
            loss(ddp, (x.to(dtype), y)).backward()
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return model


def refusals() -> list[str]:
    """What is said to a user who uses the hook in a wrong way, on one rank."""
    said = []
    dist.init_process_group("bml")
    model = make_model()
    ddp = DistributedDataParallel(model)
    bml.torch.recompute_hook(ddp, lambda given, samples: loss(ddp, samples))
    try:
        bml.torch.recompute_hook(ddp, loss)
    except bml.UsageError as error:
        said.append(str(error))
    return [*said, *(_first_batch(each) for each in (_calls_ddp, _raises, _no_number))]


def _first_batch(make: Any) -> str:
    ddp = DistributedDataParallel(make_model())
    hook = bml.torch.recompute_hook(ddp, make(ddp))
    for samples in hook.batches(make_loader(0, 1)):
        try:
            loss(ddp, samples).backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def _calls_ddp(ddp: Any) -> Any:
    return lambda model, samples: loss(ddp, samples)


def _raises(ddp: Any) -> Any:
    def fails(model: Any, samples: Any) -> Any:
        raise KeyError("of the user")

    return fails


def _no_number(ddp: Any) -> Any:
    return lambda model, samples: model(samples[0])
