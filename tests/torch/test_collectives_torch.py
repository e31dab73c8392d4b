"""Collectives of the process group against a sequential computation; ranks are threads over a model."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from modelled_ranks import options, run_ranks  # noqa: E402

from bml.errors import ContributorLost, FabricError, StepMismatch, UsageError  # noqa: E402
from bml.torch.process_group import ProcessGroup  # noqa: E402
from bml.torch.reductions import _divided  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
OPS = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
SHAPES: tuple[tuple[int, ...], ...] = ((7,), (2, 3), (), (0,), (3, 0))
LOST = {1: (1, "before")}
"""Rank 1 dies in the first step, before it brings its part."""


def values(rank: int, dtype: Any, shape: tuple[int, ...] = (7,)) -> Any:
    """What a rank gives: small whole numbers, so that every order of additions gives the same bits."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rank + 1))
    return (made % 2 == 0) if dtype is torch.bool else made.to(dtype)


def reduced(op: str, all_values: list[Any]) -> Any:
    """The oracle: torch's own arithmetic on the stacked values."""
    stacked = torch.stack(all_values)
    dtype = stacked.dtype
    if dtype is torch.bool:
        return stacked.any(0) if op in ("SUM", "MAX", "BOR") else stacked.all(0)
    if op in BITWISE:
        found = stacked[0]
        for each in stacked[1:]:
            found = {"BAND": found & each, "BOR": found | each, "BXOR": found ^ each}[op]
        return found
    wide = stacked.double() if dtype.is_floating_point else stacked.long()
    if op == "AVG" and not dtype.is_floating_point:
        return torch.div(wide.sum(0).to(dtype), len(all_values), rounding_mode="trunc").to(dtype)
    found = {"SUM": wide.sum, "PRODUCT": wide.prod, "AVG": wide.double().mean}.get(op, lambda axis: None)(0)
    if found is None:
        found = wide.amin(0) if op == "MIN" else wide.amax(0)
    return found.to(dtype)


CASES = [
    *((op, dtype) for op in OPS for dtype in (*FLOATS, *INTEGERS, torch.bool)),
    *(("AVG", dtype) for dtype in (*FLOATS, *INTEGERS)),
    *((op, dtype) for op in BITWISE for dtype in INTEGERS),
    ("BAND", torch.bool),
    ("BOR", torch.bool),
]


@pytest.mark.few(22)
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_all_reduce(op: str, dtype: Any) -> None:
    def rank(group: ProcessGroup) -> Any:
        made = [values(group.rank(), dtype, shape) for shape in SHAPES]
        for each in made:
            assert group.allreduce([each], options(dist.AllreduceOptions, op)).wait()
        return made

    for found in run_ranks(4, rank):
        for shape, each in zip(SHAPES, found, strict=True):
            awaited = reduced(op, [values(r, dtype, shape) for r in range(4)])
            assert each.dtype == dtype
            assert torch.equal(each, awaited), (op, dtype, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_summed_in_float32_and_rounded_once(dtype: Any) -> None:
    """1 + 256 ulps that are lost one by one when every addition rounds."""
    tiny = torch.finfo(dtype).eps / 4

    def rank(group: ProcessGroup) -> Any:
        own = torch.tensor([1.0 if group.rank() == 0 else tiny], dtype=dtype)
        group.allreduce([own]).wait()
        return own

    awaited = torch.tensor([1 + 4 * tiny], dtype=torch.float32).to(dtype)
    assert awaited != 1
    assert all(torch.equal(found, awaited) for found in run_ranks(5, rank))


def test_memory_that_is_not_contiguous() -> None:
    def rank(group: ProcessGroup) -> Any:
        whole = torch.zeros(4, 6)
        part = whole[::2, 1:4].t()
        part += group.rank() + torch.arange(6.0).reshape(3, 2)
        group.allreduce([part]).wait()
        gathered = torch.zeros(2, 9).t()[:, :1]
        group.all_gather_single(gathered, part.t()[:1, :1].expand(3, 1)).wait()
        return whole, gathered

    for whole, gathered in run_ranks(3, rank):
        awaited = torch.zeros(4, 6)
        awaited[::2, 1:4] = (3 + 3 * torch.arange(6.0).reshape(3, 2)).t()
        assert torch.equal(whole, awaited)
        assert torch.equal(gathered, torch.full((9, 1), 3.0))


def test_several_tensors_in_one_step() -> None:
    def rank(group: ProcessGroup) -> Any:
        made = [torch.full((n,), float(group.rank())) for n in (3, 1, 0, 4)]
        group.allreduce_coalesced(made).wait()
        return torch.cat(made)

    assert all(torch.equal(found, torch.full((8,), 6.0)) for found in run_ranks(4, rank))


MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn)


