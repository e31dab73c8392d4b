"""The running statistics of batch normalisation: after every batch their mean, weighted by samples.

Each server normalises with the statistics of its own share, so what it adds to the running ones differs. The
mean is the same on all servers, so servers that join can be given it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.batchnorm import _NormBase

from bml.torch.attached.bucket import Terms
from bml.torch.devices.vectors import vector_on
from bml.train.batch import Batch
from bml.train.batches import Indices
from bml.train.pending import Pending
from bml.train.session import Session


class Statistics:
    """All running statistics of a model, as one float64 vector that is reduced in a step of its own."""

    def __init__(self, session: Session, model: Any):
        self._buffers = [
            buffer
            for module in model.modules()
            if isinstance(module, _NormBase)
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
            if buffer is not None
        ]
        size = sum(buffer.numel() for buffer in self._buffers)
        self._where = self._buffers[0].device if size else None
        dtypes = (torch.float64, torch.float64)
        self._vector = vector_on(self._where, [(size + 1,)], dtypes, session.empty) if size else None
        """The values, and 1 if there are samples, each times the number of samples."""
        self._kept: torch.Tensor | None = None
        self._pending: Pending | None = None

    def open(self, batch: Batch) -> None:
        """Begin a batch. A server without samples keeps the values, as perhaps no server has any."""
        self._kept = self._values() if self._vector is not None and not len(batch.indices) else None

    def begin(self, batch: Batch, has_loss: bool, terms: Terms) -> None:
        """Begin the step of this batch; a model without such statistics needs none."""
        if self._vector is None:
            return
        n_samples = len(batch.indices)
        self._vector.put(0, self._weighted(n_samples))
        ready = self._vector.begin(as_zeros=not n_samples)
        self._pending = batch.allreduce_async(
            self._vector.array, self._again if has_loss else None, ready=ready, **terms
        )

    def finish(self) -> None:
        """Wait for the step, and take the means; if no sample counted, the values are those of before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        assert self._vector is not None
        found = pending.wait()
        (mean,) = self._vector.take(found)
        if not found[-1] and self._kept is not None:
            mean = self._kept
        at = 0
        with torch.no_grad():
            for buffer in self._buffers:
                part = mean[at : at + buffer.numel()].view(buffer.shape)
                buffer.copy_(part if buffer.is_floating_point() else part.round())
                at += buffer.numel()

    def _again(self, indices: Indices) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._weighted(len(indices)).cpu().numpy()
        return found

    def _weighted(self, n_samples: int) -> torch.Tensor:
        values = self._values()
        return torch.cat([values, values.new_ones(1)]) * n_samples

    def _values(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([each.to(self._where, torch.float64).reshape(-1) for each in self._buffers])
