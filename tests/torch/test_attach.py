"""`bml.torch.attach` on modelled servers: the numbers of plain torch on one process, whatever fails."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from functools import partial
from itertools import product
from typing import Any

import pytest
from sampled import one_of_each

torch = pytest.importorskip("torch")

from attached_programs import (  # noqa: E402
    OPTIMIZERS,
    PLAN,
    SCHEDULERS,
    assert_close,
    batches_of,
    cross_entropy,
    expected,
    mlp,
    parameters_of,
    sgd,
    training,
)
from jobs_in_threads import N_CLASSES, N_FEATURES, initialised, on_servers, oracle, samples  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import bml.torch  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached.layout import NO_SAMPLES, seed_of  # noqa: E402
from bml.train.batches import BatchPlan  # noqa: E402


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_server_has_the_bits_of_plain_torch(name: str) -> None:
    # Gradients of one server are summed nowhere; what differs is what was made before the first step.
    model = mlp()
    optimizer = OPTIMIZERS[name](model)

    def divide() -> None:  # as a session does: the sum is divided, not the loss
        for parameter in model.parameters():
            parameter.grad /= float(len(rows))

    x, y = samples()
    for batch in PLAN:
        rows = torch.from_numpy(batch.indices.copy())
        optimizer.zero_grad()
        cross_entropy(model, (x[rows], y[rows])).backward()
        divide()
        optimizer.step()
    found = on_servers(training(OPTIMIZERS[name]), 1).value
    for one, other in zip(found, parameters_of(model), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # from within SequentialLR of PyTorch 2.7
@pytest.mark.parametrize(
    ("name", "moment"),
    one_of_each(lambda name, _: name, list(product(SCHEDULERS, ["before", "brought", "committed"]))),
)
def test_a_death_and_a_joiner_change_no_number(name: str, moment: str) -> None:
    adam = OPTIMIZERS["AdamW"]
    faults = Faults(kills={2: (7, moment)}, joins=[(12, 2)])
    job = on_servers(training(adam, make_scheduler=SCHEDULERS[name], bucket_mib=1e-4), 3, faults)
    assert sorted(job.values) == [0, 1, 2]
    assert_close(job.value, expected(adam, make_scheduler=SCHEDULERS[name]))
    assert all(ledger["complete"] for ledger in job.ledgers.values())


def odd() -> Any:
    """Parameters whose elements lie in another order than that of their places."""
    model = mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    return model


@pytest.mark.parametrize("overlaps", [False, True])
def test_fused_optimizers_get_gradients_that_lie_as_their_parameters(overlaps: bool) -> None:
    fused = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    make = lambda model: fused(model.parameters())  # noqa: E731
    faults = Faults(kills={2: (7, "before")})
    found = on_servers(training(make, make_model=odd, overlap_forward=overlaps), 3, faults)
    assert_close(found.value, expected(make, make_model=odd))


@pytest.mark.few(7)
@pytest.mark.parametrize("call", range(1, 22))
def test_a_death_at_any_call_changes_no_number(call: int) -> None:
    # The first call makes the state equal; three buckets a batch.
    job = on_servers(training(bucket_mib=1e-4), 3, Faults(kills={1: (call, "brought")}))
    assert sorted(job.values) == [0, 2]
    assert_close(job.value, expected())


def test_a_loss_may_use_torch_func() -> None:
    def penalised(model: Any, batch: Any) -> Any:
        slope = torch.func.grad(lambda x: (x**2).sum())(batch[0])
        return cross_entropy(model, batch) + 0 * slope.sum()

    job = on_servers(training(loss=penalised), 3, Faults(kills={1: (4, "before")}))
    assert not job.errors
    assert_close(job.value, expected())


def test_without_a_loss_samples_are_left_out_and_that_is_said_once() -> None:
    faults = Faults(kills={1: (4, "before"), 2: (9, "before")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = on_servers(training(loss=None), 3, faults)
    assert job.value
    texts = [str(each.message) for each in caught]
    assert len(texts) == 1, "by the lowest server only"
    assert "the samples of server 1 are left out of batch 2 of epoch 0" in texts[0]
    assert not any(ledger["complete"] for ledger in job.ledgers.values())


def test_a_bucket_begins_inside_of_backward_in_the_same_order_everywhere() -> None:
    orders: dict[int, list[Any]] = {}

    def train(session: Any) -> None:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy, bucket_mib=1e-6)
        begun: list[Any] = []
        begin = session._collectives.begin
        session._collectives.begin = lambda *given: (
            begun.append(model[0].weight.grad is None) or begin(*given)
        )
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            n_begun = len(begun)
            optimizer.step()
            assert n_begun == len(begun), "all had begun before the step"
        orders[session.server] = begun

    assert not on_servers(train).errors
    assert set(map(tuple, orders.values())) == {(True, True, True, False) * len(PLAN)}


def test_a_checkpoint_that_was_loaded_before_goes_on() -> None:
    adam = OPTIMIZERS["AdamW"]

    def half(session: Any, checkpoint: Any, epochs: int) -> Any:
        model = mlp()
        optimizer = adam(model)
        if checkpoint is not None:
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))  # torch would share the tensors
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for batch in run.batches(samples(), global_batch=24, epochs=epochs, seed=3):
            cross_entropy(model, batch).backward()
            optimizer.step()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict())), parameters_of(model)

    checkpoint, _ = on_servers(lambda session: half(session, None, 2)).value
    _, found = on_servers(lambda session: half(session, checkpoint, 2)).value
    model = mlp()
    optimizer = adam(model)
    for _ in range(2):
        oracle(model, optimizer, cross_entropy, BatchPlan(90, 24, 2, 3))
    assert_close(found, parameters_of(model))


class Tied(nn.Module):
    """A frozen layer, one that is used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(N_FEATURES, N_FEATURES)
        self.frozen = nn.Linear(N_FEATURES, N_FEATURES).requires_grad_(False)
        self.outer = nn.Linear(N_FEATURES, N_CLASSES)
        self.unused = nn.Linear(2, 2)
        self.again = self.inner

    def forward(self, x: Any) -> Any:
        return self.outer(self.again(torch.tanh(self.frozen(torch.tanh(self.inner(x))))))


