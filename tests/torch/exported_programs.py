"""Reads a folder of torch.distributed.checkpoint with plain PyTorch; as a process it must not import bml."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler


def model_of(dtype: Any = torch.float32) -> Any:
    """A model with buffers, of which one is no part of its state, and a parameter that two layers share."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)
    )
    model[2].weight = model[0].weight
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def optimizer_of(model: Any) -> Any:
    slow, fast = model[3].parameters(), [each for layer in model[:3] for each in layer.parameters()]
    return torch.optim.AdamW(
        [{"params": list(dict.fromkeys(fast))}, {"params": list(slow), "lr": 0.01}], lr=0.02, amsgrad=True
    )


def scheduler_of(optimizer: Any) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [3, 3, 8], 0.5)


def loaded(folder: str, dtype: str) -> dict[str, Any]:
    """Model, optimizer and scheduler as a user of PyTorch loads them, and what they hold then."""
    model = model_of(getattr(torch, dtype))
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return held(model, optimizer, scheduler)


def held(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Everything that a training has, with tensors in hexadecimal digits."""

    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (
                str(value.dtype),
                list(value.shape),
                value.detach().flatten().view(torch.uint8).numpy().tobytes().hex(),
            )
        if isinstance(value, dict):
            return {str(key): shown(each) for key, each in value.items()}
        return [shown(each) for each in value] if isinstance(value, list | tuple) else value

    found = shown([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    return json.loads(json.dumps({"held": found}))


if __name__ == "__main__":
    found = loaded(*sys.argv[1:])
    assert not [name for name in sys.modules if name.partition(".")[0] == "bml"]
    print(json.dumps(found))
