"""Trainings by `bml.torch.attach` that tests share, and plain torch over the same batches as their oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jobs_in_threads import N_CLASSES, N_FEATURES, initialised, oracle, samples
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import bml.torch
from bml.train.batches import BatchPlan

PLAN = BatchPlan(90, 24, 4, 3)
"""16 batches; the last one of an epoch is smaller."""


def mlp() -> Any:
    return initialised(nn.Sequential(nn.Linear(N_FEATURES, 8), nn.Tanh(), nn.Linear(8, N_CLASSES)))


def cross_entropy(model: Any, batch: Any) -> Any:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="sum")


def batches_of(run: bml.torch.Run, dataset: Any = None, **settings: Any) -> Any:
    return run.batches(
        samples() if dataset is None else dataset, global_batch=24, epochs=4, seed=3, **settings
    )


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)


def parameters_of(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def training(
    make_optimizer: Callable[[Any], Any] = sgd,
    make_model: Callable[[], Any] = mlp,
    loss: Any = cross_entropy,
    make_scheduler: Callable[[Any], Any] = lambda optimizer: None,
    **settings: Any,
) -> Callable[[Any], list[Any]]:
    def train(session: Any) -> list[Any]:
        model = make_model()
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        run = bml.torch.attach(session, model, optimizer, scheduler, loss, **settings)
        for batch in batches_of(run):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return parameters_of(model)

    return train


def expected(
    make_optimizer: Callable[[Any], Any] = sgd,
    make_model: Callable[[], Any] = mlp,
    make_scheduler: Callable[[Any], Any] = lambda optimizer: None,
) -> list[Any]:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    oracle(model, optimizer, cross_entropy, PLAN, lambda: scheduler is not None and scheduler.step())
    return parameters_of(model)


def assert_close(found: list[Any], wanted: list[Any], rtol: float = 2e-4) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
    "SGD, Nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD, dampened": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.3, momentum=0.9, dampening=0.4, weight_decay=0.01
    ),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.02, weight_decay=0.1),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.02),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.02),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(
        model.parameters(), lr=0.01, momentum=0.5, centered=True, weight_decay=0.1
    ),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.1, t0=3),
}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 3, 8], 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 16),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.6, total_steps=17),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}
