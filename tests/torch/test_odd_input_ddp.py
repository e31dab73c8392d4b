"""Odd input of real DDP over the model of a job; the oracle is plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bad_input_programs import (  # noqa: E402
    BAD_STEP,
    ODD_EVENTS,
    ODD_MODELS,
    REFUSED,
    Net,
    loss,
    make_loader,
    optimizer_of,
    vector,
)
from modelled_ranks import run_ranks  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.recomputing.hook import recompute_hook  # noqa: E402

N_RANKS = 2
NOT_FINITE = ("Inf", "NaN")


def nothing(model: Any) -> None:
    pass


def made(name: str) -> tuple[Any, Callable[[Any], None], tuple[int, ...]]:
    """A model, what becomes of it between two steps, and on which ranks."""
    generator = torch.Generator().manual_seed(5)
    model = Net(**ODD_MODELS.get(name, dict)())
    with torch.no_grad():
        for each in (model.first, model.left, model.right):
            for parameter in each.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model, *ODD_EVENTS.get(name, (nothing, ()))


def train(group: ProcessGroup, name: str, hooked: bool) -> Any:
    """Train with odd input; returns the parameters."""
    model, event, bad = made(name)
    ddp = DistributedDataParallel(
        model, process_group=group, find_unused_parameters=event.__name__ in ("skip", "freeze")
    )
    optimizer, loader = optimizer_of(model), make_loader(group.rank(), N_RANKS)
    for step, samples in enumerate(recompute_hook(ddp, loss).batches(loader) if hooked else loader):
        if step == BAD_STEP and group.rank() in bad:
            event(model)
        optimizer.zero_grad()
        loss(ddp, samples).backward()
        optimizer.step()
    return vector(model)


def oracle(name: str) -> Any:
    """The same with a model for each rank, and the means of their gradients."""
    models = [made(name)[0] for _ in range(N_RANKS)]
    _, event, bad = made(name)
    optimizers = [optimizer_of(model) for model in models]
    loaders = [make_loader(rank, N_RANKS) for rank in range(N_RANKS)]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        for rank, (model, samples) in enumerate(zip(models, batches, strict=True)):
            if step == BAD_STEP and rank in bad:
                event(model)
            model.zero_grad()
            loss(model, samples).backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            grads = [each.grad for each in parameters if each.grad is not None]
            for each in parameters if grads else ():
                each.grad = sum(grads) / N_RANKS
        for optimizer in optimizers:
            optimizer.step()
    return models[0]


@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "hook"])
@pytest.mark.parametrize("name", [*ODD_MODELS, *ODD_EVENTS])
def test_odd_input_is_trained_as_in_one_process(name: str, hooked: bool) -> None:
    """NaN and Inf pass, and parameters that are empty, mixed, frozen or unused hurt nobody."""
    model = oracle(name)
    for parameter, before in zip(model.parameters(), made(name)[0].parameters(), strict=True):
        if before.requires_grad and before.numel():
            assert not torch.equal(parameter, before)
    wanted = vector(model)
    assert torch.isfinite(wanted).all() == (name not in NOT_FINITE)
    for found in run_ranks(N_RANKS, lambda group: train(group, name, hooked)):
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "hook"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "meta",
            "UsageError: all_gather was given a tensor on meta, which has no elements: call model.to_empty",
        ),
        ("two devices", "ValueError: DistributedDataParallel's input module must be on the same type of dev"),
        ("sparse", "was given a sparse tensor (torch.sparse_coo): give tensor.to_dense()"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_and_the_group_goes_on(
    name: str, said: str, hooked: bool
) -> None:
    def program(group: ProcessGroup) -> tuple[str, float]:
        error = refused(group, REFUSED[name], hooked)
        total = torch.ones(1)
        group.allreduce([total], ReduceOp.SUM).wait()
        return error, total.item()

    for error, total in run_ranks(N_RANKS, program):
        assert said in error
        assert total == N_RANKS


def refused(group: ProcessGroup, make: Callable[[], Any], hooked: bool) -> str:
    """What is said of a model when DDP is made, or in the first step."""
    try:
        ddp, loader = DistributedDataParallel(make(), process_group=group), make_loader(group.rank(), N_RANKS)
        for samples in recompute_hook(ddp, loss).batches(loader) if hooked else loader:
            loss(ddp, samples).backward()
            break
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def raising(group: ProcessGroup, bucket: Any) -> Any:
    raise KeyError("of the user")


def in_float8(group: ProcessGroup, bucket: Any) -> Any:
    narrow = bucket.buffer().to(torch.float8_e4m3fn)
    return group.allreduce([narrow], ReduceOp.SUM).get_future().then(lambda _: bucket.buffer())


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (raising, "KeyError: 'of the user'"),
        (in_float8, "UsageError: all_reduce cannot reduce torch.float8"),
    ],
)
def test_an_error_of_a_users_communication_hook_comes_as_it_is_and_the_group_goes_on(
    hook: Callable[[ProcessGroup, Any], Any], said: str
) -> None:
    def program(group: ProcessGroup) -> tuple[str, bool, float]:
        model = Net()
        ddp = DistributedDataParallel(model, process_group=group)
        before = vector(model)
        ddp.register_comm_hook(None, lambda state, bucket: hook(group, bucket))
        error = ""
        try:
            loss(ddp, next(iter(make_loader(group.rank(), N_RANKS)))).backward()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        total = torch.ones(1)
        group.allreduce([total], ReduceOp.SUM).wait()
        return error, torch.equal(vector(model), before), total.item()

    for error, is_same, total in run_ranks(N_RANKS, program):
        assert said in error
        assert is_same
        assert total == N_RANKS
