"""Trainings by `bml.torch.attach` on a device that is late; run as a script, in a process of their own.

The script runs the programs that it is given by name, or all.
Prints one line of JSON for each program: its name, and the error if it failed.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import late_tensors
import torch
from fake_device import BUGS
from jobs_in_threads import N_CLASSES, N_FEATURES, Job, initialised, on_servers, samples
from late_tensors import LateDevice, LateTensor, module
from torch import nn
from torch.nn import functional

import bml.torch
from bml.sim.programs.faults import Faults
from bml.topology.errors import UsageError
from bml.torch.attached.memory import Named, array_of
from bml.torch.attached.recompute import Recompute
from bml.torch.devices import registry

LATE = "late:0"
KILL = Faults(kills={2: (7, "before")})
PROGRAMS: dict[str, Callable[[], None]] = {}


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


def on_device(seed: int, bug: str = "") -> LateDevice:
    """A new device in the place of the last one."""
    made = module.device_of_tests = LateDevice(seed, bug)
    registry._made.clear()
    registry.MAKERS["late"] = lambda where: made
    return made


def mlp() -> Any:
    return initialised(nn.Sequential(nn.Linear(N_FEATURES, 8), nn.Tanh(), nn.Linear(8, N_CLASSES)))


def normalised() -> Any:
    return initialised(
        nn.Sequential(nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, N_CLASSES))
    )


class Partly(nn.Module):
    """A model whose first layer, of which the bucket is the last one, takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 6)
        self.used = nn.Linear(N_FEATURES, 8)
        self.last = nn.Linear(8, N_CLASSES)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.used(x)))


def partly() -> Any:
    return initialised(Partly())


def cross_entropy(model: Any, batch: Any) -> Any:
    x, y = batch
    return functional.cross_entropy(model(x).float(), y, reduction="sum")


