"""The communication hook that computes the samples of lost ranks, over the model of a job.

The oracle is plain torch in one process: the mean over all ranks' shares, also of ranks that are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sampled import chosen

torch = pytest.importorskip("torch")

from modelled_ranks import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

from bml.errors import Evicted, StepMismatch  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached.optimizers import prime  # noqa: E402
from bml.torch.attached.state import TrainingState  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.recomputing.hook import RecomputeHook, check_model, recompute_hook  # noqa: E402
from bml.torch.recomputing.loader import LoaderShares  # noqa: E402
from bml.torch.recomputing.plan import LoaderPlan, PassLedger  # noqa: E402
from bml.torch.resuming import Resumable  # noqa: E402

N_RANKS, N_EPOCHS, N_BATCHES = 4, 2, 5
WHENS = ("before", "brought", "committed")
N_BUCKETS = 3


class Bucket:
    """What DDP gives a hook."""

    def __init__(self, index: int, parameters: list[Any]):
        self._index, self._parameters = index, parameters
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        self._buffer = torch.cat([each.reshape(-1) for each in grads])

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == N_BUCKETS - 1

    def parameters(self) -> list[Any]:
        return self._parameters

    def buffer(self) -> Any:
        return self._buffer


def backward(hook: Any, model: Any) -> None:
    """What DDP does once autograd has made the gradients: a bucket for each layer, the last layer first."""
    layers = [
        list(each.parameters()) for each in reversed([each for each in model if list(each.parameters())])
    ]
    with torch.no_grad():
        made = [Bucket(index, parameters) for index, parameters in enumerate(layers)]
        assert len(made) == N_BUCKETS
        futures = [hook.reduce(each) for each in made]
        for each, future in zip(made, futures, strict=True):
            flat = future.wait()
            for parameter, part in zip(
                each.parameters(), flat.split([p.numel() for p in each.parameters()]), strict=True
            ):
                parameter.grad = part.view(parameter.shape).clone()


def make_model() -> Any:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def make_loader(rank: int, n_samples: int = 78, n_ranks: int = N_RANKS, **settings: Any) -> Any:
    """78 samples of 4 ranks make 20 for each, with two that are there twice, in batches of 4."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(n_samples, 6, generator=generator), torch.randint(0, 3, (n_samples,), generator=generator)
    )
    sampler = DistributedSampler(data, n_ranks, rank, seed=2)
    return DataLoader(data, **{"batch_size": 4, "sampler": sampler, **settings})


def loss(model: Any, samples: Any) -> Any:
    x, y = samples
    return nn.functional.cross_entropy(model(x), y)


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def vector(model: Any) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def oracle(accumulates: int = 1) -> Any:
    """The parameters after a run without faults."""
    model = make_model()
    optimizer = optimizer_of(model)
    loaders = [make_loader(rank) for rank in range(N_RANKS)]
    for epoch in range(N_EPOCHS):
        for each in loaders:
            each.sampler.set_epoch(epoch)
        for index, shares in enumerate(zip(*loaders, strict=True)):
            for share in shares:
                (loss(model, share) / N_RANKS / accumulates).backward()
            if (index + 1) % accumulates == 0 or index == N_BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
    return vector(model)


def program(group: ProcessGroup, accumulates: int = 1) -> Any:
    """Train as a DDP script does; returns parameters and ledger."""
    model = make_model()
    optimizer = optimizer_of(model)
    loader = make_loader(group.rank())
    hook = RecomputeHook(group, model, lambda model, samples: loss(model, samples) / accumulates)
    prime(optimizer)
    loops = Resumable(group, TrainingState(model, optimizer, hook))
    seen = 0
    for epoch in loops.epochs(N_EPOCHS):
        loader.sampler.set_epoch(epoch)
        for samples in loops.batches(hook.batches(loader)):
            index = hook._passes.drawn[-1].whole.batch_no
            hook.forwarded()
            (loss(model, samples) / accumulates).backward()
            seen += 1
            if (index + 1) % accumulates == 0 or index == N_BATCHES - 1:
                backward(hook, model)
                optimizer.step()
                optimizer.zero_grad()
    return vector(model), hook.samples(), seen


def check(ends: list[Any], wanted: Any) -> int:
    """All that ended have the oracle's parameters and one ledger, which is complete; returns how many."""
    found = [end for end in ends if isinstance(end, tuple)]
    assert found, ends
    for parameters, ledger, _ in found:
        assert torch.equal(parameters, found[0][0]), "bits differ between ranks"
        torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)
        assert ledger == found[0][1]
        assert ledger["complete"], ledger
        assert [each["used_once"] for each in ledger["epochs"]] == [80] * N_EPOCHS
        assert ledger["steps"] == N_EPOCHS * N_BATCHES
        assert not ledger["left_out"]
    return len(found)