def bits(rank: int, dtype: Any, n: int = 5) -> Any:
    """Any bits, also NaN with payloads and negative zeros."""
    seeded = torch.Generator().manual_seed(rank + 10)
    nbytes = n * torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    return torch.randint(0, top, (nbytes,), dtype=torch.uint8, generator=seeded).view(dtype)


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", MOVED)
def test_movements_keep_all_bits(dtype: Any) -> None:
    n = 3

    def rank(group: ProcessGroup) -> Any:
        own = group.rank()
        cast = bits(own, dtype)
        group.broadcast([cast], options(dist.BroadcastOptions, root=2)).wait()
        gathered = [torch.empty(5, dtype=dtype) for _ in range(n)]
        group.allgather([gathered], [bits(own, dtype)]).wait()
        single = torch.empty(n * 5, dtype=dtype)
        group._allgather_base(single, bits(own, dtype)).wait()
        at_root = [[torch.empty(5, dtype=dtype) for _ in range(n)]] if own == 1 else []
        group.gather(at_root, [bits(own, dtype)], options(dist.GatherOptions, root=1)).wait()
        scattered = torch.empty(5, dtype=dtype)
        given = [[bits(20 + to, dtype) for to in range(n)]] if own == 0 else []
        group.scatter([scattered], given, options(dist.ScatterOptions, root=0)).wait()
        exchanged = [torch.empty(5, dtype=dtype) for _ in range(n)]
        group.alltoall(exchanged, [bits(own * n + to, dtype) for to in range(n)]).wait()
        return cast, gathered, single, at_root, scattered, exchanged

    for own, found in enumerate(run_ranks(n, rank)):
        cast, gathered, single, at_root, scattered, exchanged = found
        assert same(cast, bits(2, dtype))
        assert all(same(each, bits(r, dtype)) for r, each in enumerate(gathered))
        assert all(same(each, bits(r, dtype)) for r, each in enumerate(single.split(5)))
        assert all(
            same(each, bits(r, dtype)) for r, each in enumerate(each for part in at_root for each in part)
        )
        assert same(scattered, bits(20 + own, dtype))
        assert all(same(each, bits(r * n + own, dtype)) for r, each in enumerate(exchanged))