def tied() -> Any:
    return initialised(Tied())


def test_shared_frozen_and_unused_parameters_are_as_in_plain_torch() -> None:
    def optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    faults = Faults(kills={2: (7, "brought")}, joins=[(12, 2)])
    job = on_servers(training(optimizer, tied, allow_unused=True), 3, faults)
    assert_close(job.value, expected(optimizer, tied))


def test_a_parameter_without_a_gradient_is_named() -> None:
    job = on_servers(training(make_model=tied), 3)
    assert all("'unused.bias' got no gradient" in str(error) for error in job.errors.values())
    assert {type(error) for error in job.errors.values()} == {UsageError}


@pytest.mark.parametrize("n", [1, 3, 5])
def test_accumulated_gradients_are_those_of_the_whole_share(n: int) -> None:
    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy, bucket_mib=1e-4)
        for batch in batches_of(run):
            for part in batch.micro(n):
                cross_entropy(model, part).backward()
            optimizer.step()
        return parameters_of(model)

    faults = Faults(kills={2: (7, "brought")}, joins=[(12, 2)])
    assert_close(on_servers(train, 3, faults).value, expected())


def test_clipping_sees_the_means() -> None:
    norms: dict[int, list[float]] = {}

    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        found = norms.setdefault(session.server, [])
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            run.reduce()
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        return parameters_of(model)

    job = on_servers(train)
    model = mlp()
    wanted: list[float] = []
    oracle(
        model,
        sgd(model),
        cross_entropy,
        PLAN,
        before_step=lambda: wanted.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))),
    )
    assert_close(job.value, parameters_of(model))
    for found in norms.values():
        assert found == pytest.approx(wanted, rel=1e-4)


