"""Worker processes load the shares of batches to come, which are those of now unless a server is lost.

Each share is loaded with random numbers of its own, as in the process that computes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bml.torch.attached.layout import seed_of
from bml.torch.attached.source import Source, rows_of
from bml.torch.devices.chance import seed_host
from bml.train.batches import Indices

Foretell = Callable[[int], Indices]
"""Returns the samples that this server will probably compute in a step."""


class Ahead:
    """Shares of one loop in order of steps, of which torch's workers load some in advance.

    A share that turns out to be another one, after a change of the servers, is loaded in this process.
    """

    def __init__(self, source: Source, n_steps: int, foretell: Foretell, n_workers: int, seed: int):
        self._source, self._n_steps, self._foretell = source, n_steps, foretell
        self._n_workers, self._seed = n_workers, seed
        self._foretold: deque[tuple[int, Indices]] = deque()
        self._loaded: Iterator[Any] | None = None
        self.was_ahead = False
        """Whether the share that was fetched last had been loaded in advance."""

    def fetch(self, step: int, indices: Indices) -> Any:
        """Return the samples of a step, collated; steps only grow."""
        begins = self._loaded is None or not self._foretold or self._foretold[0][0] != step
        if begins:
            self._begin(step)
        assert self._loaded is not None
        samples = next(self._loaded)
        _, foretold = self._foretold.popleft()
        is_foretold = np.array_equal(foretold, indices)
        self.was_ahead = is_foretold and not begins
        if not is_foretold:
            return self._source.fetch(indices)
        return self._source.moved(samples)

    def close(self) -> None:
        """End the workers."""
        self._loaded = None
        self._foretold.clear()

    def _begin(self, step: int) -> None:
        self.close()
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        self._loaded = iter(
            DataLoader(
                _Seeded(self._source.dataset, self._seed),
                batch_sampler=_Shares(self._foretell, step, self._n_steps, self._foretold),
                num_workers=self._n_workers,
                collate_fn=self._source.collate,
                generator=generator,  # not torch's own numbers, of which all servers must draw alike
            )
        )


class _Seeded(Dataset):  # type: ignore[misc]
    """A data set whose samples are loaded a share at a time, with the random numbers of that share."""

    def __init__(self, dataset: Any, seed: int):
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, share: tuple[int, Indices]) -> list[Any]:
        step, indices = share
        seed_host(seed_of(self._seed, step, indices))
        return rows_of(self._dataset, indices.tolist())


class _Shares:
    """Each step from one on and its samples, which are noted when they are asked for."""

    def __init__(self, foretell: Foretell, start: int, stop: int, noted: deque[tuple[int, Indices]]):
        self._foretell, self._steps, self._noted = foretell, range(start, stop), noted

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        for step in self._steps:
            indices = self._foretell(step)
            self._noted.append((step, indices))
            yield step, indices

    def __len__(self) -> int:
        return len(self._steps)
