"""One rank of Gloo, through torch; `python -m bml.lab.bench.rank_gloo PATH RANK RANKS MEETING-FILE`."""

from __future__ import annotations

import datetime
import importlib
import sys
from typing import Any

from bml.lab.bench.ranks import Vector, serve


class Gloo:
    """A rank of Gloo. It works in place, as torch does."""

    def __init__(self, dist: Any, torch: Any):
        self._dist = dist
        self._torch = torch
        self._data: Any = None
        self._tensor: Any = None

    def prepare(self, data: Vector) -> None:
        """See Collective."""
        self._data = data
        self._tensor = self._torch.from_numpy(data)

    def run(self) -> Vector:
        """See Collective."""
        self._dist.all_reduce(self._tensor)
        result: Vector = self._data
        return result

    def failures(self) -> list[str]:
        """See Collective: Gloo knows of no failures."""
        return []


def main() -> None:
    """Connect to the other ranks, and serve the host."""
    path, rank, n_ranks, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    minute = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=n_ranks, timeout=minute
    )
    serve(path, rank, Gloo(dist, torch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
