"""Ranks that were started again, over the model of a job: all end as in a run without faults."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from modelled_ranks import run_ranks  # noqa: E402

from bml.errors import Evicted  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached.optimizers import prime  # noqa: E402
from bml.torch.attached.state import TrainingState  # noqa: E402
from bml.torch.group_info import is_writer  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.resuming import Resumable, resumable  # noqa: E402

N_EPOCHS, N_BATCHES = 4, 5
POSITIONS = [(epoch, batch) for epoch in range(N_EPOCHS) for batch in range(N_BATCHES)]


def program(group: ProcessGroup) -> tuple[list[tuple[int, int]], Any, float]:
    """Every rank has the same gradients, so that sums that are scaled are those without a fault."""
    weight = torch.full((7,), float(group.rank()))
    group.broadcast([weight]).wait()
    weight = torch.zeros(7) if group.joins else weight  # a joiner is given that of the others
    parameter = torch.nn.Parameter(weight)
    model = torch.nn.Module()
    model.register_parameter("weight", parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    prime(optimizer)
    loops = Resumable(group, TrainingState(model, optimizer, scheduler))
    seen = []
    for epoch in loops.epochs(N_EPOCHS):
        group.barrier().wait()  # the others have had it, where a joiner begins
        for batch in loops.batches(range(N_BATCHES)):
            seen.append((epoch, batch))
            parameter.grad = torch.arange(7.0) + epoch + batch / 10
            group.allreduce([parameter.grad]).wait()
            optimizer.step()
        scheduler.step()
    return seen, parameter.detach().clone(), scheduler.get_last_lr()[0]


@pytest.fixture(scope="module")
def fault_free() -> Any:
    ends = run_ranks(3, program)
    assert [seen for seen, _, _ in ends] == [POSITIONS] * 3
    assert torch.equal(ends[0][1], ends[2][1])
    return ends[0]


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_comes_again_ends_as_the_others(seed: int, fault_free: Any) -> None:
    rng = random.Random(seed)
    victim, step = rng.randrange(3), rng.randrange(2, 12)
    when = rng.choice(["before", "brought", "committed"])
    back = step + rng.randrange(1, 6)
    ends = run_ranks(3, program, {victim: (step, when)}, [(back, victim)])
    _, weights, rate = fault_free
    for rank, end in enumerate(ends):
        if rank == victim and isinstance(end, Evicted):
            continue  # it came when the others had ended
        assert isinstance(end, tuple), f"rank {rank}: {end!r}"
        seen, found, found_rate = end
        assert seen == POSITIONS[-len(seen) :]
        assert rank != victim or len(seen) < len(POSITIONS), "it came back in the middle"
        assert torch.equal(found, ends[(victim + 1) % 3][1])
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=0)
        assert found_rate == rate


def test_a_joiner_reduces_nothing_before_its_loops() -> None:
    def reduces_at_once(group: ProcessGroup) -> str:
        assert not (group.joins and is_writer(group)), "another rank writes"
        total = torch.ones(1)
        try:
            group.allreduce([total]).wait()
        except UsageError as error:
            return str(error)
        for _ in range(6):
            group.barrier().wait()
        return f"{total.item()}"

    ends = run_ranks(3, reduces_at_once, {0: (3, "before")}, [(4, 0)])
    assert ends[1] == ends[2] == "3.0"
    assert "rank 0 was started again" in ends[0]
    assert "bml.torch.resumable" in ends[0]


class FakeGroup:
    """One whose joiner is given a state at the boundaries in `later`, counted from 1."""

    def __init__(self, later: dict[int, Any]):
        self.later, self.n_asked, self.contributors = later, 0, (0, 1)
        self.stood_aside = False

    def joined(self) -> Any:
        self.n_asked += 1
        return self.later.get(self.n_asked)

    def boundary(self, state: Any) -> None:
        given = state()
        self.last = memoryview(bytes(given[0 : len(given)]))

    def is_among(self, contributors: tuple[int, ...]) -> None:
        self.contributors = contributors

    def stand_aside(self) -> None:
        self.stood_aside = True


def loops_of(group: FakeGroup) -> tuple[Resumable, Any]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.Module()
    model.register_parameter("weight", parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    prime(optimizer)
    return Resumable(group, TrainingState(model, optimizer, None)), parameter  # type: ignore[arg-type]


@pytest.mark.parametrize(("epoch", "index"), [(0, 4), (1, 2), (2, 0)])
def test_a_joiner_that_falls_behind_takes_a_later_state(epoch: int, index: int) -> None:
    """The loop's end of an epoch runs before the state of a later epoch is taken: it must not change that."""
    others = FakeGroup({})
    loops, theirs = loops_of(others)
    for number in loops.epochs(3):
        for place in loops.batches(range(N_BATCHES)):
            if (number, place) == (epoch, index):
                state = others.last
            theirs.data += 1
    joiner = FakeGroup({4: state})  # asked first by `epochs`, then before batches 0 and 1
    loops, mine = loops_of(joiner)
    seen: list[Any] = []
    for number in loops.epochs(3):
        for place in loops.batches(range(N_BATCHES)):
            seen.append((number, place))
            mine.data += 1
        seen.append(f"end of {number}")
        mine.data *= 1.0 if number else 0.0
    assert seen[:3] == [(0, 0), (0, 1), "end of 0" if epoch else (0, 4)]
    assert seen[-1] == "end of 2"
    assert joiner.stood_aside == bool(epoch), "what ends its epoch is not a step of the others"
    assert (epoch, index) in seen
    if epoch:
        assert torch.equal(mine, theirs)


def test_one_loop_over_batches_an_epoch() -> None:
    def twice(group: ProcessGroup) -> str:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        loops = Resumable(group, TrainingState(torch.nn.Module(), optimizer, None))
        for _ in loops.epochs(1):
            list(loops.batches([1, 2]))
            with pytest.raises(UsageError, match="iterate over the loader itself") as refused:
                list(loops.batches([1, 2]))
        return str(refused.value)

    assert "epoch 0" in run_ranks(1, twice)[0]


def test_without_a_group_of_ours_there_is_nothing_to_resume() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        resumable(torch.nn.Linear(1, 1), None)
