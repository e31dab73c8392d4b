"""What ranks run in tests of Join: ranks have different numbers of batches, and some are killed."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import bml.torch  # noqa: F401


def means(
    n_batches: list[int],
    victims: list[int],
    after: str,
    initial: bool,
    at: int = 2,
) -> list[list[float]]:
    """The gradients of each iteration: rank r contributes r + 1 to the first, and twice that to the second.

    `victims` are killed in iteration `at`: before it, or `after` its forward pass. `initial`: gradients are
    divided by the number of ranks at first.
    """
    dist.init_process_group("bml")
    rank, found = dist.get_rank(), []
    first, second = (nn.Linear(1, 1, bias=False) for _ in range(2))
    ddp = DistributedDataParallel(nn.Sequential(first, second), bucket_cap_mb=1e-6)
    with Join([ddp], divide_by_initial_world_size=initial):
        for number in range(n_batches[rank]):
            if number == at and rank in victims and after == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            for each in (first, second):
                each.weight.grad = None
                nn.init.constant_(each.weight, 1 + (each is first))
            loss = ddp(torch.full((1, 1), rank + 1.0)).sum()
            if number == at and rank in victims:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            found.append([grad.item() for each in (first, second) if (grad := each.weight.grad) is not None])
    dist.destroy_process_group()
    return found
