"""The samples of a data set: columns that are indexed, or a data set whose samples are collated.

Columns are a tensor, or a tuple or dict of tensors, with a row for each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from bml.topology.errors import UsageError
from bml.train.batches import Indices


class Source:
    """Samples by index, moved to `device` if it is given.

    Raises UsageError for a data set without a length or without indices.
    """

    def __init__(self, dataset: Any, collate_fn: Any = None, device: Any = None):
        self._device = device
        # A subclass may make something else of its rows.
        columns = dataset.tensors if type(dataset) is TensorDataset else dataset
        are_columns = _are_columns(columns)
        self._columns = columns if collate_fn is None and are_columns else None
        self.dataset = _Rows(columns) if are_columns and columns is dataset else dataset
        self.collate = collate_fn or default_collate
        lengths = {len(each) for each in _flat(columns)} if are_columns else {_length(dataset)}
        if len(lengths) != 1:
            raise UsageError(f"the tensors have {sorted(lengths)} samples: give tensors of one length")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    @property
    def is_in_memory(self) -> bool:
        """Whether samples are rows of tensors, which no worker need load."""
        return self._columns is not None

    def fetch(self, indices: Indices) -> Any:
        """Return the samples of these indices (shape (n,), n at least 1), collated, in this thread."""
        if self._columns is not None:
            return self.moved(_at(self._columns, torch.from_numpy(np.array(indices))))
        return self.moved(self.collate(rows_of(self.dataset, indices.tolist())))

    def moved(self, samples: Any) -> Any:
        """Return collated samples with their tensors on the device, if one was given."""
        return samples if self._device is None else _moved(samples, self._device)


class _Rows(Dataset):  # type: ignore[misc]
    """The rows of columns, as samples."""

    def __init__(self, columns: Any):
        self._columns = columns

    def __getitem__(self, number: int) -> Any:
        return _at(self._columns, number)


def rows_of(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Return the samples of a data set with these numbers."""
    if hasattr(dataset, "__getitems__"):
        found: list[Any] = dataset.__getitems__(numbers)
        return found
    return [dataset[number] for number in numbers]


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


def _moved(samples: Any, device: Any) -> Any:
    if isinstance(samples, torch.Tensor):
        return samples.to(device, non_blocking=True)
    if hasattr(samples, "to"):  # a class of packed sequences or of texts, which knows better
        return samples.to(device)
    if isinstance(samples, Mapping):
        return {key: _moved(each, device) for key, each in samples.items()}
    if isinstance(samples, tuple | list):
        parts = [_moved(each, device) for each in samples]
        return type(samples)(*parts) if hasattr(samples, "_fields") else type(samples)(parts)
    return samples


def _at(columns: Any, which: Any) -> Any:
    if isinstance(columns, torch.Tensor):
        return columns[which]
    if isinstance(columns, Mapping):
        return {key: each[which] for key, each in columns.items()}
    return tuple(each[which] for each in columns)


def _flat(columns: Any) -> list[torch.Tensor]:
    if isinstance(columns, torch.Tensor):
        return [columns]
    return list(columns.values()) if isinstance(columns, Mapping) else list(columns)


def _are_columns(dataset: Any) -> bool:
    if isinstance(dataset, torch.Tensor):
        return bool(dataset.dim())
    if not isinstance(dataset, tuple | Mapping):
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
