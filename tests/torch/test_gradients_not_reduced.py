"""Real DDP with the hook over the model of a job: gradients that were not reduced, and odd ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bad_input_programs import N_STEPS, Net, digest, loss, make_loader, optimizer_of, vector  # noqa: E402
from modelled_ranks import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.recomputing.hook import _hooks, recompute_hook  # noqa: E402

N_RANKS, BAD_STEP = 2, 2
FIRST_GRADIENTS = 5
"""The step of the group with the gradients of the first batch; DDP itself takes those before."""


def train(
    group: ProcessGroup,
    model: Any,
    before: Callable[[int], None] = lambda step: None,
    loss: Callable[[Any, Any], Any] = loss,
    **settings: Any,
) -> tuple[str, bool]:
    """Train with the hook; returns the error's text, and whether the model is that of the last whole step."""
    ddp = DistributedDataParallel(model, process_group=group, **settings)
    hook, optimizer = recompute_hook(ddp, loss), optimizer_of(model)
    last = digest(model)
    try:
        for step, samples in enumerate(hook.batches(make_loader(group.rank(), N_RANKS))):
            before(step)
            optimizer.zero_grad()
            loss(ddp, samples).backward()
            optimizer.step()
            last = digest(model)
    except UsageError as error:
        return str(error), digest(model) == last
    return "", digest(model) == last


def test_gradients_that_were_not_reduced_are_not_used() -> None:
    """Each rank would use its own: DDP says so in the next forward pass."""

    def program(group: ProcessGroup) -> tuple[str, bool, Any]:
        torch.manual_seed(3)
        model = Net()

        def before(step: int) -> None:
            model.skips = step == BAD_STEP

        return *train(group, model, before), vector(model).tolist()

    (said, is_last, first), (_, others, second) = run_ranks(N_RANKS, program)
    assert "optimizer.step() with gradients that were not reduced" in said
    assert "the parameters right.weight, right.bias got none" in said
    assert is_last
    assert others
    assert first == second


def test_a_backward_that_raised_is_named_when_its_gradients_are_used() -> None:
    def program(group: ProcessGroup) -> str:
        model = Net()
        ddp = DistributedDataParallel(model, process_group=group)
        hook, optimizer = recompute_hook(ddp, loss), optimizer_of(model)
        for samples in hook.batches(make_loader(group.rank(), N_RANKS)):
            made = loss(ddp, samples)
            model.first.weight.register_post_accumulate_grad_hook(_raise)
            with pytest.raises(KeyError):
                made.backward()
            with pytest.raises(UsageError) as caught:
                optimizer.step()
            return str(caught.value)
        return "no batch"

    for said in run_ranks(N_RANKS, program):
        assert "backward raised an error" in said
        assert "this rank cannot go on" in said


def _raise(*_: Any) -> None:
    raise KeyError("of the user")


def test_steps_that_use_what_is_reduced_or_is_nobody_elses_are_let_alone() -> None:
    """Another model's optimizer steps at any time, and under no_sync a rank may use its own gradients."""

    def program(group: ProcessGroup) -> int:
        torch.manual_seed(3)
        model, other = Net(), nn.Linear(2, 1)
        ddp = DistributedDataParallel(model, process_group=group)
        hook, optimizer, others = recompute_hook(ddp, loss), optimizer_of(model), optimizer_of(other)
        steps = 0
        for step, samples in enumerate(hook.batches(make_loader(group.rank(), N_RANKS))):
            optimizer.zero_grad()
            made = loss(ddp, samples)
            model.right.bias.register_hook(lambda gradient: others.step())  # in the middle of backward
            optimizer.step()  # of no gradients: none are made yet
            made.backward()
            optimizer.step()
            steps = step + 1
        with ddp.no_sync():
            loss(ddp, samples).backward()
            optimizer.step()
        return steps

    assert run_ranks(N_RANKS, program) == [N_STEPS] * N_RANKS


@pytest.mark.slow
def test_a_hook_may_come_and_go_while_an_optimizer_steps() -> None:
    """As in another thread, or where the garbage collector runs then."""

    def program(group: ProcessGroup) -> tuple[bool, float, int]:
        gc.collect()  # those of other tests
        known = len(_hooks)
        made = {0: recompute_hook(DistributedDataParallel(Net(), process_group=group), loss)}
        gone = weakref.ref(made[0])
        other = nn.Linear(2, 1)
        optimizer = optimizer_of(other)
        other.bias.grad = torch.ones(1)

        def come_and_go(*_: Any) -> None:
            made[1] = recompute_hook(DistributedDataParallel(Net(), process_group=group), loss)
            del made[0]
            gc.collect()

        handles = [register_optimizer_step_pre_hook(each) for each in (come_and_go, lambda *_: None)]
        before = other.bias.detach().clone()
        try:
            optimizer.step()
        finally:
            for handle in handles:
                handle.remove()
        made.clear()
        gc.collect()
        return gone() is None, float((before - other.bias).detach()), len(_hooks) - known

    assert run_ranks(1, program) == [(True, pytest.approx(0.05), 0)]


class Complex(nn.Module):
    """The absolute values of complex numbers, to which real ones are added."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.factors = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64, generator=generator))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return (x.to(torch.complex64) @ self.factors).abs() + self.bias


@pytest.mark.parametrize("when", ["before", "brought"])
def test_complex_gradients_of_a_lost_rank_are_computed(when: str) -> None:
    """DDP reduces a complex gradient as pairs of real numbers."""

    def program(group: ProcessGroup) -> Any:
        model = Complex()
        assert train(group, model) == ("", True)
        return vector(model)

    whole = run_ranks(N_RANKS, program)
    found = run_ranks(N_RANKS, program, kills={1: (FIRST_GRADIENTS + BAD_STEP, when)})
    assert found[1] == "dead"
    torch.testing.assert_close(found[0], whole[0])
