"""One rank of OpenMPI, through mpi4py; `mpirun … python -m bml.lab.bench.rank_openmpi PATH`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from bml.lab.bench.ranks import Vector, serve


class OpenMpi:
    """A rank of OpenMPI. Its result has memory of its own, as with most users of MPI."""

    def __init__(self, world: Any):
        self._world = world
        self._data: Any = None
        self._result: Any = None

    def prepare(self, data: Vector) -> None:
        """See Collective."""
        self._data = data
        self._result = np.empty_like(data)

    def run(self) -> Vector:
        """See Collective; the default operation is the sum."""
        self._world.Allreduce(self._data, self._result)
        result: Vector = self._result
        return result

    def failures(self) -> list[str]:
        """See Collective: OpenMPI knows of no failures."""
        return []


def main() -> None:
    """Serve the host; mpi4py starts MPI when it is imported and ends it at exit."""
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    serve(sys.argv[1], world.Get_rank(), OpenMpi(world))


if __name__ == "__main__":
    main()
