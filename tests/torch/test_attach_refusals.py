"""Wrong use of `bml.torch.attach`: each error says what is wrong and what to do, on all servers alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jobs_in_threads import initialised, on_servers, samples  # noqa: E402
from torch import nn  # noqa: E402

import bml.torch  # noqa: E402
from bml.errors import BmlError, StepMismatch, UsageError  # noqa: E402


def linear() -> Any:
    return initialised(nn.Linear(6, 3))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model: Any, batch: Any) -> Any:
    return model(batch[0]).square().sum()


def step(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
    x, _ = batch
    model(x).square().sum().backward()
    optimizer.step()


def one(
    do: Callable[[Any, Any, Any, Any], None] = step,
    make: Callable[[], Any] = linear,
    optimize: Callable[[Any], Any] = sgd,
    after: Callable[[Any, Any, Any], None] = lambda model, optimizer, run: None,
    **batches: Any,
) -> str:
    """The errors that two servers end with, which are mostly the same."""

    def train(session: Any) -> None:
        model = make()
        optimizer = optimize(model)
        run = bml.torch.attach(session, model, optimizer, None, loss)
        settings = {"global_batch": 30, "epochs": 2, **batches}
        for batch in run.batches(settings.pop("dataset", samples()), **settings):
            do(model, optimizer, run, batch)
        after(model, optimizer, run)

    job = on_servers(train, 2)
    assert sorted(job.errors) == [0, 1]
    assert {type(error) for error in job.errors.values()} == {UsageError}, job.errors
    return "\n".join(sorted({str(error) for error in job.errors.values()}))


def test_gradients_that_are_used_before_the_sum_are_refused() -> None:
    def clip(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        model(batch.samples[0]).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def zero(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        model(batch.samples[0]).square().sum().backward()
        optimizer.zero_grad()
        optimizer.step()

    def scale(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(batch.samples[0]).square().sum()).backward()
        scaler.step(optimizer)

    assert "the gradient of 'bias' was replaced" in one(zero)
    assert "is not summed over all servers yet: call run.reduce()" in one(scale)
    assert "is not summed over all servers yet: call run.reduce()" in one(clip)
    assert "is not summed" in one(clip, lambda: linear().bfloat16(), dataset=samples()[0].bfloat16()[:, None])


def test_a_mean_in_the_place_of_a_sum_is_found_in_the_first_batch() -> None:
    def mean(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        (loss(model, batch) / len(batch.indices)).backward()
        optimizer.step()

    assert "SUMMED over the samples" in one(mean)


def test_a_second_backward_pass_is_refused_in_backward() -> None:
    def twice(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        for _ in range(2):
            model(batch.samples[0]).square().sum().backward()

    assert "call backward() once" in one(twice)


def test_a_batch_without_a_step_is_named() -> None:
    def no_step(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        model(batch.samples[0]).square().sum().backward()

    assert "batch 0 of epoch 0 was not ended: call optimizer.step()" in one(no_step)
    assert "got no gradient in this batch" in one(lambda model, optimizer, run, batch: optimizer.step())


def test_a_loop_over_parts_that_was_left_is_named() -> None:
    def leave(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        for part in batch.micro(3):
            model(part[0]).square().sum().backward()
            break
        optimizer.step()

    assert "was left before its last part" in one(leave)
    assert "at least 1; it is 0" in one(lambda model, optimizer, run, batch: list(batch.micro(0)))


def test_a_step_outside_of_the_loop_is_refused() -> None:
    assert "outside of a loop over run.batches" in one(after=lambda model, optimizer, run: optimizer.step())


def test_what_was_replaced_is_named() -> None:
    def rebind(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        step(model, optimizer, run, batch)
        model.weight.data = model.weight.data.clone()

    def load(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        step(model, optimizer, run, batch)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert "the memory of the parameter 'weight' was replaced" in one(rebind)
    assert "'momentum_buffer' of the optimizer's state of 'weight' was replaced" in one(load)


def test_a_parameter_that_is_trained_later_is_refused() -> None:
    def frozen() -> Any:
        model = initialised(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))
        model[0].requires_grad_(False)
        return model

    def thaw(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        model[0].requires_grad_(True)
        step(model, optimizer, run, batch)

    assert "was frozen or absent when it was attached" in one(thaw, frozen)


def test_models_that_differ_are_refused_before_anything_is_summed() -> None:
    def train(session: Any) -> None:
        model = initialised(nn.Linear(6, 3 + session.server))
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, loss)
        for batch in run.batches(samples(), global_batch=30, epochs=1):
            step(model, optimizer, run, batch)

    errors = on_servers(train, 2).errors
    assert {type(error) for error in errors.values()} == {StepMismatch}
    assert "params.weight <f4[3, 6]" in str(errors[0])
    assert "params.weight <f4[4, 6]" in str(errors[0])


def test_a_parameter_that_the_optimizer_does_not_have_is_named() -> None:
    def make() -> Any:
        return initialised(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))

    text = one(make=make, optimize=lambda model: sgd(model[1]))
    assert "'0.weight' requires a gradient, and the optimizer does not have it" in text
    assert "freeze it with requires_grad_(False), or give it to the optimizer" in text


def test_state_that_the_optimizer_makes_later_is_named() -> None:
    def momentum(model: Any, optimizer: Any, run: Any, batch: Any) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9
        step(model, optimizer, run, batch)

    text = one(momentum, optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "has made 'momentum_buffer' of the parameter 'weight' since it was attached" in text


class Unused(nn.Module):
    """A layer that is used, and one before it that is not: its buckets are the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(6, 3), nn.Linear(6, 3)
        initialised(self)

    def forward(self, x: Any) -> Any:
        return self.used(x)