def test_a_scaler_decides_alike_everywhere() -> None:
    def train(session: Any) -> tuple[list[Any], list[float]]:
        model = mlp()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        session.state_fn("scaler", scaler.load_state_dict, scaler.state_dict)

        def scaled(model: Any, samples: Any) -> Any:
            return scaler.scale(cross_entropy(model, samples))

        run = bml.torch.attach(session, model, optimizer, None, scaled)
        scales = []
        for number, batch in enumerate(batches_of(run)):
            loss = scaled(model, batch)
            if session.server == 1 and (batch.epoch_no, batch.batch_no) == (0, 2) and number == 2:
                loss = loss * torch.inf
            loss.backward()
            run.reduce()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters_of(model), scales

    faults = Faults(kills={2: (7, "brought")}, joins=[(12, 2)])
    job = on_servers(train, 3, faults)
    found, scales = job.value
    assert scales[:3] == [256.0, 256.0, 128.0], "the step without finite gradients was skipped"
    assert scales[-1] > 128.0
    assert {each[1][-1] for each in job.values.values()} == {scales[-1]}
    assert all(torch.isfinite(parameter).all() for parameter in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_dtypes_are_summed_in_float32_at_least(dtype: Any) -> None:
    def model() -> Any:
        return mlp().to(dtype)

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        return functional.cross_entropy(model(x.to(dtype)).float(), y, reduction="sum")

    def train(session: Any) -> list[Any]:
        made = model()
        optimizer = sgd(made)
        run = bml.torch.attach(session, made, optimizer, None, loss)
        for batch in batches_of(run):
            loss(made, batch).backward()
            optimizer.step()
        return [each.float() for each in parameters_of(made)]

    plain = model()
    oracle(plain, sgd(plain), loss, PLAN)
    job = on_servers(train, 3, Faults(kills={2: (7, "brought")}, joins=[(12, 2)]))
    wanted = [each.float() for each in parameters_of(plain)]
    rtol = {torch.float64: 1e-7, torch.bfloat16: 0.2, torch.float16: 0.05}[dtype]
    for one, other in zip(job.value, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def test_a_parameter_may_be_used_in_some_parts_only() -> None:
    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer)
        for batch in batches_of(run):
            for number, part in enumerate(batch.micro(2)):
                (cross_entropy(model, part) if number == 0 else model[2].bias.sum()).backward()
            optimizer.step()
        return parameters_of(model)

    assert on_servers(train, 1).value


def test_what_an_optimizer_draws_is_seeded_by_the_batch_alone() -> None:
    seeds: list[tuple[int, int]] = []

    def train(session: Any) -> None:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for step, batch in enumerate(batches_of(run)):
            assert torch.initial_seed() == seed_of(3, step, batch.indices)
            cross_entropy(model, batch).backward()
            optimizer.step()
            seeds.append((step, torch.initial_seed()))

    job = on_servers(train, 1)
    assert not job.errors
    assert seeds == [(step, seed_of(3, step, NO_SAMPLES)) for step in range(len(PLAN))]


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 90

    def __getitem__(self, number: int) -> dict[str, Any]:
        x, y = samples()
        return {"x": x[number], "label": int(y[number])}


DATASETS: dict[str, Any] = {
    "tensors": samples,
    "dict of tensors": lambda: dict(zip(("x", "label"), samples(), strict=True)),
    "TensorDataset": lambda: torch.utils.data.TensorDataset(*samples()),
    "map style": Rows,
    "Subset": lambda: torch.utils.data.Subset(Rows(), range(90)),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_every_kind_of_data_set_gives_the_same_numbers(kind: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        found = getattr(batch, "samples", batch)
        return cross_entropy(model, (found["x"], found["label"]) if isinstance(found, dict) else found)

    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, loss)
        for batch in batches_of(run, DATASETS[kind]()):
            for part in batch.micro(2):
                loss(model, part).backward()
            optimizer.step()
        return parameters_of(model)

    assert_close(on_servers(train, 3, Faults(kills={2: (5, "brought")})).value, expected())


def test_collate_fn_makes_what_the_loop_gets() -> None:
    def collate(rows: list[Any]) -> tuple[Any, Any]:
        return torch.stack([row["x"] for row in rows]), torch.tensor([row["label"] for row in rows])

    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for x, y in batches_of(run, Rows(), collate_fn=collate):
            cross_entropy(model, (x, y)).backward()
            optimizer.step()
        return parameters_of(model)

    assert_close(on_servers(train, 3, Faults(kills={2: (5, "brought")})).value, expected())


def test_more_servers_than_samples_train_all_the_same() -> None:
    def train(session: Any) -> list[Any]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for batch in run.batches(samples(), global_batch=2, epochs=1, seed=3):
            cross_entropy(model, batch).backward()
            optimizer.step()
        return parameters_of(model)

    model = mlp()
    oracle(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, BatchPlan(90, 2, 1, 3))
    assert_close(on_servers(train, 4).value, parameters_of(model))


def normalised() -> Any:
    return initialised(
        nn.Sequential(nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, N_CLASSES))
    )


def test_what_stands_in_for_samples_is_not_cut_into_single_ones() -> None:
    def train(session: Any) -> list[int]:
        model = normalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        parts = []
        for batch in run.batches(samples(), global_batch=9, epochs=1, seed=3):
            own = len(batch.indices)
            for part in batch.micro(2 if own != 3 else 1):
                cross_entropy(model, part).backward()  # refuses a single sample
                parts += [len(part[1])] * (not own)
            optimizer.step()
        return parts

    job = on_servers(train, 3, Faults(kills={2: (3, "brought")}, joins=[(6, 2)]))
    assert not job.errors
    assert 2 in job.values[2], "the joiner had a batch without samples of its own"
    assert {each for parts in job.values.values() for each in parts} == {2}


def test_running_statistics_are_equal_and_weighted_by_samples() -> None:
    def train(session: Any) -> list[Any]:
        model = normalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            optimizer.step()
        return [buffer.clone() for buffer in model.buffers()]

    faults = Faults(kills={2: (7, "brought")}, joins=[(12, 2)])
    job = on_servers(train, 3, faults)
    assert job.value
    assert sorted(job.values) == [0, 1, 2]
    for value in job.values.values():
        for one, other in zip(value, job.value, strict=True):
            assert torch.equal(one, other)
    mean, variance, count = job.value
    assert int(count) == len(PLAN)
    undisturbed = on_servers(train, 3).value
    model = normalised()
    oracle(model, torch.optim.SGD(model.parameters(), lr=1e-6), cross_entropy, PLAN)
    whole = dict(model.named_buffers())["1.running_mean"]
    torch.testing.assert_close(undisturbed[0], whole, rtol=1e-4, atol=1e-5)  # shares are of equal size
    torch.testing.assert_close(mean, whole, rtol=0.2, atol=0.05)
    assert (variance > 0).all()


def test_recompute_changes_no_buffer_no_gradient_and_no_random_number() -> None:
    from bml.torch.attached.memory import Named
    from bml.torch.attached.recompute import Recompute

    model = nn.Sequential(nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    named = [Named(*each) for each in model.named_parameters()]
    x, y = samples()
    fetched = []

    def fetch(indices: Any) -> Any:
        fetched.append(list(indices))
        rows = torch.from_numpy(indices.copy())
        return x[rows], y[rows]

    before = copy.deepcopy(model.state_dict()), torch.default_generator.get_state()
    again = Recompute(model, cross_entropy, named).of_batch(5, 7, fetch)
    rows = PLAN.batch(0).indices
    with torch.no_grad():
        first = again(rows[:8])
        assert all(one is other for one, other in zip(again(rows[:8]), first, strict=True))
    assert fetched == [list(rows[:8])], "once for all buckets"
    assert torch.equal(torch.default_generator.get_state(), before[1])
    torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    elsewhere = Recompute(copy.deepcopy(model), cross_entropy, named)
    elsewhere._parameters = list(elsewhere._model.parameters())
    torch.manual_seed(99)
    theirs = elsewhere.of_batch(5, 7, fetch)(rows[:8])
    assert all(torch.equal(one, other) for one, other in zip(first, theirs, strict=True)), "the same masks"
    other_batch = elsewhere.of_batch(5, 8, fetch)(rows[:8])
    assert not torch.equal(first[0], other_batch[0])
    assert all(torch.isfinite(each).all() for each in again(rows[:1])), (
        "one sample has the running statistics"
    )


@pytest.mark.slow
def test_a_model_that_is_dropped_takes_its_buckets_with_it() -> None:
    # Hooks of a parameter are kept by C++, where Python's collector sees no cycle.
    dropped: list[Any] = []

    def train(session: Any) -> None:
        model = mlp()
        optimizer = sgd(model)
        run = bml.torch.attach(session, model, optimizer, None, cross_entropy)
        for batch in batches_of(run):
            cross_entropy(model, batch).backward()
            optimizer.step()
        dropped.extend(map(weakref.ref, (*model.parameters(), run._gradients)))

    assert not on_servers(train, 1).errors
    gc.collect()
    assert len(dropped) == 5
    assert all(each() is None for each in dropped)
