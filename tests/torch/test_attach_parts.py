"""The parts of `bml.torch.attach` that decide alike on all servers, and those that load samples."""

from __future__ import annotations

import copy
from collections import Counter, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached import layout, plain  # noqa: E402
from bml.torch.attached.ahead import Ahead  # noqa: E402
from bml.torch.attached.memory import Named  # noqa: E402
from bml.torch.attached.optimizers import keep_first_gradients, prime  # noqa: E402
from bml.torch.attached.recompute import Recompute  # noqa: E402
from bml.torch.attached.source import Source, part  # noqa: E402
from bml.torch.attached.statistics import Statistics  # noqa: E402
from bml.train import state  # noqa: E402

KIB = 1 << 10


def test_buckets_are_neighbours_in_reverse_order() -> None:
    sizes = [("float32", each * KIB) for each in (2000, 10, 900, 10, 600, 10)]
    assert layout.buckets(sizes, 4000 * KIB) == [(5, 4, 3, 2), (1, 0)], "the first one is full at 1 MiB"
    assert layout.buckets(sizes, 500 * KIB) == [(5, 4), (3, 2), (1, 0)]
    assert layout.buckets([("float32", 4)], 1) == [(0,)]


def test_buckets_have_one_dtype_and_are_ordered_by_their_last_gradients() -> None:
    sizes = [("float32", 5), ("float64", 5), ("float32", 5), ("float64", 5)]
    assert layout.buckets(sizes, 100) == [(3, 1), (2, 0)]
    for limit in (1, 5, 6, 11, 100):
        found = layout.buckets(sizes, limit)
        assert sorted(number for bucket in found for number in bucket) == [0, 1, 2, 3]
        assert [bucket[-1] for bucket in found] == sorted((bucket[-1] for bucket in found), reverse=True)
        assert all(len({sizes[number][0] for number in bucket}) == 1 for bucket in found)


@pytest.mark.parametrize(
    ("total_mib", "bucket_mib", "n_buckets"), [(0.5, 1, 1), (4, 1, 4), (16, 2, 9), (64, 8, 9), (800, 8, 101)]
)
def test_buckets_are_an_eighth_of_a_model_but_neither_small_nor_large(
    total_mib: float, bucket_mib: int, n_buckets: int
) -> None:
    limit = layout.limit_of(int(total_mib * KIB * KIB))
    assert limit == bucket_mib * KIB * KIB
    sizes = [("float32", 256 * KIB)] * round(total_mib * 4)
    found = layout.buckets(sizes, limit)
    assert len(found) == n_buckets
    assert len(found[0]) == min(4, len(sizes)), "the first one is full at 1 MiB"


def test_a_seed_depends_on_run_batch_and_samples() -> None:
    rows = np.arange(6)
    seeds = {
        layout.seed_of(0, 0, rows),
        layout.seed_of(1, 0, rows),
        layout.seed_of(0, 1, rows),
        layout.seed_of(0, 0, rows[:5]),
        layout.seed_of(0, 0, rows[::-1]),
    }
    assert len(seeds) == 5
    assert layout.seed_of(0, 0, rows) == layout.seed_of(0, 0, np.arange(12)[:6].copy())
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(("n_samples", "n_parts"), [(7, 3), (3, 7), (1, 1), (32, 4), (0, 3)])
def test_cuts_cover_all_samples(n_samples: int, n_parts: int) -> None:
    found = layout.cuts(n_samples, n_parts)
    assert [number for start, stop in found for number in range(start, stop)] == list(range(n_samples))
    assert len(found) == max(1, min(n_samples, n_parts))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 1


def test_values_of_optimizers_pass_through_a_session() -> None:
    value = [
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nested": {"": 1, "a": [True, "x"]}},
        {3: torch.tensor([1.5, 2.5]), "milestones": Counter({30: 2, 80: 1}), "best": float("inf")},
        (),
        None,
    ]
    sent = msgspec.msgpack.encode(state.packed(plain.packed(value), "value"))
    found = plain.unpacked(state.unpacked(msgspec.msgpack.decode(sent)))
    assert torch.equal(found[1].pop(3), value[1].pop(3))  # type: ignore[index,union-attr]
    assert found == value
    assert type(found[1]["milestones"]) is Counter
    assert type(found[0]["betas"]) is tuple
    with pytest.raises(UsageError, match="returned a function"):
        state.packed(plain.packed({"lr_lambda": lambda: 1}), "value")


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Counts what is loaded in this process."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> float:
        self.loaded.append(number)
        return float(number)


