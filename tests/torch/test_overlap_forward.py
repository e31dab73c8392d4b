"""Steps of the optimizer that are taken in the next forward pass: the bits of those that are not."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sampled import chosen

torch = pytest.importorskip("torch")

from attached_programs import (  # noqa: E402
    OPTIMIZERS,
    PLAN,
    SCHEDULERS,
    assert_close,
    batches_of,
    cross_entropy,
    expected,
    parameters_of,
    sgd,
    training,
)
from jobs_in_threads import N_CLASSES, N_FEATURES, initialised, on_servers, oracle, samples  # noqa: E402
from overlapped_programs import SIZES, attached, backwards, coupled, is_behind  # noqa: E402
from torch import nn  # noqa: E402

import bml.torch  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.overlap.before import Before  # noqa: E402
from bml.torch.overlap.guard import Behind  # noqa: E402
from bml.torch.overlap.support import OPTIMIZERS as SUPPORTED  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(lambda name: name == "AdamW", OPTIMIZERS))
def test_every_optimizer_has_the_same_bits_with_it(name: str) -> None:
    # The learning rate differs in every batch: a step that took that of the next one would show.
    settings: dict[str, Any] = {**SIZES, "make_scheduler": SCHEDULERS["CosineAnnealingLR"]}
    without = on_servers(training(OPTIMIZERS[name], coupled, **settings))
    found = on_servers(training(OPTIMIZERS[name], coupled, **settings, overlap_forward=True))
    assert found.value
    assert without.value
    assert found.digests[0] == without.digests[0]


def test_every_optimizer_that_is_supported_is_tried() -> None:
    assert {type(make(coupled())).__name__ for make in OPTIMIZERS.values()} == set(SUPPORTED)


def error_after_a_death(call: int, make_model: Callable[[], Any]) -> float:
    """The largest difference to a run on one process, if a server dies in this call."""
    job = on_servers(
        training(make_model=make_model, **SIZES, overlap_forward=True),
        faults=Faults(kills={1: (call, "brought")}),
    )
    assert sorted(job.values) == [0, 2]
    pairs = zip(job.value, expected(make_model=make_model), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("make_model", [coupled, backwards])
def test_a_death_between_two_buckets_changes_no_number(make_model: Callable[[], Any]) -> None:
    assert max(error_after_a_death(call, make_model) for call in range(1, 22)) < 1e-5


@pytest.mark.slow
def test_a_death_between_two_buckets_of_one_batch_changes_no_number() -> None:
    assert max(error_after_a_death(call, backwards) for call in (9, 10)) < 1e-5


@pytest.mark.slow
def test_without_the_old_values_a_death_between_two_buckets_would_change_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Else the test above would not show that they are used.
    monkeypatch.setattr(Before, "keep", lambda *_: None)
    assert max(error_after_a_death(call, backwards) for call in (9, 10)) > 1e-5


def freezing(overlaps: bool) -> Callable[[Any], Any]:
    def train(session: Any) -> Any:
        model, optimizer, run = attached(session, allow_unused=True, overlap_forward=overlaps)
        for number, batch in enumerate(batches_of(run)):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
            if number == 2:
                model[0].requires_grad_(False)
        return parameters_of(model)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("call", chosen(lambda call: call in (10, 11), range(6, 18)))
def test_a_layer_that_is_frozen_after_a_step_takes_part_in_that_step(call: int) -> None:
    job = on_servers(freezing(True), faults=Faults(kills={2: (call, "brought")}))
    assert not job.errors
    assert_close(job.value, on_servers(freezing(False)).value)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "committed"])
def test_a_joiner_is_given_what_was_late_and_the_order_of_buckets(moment: str) -> None:
    adam, scheduler = OPTIMIZERS["AdamW"], SCHEDULERS["OneCycleLR"]
    faults = Faults(kills={2: (17, moment)}, joins=[(30, 2)])
    job = on_servers(
        training(adam, coupled, make_scheduler=scheduler, **SIZES, overlap_forward=True), 3, faults
    )
    assert sorted(job.values) == [0, 1, 2]
    assert_close(job.value, expected(adam, coupled, scheduler))
    assert all(ledger["complete"] for ledger in job.ledgers.values())


def reading(read: Callable[[Any, Any, Any], Any], **settings: Any) -> tuple[list[Any], bool]:
    """What one of three servers reads after each step; and whether parameters were behind before."""
    found: list[Any] = []
    were_behind = []

    def train(session: Any) -> list[Any]:
        model = coupled()
        optimizer = OPTIMIZERS["AdamW"](model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy, **SIZES, **settings)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            optimizer.step()
            if session.server == min(session.contributors):
                were_behind.append(is_behind(model))
                found.append(copy.deepcopy(read(model, optimizer, run)))
        return parameters_of(model)

    job = on_servers(train)
    return [*found, job.value], any(were_behind)


def averaged(model: Any, optimizer: Any, run: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return list(average.parameters())


def evaluated(model: Any, optimizer: Any, run: Any) -> Any:
    model.eval()
    with torch.inference_mode():
        found = model(samples()[0]).clone()
    model.train()
    return found


def saved(model: Any, optimizer: Any, run: Any) -> Any:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return parameters_of(torch.load(memory, weights_only=False))


def norms(model: Any, optimizer: Any, run: Any) -> Any:
    return [each.detach() for each in torch._foreach_norm(list(model.parameters()))]


def synchronized(model: Any, optimizer: Any, run: Any) -> Any:
    run.synchronize()
    assert not is_behind(model)
    return [state["exp_avg"].clone() for state in optimizer.state.values()]


def of_samples(model: Any, optimizer: Any, run: Any) -> Any:
    """The gradient of each sample, by transforms of torch.func in which hooks of modules take the steps."""
    x, y = (each[:4] for each in samples())

    def loss(parameters: Any, row: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(torch.func.functional_call(model, parameters, row), label)

    parameters = dict(model.named_parameters())
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return [each.detach() for each in found.values()]


READS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "state_dict": lambda model, optimizer, run: model.state_dict(),
    "state of the optimizer": lambda model, optimizer, run: optimizer.state_dict()["state"],
    "copy": lambda model, optimizer, run: parameters_of(copy.deepcopy(model)),
    "pickle": saved,
    "print": lambda model, optimizer, run: str(list(model.parameters())),
    "moving average": averaged,
    "evaluation": evaluated,
    "one weight": lambda model, optimizer, run: float(model[2].weight.detach()[0, 0]),
    "numpy": lambda model, optimizer, run: model[4].bias.detach().numpy().copy(),
    "vector": lambda model, optimizer, run: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "norms": norms,
    "another layer": lambda model, optimizer, run: nn.functional.linear(
        torch.ones(8), model[2].weight
    ).detach(),
    "synchronize": synchronized,
    "a parameter made of it": lambda model, optimizer, run: nn.Parameter(model[2].weight).detach(),
    "detached": lambda model, optimizer, run: model[2].weight.detach(),
    "gradients of samples": of_samples,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(lambda name: name in ("state_dict", "another layer"), READS))
def test_whatever_reads_a_parameter_after_the_step_sees_new_values(name: str) -> None:
    # One server alone reads, as one that writes checkpoints does.
    found, were_behind = reading(READS[name], overlap_forward=True)
    wanted, _ = reading(READS[name])
    assert were_behind
    assert len(found) == len(wanted) == len(PLAN) + 1
    if name == "print":
        assert found[:-1] == wanted[:-1]
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("reader", [0, 2])
def test_a_server_that_reads_alone_splits_batches_as_the_others_do_after_a_death(reader: int) -> None:
    def train(session: Any) -> list[Any]:
        model, optimizer, run = attached(session, backwards)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            optimizer.step()
            if session.server == reader:
                model.state_dict()
        return parameters_of(model)

    wanted = expected(make_model=backwards)
    for call in range(5, 17):
        job = on_servers(train, faults=Faults(kills={1: (call, "brought")}))
        for one, other in zip(job.value, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_zero_grad_and_numbers_of_a_tensor_wait_for_nothing() -> None:
    def train(session: Any) -> None:
        model, optimizer, run = attached(session)
        for number, batch in enumerate(batches_of(run)):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
            model.zero_grad()
            assert sum(
                each.numel() * each.element_size() for each in model.parameters() if each.requires_grad
            )
            assert {each.shape for each in model.parameters()}
            assert all(isinstance(each, Behind) for each in model.parameters()) == (number > 0)

    assert not on_servers(train).errors


def test_what_reads_gradients_sees_the_means_and_the_step_is_not_late() -> None:
    def train(session: Any) -> list[Any]:
        model, optimizer, run = attached(session)
        for batch in batches_of(run):
            for part in batch.micro(2):
                cross_entropy(model, part).backward()
            if batch.batch_no % 2:
                run.reduce()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return parameters_of(model)

    number = iter(range(len(PLAN)))

    def clip() -> None:
        if next(number) % len([each for each in PLAN if each.epoch_no == 0]) % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    model = coupled()
    oracle(model, sgd(model), cross_entropy, PLAN, before_step=clip)
    assert_close(on_servers(train).value, parameters_of(model))


class Odd(nn.Module):
    """Modules that use parameters in other places than their own forward, or more than once, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, N_CLASSES)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.Linear(N_FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.square = nn.Linear(8, 8)
        self.again = self.square

    def forward(self, x: Any) -> Any:
        x = self.norm(self.inner(x)).unsqueeze(1)
        x = self.recurrent(self.attention(x, x, x)[0])[0].squeeze(1)
        x = torch.utils.checkpoint.checkpoint(self.square, x, use_reentrant=False)
        return self.outer(torch.tanh(self.again(x)) + x @ self.square.weight)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [None, 40, 47, 53])
