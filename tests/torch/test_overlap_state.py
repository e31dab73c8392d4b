"""Steps in the next forward pass, and what a loop or a pass changes meanwhile besides trained parameters."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from sampled import chosen

torch = pytest.importorskip("torch")

from attached_programs import batches_of, cross_entropy, parameters_of, sgd  # noqa: E402
from jobs_in_threads import Job, initialised, on_servers, samples  # noqa: E402
from overlapped_programs import SIZES, attached, coupled  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import bml.torch  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached.memory import Named  # noqa: E402
from bml.torch.attached.recompute import Recompute  # noqa: E402
from bml.torch.overlap.apart import outside_of_the_pass  # noqa: E402
from bml.torch.overlap.before import Before  # noqa: E402
from bml.torch.overlap.guard import BeforeForward, Behind  # noqa: E402
from bml.torch.overlap.late_steps import LateSteps  # noqa: E402

CALLS = range(6, 16)
"""The calls of two batches, in each of which a server may die."""
Body = Callable[[Any, int], None]


def training(
    make_model: Callable[[], Any], loss: Any = cross_entropy, after: Body = lambda *_: None, **settings: Any
) -> Callable[[Any], list[Any]]:
    """`after(model, number)` is what the loop does after each step."""

    def train(session: Any) -> list[Any]:
        model = make_model()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.3)
        run = bml.torch.attach(session, model, optimizer, None, loss, **SIZES, **settings)
        for number, batch in enumerate(batches_of(run)):
            loss(model, batch).backward()
            optimizer.step()
            after(model, number)
        return parameters_of(model)

    return train


def killed(call: int) -> Faults:
    return Faults(kills={2: (call, "brought")})


def error_of(job: Job, wanted: Job) -> float:
    """The largest difference between the parameters that two jobs end with."""
    pairs = zip(job.value, wanted.value, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def assert_a_death_changes_no_number(calls: Any, *program: Any) -> None:
    wanted = on_servers(training(*program))
    assert error_of(on_servers(training(*program, overlap_forward=True)), wanted) == 0
    for call in calls:
        job = on_servers(training(*program, overlap_forward=True), faults=killed(call))
        assert error_of(job, wanted) < 1e-6, f"a death in call {call}"


class Teacher(nn.Module):
    """A network, and another one that follows it and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = coupled(), coupled().requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.temperature = 1.0
        self.weights = {"teacher": 0.3}

    def forward(self, x: Any) -> Any:
        mixed = self.net(x) + self.weights["teacher"] * self.teacher(x)
        return mixed * self.scale / self.temperature * (1.0 if self.training else 0.5)


def each_pair(change: Callable[[Any, Any], Any]) -> Body:
    def body(model: Teacher, _: int) -> None:
        with torch.no_grad():
            for one, other in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
                change(one, other)

    return body


def fused(model: Teacher, _: int) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(model.teacher.parameters()), list(model.net.parameters()), 0.5)


def unrelated(model: Teacher, number: int) -> None:
    """Nothing that it reads is late: only the change itself can be waited for."""
    with torch.no_grad():
        for each in model.teacher.parameters():
            each.mul_(0.9)


def through_numpy(model: Teacher, number: int) -> None:
    for each in model.teacher.parameters():
        each.numpy()[...] *= 0.9


def through_views(model: Teacher, number: int) -> None:
    for each in model.teacher.parameters():
        each.detach().numpy()[...] *= 0.9


def attributes(model: Teacher, number: int) -> None:
    model.temperature = 1.0 + 0.2 * (number % 3)
    model.weights["teacher"] = 0.1 * (number % 4)


def buffers(model: Teacher, number: int) -> None:
    model.scale.fill_(1.0 + 0.2 * (number % 3))


def modes(model: Teacher, number: int) -> None:
    model.train(number % 2 == 0)


