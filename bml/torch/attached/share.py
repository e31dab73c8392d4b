"""This server's share of a global batch, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bml.topology.errors import UsageError
from bml.torch.attached.gradients import Gradients
from bml.torch.attached.layout import cuts
from bml.torch.attached.source import part
from bml.train.batch import Batch


class Share:
    """The samples that this server computes in one batch; `for x, y in run.batches(...)` unpacks them."""

    def __init__(self, batch: Batch, samples: Any, n_samples: int, gradients: Gradients):
        self.samples = samples
        """The samples, collated. A server that has none in this batch gets two others, which do not count."""
        self.indices = batch.indices
        """The numbers of its samples in the data set: int64, shape (n,); empty if it has none."""
        self.epoch_no, self.batch_no = batch.epoch_no, batch.batch_no
        """The epoch and the number in that epoch, from 0."""
        self.is_whole = True
        """Whether the samples were not cut into parts."""
        self._n_samples = n_samples
        self._gradients = gradients

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)

    def __getitem__(self, key: Any) -> Any:
        return self.samples[key]

    def micro(self, n: int) -> Iterator[Any]:
        """Cut the samples into at most `n` parts, for a backward pass each: gradients are accumulated.

        The steps begin in the last of these backward passes. A server that has no samples in this batch gets
        its two others as one part. Raises UsageError if `n` is no whole number above 0, or if the samples
        cannot be cut along the first dimension of each tensor.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"micro takes a whole number of parts, at least 1; it is {n!r}")
        # Samples that only stand in stay together: batch normalisation needs two at a time.
        parts = cuts(self._n_samples, n if len(self.indices) else 1)
        self._gradients.is_last_part = self.is_whole = False
        for number, (start, stop) in enumerate(parts, 1):
            samples = part(self.samples, start, stop, self._n_samples)
            self._gradients.is_last_part = number == len(parts)
            yield samples