def test_modules_that_share_keep_or_do_not_use_parameters_have_the_same_bits(kill: int | None) -> None:
    def odd() -> Any:
        return initialised(Odd())

    faults = Faults() if kill is None else Faults(kills={2: (kill, "brought")})
    settings: dict[str, Any] = {**SIZES, "allow_unused": True}
    found = on_servers(training(make_model=odd, **settings, overlap_forward=True), 3, faults)
    wanted = on_servers(training(make_model=odd, **settings), 3)
    if kill is None:
        assert found.value
        assert wanted.value
        assert found.digests[0] == wanted.digests[0]
    else:
        # Batch normalisation sees other shares after the fault, so only the promise of equal bits is left.
        assert found.value
        assert all(ledger["complete"] for ledger in found.ledgers.values())


def test_a_loop_that_is_left_after_a_step_has_its_values() -> None:
    def train(overlaps: bool) -> Callable[[Any], list[Any]]:
        def function(session: Any) -> list[Any]:
            model, optimizer, run = attached(session, overlap_forward=overlaps)
            for batch in batches_of(run):
                cross_entropy(model, batch).backward()
                optimizer.step()
                if (batch.epoch_no, batch.batch_no) == (1, 2):
                    break
            assert not is_behind(model)
            return parameters_of(model)

        return function

    found, wanted = (on_servers(train(overlaps)).value for overlaps in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Doubled(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer of which nobody knows whether it can be stepped for some parameters."""


def scripted() -> Any:
    return nn.Sequential(torch.jit.trace(nn.Linear(N_FEATURES, 3), torch.ones(1, N_FEATURES)))


class Special(nn.Parameter):  # type: ignore[misc]
    """A parameter with an opinion on functions."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def special() -> Any:
    model = coupled()
    model[0].weight = Special(model[0].weight.detach())
    return model


def compiled() -> Any:
    model = coupled()
    model.compile(backend="eager")
    return model


@pytest.mark.slow
def test_a_model_that_is_compiled_outside_is_an_error() -> None:
    def train(session: Any) -> None:
        model, optimizer, run = attached(session)
        faster = torch.compile(model, backend="eager")
        for batch in batches_of(run):
            cross_entropy(faster, batch).backward()
            optimizer.step()

    (error,) = on_servers(train, 1).errors.values()
    assert type(error) is UsageError
    assert "cannot be used with torch.compile" in str(error)


def step_with_hook(model: Any, optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()


def step_when_compiled(model: Any, optimizer: Any) -> None:
    model.compile(backend="eager")
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], Any], str]] = {
    "optimizer": (coupled, lambda m: Doubled(m.parameters(), 0.1), lambda m, o: o.step(), "not of Doubled"),
    "TorchScript": (scripted, sgd, lambda m, o: o.step(), "a module of TorchScript (0)"),
    "class": (special, sgd, lambda m, o: o.step(), "'0.weight' is a Special"),
    "DataParallel": (
        lambda: nn.DataParallel(coupled()),
        sgd,
        lambda m, o: o.step(),
        "DataParallel (the model)",
    ),
    "compiled": (compiled, sgd, lambda m, o: o.step(), "a module of torch.compile (the model)"),
    "compiled later": (coupled, sgd, step_when_compiled, "a module of torch.compile (the model)"),
    "closure": (coupled, sgd, lambda m, o: o.step(lambda: 0.0), "takes no closure"),
    "hook": (coupled, sgd, step_with_hook, "hooks of its own"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated, and still used
@pytest.mark.parametrize("name", chosen(lambda name: name not in ("compiled", "compiled later"), REFUSED))
def test_what_it_cannot_be_had_with_is_an_error(name: str) -> None:
    make, optimize, step, text = REFUSED[name]

    def train(session: Any) -> None:
        model = make()
        optimizer = optimize(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy, overlap_forward=True)
        for number, _ in enumerate(batches_of(run)):
            sum(each.sum() for each in model.parameters()).backward()
            step(model, optimizer) if number else optimizer.step()

    job = on_servers(train, 1)
    assert {type(error) for error in job.errors.values()} == {UsageError}, job.errors
    assert text in str(job.errors[0])


def test_another_thread_is_told_to_wait_before() -> None:
    errors: list[BaseException] = []

    def read(model: Any) -> None:
        try:
            model[0].weight.detach().sum()
        except UsageError as error:
            errors.append(error)

    def train(session: Any) -> None:
        model = coupled()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy, overlap_forward=True)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            optimizer.step()
            thread = threading.Thread(target=read, args=(model,))
            thread.start()
            thread.join()
            run.synchronize()
            read(model)

    assert not on_servers(train, 1).errors
    assert len(errors) == len(PLAN) - 1
    assert all("run.synchronize()" in str(error) for error in errors)