def allowing_unused(do: Callable[[Any, Any, Any], None], bucket_mib: float) -> str:
    def train(session: Any) -> None:
        model = Unused()
        optimizer = sgd(model)
        run = bml.torch.attach(
            session, model, optimizer, None, loss, bucket_mib=bucket_mib, allow_unused=True
        )
        for batch in run.batches(samples(), global_batch=30, epochs=2):
            loss(model, batch).backward()
            do(session, model, optimizer)
            optimizer.step()

    job = on_servers(train, 2)
    assert {type(error) for error in job.errors.values()} == {UsageError}, job.errors
    return "\n".join(sorted({str(error) for error in job.errors.values()}))


def test_a_gradient_that_was_made_cannot_be_changed_while_others_are_missing() -> None:
    def clip(session: Any, model: Any, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def zero(session: Any, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()

    assert "is not summed over all servers yet: call run.reduce()" in allowing_unused(clip, 8.0)
    assert "the gradient of 'used.bias' was replaced" in allowing_unused(zero, 8.0)


def test_another_call_between_backward_and_the_step_says_what_to_call_first() -> None:
    def other(session: Any, model: Any, optimizer: Any) -> None:
        session.allreduce(np.ones(1))

    assert "call run.reduce() before other calls of the session" in allowing_unused(other, 1e-6)


def test_after_an_error_the_parameters_are_those_of_the_last_step() -> None:
    """The third batch of server 1 makes no gradient: nobody's parameters change, and no sample is counted."""

    ends: dict[int, tuple[Any, str]] = {}

    def train(session: Any) -> None:
        model = linear()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, loss)
        after_two, said = None, ""
        try:
            for number, batch in enumerate(run.batches(samples(), global_batch=30, epochs=1)):
                if number == 2:
                    after_two = [each.detach().clone() for each in model.parameters()]
                if number < 2 or session.server == 0:
                    loss(model, batch).backward()
                optimizer.step()
        except BmlError as error:
            said = str(error)
        assert after_two is not None
        assert all(map(torch.equal, after_two, model.parameters()))
        ledger = session.samples()
        assert ledger is not None
        assert ledger["steps"] == 2
        ends[session.server] = [each.tolist() for each in model.parameters()], said

    errors = on_servers(train, 2).errors
    assert {server: type(error) for server, error in errors.items()} == {0: StepMismatch}
    assert ends[0][0] == ends[1][0]
    assert "got no gradient in this batch" in ends[1][1]
    assert "server 1 has ended, others call batch.allreduce" in ends[0][1]


def test_sparse_gradients_are_refused() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4, sparse=True)
            initialised(self)

        def forward(self, x: Any) -> Any:
            return self.table(x.abs().long().clamp(max=8))

    text = one(make=Words, optimize=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "the gradient of 'table.weight' is torch.sparse_coo" in text
    assert "sparse=False" in text


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (lambda: torch.zeros(3, dtype=torch.complex64), "'p' is complex64"),
        (lambda: torch.zeros(3).to(torch.float8_e4m3fn), "'p' is float8_e4m3fn"),
        (lambda: torch.zeros(3, device="meta"), "'p' is on the device meta"),
    ],
)
def test_parameters_that_cannot_be_reduced_are_named(parameter: Callable[[], Any], said: str) -> None:
    def make() -> Any:
        model = linear()
        model.p = nn.Parameter(parameter())
        return model

    assert said in one(make=make)


def test_optimizers_that_cannot_be_used_say_why() -> None:
    assert "takes no step with zero gradients" in one(
        optimize=lambda model: torch.optim.LBFGS(model.parameters())
    )
    assert "there is nothing to train" in one(make=lambda: linear().requires_grad_(False))


def test_data_sets_that_cannot_be_divided_say_why() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(range(9))

    class Endless(torch.utils.data.Dataset):  # type: ignore[misc]
        def __getitem__(self, number: int) -> int:
            return number

    assert "give one with samples by index" in one(dataset=Stream())
    assert "has no length" in one(dataset=Endless())
    assert "tensors have [3, 4] samples" in one(dataset=(torch.zeros(3), torch.zeros(4)))
    assert "num_workers must be a whole number" in one(num_workers=-1)
    assert "global_batch must be at least 1" in one(global_batch=0)


def test_wrong_arguments_are_named() -> None:
    def refused(*given: Any) -> str:
        with pytest.raises(UsageError) as caught:
            bml.torch.attach(*given)
        return str(caught.value)

    model = linear()
    assert "takes the session" in refused(3, model, sgd(model))

    def train(session: Any) -> None:
        assert "takes a torch.nn.Module" in refused(session, 3, sgd(model))
        assert "takes a torch.optim.Optimizer" in refused(session, linear(), 3)
        assert "has no state_dict" in refused(session, linear(), sgd(linear()), 3)
        assert "loss must be a function" in refused(session, linear(), sgd(linear()), None, 3)
        own = linear()
        bml.torch.attach(session, own, sgd(own))
        assert "has a model already" in refused(session, own, sgd(own))

    assert not on_servers(train, 1).errors