def test_all_to_all_with_split_sizes() -> None:
    """Rank r sends (r + to) % 3 rows to rank `to`, among them none."""
    n = 3

    def sizes(giver: int) -> list[int]:
        return [(giver + to) % 3 for to in range(n)]

    def rank(group: ProcessGroup) -> Any:
        own = group.rank()
        given = torch.cat([torch.full((size, 2), 10 * own + to) for to, size in enumerate(sizes(own))])
        taken = [sizes(giver)[own] for giver in range(n)]
        into = torch.empty(sum(taken), 2, dtype=torch.int64)
        group.all_to_all_single(into, given, taken, sizes(own), dist.AllToAllOptions()).wait()
        even = torch.empty(n, dtype=torch.int64)
        group.alltoall_base(even, torch.arange(n) + 10 * own, [], []).wait()
        return into, even

    for own, (into, even) in enumerate(run_ranks(n, rank)):
        parts = [torch.full((sizes(giver)[own], 2), 10 * giver + own) for giver in range(n)]
        assert torch.equal(into, torch.cat(parts))
        assert even.tolist() == [10 * giver + own for giver in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_reduce_and_reduce_scatter(dtype: Any) -> None:
    n = 3

    def rank(group: ProcessGroup) -> Any:
        own = group.rank()
        to_root = values(own, dtype)
        group.reduce([to_root], options(dist.ReduceOptions, "SUM", 1)).wait()
        part = torch.empty(2, dtype=dtype)
        inputs = [values(own * n + to, dtype, (2,)) for to in range(n)]
        group.reduce_scatter([part], [inputs], options(dist.ReduceScatterOptions, "MAX")).wait()
        base = torch.empty(2, dtype=dtype)
        group._reduce_scatter_base(base, torch.cat(inputs), options(dist.ReduceScatterOptions, "SUM")).wait()
        return to_root, part, base

    for own, (to_root, part, base) in enumerate(run_ranks(n, rank)):
        given = [values(r * n + own, dtype, (2,)) for r in range(n)]
        awaited = reduced("SUM", [values(r, dtype) for r in range(n)]) if own == 1 else values(own, dtype)
        assert torch.equal(to_root, awaited)
        assert torch.equal(part, reduced("MAX", given))
        assert torch.equal(base, reduced("SUM", given))


# --- lost ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "awaited"),
    [
        ("SUM", torch.float32, (1 + 3 + 4) * 4 / 3),
        ("SUM", torch.bfloat16, (1 + 3 + 4) * 4 / 3),
        ("AVG", torch.float64, (1 + 3 + 4) / 3),
        ("SUM", torch.int32, 1 + 3 + 4),
        ("MAX", torch.float32, 4),
        ("MIN", torch.float32, 1),
        ("PRODUCT", torch.float32, 12),
        ("BXOR", torch.int64, 1 ^ 3 ^ 4),
    ],
)
def test_floating_sums_keep_their_size_when_a_rank_is_lost(op: str, dtype: Any, awaited: float) -> None:
    def rank(group: ProcessGroup) -> Any:
        own = torch.full((3,), group.rank() + 1).to(dtype)
        group.allreduce([own], options(dist.AllreduceOptions, op)).wait()
        return own, group.contributors, group.size()

    found = run_ranks(4, rank, LOST)
    assert found.pop(1) == "dead"
    for tensor, contributors, size in found:
        torch.testing.assert_close(tensor, torch.full((3,), awaited).to(dtype))
        assert torch.equal(tensor, found[0][0])
        assert (contributors, size) == ((0, 2, 3), 4)


def test_a_floating_sum_that_counts_stays_an_integer_when_ranks_are_lost() -> None:
    """11 times 13/11 is 12.999999 in float32, and a count is often truncated."""

    def rank(group: ProcessGroup) -> list[float]:
        found = []
        for _ in range(3):
            count = torch.ones(1)
            group.allreduce([count]).wait()
            found.append(count.item())
        return found

    found = run_ranks(13, rank, {3: (2, "before"), 7: (2, "before")})
    assert [each for each in found if each != "dead"] == [[13.0] * 3] * 11


def test_parts_of_a_lost_rank() -> None:
    def rank(group: ProcessGroup) -> Any:
        own = group.rank()
        cast = torch.tensor([float(own)])
        group.broadcast([cast], options(dist.BroadcastOptions, root=1)).wait()
        gathered = [torch.empty(1) for _ in range(4)]
        group.allgather([gathered], [torch.tensor([float(own)])]).wait()
        exchanged = [torch.full((1,), -1.0) for _ in range(4)]
        group.alltoall(exchanged, [torch.tensor([10.0 * own + to]) for to in range(4)]).wait()
        at_root = [[torch.full((1,), -1.0) for _ in range(4)]] if own == 3 else []
        group.gather(at_root, [torch.tensor([float(own)])], options(dist.GatherOptions, root=3)).wait()
        kept = torch.tensor([float(own)])
        group.reduce([kept], options(dist.ReduceOptions, "SUM", 1)).wait()
        lost = None
        try:
            group.scatter([torch.empty(1)], [], options(dist.ScatterOptions, root=1)).wait()
        except ContributorLost as error:
            lost = str(error)
        group.barrier().wait()
        return [t.item() for t in [cast, *gathered, *exchanged, *(at_root[0] if at_root else []), kept]], lost

    found = run_ranks(4, rank, LOST)
    assert found[1] == "dead"
    for own in (0, 2, 3):
        numbers, lost = found[own]
        gathered = [0.0, 0.0, 2.0, 3.0]
        exchanged = [10.0 * giver + own if giver != 1 else 0.0 for giver in range(4)]
        assert numbers == [0.0, *gathered, *exchanged, *(gathered if own == 3 else []), float(own)]
        assert "rank 1 was lost" in lost


