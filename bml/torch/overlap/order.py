"""The order in which the forward pass needs the buckets: each server notes it once, and all use the mean.

Servers may run a model alike and still use its layers in other orders, if the order depends on the samples.
The priorities must be equal on all servers, so they come from a step of their own in the first batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bml.topology.errors import UsageError
from bml.train.batch import Batch
from bml.train.batches import Indices
from bml.train.pending import Pending
from bml.train.session import Session


class Order:
    """The priorities of buckets: 1 for the bucket that is needed first. Servers that join are given them."""

    def __init__(self, session: Session, n_buckets: int):
        self._used: list[int] = []
        self._contribution = session.empty(n_buckets, "float64")
        self._pending: Pending | None = None
        self.priorities: list[int] | None = None

    def note(self, bucket: int) -> None:
        """Note that the forward pass uses a bucket; the first use counts."""
        if bucket not in self._used:
            self._used.append(bucket)

    def forget(self) -> None:
        """Begin a forward pass."""
        self._used.clear()

    def begin(self, batch: Batch, has_loss: bool) -> None:
        """Begin the step that makes one order of those of all servers. The forward pass is over."""
        n_samples = len(batch.indices)
        self._contribution[:] = self._places(n_samples)
        self._pending = batch.allreduce_async(self._contribution, self._again if has_loss else None)

    def finish(self) -> None:
        """Wait for the step, if one was begun, and take its result."""
        pending, self._pending = self._pending, None
        if pending is not None:
            places = np.argsort(pending.wait(), kind="stable")
            self.priorities = (np.argsort(places, kind="stable") + 1).tolist()

    def save(self) -> Any:
        """Return the priorities for a server that joins; none before the first batch."""
        return self.priorities

    def load(self, saved: Any) -> None:
        """Take what `save` returned on another server. Raises UsageError for another number of buckets."""
        if saved is not None and len(saved) != len(self._contribution):
            raise UsageError(
                f"this server has {len(self._contribution)} buckets of gradients, the others have "
                f"{len(saved)}: give attach the same bucket_mib on all servers"
            )
        self.priorities = saved

    def _again(self, indices: Indices) -> npt.NDArray[np.float64]:
        return self._places(len(indices))

    def _places(self, n_samples: int) -> npt.NDArray[np.float64]:
        """Places in the order, times the number of samples; what was not used comes last."""
        places = np.full(len(self._contribution), float(len(self._contribution)))
        places[self._used] = np.arange(len(self._used))
        return places * n_samples
