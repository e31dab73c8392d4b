"""Which samples belong to a step, and which server computes which of them.

The global batch of a step depends on the seed and the number of the step alone, also when servers fail
(promise 7 of the protocol, constant work). Its division depends on two sets of servers: `base`, among which
the batch was first split, and `members`, which are left. Every server evaluates the same functions, so every
server knows the parts of all others without a message.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bml.topology.errors import UsageError

Indices = npt.NDArray[np.int64]
Weights = Mapping[int, int]
"""Server -> its weight (> 0) when a batch is split: shares are in proportion. One that it lacks has FULL."""
FULL = 64
LEAST = 2
"""No share has fewer samples where there are so many for each server: batch normalisation needs two."""
EQUAL: Weights = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatch:
    """One global batch: `indices` (int64, shape (size,), read-only) of training epoch `epoch_no`.

    `step` counts batches over all epochs from 0; `batch_no` counts them within the epoch.
    """

    step: int
    epoch_no: int
    batch_no: int
    indices: Indices


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The global batches of a run: every sample exactly once per training epoch, in seeded order.

    `n_samples` samples, `global_batch` of them per step (the last batch of an epoch may be smaller),
    `epochs` passes. The order of epoch e is `Generator(PCG64((seed, e))).permutation(n_samples)`. With
    `balance` slower servers get smaller shares. Raises UsageError when a number is out of range, or `balance`
    is no bool.
    """

    n_samples: int
    global_batch: int
    epochs: int
    seed: int = 0
    balance: bool = False

    def __post_init__(self) -> None:
        for name, least in (("n_samples", 1), ("global_batch", 1), ("epochs", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise UsageError(f"{name} must be a whole number, it is {value!r}")
            object.__setattr__(self, name, int(value))
            if value < least:
                raise UsageError(f"{name} must be at least {least}, it is {value}")
        if not isinstance(self.balance, bool):
            raise UsageError(f"balance must be True or False, it is {self.balance!r}")

    @property
    def batches_per_epoch(self) -> int:
        """Steps of one training epoch."""
        return -(-self.n_samples // self.global_batch)

    @property
    def largest(self) -> int:
        """Samples of the largest batch: all but the last of an epoch have so many."""
        return min(self.global_batch, self.n_samples)

    def __str__(self) -> str:
        return (
            f"batches({self.n_samples}, global_batch={self.global_batch}, "
            f"epochs={self.epochs}, seed={self.seed}{', balance=True' * self.balance})"
        )

    def __len__(self) -> int:
        """Steps of the whole run."""
        return self.batches_per_epoch * self.epochs

    def __iter__(self) -> Iterator[GlobalBatch]:
        return (self.batch(step) for step in range(len(self)))

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of `step` (0 ≤ step < len(self)); raises UsageError outside that range."""
        if not 0 <= step < len(self):
            raise UsageError(f"this plan has steps 0-{len(self) - 1}, there is no step {step}")
        epoch_no, batch_no = divmod(step, self.batches_per_epoch)
        start = batch_no * self.global_batch
        order = _order(self.n_samples, self.seed, epoch_no)
        return GlobalBatch(step, epoch_no, batch_no, order[start : start + self.global_batch])


class Assignment(NamedTuple):
    """The samples that one server computes: its `own` share, and the `extra` ones of lost servers."""

    own: Indices
    extra: Indices


def sizes(n_samples: int, weights: Weights) -> dict[int, int]:
    """Split so many samples in proportion to the weights of all servers, in order of server id.

    Sizes are rounded down, and the servers that lost most by that get one more, the lower ids first. No size
    is below LEAST, or 1, if there are so many samples for each server. Sizes depend on whole numbers alone.
    """
    ids = sorted(weights)
    return dict(zip(ids, _sizes(n_samples, tuple(weights[server] for server in ids)), strict=True))


def shares(indices: Indices, members: Iterable[int], weights: Weights = EQUAL) -> dict[int, Indices]:
    """Split `indices` (shape (m,)) into contiguous shares of these `sizes`, in order of server id.

    With equal weights sizes differ by at most one, the larger ones first; with fewer indices than members
    some shares are empty. The values are views into `indices`. Raises UsageError when there are no members.
    """
    of = {server: weights.get(server, FULL) for server in members}
    if not of:
        raise UsageError("a batch cannot be shared among no servers")
    found, start = {}, 0
    for server, size in sizes(len(indices), of).items():
        found[server] = indices[start : start + size]
        start += size
    return found


def assignment(
    indices: Indices, base: Iterable[int], members: Iterable[int], weights: Weights = EQUAL
) -> dict[int, Assignment]:
    """Divide a batch that was split among `base` when only `members` contribute.

    A member of the base keeps its own share, and a server that joined since has none. The shares of the lost
    servers, one after the other in order of id, are split among the members like a batch of their own, by
    the same weights. The own and extra indices of all members together are `indices`, each exactly once. The
    result depends on the two sets and the weights only, not on the order of events. Raises UsageError when
    `members` is empty.
    """
    base_ids, member_ids = set(base), set(members)
    first = shares(indices, base_ids, weights)
    lost = [share for server, share in first.items() if server not in member_ids]
    again = shares(np.concatenate([indices[:0], *lost]), member_ids, weights)
    none = indices[:0]
    return {server: Assignment(first.get(server, none), again[server]) for server in sorted(member_ids)}


def used_indices(assigned: Mapping[int, Assignment], *, recomputed: bool) -> dict[int, Indices]:
    """Return the contributed samples per server: own and extra if they were recomputed, else own alone."""
    return {
        server: np.concatenate(part) if recomputed and len(part.extra) else part.own
        for server, part in assigned.items()
    }


@lru_cache(maxsize=64)
def _sizes(n_samples: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes by position. They are cached, as a batch is split several times in a step."""
    total, least = sum(weights), min(LEAST, n_samples // len(weights))
    found = [max(least, n_samples * weight // total) for weight in weights]

    def owed(at: int) -> int:
        return n_samples * weights[at] - found[at] * total

    left = n_samples - sum(found)
    for at in sorted(range(len(found)), key=owed, reverse=True)[: max(left, 0)]:
        found[at] += 1
    for _ in range(-left):  # the least share was more than theirs
        found[min((at for at in range(len(found)) if found[at] > least), key=owed)] -= 1
    return tuple(found)


@lru_cache(maxsize=4)
def _order(n_samples: int, seed: int, epoch_no: int) -> Indices:
    """Return the order of one epoch. It is cached, as every step of the epoch takes a slice of it."""
    generator = np.random.Generator(np.random.PCG64((seed, epoch_no)))
    order = generator.permutation(n_samples).astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
