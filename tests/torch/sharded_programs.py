"""FSDP2 over a mesh of replicas and shards, and the same training in one process."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bml.torch

N_STEPS = 12


def make_model() -> Any:
    torch.manual_seed(8)
    return nn.Sequential(*(nn.Linear(20, 64), nn.ReLU()), *(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10))


def batch(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 20, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def loss(model: Any, samples: Any) -> Any:
    return nn.functional.cross_entropy(model(samples[0]), samples[1])


def fault_free(contributors: list[list[int]]) -> list[float]:
    """The oracle: in each step the mean over the ranks of `contributors`."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, ranks in enumerate(contributors):
        optimizer.zero_grad()
        for rank in ranks:
            (loss(model, batch(rank, step)) / len(ranks)).backward()
        optimizer.step()
    found: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


def train(way: str, kill: int = -1, at: int = 5, phase: str = "forward") -> dict[str, Any]:
    """Two replicas of two ranks each. Rank `kill` gets SIGKILL in step `at`.

    `way` is "mesh" (all groups are of the backend bml), "gloo" (those of shards are of gloo), or "hook" (FSDP
    knows the shards alone, and a hook reduces over the replicas).
    """
    dist.init_process_group("bml")
    rank = dist.get_rank()
    backends = {} if way == "mesh" else {"shard": "gloo"}
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override=backends or None
    )
    model = make_model()
    replicas = mesh.get_group("replicate")
    for each in [*(layer for layer in model if isinstance(layer, nn.Linear)), model]:
        fully_shard(each, mesh=mesh["shard"] if way == "hook" else mesh)
        if way == "hook":
            each.set_all_reduce_hook(lambda grad: dist.all_reduce(grad, dist.ReduceOp.AVG, group=replicas))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(N_STEPS):
        dies = (rank, step) == (kill, at)
        if dies and phase == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        if dies:
            model[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        loss(model, batch(rank, step)).backward()
        optimizer.step()
    whole = torch.cat([each.full_tensor().reshape(-1) for each in model.parameters()])
    found = {"parameters": whole.tolist(), "contributors": bml.torch.contributors(replicas)}
    dist.destroy_process_group()
    return found