def test_without_faults_it_is_the_mean_over_the_ranks() -> None:
    assert check(run_ranks(N_RANKS, program), oracle()) == N_RANKS


@pytest.mark.few(3)
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("step", chosen(lambda step: step in (1, 5, 30), [1, 2, 3, 5, 12, 30]))
def test_the_samples_of_lost_ranks_are_in_every_sum(step: int, when: str) -> None:
    ends = run_ranks(N_RANKS, program, {1: (step, when)})
    assert ends[1] == "dead"
    assert check(ends, oracle()) == N_RANKS - 1


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(8))
def test_several_ranks_are_lost_at_any_time(seed: int) -> None:
    rng = random.Random(seed)
    kills = {rank: (rng.randrange(1, 31), rng.choice(WHENS)) for rank in rng.sample(range(N_RANKS), 3)}
    ends = run_ranks(N_RANKS, program, kills)
    # A call that is repeated for a death does not come to the moment at which another rank was to die.
    n_dead = sum(isinstance(end, str) for end in ends)
    assert 0 < n_dead <= len(kills)
    assert check(ends, oracle()) == N_RANKS - n_dead


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("accumulates", "seed"),
    chosen(lambda _, seed: seed < 4, [*((1, seed) for seed in range(14)), *((2, seed) for seed in range(8))]),
)
def test_a_rank_that_comes_again_has_the_others_ledger(seed: int, accumulates: int) -> None:
    rng = random.Random(seed)
    n_steps = 3 * N_EPOCHS * (N_BATCHES if accumulates == 1 else 3)
    step = rng.randrange(2, n_steps - 6)
    victim, when, back = rng.randrange(N_RANKS), rng.choice(WHENS), step + rng.randrange(1, 5)
    ends = run_ranks(
        N_RANKS, lambda group: program(group, accumulates), {victim: (step, when)}, [(back, victim)]
    )
    n_ended = check(ends, oracle(accumulates))
    assert n_ended == N_RANKS or isinstance(ends[victim], Evicted)  # it came when the others had ended
    if n_ended == N_RANKS:
        assert ends[victim][2] < N_EPOCHS * N_BATCHES, "it came back in the middle"


def test_accumulated_batches_are_one_sum() -> None:
    ends = run_ranks(N_RANKS, lambda group: program(group, 2), {2: (4, "before")})
    assert check(ends, oracle(2)) == N_RANKS - 1


def one_rank(do: Callable[[Any, Any, Any, Any], Any], n: int = 2, **loaders: Any) -> list[Any]:
    """What ranks end with whose loop does something else than it should."""

    def rank(group: ProcessGroup) -> Any:
        model = make_model()
        hook = RecomputeHook(group, model, loss)
        loader = make_loader(group.rank(), **{"n_ranks": n, **loaders})
        return do(group, hook, model, loader)

    return run_ranks(n, rank)


