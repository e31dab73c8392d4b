"""Collectives that move tensors and compute nothing: any dtype comes through, bit by bit.

Each makes a job that the thread of the group carries out. What becomes of the part of a lost rank is said
with each; all ranks that are left see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from bml.errors import ContributorLost
from bml.protocol.step.workspace import Padded
from bml.topology.errors import UsageError
from bml.torch.steps import GroupSteps, UnfitSizes, Vector
from bml.torch.tensors import Tensor, check_alike, describe, raw, write
from bml.train.communicator import Committed
from bml.train.operations.places import Places, source

Job = Callable[[GroupSteps], bool]
"""Carries out one collective, in the thread of the group; returns whether it wrote the outputs."""


def broadcast(tensors: Sequence[Tensor], root: int, may_stand_in: bool = True) -> Job:
    """Every rank gets the tensors of `root`; if it is lost, those of the lowest contributor.

    All get ContributorLost then unless another rank `may_stand_in`.
    """
    places = Places([each.nbytes for each in tensors])
    text = f"broadcast from {root} {describe(tensors)}"

    def job(steps: GroupSteps) -> bool:
        def prepare(contributors: tuple[int, ...]) -> Vector | Padded:
            gives = source(root, contributors) == steps.rank
            return places.vector(0, [raw(each) for each in tensors] if gives else (), steps.empty)

        done = steps.step(text, "sum", prepare)
        if root not in done.contributors and not may_stand_in and steps.is_alone:
            raise UsageError(
                "this rank was started again and is alone until its first loop of bml.torch.resumable: "
                f"objects of rank {root} come to it in that loop, not before"
            )
        if root not in done.contributors and not may_stand_in:
            raise ContributorLost(
                f"rank {root} was lost before all ranks had the objects that it broadcasts: give the lowest "
                "rank that is left, min(bml.torch.contributors()), as src"
            )
        takes = source(root, done.contributors) != steps.rank
        if takes:
            _store(places, done, range(len(tensors)), tensors)
        return takes

    return job


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Job:
    """Output [i][r] gets input i of rank r; of a lost rank, that of the lowest contributor.

    Parts may differ in size between ranks. If that of a lost rank does from the lowest contributor's, it is
    zero. Raises UsageError for outputs that do not fit.
    """
    for into, given in zip(outputs, inputs, strict=True):
        check_alike([*into, given], "all_gather")
    by_rank = [each for row in zip(*outputs, strict=True) for each in row]
    places, width = Places([each.nbytes for each in by_rank]), len(inputs)
    text = f"all_gather {describe(by_rank)}"

    def job(steps: GroupSteps) -> bool:
        done = _step(steps, text, places, steps.rank * width, inputs)

        def found(place: int) -> int:
            rank, number = divmod(place, width)
            held = source(rank, done.contributors) * width + number
            return held if places.sizes[held] == places.sizes[place] else place

        _store(places, done, map(found, range(len(by_rank))), by_rank)
        return True

    return job


def gather(outputs: Sequence[Tensor], given: Tensor, root: int) -> Job:
    """`outputs[r]` on `root` gets the tensor of rank r; of a lost rank, that of the lowest contributor.

    If the root is lost, nobody gets anything. Raises UsageError for outputs that do not fit.
    """
    check_alike([*outputs, given], "gather")
    if any(each.nbytes != given.nbytes for each in outputs):
        raise UsageError("gather needs outputs of the size of the input: all ranks give tensors of one size")
    text = f"gather to {root} {describe([given])}"

    def job(steps: GroupSteps) -> bool:
        places = Places([given.nbytes] * steps.n_ranks)
        done = _step(steps, text, places, steps.rank, [given])
        if steps.rank == root:
            _store(places, done, (source(rank, done.contributors) for rank in range(steps.n_ranks)), outputs)
        return steps.rank == root

    return job


def scatter(output: Tensor, inputs: Sequence[Tensor], root: int) -> Job:
    """The output of rank r gets `inputs[r]` of `root`; if the root is lost, all get ContributorLost.

    Raises UsageError for inputs that do not fit.
    """
    check_alike([*inputs, output], "scatter")
    if any(each.nbytes != output.nbytes for each in inputs):
        raise UsageError("scatter needs inputs of the size of the output: all ranks get tensors of one size")
    text = f"scatter from {root} {describe([output])}"

    def job(steps: GroupSteps) -> bool:
        places = Places([output.nbytes] * steps.n_ranks)
        done = _step(steps, text, places, 0, inputs)
        if root not in done.contributors:
            raise ContributorLost(f"rank {root} was lost before all ranks had what it scatters")
        _store(places, done, [steps.rank], [output])
        return True

    return job


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], even: bool = False) -> Job:
    """`outputs[r]` gets `inputs[this rank]` of rank r; of a lost rank, zeros.

    Unless all parts are `even`, the ranks first tell each other the sizes. If they do not fit, all ranks get
    UsageError.
    """
    check_alike([*outputs, *inputs], "all_to_all")
    text = f"all_to_all {describe(inputs)}" if even else f"all_to_all {inputs[0].dtype}, parts of any size"

    def job(steps: GroupSteps) -> bool:
        n, rank = steps.n_ranks, steps.rank
        sizes = [inputs[0].nbytes] * n * n if even else _agreed_sizes(steps, outputs, inputs)
        places = Places(sizes)
        done = _step(steps, text, places, rank * n, inputs)
        _store(places, done, range(rank, n * n, n), outputs)
        return True

    return job


def _agreed_sizes(steps: GroupSteps, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[int]:
    """The bytes that each rank sends to each, by giver and taker. Raises UsageError on all ranks alike."""
    n = steps.n_ranks
    mine = torch.tensor([[each.nbytes for each in tensors] for tensors in (inputs, outputs)])
    done = _step(steps, "all_to_all: sizes", Places([mine.nbytes] * n), steps.rank, [mine])
    found: npt.NDArray[np.int64] = done.result.view(np.int64).reshape(n, 2, n)
    sent, awaited = found[:, 0].tolist(), found[:, 1].tolist()
    for giver in done.contributors:
        for taker in done.contributors:
            gives, takes = sent[giver][taker], awaited[taker][giver]
            if gives != takes:
                raise UnfitSizes(
                    f"all_to_all: rank {giver} sends {gives} bytes to rank {taker}, which awaits {takes}: "
                    "make the sizes of its outputs those of the inputs of the others"
                )
    for lost in set(range(n)) - set(done.contributors):
        sent[lost] = [row[lost] for row in awaited]
    return list(chain.from_iterable(sent))


def _step(steps: GroupSteps, text: str, places: Places, first: int, tensors: Sequence[Tensor]) -> Committed:
    """The step in which this rank brings these tensors, from the place `first` on."""
    parts = [raw(each) for each in tensors]
    return steps.step(text, "sum", lambda contributors: places.vector(first, parts, steps.empty))


def _store(places: Places, done: Committed, found: Iterable[int], outputs: Sequence[Tensor]) -> None:
    """Give each output the part at its place."""
    for place, each in zip(found, outputs, strict=True):
        write(each, places.part(done.result, place))
