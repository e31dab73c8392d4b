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
        self._vector = session.empty(size + 1, "float64") if size else None
        """The values, and 1 if there are samples, each times the number of samples."""
        self._kept: npt.NDArray[np.float64] | None = None
        self._pending: Pending | None = None

    def open(self, batch: Batch) -> None:
        """Begin a batch. A server without samples keeps the values, as perhaps no server has any."""
        self._kept = self._values() if self._vector is not None and not len(batch.indices) else None

    def begin(self, batch: Batch, has_loss: bool) -> None:
        """Begin the step of this batch; a model without such statistics needs none."""
        if self._vector is None:
            return
        self._vector[:] = self._weighted(len(batch.indices))
        self._pending = batch.allreduce_async(self._vector, self._again if has_loss else None)

    def finish(self) -> None:
        """Wait for the step, and take the means; if no sample counted, the values are those of before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        found = pending.wait()
        mean, at = torch.from_numpy(self._kept if not found[-1] and self._kept is not None else found), 0
        with torch.no_grad():
            for buffer in self._buffers:
                part = mean[at : at + buffer.numel()].view(buffer.shape)
                buffer.copy_(part if buffer.is_floating_point() else part.round())
                at += buffer.numel()

    def _again(self, indices: Indices) -> npt.NDArray[np.float64]:
        return self._weighted(len(indices))

    def _weighted(self, n_samples: int) -> npt.NDArray[np.float64]:
        values = np.append(self._values(), 1.0)
        return np.multiply(values, n_samples) if n_samples else np.zeros_like(values)

    def _values(self) -> npt.NDArray[np.float64]:
        values: Any = torch.cat([buffer.detach().double().reshape(-1) for buffer in self._buffers]).numpy()
        return np.asarray(values)