def test_nothing_stands_for_a_lost_part_of_one_tensor() -> None:
    """Shards of parameters are gathered so: another one in the place of a lost one makes a wrong model."""

    def rank(group: ProcessGroup) -> Any:
        texts = []
        for call in (group.all_gather_single, group._allgather_base):
            with pytest.raises(ContributorLost) as caught:
                call(torch.empty(8), torch.full((2,), float(group.rank()))).wait()
            texts.append(str(caught.value))
        total = torch.ones(1)
        group.allreduce([total]).wait()
        return texts, total.item()

    for own, found in enumerate(run_ranks(4, rank, LOST)):
        if own != 1:
            texts, total = found
            assert all("ranks [1] of the group are lost" in text for text in texts)
            assert total == 4.0


def test_sizes_of_a_rank_that_was_lost_before() -> None:
    def rank(group: ProcessGroup) -> Any:
        group.barrier().wait()
        own = group.rank()
        into = torch.full((3,), -1.0)
        given = torch.full((3,), float(own))
        group.all_to_all_single(into, given, [1, 1, 1], [1, 1, 1]).wait()
        return into.tolist()

    found = run_ranks(3, rank, {1: (2, "before")})
    assert [found[0], found[2]] == [[0.0, 0.0, 2.0]] * 2


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint64"])
def test_integers_are_averaged_over_more_ranks_than_their_dtype_counts(dtype: str) -> None:
    limits = np.iinfo(dtype)
    total = np.array([limits.min, limits.max, 0], dtype)
    for n in (3, 128, 300):
        wanted = [int(each) // n if each >= 0 else -(-int(each) // n) for each in total]
        found = _divided(total, n)
        assert (found.dtype, found.tolist()) == (total.dtype, wanted)


# --- wrong use -------------------------------------------------------------------------------


def sparse() -> Any:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,), check_invariants=True)


BAD = {
    "to_dense": lambda group: group.allreduce([sparse()]),
    "different dtypes": lambda group: group.allreduce([torch.ones(1), torch.ones(1, dtype=torch.int32)]),
    "a tensor on meta": lambda group: group.allreduce([torch.ones(1), torch.ones(1, device="meta")]),
    "has no elements": lambda group: group.allreduce([torch.ones(1, device="meta")]),
    "cannot reduce torch.float8": lambda group: group.allreduce([torch.ones(2).to(torch.float8_e5m2)]),
    "no order": lambda group: group.allreduce(
        [torch.ones(2, dtype=torch.complex64)], options(dist.AllreduceOptions, "MAX")
    ),
    "integers and bool": lambda group: group.allreduce(
        [torch.ones(2)], options(dist.AllreduceOptions, "BXOR")
    ),
    "offers": lambda group: group.allreduce([torch.ones(2)], dist._make_nccl_premul_sum(2.0)),
    "all_reduce was given an expanded tensor": lambda group: group.allreduce([torch.ones(1).expand(3)]),
    "all_gather was given an expanded": lambda group: group.allgather(
        [[torch.ones(2), torch.ones(1).expand(2)]], [torch.ones(2)]
    ),
    "recv was given an expanded": lambda group: group.recv([torch.ones(1).expand(3)], 1 - group.rank()),
    "takes tensors": lambda group: group.allreduce([1]),
    "at least one tensor": lambda group: group.allreduce([]),
    "the root is rank 9": lambda group: group.broadcast(
        [torch.ones(1)], options(dist.BroadcastOptions, root=9)
    ),
    "has 8 bytes, its input 4": lambda group: group.allgather([[torch.ones(2)] * 2], [torch.ones(1)]),
    "2 outputs for each input": lambda group: group.allgather([[torch.ones(2)] * 3], [torch.ones(2)]),
    "multiple of the 2 ranks": lambda group: group._allgather_base(torch.ones(3), torch.ones(1)),
    "2 inputs, that of": lambda group: group.reduce_scatter([torch.ones(1)], [[torch.ones(1)]]),
    "2 inputs and outputs": lambda group: group.alltoall([torch.ones(1)], [torch.ones(1)]),
    "split sizes": lambda group: group.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], []),
}


