"""`bml.torch.attach` with a model on a GPU; the same training in host memory is the oracle."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jobs_in_threads import on_servers, samples  # noqa: E402
from late_programs import adam, cross_entropy, mlp, normalised, sgd, training  # noqa: E402
from torch import nn  # noqa: E402

import bml.torch  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.torch.devices.registry import device_at  # noqa: E402

WHERE = "cuda:0"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and PyTorch with CUDA"),
]


def assert_as_on_the_host(faults: Faults, **settings: Any) -> None:
    found, plain = (on_servers(training(where, **settings), 3, faults) for where in (WHERE, "cpu"))
    for one, other in zip(found.value, plain.value, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for each in found.values.values():
        assert all(torch.equal(*pair) for pair in zip(each[1:], found.value[1:], strict=True))


@pytest.mark.parametrize("moment", ["before", "committed"])
def test_a_death_changes_no_number(moment: str) -> None:
    assert_as_on_the_host(Faults(kills={2: (7, moment)}))
    assert_as_on_the_host(Faults(kills={2: (8, moment)}), make_optimizer=adam, n_micro=3, clips=True)


def test_running_statistics_and_a_joiner() -> None:
    faults = Faults(kills={2: (7, "before")}, joins=[(12, 2)])
    job = on_servers(training(WHERE, normalised, adam), 3, faults)
    assert sorted(job.values) == [0, 1, 2]
    assert all(torch.equal(*pair) for pair in zip(job.value[1:], job.values[2][1:], strict=True))


def test_gradients_of_16_bits() -> None:
    """Devices round apart, and steps after steps add up what they round: both are as near to 32 bits."""
    exact = parameters_of(training("cpu"))
    half = {where: parameters_of(training(where, lambda: mlp().bfloat16())) for where in (WHERE, "cpu")}
    errors = {where: (found.float() - exact).abs().max() for where, found in half.items()}
    assert 0 < errors[WHERE] < 2 * errors["cpu"]


def parameters_of(train: Any) -> Any:
    return torch.cat([each.flatten() for each in on_servers(train, 3, Faults()).value[1:]])


def test_dropout_is_drawn_from_the_seed_of_the_share() -> None:
    ends = []
    for seed in range(2):
        torch.cuda.manual_seed(seed)
        make = lambda: nn.Sequential(mlp(), nn.Dropout(0.3))  # noqa: E731
        ends.append(on_servers(training(WHERE, make), 1).value)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_an_error_in_a_hook_is_raised_in_backward_as_it_is() -> None:
    def train(session: Any) -> None:
        model = mlp().to(WHERE)
        run = bml.torch.attach(session, model, sgd(model), None, cross_entropy)
        for batch in run.batches(samples(), global_batch=24, epochs=1, device=WHERE):
            cross_entropy(model, batch).backward()
            cross_entropy(model, batch).backward()

    (error,) = on_servers(train, 1).errors.values()
    assert type(error) is bml.UsageError
    assert "call backward() once" in str(error)


def test_a_scaler_decides_by_the_means() -> None:
    def train(session: Any) -> Any:
        model = mlp().to(WHERE)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        run = bml.torch.attach(
            session, model, optimizer, None, lambda *given: scaler.scale(cross_entropy(*given))
        )
        session.state_fn("scaler", scaler.load_state_dict, scaler.state_dict)
        for batch in run.batches(samples(), global_batch=24, epochs=2, device=WHERE):
            scaler.scale(cross_entropy(model, batch)).backward()
            run.reduce()
            scaler.step(optimizer)
            scaler.update()
        return [each.cpu() for each in model.parameters()]

    assert on_servers(train, 2).value


def test_locked_memory_is_given_back() -> None:
    on_servers(training(WHERE), 1)
    gc.collect()
    device: Any = device_at(torch.device(WHERE))
    assert not device._pinned


def train_for_long(session: bml.Session) -> list[float]:
    model = mlp().to(WHERE)
    optimizer = sgd(model)
    run = bml.torch.attach(session, model, optimizer, None, cross_entropy, bucket_mib=1e-4)
    for batch in run.batches(samples(), global_batch=24, epochs=10, seed=3, device=WHERE):
        cross_entropy(model, batch).backward()
        optimizer.step()
    return [float(each.sum()) for each in model.parameters()]


@pytest.mark.real
def test_processes_that_share_a_gpu_outlive_one_of_them() -> None:
    result = bml.launch(train_for_long, "switch:3", launcher="processes", faults=["kill:1@step=20"])
    assert sorted(result.values) == [0, 2]
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    assert result.values[0] == result.values[2]
