"""Programs of ranks that write a checkpoint with torch.distributed.checkpoint after the loss of rank 0."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bml.torch
from bml.errors import ContributorLost

N = 3


def after_a_loss(folder: str) -> dict[str, Any]:
    """What of the ways to write a checkpoint worked on this rank, with what each of them loaded again."""
    at, rank = Path(folder), int(os.environ["RANK"])
    store = dist.FileStore(str(at / "store"), N)  # not that of rank 0, which dies with it
    dist.init_process_group("bml", store=store, rank=rank, world_size=N)
    weight = torch.arange(6.0)
    dist.all_reduce(weight)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(weight)
    found: dict[str, Any] = {"weight": weight.tolist()}
    try:
        dcp.save(_state(weight), checkpoint_id=at / "all")
    except ContributorLost as error:
        found["all"] = str(error)

    if bml.torch.is_writer():
        dcp.save(_state(weight), checkpoint_id=at / "writer", no_dist=True)
    dist.barrier()
    found["writer"] = _loaded(at / "writer", no_dist=True)

    left = dist.new_group(bml.torch.contributors(), use_local_synchronization=True)
    dcp.save(_state(weight), checkpoint_id=at / "left", process_group=left)
    found["left"] = _loaded(at / "left", process_group=left)
    dist.destroy_process_group()
    return found


def _state(weight: Any) -> dict[str, Any]:
    return {"weight": weight, "step": 7}


def _loaded(at: Path, **how: Any) -> tuple[list[float], int]:
    state = {"weight": torch.zeros(6), "step": 0}
    dcp.load(state, checkpoint_id=at, **how)
    return state["weight"].tolist(), state["step"]