def share(step: int, of: int = 2) -> Any:
    return np.arange(10 * step, 10 * step + 10 // of)


class Texts(UserDict):  # type: ignore[type-arg]
    """As the batches of tokenizers: they know how to move themselves."""

    def to(self, device: Any) -> str:
        return f"texts on {device}"


def test_samples_are_moved_with_everything_that_can_be() -> None:
    packed_rows = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    pair = namedtuple("pair", "one other")
    given = {"x": torch.ones(4), "more": [pair(torch.ones(2), "text"), (packed_rows, 5)], "texts": Texts()}
    source = Source([1, 2, 3], lambda rows: given, "meta")
    for found in (source.fetch(np.array([0, 2])), source.moved(given)):
        assert found["x"].device.type == "meta"
        (moved, text), (rows, number) = found["more"]
        assert type(found["more"][0]) is pair
        assert (moved.device.type, text, number) == ("meta", "text", 5)
        assert rows.data.device.type == "meta"
        assert rows.batch_sizes.device.type == "cpu"
        assert found["texts"] == "texts on meta"
    assert Source(torch.ones(4), device="meta").fetch(np.array([1])).device.type == "meta"
    assert Source([1, 2, 3], lambda rows: given).fetch(np.array([0])) is given


def test_shares_that_were_foretold_are_loaded_once() -> None:
    rows = Rows()
    ahead = Ahead(Source(rows), 10, share, 0, 0)
    for step in range(10):
        assert ahead.fetch(step, share(step)).tolist() == share(step).tolist()
    assert Counter(rows.loaded) == Counter(number for step in range(10) for number in share(step).tolist())
    ahead.close()


def test_shares_that_were_not_foretold_are_right_all_the_same() -> None:
    n_servers = 2
    ahead = Ahead(Source(Rows()), 10, lambda step: share(step, n_servers), 0, 0)
    assert ahead.fetch(0, share(0, 2)).tolist() == [0, 1, 2, 3, 4]
    assert ahead.fetch(1, share(1, 1)).tolist() == list(range(10, 20)), "a server was lost meanwhile"
    n_servers = 1
    assert ahead.fetch(2, share(2, 1)).tolist() == list(range(20, 30))
    assert ahead.fetch(7, share(7, 1)).tolist() == list(range(70, 80)), "a joiner went on later"
    assert ahead.fetch(8, share(8, 1)).tolist() == list(range(80, 90))
    ahead.close()


def test_only_what_workers_have_loaded_was_loaded_ahead() -> None:
    ahead = Ahead(Source(Rows()), 10, share, 1, 0)
    found = []
    for step in range(4):
        wanted = share(step, 1) if step == 2 else share(step)  # weights have changed in step 2
        assert ahead.fetch(step, wanted).tolist() == wanted.tolist()
        found.append(ahead.was_ahead)
    ahead.close()
    assert found == [False, True, False, True], "the first waits until the worker has begun"


def test_collated_samples_are_cut_along_their_first_dimension() -> None:
    samples = {
        "x": torch.arange(12).view(6, 2),
        "rest": [torch.arange(6), torch.arange(6)],
        "names": list("abcdef"),
    }
    found = part(samples, 2, 5, 6)
    assert found["x"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert [each.tolist() for each in found["rest"]] == [[2, 3, 4]] * 2
    assert found["names"] == list("cde")
    for wrong in (torch.zeros(5), (torch.zeros(6), torch.zeros(2)), 3, {"x": torch.tensor(1)}):
        with pytest.raises(UsageError, match="cannot cut"):
            part(wrong, 0, 3, 6)


class Doubled(torch.utils.data.TensorDataset):  # type: ignore[misc]
    def __getitem__(self, number: int) -> Any:
        return tuple(2 * each for each in super().__getitem__(number))


def test_samples_are_those_that_the_data_set_gives() -> None:
    x, two = torch.arange(12.0).view(6, 2), np.array([1, 4])
    (found,) = Source(Doubled(x)).fetch(two)
    assert found.tolist() == [[4, 6], [16, 18]], "of a subclass"
    assert Source([*x]).fetch(two).tolist() == [[2, 3], [8, 9]], "a list has samples, no columns"
    assert Source({"x": x}).fetch(two)["x"].tolist() == [[2, 3], [8, 9]]


@pytest.mark.parametrize("columns", [torch.arange(6.0), (torch.arange(6.0),), {"x": torch.arange(6.0)}])
def test_collate_fn_gets_rows_of_columns(columns: Any) -> None:
    rows = Source(columns, list).fetch(np.array([1, 4]))
    wanted = {"Tensor": [1, 4], "tuple": [(1,), (4,)], "dict": [{"x": 1}, {"x": 4}]}
    assert rows == wanted[type(columns).__name__]


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Any:
        return number + torch.rand(1, dtype=torch.float64)


def test_random_transforms_are_the_same_whoever_loads_a_share() -> None:
    source = Source(Noisy())
    linear = torch.nn.Linear(1, 1, dtype=torch.float64)
    seen: list[Any] = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append((batch, torch.rand(1)))
        return model(batch).sum()

    recompute = Recompute(linear, loss, [Named(*each) for each in linear.named_parameters()])
    ahead = Ahead(source, 10, share, 0, 7)
    for step in range(3):
        torch.manual_seed(step)
        loaded = ahead.fetch(step, share(step))
        recompute.of_batch(7, step, source.fetch)(share(step))
        batch, drawn = seen[-1]
        assert torch.equal(loaded, batch)
        torch.manual_seed(layout.seed_of(7, step, share(step)))
        assert torch.equal(drawn, torch.rand(1)), "what loading draws does not count"
    ahead.close()


def adam(*parameters: Any, **settings: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.1, **settings)


def test_a_checkpoint_and_a_new_parameter_both_have_state() -> None:
    old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = adam(old)
    old.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[old])
    optimizer.add_param_group({"params": [new]})
    value = old.detach().clone()
    prime(optimizer)
    assert optimizer.state[old].keys() == optimizer.state[new].keys() == before.keys()
    assert all(torch.equal(each, optimizer.state[old][key]) for key, each in before.items())
    assert not any(each.any() for each in optimizer.state[new].values())
    assert torch.equal(old, value)
    assert torch.equal(new, torch.ones(2))
    assert torch.equal(old.grad, torch.ones(2))
    assert new.grad is None


class Counting(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            group["lr"] *= 0.5
            group["scale"] += 1
        return super().step(closure)


def test_the_values_of_groups_are_as_before() -> None:
    scale = torch.ones(1)
    optimizer = Counting([torch.nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.9, weight_decay=0.1)
    (group,) = optimizer.param_groups
    group["scale"] = scale
    before = {**group, "scale": scale.clone()}
    prime(optimizer)
    assert group == before
    assert group["scale"] is scale
    assert optimizer.state


@pytest.mark.parametrize("foreach", [False, True])
def test_the_first_gradient_is_not_dampened(foreach: bool) -> None:
    """Bits are those of an optimizer that was not primed; a parameter may get its first gradient later."""

    def train(is_primed: bool) -> tuple[list[Any], Any]:
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5) + number) for number in range(3)]
        settings = {"momentum": 0.9, "weight_decay": 0.01, "foreach": foreach}
        groups = [{"params": parameters[:2], "dampening": 0.3}, {"params": parameters[2:]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, **settings)
        if is_primed:
            prime(optimizer)
            keep_first_gradients(optimizer)
            buffers = [optimizer.state[each]["momentum_buffer"] for each in parameters]
        for step in range(4):
            for number, each in enumerate(parameters):
                late = number == 1 and step < 2
                each.grad = None if late else torch.sin(torch.arange(5.0) + step + number)
            optimizer.step()
        if is_primed:  # joiners are given what is in these
            assert all(
                optimizer.state[each]["momentum_buffer"] is buffer
                for each, buffer in zip(parameters, buffers, strict=True)
            )
        return [each.detach() for each in parameters], optimizer

    (ours, primed), (wanted, _) = train(True), train(False)
    assert all(map(torch.equal, ours, wanted))
    flags = [state.get("bml_is_first") for state in primed.state.values()]
    assert flags == [False, False, None]


def test_running_statistics_are_kept_if_no_sample_counted() -> None:
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.randn(8, 3))
    before = copy.deepcopy(norm.state_dict())
    session: Any = SimpleNamespace(empty=np.empty)
    statistics = Statistics(session, norm)
    for n_used in (0, 2):
        mean = np.concatenate([np.full(7, 5.0), [1.0]]) if n_used else np.zeros(8)
        pending = SimpleNamespace(wait=mean.copy)
        batch: Any = SimpleNamespace(indices=layout.NO_SAMPLES, allreduce_async=Mock(return_value=pending))
        statistics.open(batch)
        norm(torch.randn(2, 3))  # of samples that do not count
        statistics.begin(batch, True, {})
        statistics.finish()
        wanted = {key: torch.full_like(each, 5) for key, each in before.items()} if n_used else before
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(norm.state_dict()[key], wanted[key])