def test_a_sum_in_the_place_of_a_mean_is_found_in_the_first_batch() -> None:
    def sums(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for x, y in hook.batches(loader):
            hook.forwarded()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            backward(hook, model)

    for error in one_rank(sums, batch_size=16):
        assert isinstance(error, UsageError)
        assert "let loss(model, samples) return what the training loop calls backward of" in str(error)


def test_a_first_gradient_that_overflows_is_no_sum() -> None:
    """A GradScaler begins with a factor that is too large, and skips such steps."""

    def overflows(group: Any, hook: Any, model: Any, loader: Any) -> Any:
        for index, samples in enumerate(hook.batches(loader)):
            hook.forwarded()
            (loss(model, samples) * (float("inf") if index == 0 else 1)).backward()
            backward(hook, model)
            model.zero_grad()
        return hook.samples()["complete"]

    def rank(group: ProcessGroup) -> Any:
        factors = iter([float("inf"), 1.0])
        model, loader = make_model(), make_loader(group.rank(), n_ranks=2, batch_size=16)
        hook = RecomputeHook(group, model, lambda model, samples: loss(model, samples) * next(factors))
        return overflows(group, hook, model, loader), next(factors, None)

    assert run_ranks(2, rank) == [(True, None)] * 2, "compared in the first two batches"


def test_gradients_that_are_kept_are_not_summed_twice() -> None:
    def keeps(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for index, samples in enumerate(hook.batches(loader)):
            hook.forwarded()
            if index == 1:
                model.zero_grad(set_to_none=False)
            loss(model, samples).backward()
            backward(hook, model)
            assert index < 2

    for error in one_rank(keeps):
        assert isinstance(error, UsageError)
        assert "call optimizer.zero_grad() before the next backward" in str(error)


def test_gradients_that_autograd_returns_are_not_taken_for_kept_ones() -> None:
    """torch.autograd.grad adds to no gradient: those of the last step may be there still."""

    def measures(group: Any, hook: Any, model: Any, loader: Any) -> Any:
        for samples in hook.batches(loader):
            hook.forwarded()
            value = loss(model, samples)
            torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            model.zero_grad(set_to_none=False)
            value.backward()
            backward(hook, model)
        return hook.samples()["complete"]

    assert one_rank(measures) == [True, True]


def test_a_backward_pass_that_did_not_end_is_said_in_the_next_forward() -> None:
    def half(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for samples in hook.batches(loader):
            hook.forwarded()
            loss(model, samples).backward()
            hook.reduce(Bucket(0, list(model[-1].parameters())))

    for error in one_rank(half):
        assert isinstance(error, UsageError)
        assert "the backward pass before did not end" in str(error)


def test_a_backward_pass_whose_samples_are_unknown_is_refused() -> None:
    def outside(group: Any, hook: Any, model: Any, loader: Any) -> None:
        loss(model, next(iter(loader))).backward()
        backward(hook, model)

    def twice(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for samples in hook.batches(loader):
            hook.forwarded()
            loss(model, samples).backward()
            backward(hook, model)
            model.zero_grad()
            backward(hook, model)

    for do in (outside, twice):
        for error in one_rank(do):
            assert isinstance(error, UsageError)
            assert "once for each batch, under no_sync for the others" in str(error)


def test_batches_that_are_skipped_are_left_out_and_said() -> None:
    def skips(group: Any, hook: Any, model: Any, loader: Any) -> Any:
        for index, samples in enumerate(hook.batches(loader)):
            if index == 1:
                continue
            if index == 3:
                break
            hook.forwarded()
            loss(model, samples).backward()
            backward(hook, model)
            model.zero_grad()
        return hook.samples()

    for ledger in one_rank(skips, n_samples=80):
        assert not ledger["complete"]
        assert ledger["left_out"] == 2 * 8
        assert ledger["epochs"][0]["used_once"] == 2 * 8


@pytest.mark.parametrize("how", ["before backward", "gradients are dropped"])
@pytest.mark.parametrize("skipped", [2, N_BATCHES - 1])
def test_a_batch_that_is_skipped_after_its_forward_pass_is_in_no_sum(skipped: int, how: str) -> None:
    """As all ranks agree to do when the loss or the gradients of one are not finite."""

    def rank(group: ProcessGroup) -> Any:
        model, loader = make_model(), make_loader(group.rank())
        optimizer, hook = optimizer_of(model), RecomputeHook(group, model, loss)
        for epoch in range(N_EPOCHS):
            loader.sampler.set_epoch(epoch)
            for index, samples in enumerate(hook.batches(loader)):
                skips = index == skipped
                hook.forwarded(syncs=not skips)
                made = loss(model, samples)
                if not skips or how == "gradients are dropped":
                    made.backward()
                if not skips:
                    backward(hook, model)
                    optimizer.step()
                optimizer.zero_grad()
        return vector(model), hook.samples()

    model, loaders = make_model(), [make_loader(rank) for rank in range(N_RANKS)]
    optimizer = optimizer_of(model)
    for epoch in range(N_EPOCHS):
        for each in loaders:
            each.sampler.set_epoch(epoch)
        for index, shares in enumerate(zip(*loaders, strict=True)):
            if index != skipped:
                for share in shares:
                    (loss(model, share) / N_RANKS).backward()
                optimizer.step()
                optimizer.zero_grad()
    ends = run_ranks(N_RANKS, rank, {1: (4, "before")})
    assert ends.pop(1) == "dead"
    for parameters, ledger in ends:
        torch.testing.assert_close(parameters, vector(model), rtol=1e-5, atol=1e-6)
        assert ledger["left_out"] == N_EPOCHS * 16
        assert [each["used_once"] for each in ledger["epochs"]] == [64] * N_EPOCHS


@pytest.mark.parametrize("dies", [None, 2])
def test_losses_of_several_batches_have_one_backward(dies: int | None) -> None:
    """All are in the sums; a batch that is left out is one to which no gradient has come."""

    def rank(group: ProcessGroup) -> Any:
        model, loader = make_model(), make_loader(group.rank(), n_samples=96)
        optimizer = optimizer_of(model)
        hook = RecomputeHook(group, model, lambda model, samples: loss(model, samples) / 2)
        total = torch.zeros(())
        for index, (x, y) in enumerate(hook.batches(loader)):
            hook.forwarded()
            made = model(x)
            hook.follow({"logits": made})
            if index == 3:
                continue  # its loss is computed, and agreed not to be used
            total = total + nn.functional.cross_entropy(made, y) / 2
            if index in (1, 4):
                total.backward()
                backward(hook, model)
                optimizer.step()
                optimizer.zero_grad()
                total = torch.zeros(())
            if index == 4:
                break
        return vector(model), hook.samples()

    model, loaders = make_model(), [make_loader(rank, n_samples=96) for rank in range(N_RANKS)]
    optimizer = optimizer_of(model)
    for index, shares in enumerate(zip(*loaders, strict=True)):
        if index in (0, 1, 2, 4):
            for share in shares:
                (loss(model, share) / N_RANKS / 2).backward()
        if index in (1, 4):
            optimizer.step()
            optimizer.zero_grad()
    ends = run_ranks(N_RANKS, rank, {} if dies is None else {1: (dies, "before")})
    for parameters, ledger in [each for each in ends if each != "dead"]:
        torch.testing.assert_close(parameters, vector(model), rtol=1e-5, atol=1e-6)
        assert ledger["epochs"][0]["used_once"] == 4 * 16
        assert ledger["left_out"] == 16, "the fourth"


def test_batches_that_are_accumulated_to_the_end_are_named() -> None:
    def never(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for samples in hook.batches(loader):
            hook.forwarded()
            loss(model, samples).backward()

    for error in one_rank(never):
        assert "the last 10 batches of the loader were accumulated and not reduced" in str(error)


def test_ranks_in_other_batches_are_never_summed() -> None:
    def skews(group: Any, hook: Any, model: Any, loader: Any) -> None:
        batches = hook.batches(loader)
        for _ in range(1 + group.rank()):
            samples = next(batches)
        hook.forwarded()
        loss(model, samples).backward()
        backward(hook, model)

    for error in one_rank(skews):
        assert isinstance(error, StepMismatch)
        assert "gradients of batches [0] of pass 0" in str(error)
        assert "gradients of batches [1] of pass 0" in str(error)


def test_nothing_is_summed_without_what_a_rank_could_not_compute() -> None:
    """Rank 2 is to compute samples of rank 1, and its loss fails; it may not go on with another step."""

    def rank(group: ProcessGroup) -> Any:
        def fails(model: Any, samples: Any) -> Any:
            if group.rank() == 2:
                raise ValueError("of the user")
            return loss(model, samples)

        model = make_model()
        loader = make_loader(group.rank())
        hook = RecomputeHook(group, model, fails)
        for samples in hook.batches(loader):
            hook.forwarded()
            loss(model, samples).backward()
            try:
                backward(hook, model)
            except ValueError as error:
                with pytest.raises(ValueError, match="of the user"):  # as no step of this rank may follow
                    group.barrier().wait()
                return f"{error}"
            model.zero_grad()
        return "ended"

    ends = run_ranks(N_RANKS, rank, {1: (2, "before")})
    assert ends[1:3] == ["dead", "of the user"]
    for each in (ends[0], ends[3]):  # in a real job they go on, as an error ends rank 2
        assert isinstance(each, StepMismatch)
        assert "server 2 has ended, others call gradients of batches [0] of pass 0" in str(each)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 1, "batch_sampler": [[0]], "sampler": None}, "has a batch_sampler of its own"),
        ({"sampler": None}, "has no rank and num_replicas"),
    ],
)
def test_loaders_of_which_other_ranks_cannot_be_told(settings: dict[str, Any], said: str) -> None:
    def rank(group: ProcessGroup) -> None:
        next(RecomputeHook(group, make_model(), loss).batches(make_loader(0, **settings)))

    (error,) = run_ranks(1, rank)
    assert isinstance(error, UsageError)
    assert said in str(error)
    assert "DistributedSampler(dataset)" in str(error)


class ForOneRank(DistributedSampler):  # type: ignore[misc]
    """One that knows the samples of its own rank only."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.own = list(super().__iter__())

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)


def test_samplers_that_do_not_go_by_their_rank_are_refused() -> None:
    def rank(group: ProcessGroup) -> Any:
        model, data = make_model(), make_loader(0).dataset
        hook = RecomputeHook(group, model, loss)
        loader = DataLoader(data, 8, sampler=ForOneRank(data, 2, group.rank()))
        for samples in hook.batches(loader):
            hook.forwarded()
            loss(model, samples).backward()
            backward(hook, model)
            model.zero_grad()

    error, _ = run_ranks(2, rank, {1: (5, "before")})
    assert isinstance(error, UsageError)
    assert "gives rank 1 the samples of this rank" in str(error)


def test_samplers_of_another_rank_are_refused() -> None:
    def rank(group: ProcessGroup) -> None:
        next(RecomputeHook(group, make_model(), loss).batches(make_loader(1)))

    (error,) = run_ranks(1, rank)
    assert "is that of rank 1 of 4, this is rank 0 of 1" in str(error)
    wrong: Any = [1, 2]
    hook = None
    with suppress(UsageError):
        hook = recompute_hook(wrong, loss)
    assert hook is None


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n_samples", "batch_size"), [(20, 4), (21, 4), (3, 4), (1, 1)])
def test_places_are_those_of_the_loaders(n_samples: int, batch_size: int, drop_last: bool) -> None:
    plan = LoaderPlan(3, n_samples, batch_size, drop_last)
    loader = DataLoader(range(n_samples), batch_size, drop_last=drop_last)
    ledger = PassLedger()
    for pass_no in range(2):
        ledger.begin(plan)
        for index, batch in enumerate(loader):
            whole = plan.batch(pass_no, index)
            assert whole.indices.tolist() == [
                place + rank * plan.n_used for rank in range(3) for place in batch.tolist()
            ]
            ledger.commit(whole, (0, 2))
            ledger = PassLedger.load(ledger.dump())
    ledger.end()
    found = ledger.summary()
    assert found["complete"]
    assert [each["used_once"] for each in found["epochs"]] == [plan.n_places] * 2


class OwnGenerator(DistributedSampler):  # type: ignore[misc]
    """Draws from a generator that goes on from pass to pass."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=self.generator)
        return iter(order.tolist()[self.rank : self.num_replicas * self.num_samples : self.num_replicas])


class GlobalNumbers(OwnGenerator):
    """Draws from the random numbers of the process."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.generator = None


@pytest.mark.parametrize("kind", [OwnGenerator, GlobalNumbers])
def test_a_sampler_whose_order_cannot_be_told_again_is_refused(kind: Any) -> None:
    data = TensorDataset(torch.randn(16, 6), torch.zeros(16, dtype=torch.int64))

    def draws(group: Any, hook: Any, model: Any, loader: Any) -> None:
        next(hook.batches(DataLoader(data, batch_size=4, sampler=kind(data, 2, group.rank()))))

    for error in one_rank(draws):
        assert isinstance(error, UsageError)
        assert "gives another order each time" in str(error)


def test_random_numbers_are_as_before_when_batches_begin() -> None:
    def draws(group: Any, hook: Any, model: Any, loader: Any) -> Any:
        torch.manual_seed(7)
        wanted = torch.randn(3)
        torch.manual_seed(7)
        hook._passes.begin(LoaderShares(loader, group.rank(), 1))
        return torch.equal(torch.randn(3), wanted)

    assert one_rank(draws, n=1) == [True]


def test_two_loops_at_once_are_refused_and_an_old_one_may_end_late() -> None:
    def together(group: Any, hook: Any, model: Any, loader: Any) -> None:
        for _ in zip(hook.batches(loader), hook.batches(loader), strict=True):
            pass

    def late(group: Any, hook: Any, model: Any, loader: Any) -> Any:
        old = hook.batches(loader)
        next(old)
        for number, samples in enumerate(hook.batches(loader)):
            if number == 1:
                old.close()
            hook.forwarded()
            loss(model, samples).backward()
            backward(hook, model)
            model.zero_grad()
        return hook.samples()["epochs"][-1]["steps"]

    for error in one_rank(together):
        assert isinstance(error, UsageError)
        assert "another pass over a loader of this hook has begun" in str(error)
    assert one_rank(late) == [10, 10]


def test_models_on_a_device_are_refused() -> None:
    check_model(nn.Linear(2, 3))
    with pytest.raises(UsageError, match="'weight' is on meta: recompute_hook computes in host memory"):
        check_model(nn.Linear(2, 3, device="meta"))
