"""The samples of a data set: tensors that are indexed, or a data set whose samples are collated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from bml.topology.errors import UsageError
from bml.train.batches import Indices


class Source:
    """Samples by index. Raises UsageError for a data set without a length or without indices."""

    def __init__(self, dataset: Any, collate_fn: Any = None):
        tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
        self._tensors = tensors if collate_fn is None and _are_tensors(tensors) else None
        if self._tensors is None and _are_tensors(tensors):
            dataset = TensorDataset(*(tensors if isinstance(tensors, tuple | list) else (tensors,)))
        self.dataset = dataset
        self.collate = collate_fn or default_collate
        lengths = {len(each) for each in _flat(tensors)} if _are_tensors(tensors) else {_length(dataset)}
        if len(lengths) != 1:
            raise UsageError(f"the tensors have {sorted(lengths)} samples: give tensors of one length")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    @property
    def is_in_memory(self) -> bool:
        """Whether samples are rows of tensors, which no worker need load."""
        return self._tensors is not None

    def fetch(self, indices: Indices) -> Any:
        """Return the samples of these indices (shape (n,), n at least 1), collated, in this thread."""
        if self._tensors is not None:
            rows = torch.from_numpy(np.array(indices))
            if isinstance(self._tensors, torch.Tensor):
                return self._tensors[rows]
            if isinstance(self._tensors, Mapping):
                return {key: each[rows] for key, each in self._tensors.items()}
            return tuple(each[rows] for each in self._tensors)
        numbers = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(numbers))
        return self.collate([self.dataset[number] for number in numbers])


def part(samples: Any, start: int, stop: int, n_samples: int) -> Any:
    """Return samples start .. stop-1 of `n_samples` collated ones. Raises UsageError if that is unclear."""
    if isinstance(samples, Mapping):
        return {key: part(each, start, stop, n_samples) for key, each in samples.items()}
    if isinstance(samples, torch.Tensor) and samples.dim() and len(samples) == n_samples:
        return samples[start:stop]
    if isinstance(samples, tuple | list) and any(isinstance(each, torch.Tensor) for each in samples):
        parts = [part(each, start, stop, n_samples) for each in samples]
        return type(samples)(*parts) if hasattr(samples, "_fields") else type(samples)(parts)
    if isinstance(samples, tuple | list) and len(samples) == n_samples:  # such as texts
        return samples[start:stop]
    raise UsageError(
        f"batch.micro cannot cut {type(samples).__name__} of {n_samples} samples into parts: let the samples "
        "be the first dimension of each tensor"
    )


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)


def _are_tensors(dataset: Any) -> bool:
    if isinstance(dataset, torch.Tensor):
        return bool(dataset.dim())
    if not isinstance(dataset, tuple | list | Mapping):
        return False
    flat = _flat(dataset)
    return bool(flat) and all(isinstance(each, torch.Tensor) and each.dim() > 0 for each in flat)


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"the data set is a {type(dataset).__name__}: give one with samples by index (__getitem__ and "
            "__len__), or a tuple of tensors"
        )
    try:
        return len(dataset)
    except TypeError:
        raise UsageError(f"the data set, a {type(dataset).__name__}, has no length (__len__)") from None
