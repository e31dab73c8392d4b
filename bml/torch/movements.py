"""Collectives that move tensors and compute nothing: any dtype comes through, bit by bit.

Each makes a job that the thread of the group carries out. What becomes of the part of a lost rank is said
with each; all ranks that are left see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.errors import ContributorLost
from bml.topology.errors import UsageError
from bml.torch.places import Places, source
from bml.torch.steps import GroupSteps
from bml.torch.tensors import Tensor, check_alike, describe, raw, write

Job = Callable[[GroupSteps], None]
"""Carries out one collective, in the thread of the group."""


def broadcast(tensors: Sequence[Tensor], root: int) -> Job:
    """Every rank gets the tensors of `root`; if it is lost, those of the lowest contributor."""
    places = Places([each.nbytes for each in tensors])
    text = f"broadcast from {root} {describe(tensors)}"

    def job(steps: GroupSteps) -> None:
        def prepare(contributors: tuple[int, ...]) -> npt.NDArray[Any]:
            gives = source(root, contributors) == steps.rank
            parts = {place: raw(each) for place, each in enumerate(tensors)} if gives else {}
            return places.vector(parts, steps.empty)

        done = steps.step(text, "sum", prepare)
        if source(root, done.contributors) != steps.rank:
            _store(places, done.result, range(len(tensors)), tensors)

    return job


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Job:
    """Output [i][r] gets input i of rank r; of a lost rank, that of the lowest contributor.

    Parts may differ in size between ranks. If that of a lost rank does from the lowest contributor's, it is
    zero. Raises UsageError for outputs that do not fit.
    """
    for into, given in zip(outputs, inputs, strict=True):
        check_alike([*into, given], "all_gather")
    flat = [each for into in outputs for each in into]
    places = Places([each.nbytes for each in flat])
    text = f"all_gather {describe(flat)}"

    def job(steps: GroupSteps) -> None:
        n = steps.n_ranks
        parts = {i * n + steps.rank: raw(given) for i, given in enumerate(inputs)}
        done = steps.step(text, "sum", lambda contributors: places.vector(parts, steps.empty))
        held = [source(rank, done.contributors) for rank in range(n)]
        for i, into in enumerate(outputs):
            same = [places.sizes[i * n + rank] == places.sizes[i * n + held[rank]] for rank in range(n)]
            found = [i * n + (held[rank] if same[rank] else rank) for rank in range(n)]
            _store(places, done.result, found, into)

    return job


def gather(outputs: Sequence[Tensor], given: Tensor, root: int) -> Job:
    """`outputs[r]` on `root` gets the tensor of rank r; of a lost rank, that of the lowest contributor.

    If the root is lost, nobody gets anything. Raises UsageError for outputs that do not fit.
    """
    check_alike([*outputs, given], "gather")
    if any(each.nbytes != given.nbytes for each in outputs):
        raise UsageError("gather needs outputs of the size of the input: all ranks give tensors of one size")
    text = f"gather to {root} {describe([given])}"

    def job(steps: GroupSteps) -> None:
        places = Places([given.nbytes] * steps.n_ranks)
        parts = {steps.rank: raw(given)}
        done = steps.step(text, "sum", lambda contributors: places.vector(parts, steps.empty))
        if steps.rank == root:
            found = [source(rank, done.contributors) for rank in range(steps.n_ranks)]
            _store(places, done.result, found, outputs)

    return job


def scatter(output: Tensor, inputs: Sequence[Tensor], root: int) -> Job:
    """The output of rank r gets `inputs[r]` of `root`; if the root is lost, all get ContributorLost.

    Raises UsageError for inputs that do not fit.
    """
    check_alike([*inputs, output], "scatter")
    if any(each.nbytes != output.nbytes for each in inputs):
        raise UsageError("scatter needs inputs of the size of the output: all ranks get tensors of one size")
    text = f"scatter from {root} {describe([output])}"

    def job(steps: GroupSteps) -> None:
        places = Places([output.nbytes] * steps.n_ranks)
        parts = {rank: raw(each) for rank, each in enumerate(inputs)}
        done = steps.step(text, "sum", lambda contributors: places.vector(parts, steps.empty))
        if root not in done.contributors:
            raise ContributorLost(f"rank {root} was lost before all ranks had what it scatters")
        _store(places, done.result, [steps.rank], [output])

    return job


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], even: bool = False) -> Job:
    """`outputs[r]` gets `inputs[this rank]` of rank r; of a lost rank, zeros.

    Unless all parts are `even`, the ranks first tell each other the sizes. If they do not fit, all ranks get
    UsageError.
    """
    check_alike([*outputs, *inputs], "all_to_all")
    text = f"all_to_all {describe(inputs)}" if even else f"all_to_all {inputs[0].dtype}, parts of any size"

    def job(steps: GroupSteps) -> None:
        n, rank = steps.n_ranks, steps.rank
        if even:
            sizes = np.full((n, n), inputs[0].nbytes)
        else:
            sizes = _agreed_sizes(steps, [each.nbytes for each in inputs], [each.nbytes for each in outputs])
        places = Places(sizes.reshape(-1).tolist())
        parts = {rank * n + to: raw(each) for to, each in enumerate(inputs)}
        done = steps.step(text, "sum", lambda contributors: places.vector(parts, steps.empty))
        _store(places, done.result, [giver * n + rank for giver in range(n)], outputs)

    return job


def _agreed_sizes(steps: GroupSteps, sent: list[int], awaited: list[int]) -> npt.NDArray[np.int64]:
    """The bytes that each rank sends to each, shape (ranks, ranks). Raises UsageError on all ranks alike."""
    n = steps.n_ranks
    mine = np.zeros((2, n, n), np.int64)
    mine[0, steps.rank], mine[1, steps.rank] = sent, awaited
    done = steps.step("all_to_all: sizes", "sum", lambda contributors: mine.reshape(-1))
    found: npt.NDArray[Any] = done.result
    all_sent, all_awaited = found.reshape(2, n, n).copy()
    for giver in done.contributors:
        for taker in done.contributors:
            gives, takes = int(all_sent[giver, taker]), int(all_awaited[taker, giver])
            if gives != takes:
                raise UsageError(
                    f"all_to_all: rank {giver} sends {gives} bytes to rank {taker}, which awaits {takes}: "
                    "make the sizes of its outputs those of the inputs of the others"
                )
    for lost in set(range(n)) - set(done.contributors):
        all_sent[lost] = all_awaited[:, lost]
    sent_by_each: npt.NDArray[np.int64] = all_sent
    return sent_by_each


def _store(places: Places, vector: npt.NDArray[Any], found: Sequence[int], outputs: Sequence[Tensor]) -> None:
    """Give each output the part at its place."""
    for place, each in zip(found, outputs, strict=True):
        write(each, places.part(vector, place))
