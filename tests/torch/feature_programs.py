"""Features of PyTorch that call torch.distributed themselves, as ranks on backend bml run them."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_programs import batches, digest
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel


def states(folder: str) -> dict[str, Any]:
    """A checkpoint that is written while training goes on; a state that rank 0 alone has."""
    dist.init_process_group("bml")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    full = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    saved = {"weight": model.weight.detach().clone()}
    dcp.async_save(saved, checkpoint_id=folder).result()
    found = {"weight": torch.zeros(3, 4)}
    dcp.load(found, checkpoint_id=folder)
    dist.destroy_process_group()
    return {
        "broadcast": model.bias.tolist(),
        "loaded": found["weight"].tolist(),
        "files": os.listdir(Path(folder)),
    }


def compiled(ways: list[str], kill: int) -> dict[str, str]:
    """DDP under torch.compile, in all ways after each other; rank `kill` gets SIGKILL in the last one."""
    dist.init_process_group("bml")
    rank, found = dist.get_rank(), {}
    for way in ways:
        torch.manual_seed(0)
        torch._dynamo.reset()
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        step = _step(way, ddp)
        for number, (x, y) in enumerate(batches(rank, 8)):
            if (rank, way, number) == (kill, ways[-1], 5):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
        found[way] = digest(ddp)
    dist.destroy_process_group()
    return found


def _step(way: str, ddp: Any) -> Any:
    def plain(x: Any, y: Any, model: Any = ddp) -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    if way == "torch.compile(ddp)":
        made = torch.compile(ddp, backend="eager")
        return lambda x, y: plain(x, y, made)
    if way == "ddp.compile()":
        ddp.compile(backend="eager")
    return torch.compile(plain, backend="eager") if way == "a compiled step" else plain