@pytest.mark.parametrize("text", BAD)
def test_wrong_use_is_told_to_the_caller_and_the_group_goes_on(text: str) -> None:
    def rank(group: ProcessGroup) -> Any:
        with pytest.raises(UsageError, match=text):
            BAD[text](group)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    assert run_ranks(2, rank) == [2.0, 2.0]


def test_sizes_that_do_not_fit_are_told_to_all_ranks_and_the_group_goes_on() -> None:
    def rank(group: ProcessGroup) -> Any:
        n_rows = 2 if group.rank() else 1
        with pytest.raises(UsageError, match="rank 1 sends 8 bytes to rank 0, which awaits 4"):
            group.alltoall([torch.ones(1)] * 2, [torch.ones(n_rows), torch.ones(1)]).wait()
        group.barrier().wait()
        return True

    assert run_ranks(2, rank) == [True, True]


def test_a_collective_that_fails_on_one_rank_alone_is_not_taken_for_its_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(group: ProcessGroup) -> Any:
        if group.rank() == 1:
            monkeypatch.setattr(group._steps, "empty", out_of_memory)
            with pytest.raises(FabricError, match="no memory"):
                group.allreduce_coalesced([torch.ones(1), torch.ones(1)]).wait()
            monkeypatch.undo()
            with pytest.raises(FabricError, match="no memory"):
                group.allreduce([torch.full((1,), 10.0)]).wait()
            return True
        with pytest.raises(StepMismatch, match="server 1 has ended"):
            group.allreduce_coalesced([torch.ones(1), torch.ones(1)]).wait()
        return True

    def out_of_memory(*_: Any) -> Any:
        raise FabricError("no memory")

    assert run_ranks(2, rank) == [True, True]


def test_ranks_that_differ_get_both_texts_and_so_do_futures() -> None:
    def rank(group: ProcessGroup) -> Any:
        work = group.allreduce([torch.ones(3 + group.rank())])
        with pytest.raises(RuntimeError, match=r"\[3\]"):
            work.get_future().wait()
        assert isinstance(work.exception(), StepMismatch)
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(StepMismatch, match=r"all_reduce SUM float32 \[4\]"):
            work.wait()
        return True

    assert run_ranks(2, rank) == [True, True]


def test_ranks_that_call_other_collectives_get_both_texts() -> None:
    def rank(group: ProcessGroup) -> Any:
        tensor = [torch.ones(3)]
        work = group.broadcast(tensor, options(dist.BroadcastOptions, root=0)) if group.rank() else None
        with pytest.raises(StepMismatch) as caught:
            (work or group.allreduce(tensor)).wait()
        return "all_reduce SUM" in str(caught.value) and "broadcast from 0" in str(caught.value)

    assert run_ranks(2, rank) == [True, True]


def test_a_group_that_was_destroyed_begins_nothing() -> None:
    def rank(group: ProcessGroup) -> Any:
        tensor = torch.ones(1)
        work = group.allreduce([tensor])
        group.shutdown()
        assert work.is_success()
        with pytest.raises(UsageError, match="destroyed"):
            group.barrier()
        return work.result()[0].item()

    assert run_ranks(2, rank) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_of_inference_mode_are_written(dtype: Any) -> None:
    def program(group: ProcessGroup) -> Any:
        with torch.inference_mode():
            tensor = torch.ones(2, 3, dtype=dtype).t()
            group.allreduce([tensor]).wait()
            return tensor.sum().item()

    assert run_ranks(2, program) == [12.0, 12.0]
