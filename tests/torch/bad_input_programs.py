"""What ranks are told that give DDP what cannot be reduced, and what is left afterwards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bml.torch


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.table(x.abs().long().clamp(max=4))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.used(x)


class Typed(nn.Module):
    """Its parameter is of a dtype in which nothing can be reduced, and gets such a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn))

    def forward(self, x: Any) -> Any:
        return x @ self.weight.to(torch.float32)


def _two_devices() -> Any:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


MODELS: dict[str, Any] = {
    "devices": _two_devices,
    "sparse": Sparse,
    "no gradient": Unused,
    "shapes": lambda: nn.Linear(2, 2 + dist.get_rank()),
    "float8": Typed,
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
}


def train(hooked: bool) -> dict[str, Any]:
    """Two backward passes of each model: what was said, whether parameters changed, what is summed then."""
    dist.init_process_group("bml")
    torch.manual_seed(0)
    found = {}
    for name, make in MODELS.items():
        total = torch.ones(1)
        said, changed = _said(make, name, hooked)
        dist.all_reduce(total)
        found[name] = (said, changed, total.item())
    dist.destroy_process_group()
    return found


def _said(make: Any, name: str, hooked: bool) -> tuple[str, bool]:
    x = torch.ones(4, 2) * (1 + dist.get_rank())
    x = x.to(torch.complex64) if name == "complex" else x
    before: list[Any] = []
    try:
        ddp = DistributedDataParallel(make())
        if hooked:
            hook = bml.torch.recompute_hook(ddp, lambda model, samples: model(samples).abs().sum() / 4)
            sampler = torch.utils.data.DistributedSampler(range(4))
            batches = hook.batches(torch.utils.data.DataLoader(list(x), 1, sampler=sampler))
        before = [each.detach().clone() for each in ddp.module.parameters()]
        for _ in range(2):
            samples = next(batches) if hooked else x
            ddp(samples).abs().sum().backward()
        said = "trained"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = list(ddp.module.parameters()) if before else []
    return said, not all(map(same, before, after))


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))
