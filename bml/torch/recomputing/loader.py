"""The samples of every rank in one pass over a DataLoader whose sampler divides a data set among ranks."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from bml.topology.errors import UsageError
from bml.torch.attached.source import Source
from bml.torch.devices.chance import forked, seed_host
from bml.torch.recomputing.plan import LoaderPlan
from bml.train.batches import Indices


class LoaderShares:
    """The samples of all ranks, as this rank can load them.

    Raises UsageError for a loader from which another rank's samples cannot be told.
    """

    def __init__(self, loader: Any, rank: int, n_ranks: int):
        _check(loader, rank, n_ranks)
        self.plan = LoaderPlan(n_ranks, len(loader.sampler), loader.batch_size, bool(loader.drop_last))
        self._sampler = copy.copy(loader.sampler)  # the user's may be set to another epoch
        self._source = Source(loader.dataset, loader.collate_fn)
        self._orders: dict[int, Indices] = {}
        self._check_repeats()

    def fetch(self, places: Indices) -> Any:
        """Load the samples at these places (shape (n,), n at least 1), collated, in this thread."""
        ranks, at = np.divmod(places, self.plan.n_used)
        rows = [self._order(rank)[number] for rank, number in zip(ranks.tolist(), at.tolist(), strict=True)]
        return self._source.fetch(np.array(rows, np.int64))

    def _check_repeats(self) -> None:
        """Raise UsageError if the order is another one each time, so that it cannot be told later."""
        with forked(torch.device("cpu")):
            before = np.random.get_state(), random.getstate()
            orders = []
            for seed in (1, 2):
                seed_host(seed)
                np.random.seed(seed)
                random.seed(seed)
                orders.append(np.fromiter(copy.copy(self._sampler), np.int64))
            np.random.set_state(before[0])
            random.setstate(before[1])
        if not np.array_equal(orders[0], orders[1]):
            raise UsageError(
                f"the sampler, a {type(self._sampler).__name__}, gives another order each time: "
                "its order must follow from its seed and its epoch alone, as that of DistributedSampler"
            )
        self._orders[self._sampler.rank] = orders[0]

    def _order(self, rank: int) -> Indices:
        """The samples that a rank loads, in order."""
        if rank not in self._orders:
            sampler = copy.copy(self._sampler)
            sampler.rank = rank
            found = np.fromiter(sampler, np.int64)
            if len(found) != self.plan.n_samples:
                raise UsageError(
                    f"the sampler gives {len(found)} samples to rank {rank}, and {self.plan.n_samples} to "
                    "this one: give every rank as many"
                )
            own = found if rank == self._sampler.rank else self._order(self._sampler.rank)
            if own is not found and len(own) > 1 and np.array_equal(own, found):
                raise UsageError(
                    f"the sampler, a {type(sampler).__name__}, gives rank {rank} the samples of this rank: "
                    "it must go by its attribute rank when it is iterated over, as DistributedSampler does"
                )
            self._orders[rank] = found
        return self._orders[rank]


def _check(loader: Any, rank: int, n_ranks: int) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"batches takes the DataLoader itself, not a {type(loader).__name__}: write for example "
            "loops.batches(hook.batches(loader))"
        )
    if loader.batch_size is None:
        raise UsageError(
            "the loader has a batch_sampler of its own, and samples of other ranks cannot be told from it: "
            "give batch_size and sampler=DistributedSampler(dataset)"
        )
    sampler = loader.sampler
    if not hasattr(sampler, "rank") or not hasattr(sampler, "num_replicas"):
        raise UsageError(
            f"the sampler, a {type(sampler).__name__}, has no rank and num_replicas, so samples of other "
            "ranks cannot be told from it: give sampler=DistributedSampler(dataset)"
        )
    if (sampler.rank, sampler.num_replicas) != (rank, n_ranks):
        raise UsageError(
            f"the sampler is that of rank {sampler.rank} of {sampler.num_replicas}, this is rank {rank} of "
            f"{n_ranks}: give it the rank and the number of ranks of the group"
        )