BODIES: dict[str, Body] = {
    "moving average": each_pair(lambda one, other: one.mul_(0.5).add_(other, alpha=0.5)),
    "moving average of data": each_pair(lambda one, other: one.data.mul_(0.5).add_(0.5 * other.data)),
    "copies": each_pair(lambda one, other: one.copy_(0.5 * other)),
    "at once": fused,
    "unrelated": unrelated,
    "numpy": through_numpy,
    "detached": through_views,
    "attributes": attributes,
    "buffers": buffers,
    "modes": modes,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_what_a_loop_changes_after_a_step_is_not_seen_by_that_step(name: str) -> None:
    assert_a_death_changes_no_number(CALLS, Teacher, cross_entropy, BODIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unrelated", "attributes"])
def test_what_a_loop_changes_after_a_step_is_not_seen_if_a_server_dies(name: str) -> None:
    assert_a_death_changes_no_number((10,), Teacher, cross_entropy, BODIES[name])


@pytest.mark.slow
def test_a_change_that_cannot_be_noticed_is_an_error_if_it_would_be_seen() -> None:
    class Views(Teacher):
        def __init__(self) -> None:
            super().__init__()
            self.views = [each.detach() for each in self.teacher.parameters()]

    def body(model: Views, _: int) -> None:
        for each in model.views:
            each.mul_(0.9)

    wanted, errors = on_servers(training(Views, cross_entropy, body)), []
    for call in (8, 10, 12):
        job = on_servers(training(Views, cross_entropy, body, overlap_forward=True), faults=killed(call))
        if job.errors:
            errors += job.errors.values()
        else:
            assert error_of(job, wanted) < 1e-6
    texts = [str(error) for error in errors if type(error) is UsageError]
    assert texts
    for text in texts:
        assert "'teacher.0.weight', which is not trained, was changed" in text
        assert "run.synchronize()" in text


class Noting(nn.Module):
    """Its loss depends on what the pass has stored in attributes, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.noted = coupled(), []

    def forward(self, x: Any) -> Any:
        self.noted.clear()
        for layer in self.layers:
            x = layer(x)
            self.noted.append(x.pow(2).sum())
            self.layers.latest = x.abs().sum()
        return x


def noted(model: Noting, batch: Any) -> Any:
    found = cross_entropy(model, batch)
    return found + 0.1 * sum(model.noted) + 0.1 * model.layers.latest


def noting() -> Any:
    return initialised(Noting())


@pytest.mark.slow
@pytest.mark.parametrize("calls", chosen(lambda calls: calls == (10,), [(CALLS,), ((10,),)]))
def test_what_a_pass_has_stored_is_there_after_samples_were_computed_again_within_it(calls: Any) -> None:
    assert_a_death_changes_no_number(calls, noting, noted)


def test_what_a_pass_has_stored_is_there_after_samples_were_computed_again_without_overlap() -> None:
    model = noting()
    x, y = samples()
    noted(model, (x[:8], y[:8])).backward()
    latest, kept, values = model.layers.latest, model.noted, list(model.noted)
    recompute = Recompute(model, noted, [Named(*each) for each in model.named_parameters()])
    again = recompute.of_batch(0, 0, lambda rows: (x[rows], y[rows]))
    assert len(again(np.arange(8, 20))) == len(list(model.parameters()))
    assert model.layers.latest is latest
    assert model.noted is kept
    assert all(one is other for one, other in zip(kept, values, strict=True))


class Penalised(nn.Module):
    """A model whose penalty goes to a list that the loss knows, too."""

    def __init__(self, found: Any, grouped: Any) -> None:
        super().__init__()
        self.layer, self.found, self.grouped = nn.Linear(3, 1), found, grouped

    def forward(self, x: Any) -> Any:
        self.found.append((self.layer.weight**2).sum())
        self.grouped["l1"].append(self.layer.weight.abs().sum())
        return self.layer(x)


def test_a_list_that_others_know_is_the_same_when_samples_are_computed_again() -> None:
    found: list[Any] = []
    grouped: Any = collections.defaultdict(list)
    model, x = Penalised(found, grouped), torch.arange(24.0).reshape(8, 3)

    def loss(model: Any, rows: Any) -> Any:
        found.clear()
        grouped.clear()
        return model(rows).sum() + sum(found) + sum(grouped["l1"])

    loss(model, x).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    values = [*found, *grouped["l1"]]
    recompute = Recompute(model, loss, [Named(*each) for each in model.named_parameters()])
    grads = recompute.of_batch(0, 0, lambda rows: x[rows])(np.arange(8))
    assert all(torch.equal(torch.as_tensor(one), other) for one, other in zip(grads, wanted, strict=True))
    assert all(one is other for one, other in zip([*found, *grouped["l1"]], values, strict=True))


class Scaled(nn.Parameter):
    """A parameter that computes in its own way, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class NoSums:
    """A bucket of the head whose sums never come."""

    is_over = False

    def __init__(self, head: nn.Module):
        self.parameters = list(head.parameters())

    def wait(self) -> None:
        raise AssertionError("nobody reads the head")


def test_frozen_parameters_that_compute_in_their_own_way_go_on_so() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    model = nn.ModuleDict({"encoder": encoder, "own": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    model["own"].weight = Scaled(torch.ones(8, 8), requires_grad=False)
    head: Any = NoSums(model["head"])
    late = LateSteps(model, sgd(model["head"]), [head], Before(model, head.parameters), True)
    late.defer((), {})
    assert {type(each) for each in encoder.parameters()} == {nn.Parameter}
    assert type(model["own"].weight) is Scaled
    assert isinstance(model["own"].bias, Behind)


@pytest.mark.slow
def test_a_copy_of_a_model_can_be_compiled() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(BeforeForward(lambda: None), prepend=True)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager")
    assert torch.equal(compiled(torch.ones(1, 2)), layer(torch.ones(1, 2)))


def test_selective_checkpoints_keep_nothing_of_what_is_computed_again() -> None:
    w = [torch.eye(4) * 2, torch.ones(4, 4)]
    for each in w:
        each.requires_grad_()

    def policy(_: Any, function: Any, *args: Any, **given: Any) -> Any:
        saved = function is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(again: bool) -> Any:
        asked = [again]

        def inner(x: Any) -> Any:
            hidden = torch.relu(x.mm(w[0]))
            if asked.pop() if asked else False:
                with outside_of_the_pass(), torch.enable_grad():
                    torch.autograd.grad(torch.relu((3 * x).mm(w[0])).mm(w[1]).sum(), w)
            return torch.relu(hidden.mm(w[1])).mm(w[1])

        contexts = partial(create_selective_checkpoint_contexts, policy)
        total = torch.utils.checkpoint.checkpoint(
            inner, torch.arange(16.0).reshape(4, 4), use_reentrant=False, context_fn=contexts
        ).sum()
        return torch.autograd.grad(total, w)

    assert all(torch.equal(*each) for each in zip(gradients(True), gradients(False), strict=True))


def penalised(model: Any, batch: Any) -> Any:
    """A loss with the gradient of every sample, by torch.func."""
    x, _ = batch
    grads = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    return cross_entropy(model, batch) + 0.1 * (grads**2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("calls", chosen(lambda calls: calls == (10,), [(CALLS,), ((10,),)]))
def test_a_loss_with_torch_func_is_computed_again_within_a_pass(calls: Any) -> None:
    assert_a_death_changes_no_number(calls, coupled, penalised)


class Checkpointed(nn.Module):
    """A model that keeps nothing of what is between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = coupled()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.slow
def test_checkpoints_of_a_pass_count_only_what_it_saves_itself() -> None:
    assert_a_death_changes_no_number(CALLS, Checkpointed)


def copying(model: Any, batch: Any) -> Any:
    """A loss that compares a model with a copy, in which no gradient flows."""
    with torch.no_grad():
        wanted = copy.deepcopy(model)(batch[0])
    return cross_entropy(model, batch) + 0.0 * ((model(batch[0]) - wanted) ** 2).sum()


@pytest.mark.slow
def test_a_loss_may_copy_the_model() -> None:
    assert_a_death_changes_no_number(CALLS, coupled, copying)


def stepping_twice(reduces: bool, overlaps: bool) -> Callable[[Any], list[Any]]:
    def train(session: Any) -> list[Any]:
        model, optimizer, run = attached(session, overlap_forward=overlaps)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            if reduces:
                run.reduce()
            optimizer.step()
            optimizer.step()
        return parameters_of(model)

    return train


@pytest.mark.slow
def test_a_second_step_in_a_batch_is_an_error_unless_gradients_were_asked_for() -> None:
    job = on_servers(stepping_twice(reduces=False, overlaps=True))
    assert {type(error) for error in job.errors.values()} == {UsageError}
    assert "optimizer.step() was called twice in batch 0" in str(job.errors[0])
    wanted = on_servers(stepping_twice(reduces=False, overlaps=False))
    assert error_of(on_servers(stepping_twice(reduces=True, overlaps=True)), wanted) == 0