def adam(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def training(
    where: str,
    make_model: Callable[[], Any] = mlp,
    make_optimizer: Callable[[Any], Any] = sgd,
    n_micro: int = 1,
    clips: bool = False,
    global_batch: int = 24,
    epochs: int = 2,
    overlaps: bool = False,
    allow_unused: bool = False,
) -> Callable[[Any], Any]:
    def train(session: Any) -> Any:
        model = make_model().to(where)
        optimizer = make_optimizer(model)
        run = bml.torch.attach(
            session,
            model,
            optimizer,
            None,
            cross_entropy,
            bucket_mib=1e-4,
            overlap_forward=overlaps,
            allow_unused=allow_unused,
        )
        dtype = next(model.parameters()).dtype
        x, y = samples()
        rows = (x.to(dtype), y)
        means: list[Any] = []
        total = torch.zeros((), device=where)
        for batch in run.batches(rows, global_batch=global_batch, epochs=epochs, seed=3, device=where):
            for part in batch.micro(n_micro) if n_micro > 1 else [batch.samples]:
                cross_entropy(model, part).backward()
            for each in filter(torch.is_tensor, means):  # those of the step before, which are read late, too
                total += each.abs().sum()
            if clips:
                run.reduce()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            means = [parameter.grad for parameter in model.parameters()]
        return [total.cpu(), *(each.cpu() for each in model.state_dict().values())]

    return train


def same(one: Job, other: Job) -> bool:
    """Whether two jobs ended with the same bits, everywhere."""
    values = zip(one.value, other.value, strict=True)
    return one.digests == other.digests and all(torch.equal(*each) for each in values)


def is_right(job: Job, plain: Job) -> bool:
    try:
        return same(job, plain)
    except AssertionError:  # servers differ, or one of them raised an error
        return False


def assert_as_on_the_host(seeds: Any, faults: Faults = KILL, n_servers: int = 3, **settings: Any) -> None:
    plain = on_servers(training("cpu", **settings), n_servers, faults)
    for seed in seeds:
        on_device(seed)
        assert same(on_servers(training(LATE, **settings), n_servers, faults), plain), f"seed {seed}"


@program
def bits_are_those_of_host_memory() -> None:
    assert_as_on_the_host(range(5))


@program
def adam_and_parts_and_clipped_means() -> None:
    assert_as_on_the_host(range(3), make_optimizer=adam, n_micro=3, clips=True)


@program
def any_moment_of_a_death() -> None:
    for call in range(2, 22, 4):
        plain = []
        for moment in ("before", "committed"):
            plain.append(on_servers(training("cpu"), 3, Faults(kills={1: (call, moment)})))
            on_device(call)
            assert same(on_servers(training(LATE), 3, Faults(kills={1: (call, moment)})), plain[-1])
        # Whether a contribution that was brought counts depends on who was the last to bring one.
        on_device(call)
        job = on_servers(training(LATE), 3, Faults(kills={1: (call, "brought")}))
        assert any(same(job, each) for each in plain)


@program
def bfloat16_is_summed_in_float32_and_rounded_once() -> None:
    assert_as_on_the_host(range(3), make_model=lambda: mlp().bfloat16())


@program
def steps_in_the_next_forward_pass() -> None:
    assert_as_on_the_host(range(5), make_model=normalised, overlaps=True)
    assert_as_on_the_host(range(3), make_optimizer=adam, overlaps=True)
    for call in range(9, 17):
        on_device(call)
        assert on_servers(training(LATE, overlaps=True), 3, Faults(kills={1: (call, "brought")})).value


@program
def steps_of_layers_that_the_forward_pass_does_not_use() -> None:
    """They are taken in a thread of autograd, when backward has the first gradients.

    It waits there for the others, and a process has one such thread for a device: one server has the device.
    """
    settings: dict[str, Any] = {"make_model": partly, "overlaps": True, "allow_unused": True}

    def train(session: Any) -> Any:
        return training(LATE if session.server == 0 else "cpu", **settings)(session)

    plain = on_servers(training("cpu", **settings))
    for seed in range(3):
        on_device(seed)
        assert same(on_servers(train), plain)
    for call in range(9, 17):
        on_device(call)
        found = on_servers(train, 3, Faults(kills={1: (call, "brought")})).value
        for one, other in zip(found[1:], plain.value[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@program
def running_statistics() -> None:
    assert_as_on_the_host(range(4), make_model=normalised)


@program
def servers_without_samples() -> None:
    assert_as_on_the_host([1], global_batch=2, epochs=1)


@program
def a_joiner_gets_the_state() -> None:
    for seed in range(4):
        on_device(seed)
        faults = Faults(kills={2: (7, "brought")}, joins=[(12, 2)])
        job = on_servers(training(LATE, normalised, adam), 3, faults)
        assert sorted(job.values) == [0, 1, 2]
        assert all(torch.equal(*pair) for pair in zip(job.value[1:], job.values[2][1:], strict=True))
        assert all(ledger["complete"] for ledger in job.ledgers.values())


@program
def servers_that_differ_take_the_state_of_the_lowest() -> None:
    on_device(1)

    def train(session: Any) -> Any:
        model = initialised(mlp(), seed=session.server)
        return training(LATE, lambda: model)(session)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(on_servers(train), on_servers(training("cpu")))
    assert "the servers began with different states" in str(caught[0].message)


def with_bug(bug: str, seed: int) -> Job:
    on_device(seed, bug)
    return on_servers(training(LATE), 3, KILL)


@program
def planted_bugs_are_found() -> None:
    plain = on_servers(training("cpu"), 3, KILL)
    for bug in BUGS:
        if bug == "reached":
            continue  # nothing here asks for that
        assert any(not is_right(with_bug(bug, seed), plain) for seed in range(6)), bug


@program
def steps_begin_in_a_thread_of_autograd() -> None:
    on_device(2)
    threads, trainers = set[int](), set[int]()

    def train(session: Any) -> Any:
        begin = session._collectives.begin

        def noted(*given: Any) -> Any:
            threads.add(threading.get_ident())
            return begin(*given)

        session._collectives.begin = noted
        trainers.add(threading.get_ident())
        return training(LATE)(session)

    assert on_servers(train, 3).value
    assert len(threads) == 1
    assert not threads & trainers


@program
def an_error_of_the_device_is_that_of_the_step() -> None:
    device = on_device(3)

    def train(session: Any) -> Any:
        if session.server == 1:
            copy_out = device.copy_out

            def failing(*given: Any) -> Any:
                mark = copy_out(*given)

                def wait() -> None:
                    raise ArithmeticError("an illegal memory access")

                mark.wait = wait
                return mark

            if threading.current_thread().name == "server-1":
                device.copy_out = failing  # type: ignore[method-assign]
        return training(LATE)(session)

    job = on_servers(train, 2)
    assert job.errors
    assert all("illegal memory access" in str(error) for error in job.errors.values()), job.errors


@program
def dropout_is_drawn_from_the_seed_of_the_share() -> None:
    def dropping() -> Any:
        return nn.Sequential(mlp(), nn.Dropout(0.3))

    ends = []
    for seed in range(3):
        on_device(seed)
        module.manual_seed(seed)
        ends.append(on_servers(training(LATE, dropping), 1, Faults()))
    assert all(same(each, ends[0]) for each in ends)


@program
def computing_again_changes_no_random_number() -> None:
    on_device(4)
    model = nn.Sequential(mlp(), nn.Dropout(0.3)).to(LATE)
    named = [Named(*each) for each in model.named_parameters()]
    x, y = (each.to(LATE) for each in samples())
    recompute = Recompute(model, cross_entropy, named)
    rows = torch.arange(8)
    before, on_host = module.get_rng_state(0), torch.get_rng_state()
    one, other = (
        recompute.of_batch(5, 7, lambda indices: (x[rows], y[rows]))(rows.numpy()) for _ in range(2)
    )
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))
    assert torch.equal(module.get_rng_state(0), before)
    assert torch.equal(torch.get_rng_state(), on_host)


@program
def locked_memory_is_given_back() -> None:
    device = on_device(5)

    def train(session: Any) -> int:
        training(LATE)(session)
        return len(device.pinned)

    assert on_servers(train, 1).value > 1
    gc.collect()
    assert not device.pinned


@program
def a_model_on_two_devices_is_refused() -> None:
    on_device(6)

    def train(session: Any) -> str:
        model = mlp()
        model[2].to(LATE)
        try:
            bml.torch.attach(session, model, sgd(model))
        except UsageError as error:
            return str(error)
        return ""

    for text in on_servers(train, 1).values.values():
        assert "the parameter '2.weight' is on late:0, and '0.weight' on cpu" in text, text


@program
def tensors_of_all_dtypes_are_mirrored() -> None:
    on_device(7)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        value = torch.arange(6).reshape(2, 3).to(dtype).t().contiguous().t()
        tensor = value.to(LATE)
        mirror: Any = array_of(tensor, "it")
        mirror.read()
        plain: Any = array_of(value, "it")
        assert (mirror.__array__() == plain).all()
        mirror.__array__()[...] = 0
        mirror.write()
        assert not tensor.cpu().any()


def main() -> None:
    late_tensors.install()
    x = torch.ones(3).to(LATE)
    assert isinstance(x, LateTensor), "the device is known to torch"
    for name in sys.argv[1:] or PROGRAMS:
        try:
            PROGRAMS[name]()
            failed = ""
        except BaseException:
            failed = traceback.format_exc()
        print(json.dumps({"name": name, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