def test_a_parameter_that_was_frozen_since_is_computed_as_zeros() -> None:
    model = torch.nn.Linear(2, 2)
    recompute = Recompute(
        model, lambda model, x: model(x).sum(), [Named(*each) for each in model.named_parameters()]
    )
    model.weight.requires_grad_(False)
    weight, bias = recompute.of_batch(0, 0, lambda indices: torch.ones(len(indices), 2))(np.arange(3))
    assert weight.tolist() == [[0, 0], [0, 0]]
    assert bias.tolist() == [3, 3]


class Masked(torch.nn.Module):
    """A layer that multiplies by a buffer, which backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 8))
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.mask


@pytest.mark.parametrize("first", [lambda: torch.nn.BatchNorm1d(8), Masked], ids=["statistics", "mask"])
def test_recompute_in_the_middle_of_backward_leaves_it_as_it_is(first: Any) -> None:
    """The layers before are still to come, and need the buffers that recompute uses."""

    def gradients(recomputes: bool) -> tuple[list[Any], list[Any], int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), first(), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        named = [Named(*each) for each in model.named_parameters()]
        recompute = Recompute(model, lambda model, samples: model(samples).pow(2).mean(), named)
        again, made = recompute.of_batch(0, 0, lambda rows: torch.randn(len(rows), 8)), list[int]()
        if recomputes:
            model[3].weight.register_post_accumulate_grad_hook(
                lambda _: made.append(len(again(np.arange(4))))
            )
        model(torch.linspace(-1, 1, 128).view(16, 8)).pow(2).mean().backward()
        return [each.grad for each in model.parameters()], list(model.buffers()), len(made)

    for one, other in zip(gradients(True)[:2], gradients(False)[:2], strict=True):
        for mine, wanted in zip(one, other, strict=True):
            assert torch.equal(mine, wanted)
    assert gradients(True)[2] == 1


def test_a_first_step_that_raises_loses_no_momentum() -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.3)
    prime(optimizer)
    keep_first_gradients(optimizer)
    raises = [True]

    def once(*_: Any) -> None:
        if raises.pop():
            raises.append(False)
            raise InterruptedError

    handle = optimizer.register_step_pre_hook(once)
    parameter.grad = torch.ones(5)
    with pytest.raises(InterruptedError):
        optimizer.step()
    handle.remove()
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.linspace(-1, 1, 5) - 0.1)


@pytest.mark.parametrize("makes", [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_state_that_was_half_made_is_made_anew(makes: Any, stop: type[BaseException]) -> None:
    def stepped(interrupted: bool) -> tuple[Any, Any]:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = makes([parameter], lr=0.1, **({"momentum": 0.9} if makes is torch.optim.SGD else {}))
        if interrupted:

            def after(*_: Any) -> None:
                raise stop

            handle = optimizer.register_step_post_hook(after)
            with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else UsageError):
                prime(optimizer)
            handle.remove()
        prime(optimizer)
        parameter.grad = torch.full((3,), 2.0)
        optimizer.step()
        return parameter.detach(), optimizer.state_dict()["state"][0]

    (found, state), (expected, its) = stepped(True), stepped(False)
    assert torch.equal(found, expected)
    assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(its[key])) for key in its)


def test_a_first_gradient_that_a_closure_makes_is_not_dampened() -> None:
    def trained(primed: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, dampening=0.5)
        if primed:
            prime(optimizer)
            keep_first_gradients(optimizer)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (2 * parameter).sum()
            loss.backward()
            return loss

        values = []
        for step in range(4):
            if step == 0:
                optimizer.step()  # there is no gradient yet
            else:
                optimizer.step(closure)
            values.append(float(parameter.detach()))
        return values

    assert trained(True) == trained(False)
